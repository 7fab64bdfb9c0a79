"""Engine contract: reads and writes in push order, versions, stored operators and completion."""

import random
import threading

import pytest

from tests.contract.engines import Boom
from weftplan import engine
from weftplan.errors import EngineError


def test_writes_of_one_var_run_in_push_order(eng):
    """1,000 writes of one var run in push order, and its version is then 1,000."""
    var, seen = eng.new_variable(), []
    for i in range(1000):
        eng.push(lambda i=i: seen.append(i), (), [var])
    eng.wait_for_var(var)
    assert seen == list(range(1000))
    assert var.version == 1000


def test_readers_see_the_write_before_them(eng):
    """Every read sees the write pushed before it; versions count writes only."""
    var, value, seen = eng.new_variable(), [0], []
    for i in range(50):
        eng.push(lambda i=i: value.__setitem__(0, i), (), [var])
        for _ in range(5):
            eng.push(lambda i=i: seen.append((i, value[0])), [var])
    eng.wait_for_all()
    assert len(seen) == 250
    assert all(want == got for want, got in seen)
    assert var.version == 50


def test_reads_run_concurrently():
    """Two reads of a var run at the same time: they meet at a barrier."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2)
    var, barrier = eng.new_variable(), threading.Barrier(2)
    for _ in range(2):
        eng.push(lambda: barrier.wait(60), [var])
    eng.wait_for_all()
    assert barrier.n_waiting == 0
    eng.stop()


def test_a_write_excludes_everything():
    """While a write runs, no other write or read of that var runs."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=4)
    var, inside, worst, lock = eng.new_variable(), [0, 0], [], threading.Lock()

    def enter(kind):
        with lock:
            inside[kind] += 1
            worst.append(tuple(inside))
        with lock:
            inside[kind] -= 1

    for i in range(400):
        if i % 3 == 0:
            eng.push(lambda: enter(1), (), [var])
        else:
            eng.push(lambda: enter(0), [var])
    eng.wait_for_all()
    assert all(writes <= 1 and not (writes and reads) for reads, writes in worst)
    eng.stop()


@pytest.mark.parametrize("seed", range(2))
def test_random_programs_equal_serial_execution(eng, seed):
    """4,000 random operations on 100 vars give exactly the values and versions of serial execution."""
    rng = random.Random(seed)
    program = []
    for _ in range(4_000):
        reads = [rng.randrange(100) for _ in range(rng.randint(2, 19))]
        target = rng.randrange(100)
        program.append(([r for r in reads if r != target], target))

    def apply(values, reads, target, i):
        values[target] = (values[target] * 31 + sum(values[r] for r in reads) + i) % 1_000_003

    want = list(range(100))
    for i, (reads, target) in enumerate(program):
        apply(want, reads, target, i)
    got = list(range(100))
    variables = [eng.new_variable() for _ in range(100)]
    for i, (reads, target) in enumerate(program):
        eng.push(lambda r=reads, t=target, i=i: apply(got, r, t, i), [variables[r] for r in reads], [variables[target]])
    eng.wait_for_all()
    assert got == want
    counts = [sum(t == k for _, t in program) for k in range(100)]
    assert [v.version for v in variables] == counts


def test_version_scenario(eng):
    """As in MXNet's VarVersion test, the version is 0 after a read and 10 after ten writes."""
    var = eng.new_variable()
    assert var.version == 0
    eng.push(lambda: None, [var])
    eng.wait_for_var(var)
    assert var.version == 0
    for _ in range(10):
        eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)
    assert var.version == 10


def test_operators_are_reused(eng):
    """A stored operator runs once per push; after its deletion, pushed runs complete; new pushes raise EngineError."""
    var, runs = eng.new_variable(), []
    operator = eng.new_operator(lambda: runs.append(1), (), [var], name="again")
    for _ in range(20):
        eng.push(operator)
    eng.delete_operator(operator)
    with pytest.raises(EngineError, match="was deleted"):
        eng.push(operator)
    eng.wait_for_all()
    assert len(runs) == 20
    assert var.version == 20


def test_async_operations(eng):
    """An asynchronous operation ends when another thread calls on_complete; an error passed there is its failure."""
    if eng.kind == "Simulator":
        pytest.skip("the simulator has one thread: nobody else could call on_complete")
    var, order = eng.new_variable(), []

    def start(on_complete):
        threading.Thread(target=lambda: (order.append("work"), on_complete())).start()

    eng.push_async(start, (), [var])
    eng.push(lambda: order.append("after"), [var])
    eng.wait_for_all()
    assert order == ["work", "after"]

    def fail(on_complete):
        threading.Thread(target=lambda: on_complete(Boom("later"))).start()

    with pytest.raises(Boom, match="later"):  # noqa: PT012 - the naive engine raises at the push, the others at the wait
        eng.push_async(fail, (), [var])
        eng.wait_for_var(var)


def test_on_complete_twice_is_an_error(eng):
    """A second call of on_complete raises EngineError and changes nothing."""
    var, errors, over = eng.new_variable(), [], threading.Event()

    def start(on_complete):
        on_complete()
        try:
            on_complete()
        except EngineError as error:
            errors.append(str(error))
        over.set()

    eng.push_async(start, (), [var])
    eng.wait_for_all()  # for the first call, not for the end of the function
    assert over.wait(60)
    assert len(errors) == 1
    assert "called twice" in errors[0]
    assert var.version == 1
