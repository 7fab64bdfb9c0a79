"""Engine contract: misuse (duplicate vars, foreign objects, nested waits) raises an error that shows the fix."""

import copy
import itertools
import pickle

import pytest

from weftplan import engine
from weftplan.engine import Var
from weftplan.errors import ConfigError, DuplicateVarError, EngineError, WaitInWorkerError


def test_duplicate_declarations(eng):
    """Duplicate reads count once; a duplicate write or a var both read and written raises DuplicateVarError."""
    a, b, runs = eng.new_variable("a"), eng.new_variable("b"), []
    eng.push(lambda: runs.append(1), [a, a, a], [b])
    with pytest.raises(DuplicateVarError, match=r"writes <Var 'b'.*twice.*dedupe"):
        eng.push(lambda: runs.append(2), [a], [b, b])
    with pytest.raises(DuplicateVarError, match=r"as read and as written.*mutable_vars only"):
        eng.push(lambda: runs.append(3), [a, b], [b])
    with pytest.raises(DuplicateVarError):
        eng.new_operator(lambda: None, [a], [a])
    reads, writes = engine.dedupe([a, b, a], [b, b])
    eng.push(lambda: runs.append(4), reads, writes)
    eng.wait_for_all()
    assert runs == [1, 4]
    assert b.version == 2


def test_foreign_vars_and_no_function(eng):
    """A foreign var, an object that is no var, and a non-callable object as the function raise EngineError."""
    other_engine = engine.create("NaiveEngine")
    with pytest.raises(EngineError, match="belongs to <NaiveEngine"):
        eng.push(lambda: None, [other_engine.new_variable()])
    with pytest.raises(EngineError, match=r"made by engine.new_variable\(\), got str"):
        eng.push_async(lambda done: done(), ["x"])
    with pytest.raises(EngineError, match="needs a function"):
        eng.push(3)
    assert eng.statistics().pushed == 0


def test_errors_name_the_operation(eng):
    """Errors of a push start with the operation's name, if it has one."""
    a, gone = eng.new_variable("a"), eng.new_variable("gone")
    eng.delete_variable(gone)
    for push in (eng.push, eng.push_async, eng.new_operator):
        with pytest.raises(DuplicateVarError, match=r"^operation 'mine' writes <Var 'a'"):
            push(lambda *_: None, (), [a, a], name="mine")
        with pytest.raises(DuplicateVarError, match=r"^the operation lists <Var 'a'"):
            push(lambda *_: None, [a], [a])
        with pytest.raises(EngineError, match=r"^operation 'mine': <Var 'gone'.* has been deleted; make a new var"):
            push(lambda *_: None, [gone], name="mine")


def test_operators_of_another_engine(eng):
    """A stored operator of another engine raises EngineError with that engine's name, and still runs there."""
    other_engine = engine.create("NaiveEngine")
    theirs = other_engine.new_variable()
    operator = other_engine.new_operator(lambda: None, (), [theirs], name="stored")
    with pytest.raises(EngineError, match="<Operator 'stored': 0 reads, 1 writes> belongs to <NaiveEngine"):
        eng.push(operator)
    other_engine.push(operator)
    assert (theirs.version, eng.statistics().pushed) == (1, 0)


def test_wait_for_all_inside_a_naive_operation():
    """In an operation of the naive engine, wait_for_all raises WaitInWorkerError; a wait for an idle var returns."""
    naive = engine.create("NaiveEngine")
    idle, ran = naive.new_variable(), []

    def waits():
        naive.wait_for_var(idle)
        ran.append(1)
        naive.wait_for_all()

    with pytest.raises(WaitInWorkerError, match=r"waited for others \(wait_for_all"):
        naive.push(waits)
    assert ran == [1]
    naive.wait_for_all()


@pytest.mark.parametrize("what", ["var", "all"])
def test_wait_inside_an_operation(what):
    """A wait inside an operation raises WaitInWorkerError with the fix, and the engine continues."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    a, b = eng.new_variable(), eng.new_variable()

    def wait_here():
        eng.wait_for_var(b) if what == "var" else eng.wait_for_all()

    eng.push(wait_here, (), [a])
    with pytest.raises(WaitInWorkerError, match="const_vars"):
        eng.wait_for_var(a)
    eng.push(lambda: None, (), [b])
    eng.wait_for_var(b)
    eng.stop()


def test_unknown_kind_and_bad_counts():
    """An unknown kind raises ConfigError with the legal kinds, and a bad worker count with its range."""
    with pytest.raises(ConfigError, match=r"did you mean 'NaiveEngine'\?.*ThreadedEnginePerDevice"):
        engine.create("NaivEngine")
    for bad in (0, -1, True, "2"):
        with pytest.raises(ConfigError, match="cpu_workers must be an integer >= 1"):
            engine.create("ThreadedEngine", cpu_workers=bad)


@pytest.mark.parametrize("how", ["push", "push with priority", "push_async", "new_operator"])
def test_every_small_declaration(how):
    """All combinations of up to three reads and three writes of good, foreign, deleted and non-vars are checked.

    A bad var raises EngineError; a var written twice, or read and written, DuplicateVarError. Neither changes anything;
    all other combinations are accepted.
    """
    sim, second = engine.create("Simulator"), engine.create("NaiveEngine")
    good, deleted, foreign = [sim.new_variable(name) for name in "abc"], sim.new_variable(), second.new_variable()
    sim.delete_variable(deleted)
    sim.wait_for_all()
    push = {
        "push": lambda reads, writes: sim.push(int, reads, writes),
        "push with priority": lambda reads, writes: sim.push(int, reads, writes, priority=1),
        "push_async": lambda reads, writes: sim.push_async(lambda done: done(), reads, writes),
        "new_operator": lambda reads, writes: sim.push(sim.new_operator(int, reads, writes)),
    }[how]
    lists = [draw for count in range(4) for draw in itertools.product((*good, deleted, foreign, "x"), repeat=count)]
    versions, accepted = dict.fromkeys(good, 0), 0
    for reads in lists:
        for writes in lists:
            expected = None
            if not {*reads, *writes} <= set(good):
                expected = EngineError
            elif len(set(writes)) < len(writes) or set(reads) & set(writes):
                expected = DuplicateVarError
            assert _error_of(push, reads, writes) is expected, (reads, writes)
            if expected is None:
                accepted += 1
                for var in writes:
                    versions[var] += 1
    sim.wait_for_all()
    assert accepted > 10
    assert {var: var.version for var in versions} == versions
    assert sim.statistics().pushed == accepted + 1


def _error_of(push, reads, writes):
    try:
        push(reads, writes)
    except EngineError as error:
        return type(error)
    return None


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickle.dumps])
def test_var_cannot_be_copied(eng, twin):
    """A var cannot be copied or pickled, because operations on the copy would not wait for those on the var."""
    with pytest.raises(EngineError, match=r"<Var 'a' .* cannot be copied; make another with new_variable"):
        twin(eng.new_variable("a"))


class Compared(Var):
    """A var that counts its comparisons."""

    __slots__ = ()
    count = 0
    __hash__ = object.__hash__

    def __eq__(self, other):
        Compared.count += 1
        return self is other


@pytest.mark.parametrize("behind", [False, True])
def test_cost_is_linear_in_the_number_of_vars(deferred, behind):
    """A push with a thousand reads and a thousand writes, idle or waiting, compares vars less than 100 times."""
    reads, writes = ([Compared(deferred) for _ in range(1000)] for _ in range(2))
    if behind:
        for var in (*reads, *writes):
            deferred.push(lambda: None, (), [var])
    Compared.count = 0
    deferred.push(lambda: None, reads, writes)
    deferred.push_async(lambda done: done(), reads, writes)
    deferred.wait_for_all()
    assert Compared.count < 100
    assert writes[0].version == 2 + behind
