"""Memory of failures: no locals of failed calls, a bounded number, and one summary at exit."""

import contextlib
import gc
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest

from weftplan import engine
from weftplan.engine.failure import MOST_UNOBSERVED


class Large:
    """Stands for memory that a failed call held."""


@pytest.fixture
def without_collector():
    """Disable the cycle collector, so that reference counts alone release objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["ThreadedEngine", "ThreadedEnginePerDevice"])
def eng(request):
    """An engine with one worker, in use."""
    with engine.using(engine.create(request.param, cpu_workers=1)) as result:
        yield result
    result.stop()


def failing(alive, number=0):
    """Fail with locals on two levels, a cause and a context."""
    local = Large()
    alive.append(weakref.ref(local))

    def inner():
        deep = Large()
        alive.append(weakref.ref(deep))
        try:
            raise KeyError(number)
        except KeyError as cause:
            raise ValueError(number) from cause

    inner()


def told_by_result(alive):
    task = engine.submit(failing, alive)
    with contextlib.suppress(ValueError):
        task.result()
    del task


def told_by_exception(alive):
    assert isinstance(engine.submit(failing, alive).exception(), ValueError)


def told_by_wait(alive):
    task = engine.submit(failing, alive)
    with contextlib.suppress(ValueError):
        engine.wait(task)
    del task


def told_by_map(alive):
    with pytest.raises(ValueError, match="0"):
        list(engine.map(failing, [alive], [0]))


def told_of_a_push(alive):
    local = Large()
    alive.append(weakref.ref(local))

    def fail(local=local):
        raise ValueError(0)

    var = engine.get().new_variable()
    engine.get().push(fail, (), (var,))
    with contextlib.suppress(ValueError):
        engine.get().wait_for_var(var)
    del fail, local, var


@pytest.mark.parametrize(
    "told", [told_by_result, told_by_exception, told_by_wait, told_by_map, told_of_a_push], ids=lambda f: f.__name__
)
def test_raised_failures_release_locals(eng, without_collector, told):
    """Once the error is caught and the handle dropped, no locals of the call or its caller are alive."""
    alive: list[weakref.ref[Large]] = []

    def caller():
        local = Large()
        alive.append(weakref.ref(local))
        told(alive)

    caller()  # twice, and a successful task last: a worker's variables hold its last operation
    caller()
    engine.submit(int).result()
    assert len(alive) >= 4
    assert [one for one in alive if one() is not None] == []


def test_unobserved_failures_hold_no_locals(eng, without_collector):
    """They hold no locals of their calls while they wait to be reported."""
    alive: list[weakref.ref[Large]] = []
    for _ in range(5):
        engine.submit(failing, alive)
    while eng.statistics().pending:
        eng.settle(1)
    assert len(alive) == 10
    assert [one for one in alive if one() is not None] == []
    with pytest.raises(ValueError, match="0"):
        eng.wait_for_all()


def test_number_of_recorded_failures_is_bounded(eng):
    """The first failure is raised; its notes describe others up to the bound, then their number.

    Dropped ones heal, too.
    """
    last = np.zeros(2)
    for number in range(MOST_UNOBSERVED + 50):
        engine.submit(failing, [], number)

    def spoil(out):
        raise ValueError("last")

    engine.submit(spoil, out=last)
    eng.settle(60)
    assert len(eng.unobserved_failures()) == MOST_UNOBSERVED
    with pytest.raises(ValueError, match="0") as caught:
        eng.wait_for_all()
    assert caught.value.args == (0,)
    assert any(re.match(r"(49|50) more operations failed", note) for note in caught.value.__notes__)
    engine.submit(last.fill, 3)
    assert engine.submit(np.sum, last).result() == 6
    eng.wait_for_all()


def test_one_summary_at_exit():
    """Many unobserved failures give a few lines: their number and kinds."""
    program = (
        "from weftplan import engine\n"
        "def bad(x): raise ValueError('many\\nlines')\n"
        "def worse(x): raise KeyError('other')\n"
        "for i in range(300): engine.submit(bad, i)\n"
        "for i in range(3): engine.submit(worse, i)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "303 engine operations failed" in ran.stderr
    assert "ValueError: many" in ran.stderr
    assert len(ran.stderr.splitlines()) <= 8


def test_suspended_generators_survive_clearing(eng):
    """A suspended generator that has caught the error can be resumed."""

    def numbers():
        try:
            raise KeyError("caught")
        except KeyError as error:
            yield error
        yield "goes on"

    generator = numbers()
    caught = next(generator)

    def fail():
        raise ValueError("late") from caught

    with pytest.raises(ValueError, match="late"):
        engine.submit(fail).result()
    assert next(generator) == "goes on"
