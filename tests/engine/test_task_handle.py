"""Task handles: results, timed waits, coroutines, cancelling and completion order."""

import asyncio
import gc
import queue
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import EngineError, WaitInWorkerError
from weftplan.tasks.handle import _in_turn


@pytest.fixture
def four_task_threads():
    """The current engine of the test, with four task threads."""
    eng = engine.create("ThreadedEnginePerDevice", task_workers=4)
    with engine.using(eng):
        yield eng
    eng.stop()


def fails(*_, **__):
    """Raise ValueError, whatever the arguments are."""
    raise ValueError("no")


def test_result_is_the_return_value(driver):
    """``result()`` returns the function's return value; for a NumPy function with ``out``, the array."""
    a = np.ones(3)
    task = engine.submit(np.add, a, 1, out=a)
    assert task.result() is a
    assert task.array is a
    assert a.tolist() == [2, 2, 2]
    assert engine.submit(divmod, 7, 2).result() == (3, 1)
    assert task.done()
    assert not task.running()
    assert repr(task) == "<Task 'add': done>"


def test_keyword_arguments_are_passed_on(driver):
    """Keyword arguments are passed on; ``kwargs`` takes names that submit itself uses; duplicates raise EngineError."""
    assert engine.submit(int, "11", base=2).result() == 3
    assert engine.submit(dict, one=1, kwargs={"name": 2}).result() == {"one": 1, "name": 2}
    with pytest.raises(EngineError, match="'base' is given twice"):
        engine.submit(int, "11", base=2, kwargs={"base": 3})
    a, b = np.ones(2), np.zeros(2)
    engine.submit(np.copyto, a, 5, writes=[a])
    engine.submit(np.add, 1, 0, where=a > 9, out=b)
    assert engine.submit(lambda *, values: values.sum(), values=a).result() == 10


def test_failure_is_raised_by_result_and_dependants(driver):
    """``result()`` of a failed task and of a task that reads its output raises the original exception."""
    a, b = np.zeros(2), np.zeros(2)
    try:
        first = engine.submit(fails, out=a, name="first")
        second = engine.submit(np.add, a, 1, out=b)
    except ValueError:  # raised by the naive engine
        return
    for task in (first, second):
        with pytest.raises(ValueError, match="no"):
            task.result()
        assert isinstance(task.exception(), ValueError)
        assert task.done()
        assert repr(task).endswith(": failed>")
    engine.submit(np.copyto, a, 1, writes=[a])
    engine.submit(np.copyto, b, 1, writes=[b])
    engine.wait()


def test_failure_without_outputs_is_raised_by_wait(threaded):
    """``wait()`` raises the failure of a task without outputs, and so does a wait for the task, each once."""
    engine.submit(fails)
    with pytest.raises(ValueError, match="no"):
        engine.wait()
    task = engine.submit(fails)
    with pytest.raises(ValueError, match="no"):
        engine.wait(task)
    engine.wait()


def test_task_as_reads_orders_others(driver):
    """A task passed in ``reads`` runs first, although the two tasks share no array."""
    ran = []
    first = engine.submit(lambda: (time.sleep(0.02), ran.append(1)))
    engine.submit(lambda: ran.append(2), reads=[first]).result()
    assert ran == [1, 2]


def test_timed_waits(threaded):
    """After its timeout ``wait`` returns False and ``result`` raises TimeoutError; the task continues."""
    door = threading.Event()
    task = engine.submit(door.wait, 60)
    assert not task.wait(0.01)
    with pytest.raises(TimeoutError, match=r"task 'Event\.wait' was not over after 0\.01 seconds"):
        task.result(0.01)
    with pytest.raises(TimeoutError):
        task.exception(0)
    with pytest.raises(EngineError, match="at least 0 seconds"):
        task.wait(-1)
    assert not task.done()
    door.set()
    assert task.wait(60)
    assert task.result(0) is True
    assert task.exception() is None


def test_timeout_error_of_a_task_is_its_failure(threaded):
    """A TimeoutError that the task raises is its failure, not a timeout of the wait."""

    def late():
        raise TimeoutError("mine")

    task = engine.submit(late)
    assert str(task.exception(60)) == "mine"


def test_task_can_be_awaited(threaded):
    """A coroutine that awaits a task receives its result or its failure."""

    async def main():
        good = await engine.submit(pow, 2, 5)
        try:
            await engine.submit(fails)
        except ValueError as error:
            return good, str(error)
        return None

    assert asyncio.run(main()) == (32, "no")


def test_wait_inside_a_task_is_refused(threaded):
    """A task that waits for a task of its engine gets WaitInWorkerError, because it could wait for itself."""
    running_task = engine.submit(int)
    with pytest.raises(WaitInWorkerError):
        engine.submit(running_task.wait).result()
    assert engine.submit(lambda: running_task.exception()).exception().__class__ is WaitInWorkerError


def test_cancel(threaded):
    """A cancelled task never runs, and readers of its output are skipped with CancelledError.

    A wait for everything raises nothing, and a task that overwrites the array runs. A running or finished task cannot
    be cancelled.
    """
    a, b, door, begun = np.zeros(2), np.zeros(2), threading.Event(), threading.Event()
    first = engine.submit(lambda out: (begun.set(), door.wait(60)), out=a)
    second = engine.submit(np.add, a, 1, out=a)
    third = engine.submit(np.add, a, 1, out=b)
    assert begun.wait(60)
    assert first.running()
    assert not first.cancel()
    assert second.cancel()
    assert second.cancel()
    assert second.cancelled()
    assert repr(second) == "<Task 'add': cancelled>"
    door.set()
    first.result()
    for task in (second, third):
        with pytest.raises(CancelledError):
            task.result()
    assert not third.cancelled()
    engine.wait()
    assert (a.tolist(), b.tolist()) == ([0, 0], [0, 0])
    engine.submit(np.copyto, a, 3, writes=[a])
    engine.wait(a)
    assert not first.cancel()


def test_cancel_races_with_the_start(threaded):
    """Of 300 tasks that are cancelled while they start, each either runs or is cancelled, never both."""
    ran = []
    tasks = [engine.submit(ran.append, i) for i in range(300)]
    cancelled = {i for i, task in enumerate(tasks) if task.cancel()}
    for task in tasks:
        task.wait()
    engine.wait()
    assert cancelled.isdisjoint(ran)
    assert sorted(cancelled.union(ran)) == list(range(300))
    assert len(ran) + len(cancelled) == 300


def test_as_completed(four_task_threads):
    """``as_completed`` yields each task once, failed or not, in completion order; a timeout raises TimeoutError."""
    doors = [threading.Event() for _ in range(2)]
    slow, fast = (engine.submit(door.wait, 60) for door in doors)
    bad = engine.submit(fails)
    order = engine.as_completed([slow, bad, fast, fast])
    assert next(order) is bad
    doors[1].set()
    assert next(order) is fast
    doors[0].set()
    assert list(order) == [slow]
    assert isinstance(bad.exception(), ValueError)
    never = threading.Event()
    late = engine.submit(never.wait, 60)
    with pytest.raises(TimeoutError, match="1 of 1 tasks were not over in time"):
        next(engine.as_completed([late], timeout=0.01))
    never.set()
    late.result()
    with pytest.raises(EngineError, match="got int"):
        engine.as_completed([3])


def test_as_completed_on_every_engine(driver):
    """``as_completed`` yields all tasks on every engine, also if only the waiting thread runs operations."""
    tasks = [engine.submit(pow, 2, n) for n in range(5)]
    assert sorted(task.result() for task in engine.as_completed(tasks)) == [1, 2, 4, 8, 16]


def test_repeated_notification_yields_a_task_once(four_task_threads):
    """A task whose completion is notified twice, as may happen after an interrupt, is yielded once."""
    ended, tasks = queue.SimpleQueue(), [engine.submit(pow, 2, n) for n in range(2)]
    for task in (tasks[0], tasks[0], tasks[1]):
        ended.put(task)
    assert list(_in_turn(dict.fromkeys(tasks), ended, None)) == tasks


def test_map_keeps_argument_order(driver):
    """``map`` yields results in argument order, and arrays among the arguments order the calls."""
    assert list(engine.map(pow, [2, 3, 4], [1, 2, 3])) == [2, 9, 64]
    assert list(engine.map(pow, [], [])) == []
    a = np.zeros(2)
    engine.submit(np.copyto, a, 4, writes=[a])
    assert list(engine.map(np.sum, [a, a])) == [8, 8]


def test_map_cancels_unneeded_tasks(four_task_threads):
    """After ``map`` raises a task's ValueError it yields nothing more, and a wait for everything raises nothing.

    If an iterator of ``map`` is dropped after its first result, tasks that have not begun never run.
    """
    door, ran = threading.Event(), []

    def act(n):
        door.wait(60)
        ran.append(n)
        if not n:
            raise ValueError(n)

    results = engine.map(act, range(50))
    door.set()
    with pytest.raises(ValueError, match="0"):
        next(results)
    engine.wait()
    assert list(results) == []
    door.clear()
    ran.clear()
    results = engine.map(lambda n: act(n) if n else n, range(50))
    assert next(results) == 0
    del results
    door.set()
    engine.wait()
    assert len(ran) <= 5, "more tasks ran than four threads and the waiting one had begun"


def test_finished_task_drops_its_arguments(driver):
    """A finished task keeps its result and output alive, but not its arguments."""

    class Argument:
        pass

    argument = Argument()
    ref = weakref.ref(argument)
    task = engine.submit(lambda thing: 5, argument)
    del argument
    assert task.result() == 5
    engine.wait()
    gc.collect()
    assert ref() is None


def test_tasks_on_ndarrays(driver):
    """A task receives an NDArray as a NumPy array, after the pending operations of that NDArray."""
    x = mx.nd.ones((3,)) + 1
    out = np.zeros(3)
    assert engine.submit(np.multiply, x, 2, out=out).result() is out
    assert out.tolist() == [4, 4, 4]


@pytest.mark.parametrize(("progress", "lines"), [(True, True), (None, True), (False, False)])
def test_map_shows_how_far_it_is(progress, lines, monkeypatch, capsys):
    """``map`` counts its results in a progress line; with ``progress=False`` it prints none. The results are equal."""
    from weftplan.support import progress as shown

    monkeypatch.setenv("WEFTPLAN_PROGRESS", "1")
    monkeypatch.setattr(shown, "PATIENCE", 0.0)
    monkeypatch.setattr(shown, "PERIOD", 0.0)
    monkeypatch.setattr(shown, "live_width", lambda stream: 80)
    assert list(engine.map(pow, [2, 3, 4], [1, 2, 3], progress=progress)) == [2, 9, 64]
    text = capsys.readouterr().err
    assert ("pow: 2 of 3 results" in text) == lines
    begun = engine.map(time.sleep, [0.01] * 200, progress=progress)
    next(begun)
    begun.close()  # cancels the tasks that have not begun
    engine.get().wait_for_all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: engine.wait("a"), "expected a NumPy"),
        (lambda: engine.submit(np.add, 1, 2, reads=3), r"reads=\[array\] for one, got 3"),
        (lambda: engine.submit(np.add, 1, 2, writes="a"), r"writes=\[array\] for one, got 'a'"),
        (lambda: engine.submit(divmod, 7, 2, nout=0), "integer >= 1, got 0"),
        (lambda: engine.submit(divmod, 7, 2, nout="2"), "integer >= 1, got '2'"),
        (lambda: engine.submit(divmod, 7, 2, nout=3)[0].result(), "nout=3, but its result, a tuple, has 2"),
        (lambda: engine.submit(abs, 7, nout=2)[0].result(), "nout=2, but its result is a single int"),
        (lambda: engine.as_completed(3), "a list of tasks, got 3"),
        (lambda: engine.as_completed(engine.submit(abs, 7)), r"write as_completed\(\[task\]\)"),
        (lambda: engine.as_completed([np.ones(2)]), "got ndarray"),
    ],
)
def test_wrong_arguments_of_tasks_are_refused(call, said):
    """Arguments of the wrong kind raise EngineError with the expected kind."""
    with pytest.raises(EngineError, match=said):
        call()
