"""The engine's contract: misuse (a var twice, foreign things, a wait inside) is an error that shows the fix."""

import pytest

from weftplan import engine
from weftplan.errors import ConfigError, DuplicateVarError, EngineError, WaitInWorkerError


def test_duplicate_declarations(eng):
    """Duplicate reads count once; the two deadlocking cases are errors that show the fix, and nothing is pushed."""
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
    """A var of another engine, something that is no var, something that cannot be called."""
    other = engine.create("NaiveEngine")
    with pytest.raises(EngineError, match="belongs to <NaiveEngine"):
        eng.push(lambda: None, [other.new_variable()])
    with pytest.raises(EngineError, match=r"made by engine.new_variable\(\), got str"):
        eng.push_async(lambda done: done(), ["x"])
    with pytest.raises(EngineError, match="needs a function"):
        eng.push(3)
    assert eng.statistics().pushed == 0


@pytest.mark.parametrize("what", ["var", "all"])
def test_wait_inside_an_operation(what):
    """A worker that would wait for itself raises, with the fix; the engine works on."""
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
    """The message names what is legal."""
    with pytest.raises(ConfigError, match=r"did you mean 'NaiveEngine'\?.*ThreadedEnginePerDevice"):
        engine.create("NaivEngine")
    for bad in (0, -1, True, "2"):
        with pytest.raises(ConfigError, match="cpu_workers must be an integer >= 1"):
            engine.create("ThreadedEngine", cpu_workers=bad)
