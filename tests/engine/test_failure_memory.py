"""Memory of failures: they keep no locals alive, their number is bounded, and exit prints one summary."""

import contextlib
import gc
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest

from weftplan import engine
from weftplan.engine.failure import MAX_UNOBSERVED


class Large:
    """A local object of a failed call, whose release the tests observe."""


@pytest.fixture
def without_collector():
    """Disable the cycle collector, so that reference counts alone release objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["ThreadedEngine", "ThreadedEnginePerDevice"])
def eng(request):
    """The current engine of the test, with one worker."""
    with engine.using(engine.create(request.param, cpu_workers=1)) as result:
        yield result
    result.stop()


def failing(alive, number=0):
    """Raise ValueError(number) with a cause, and append weak references to locals of two levels to ``alive``."""
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
    """After the error is caught and the handle dropped, no local of the call or its caller is alive."""
    alive: list[weakref.ref[Large]] = []

    def caller():
        local = Large()
        alive.append(weakref.ref(local))
        told(alive)

    caller()  # twice, then a successful task, because a worker refers to its last operation
    caller()
    engine.submit(int).result()
    assert len(alive) >= 4
    assert [one for one in alive if one() is not None] == []


def test_unobserved_failures_hold_no_locals(eng, without_collector):
    """Failures that no wait has raised keep no locals of their calls alive."""
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
    """At most MAX_UNOBSERVED failures are recorded; the first is raised, with a note about the number of the rest.

    A failure that was not recorded can be cleared by an overwrite, too.
    """
    last = np.zeros(2)
    for number in range(MAX_UNOBSERVED + 50):
        engine.submit(failing, [], number)

    def spoil(out):
        raise ValueError("last")

    engine.submit(spoil, out=last)
    eng.settle(60)
    assert len(eng.unobserved_failures()) == MAX_UNOBSERVED
    with pytest.raises(ValueError, match="0") as caught:
        eng.wait_for_all()
    assert caught.value.args == (0,)
    assert any(re.match(r"(49|50) more operations failed", note) for note in caught.value.__notes__)
    engine.submit(last.fill, 3)
    assert engine.submit(np.sum, last).result() == 6
    eng.wait_for_all()


def test_one_summary_at_exit():
    """Exit after 303 unraised failures prints at most eight lines, with their number and the first error."""
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
    """After a task raises an error whose cause a suspended generator caught, the generator continues."""

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
