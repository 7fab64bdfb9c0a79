"""Tasks with futures, coroutines, context variables and NumPy, and unpacking of results."""

import asyncio
import concurrent.futures
import contextvars
import threading

import numpy as np
import pytest

from weftplan import engine
from weftplan.errors import EngineError

color: contextvars.ContextVar[str] = contextvars.ContextVar("color", default="none")


@pytest.fixture(params=["ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def eng(request):
    """The current engine of the test: two threaded kinds and the simulator."""
    workers = {} if request.param == "Simulator" else {"cpu_workers": 2}
    with engine.using(engine.create(request.param, **workers)) as result:
        yield result
    result.stop()


@pytest.fixture
def threads():
    """The current engine of the test, whose single worker runs all tasks."""
    with engine.using(engine.create("ThreadedEngine", cpu_workers=1)) as result:
        yield result
    result.stop()


def fail():
    """Raise ValueError."""
    raise ValueError("failed")


def test_wait_takes_collections(eng):
    """``engine.wait`` accepts lists, sets, generators and nested collections, and raises a failure in them."""
    a, b = np.zeros(2), np.zeros(2)
    engine.submit(np.add, a, 1, out=a)
    engine.submit(np.add, b, 2, out=b)
    engine.wait([a, b])
    assert (a.tolist(), b.tolist()) == ([1, 1], [2, 2])
    tasks = [engine.submit(int, n) for n in range(3)]
    engine.wait(tasks)
    engine.wait(set(tasks), (task for task in tasks), [[tasks]])
    engine.wait([])
    assert all(task.done() for task in tasks)
    with pytest.raises(ValueError, match="failed"):
        engine.wait([a, engine.submit(fail)])
    with pytest.raises(EngineError, match="expected a NumPy"):
        engine.wait([3])


def test_results_are_unpacked_and_indexed(eng):
    """Items of a result are tasks: they can be arguments of other tasks, and they fail if the whole result fails."""
    quotient, remaining = engine.submit(divmod, 17, 5, nout=2)
    assert engine.submit(pow, quotient, remaining).result() == 9
    table = engine.submit(lambda: {"key": [4, 5]})
    assert table["key"][1].result() == 5
    with pytest.raises(EngineError, match="nout=2"):
        iter(table)
    with pytest.raises(IndexError, match="2 results"):
        engine.submit(divmod, 1, 1, nout=2)[2]
    first, _ = engine.submit(fail, nout=2)
    with pytest.raises(ValueError, match="failed"):
        first.result()

    @engine.task(nout=2)
    def pair(x):
        return x, -x

    up, down = pair(3)
    assert (up.result(), down.result()) == (3, -3)


def test_numpy_array_of_a_task_waits(eng):
    """NumPy functions wait for a task's result and convert it to the requested dtype."""
    task = engine.submit(np.arange, 3)
    assert np.asarray(task, dtype="f4").tolist() == [0, 1, 2]
    assert np.add(task, 1).tolist() == [1, 2, 3]


def test_done_callbacks(eng):
    """Each done callback is called once with its task, also after a failure; an error of one affects no other."""
    seen, reported, done = [], [], threading.Event()
    task, bad = engine.submit(int, 3), engine.submit(fail)
    hook = threading.excepthook
    threading.excepthook = lambda arguments: reported.append(arguments.exc_type)
    try:
        task.add_done_callback(lambda _: 1 / 0)
        task.add_done_callback(seen.append)
        bad.add_done_callback(seen.append)
        bad.add_done_callback(lambda _: done.set())
        assert done.wait(60)
        eng.settle(60)
    finally:
        threading.excepthook = hook
    assert sorted(map(id, seen)) == sorted(map(id, (task, bad)))
    assert reported == [ZeroDivisionError]
    assert bad.remove_done_callback(seen.append) == 0
    with pytest.raises(EngineError, match="expected a function of the task"):
        task.add_done_callback(3)
    assert isinstance(bad.exception(), ValueError)


def test_futures_of_tasks(eng):
    """``task.future()`` returns a future for APIs without task support; a task passed there raises AttributeError."""
    tasks = [engine.submit(int, n) for n in range(3)]
    futures = [task.future() for task in tasks]
    assert concurrent.futures.wait(futures, timeout=60).not_done == set()
    assert [future.result() for future in futures] == [0, 1, 2]
    assert isinstance(engine.submit(fail).future().exception(60), ValueError)
    with pytest.raises(AttributeError, match=r"engine\.as_completed.*task\.future\(\)"):
        concurrent.futures.wait(tasks)


def test_coroutines(eng):
    """await, gather, wait, wrap_future and task groups give the results of tasks, also on an engine without threads."""

    async def main():
        task = engine.submit(lambda: 5)
        assert await task == 5
        assert await asyncio.gather(engine.submit(int, 1), engine.submit(int, 2)) == [1, 2]
        done, pending = await asyncio.wait([engine.submit(int, 3)], timeout=60)
        assert [one.result() for one in done] == [3]
        assert not pending
        assert await asyncio.wrap_future(engine.submit(int, 4).future()) == 4

        async def awaited():
            return await engine.submit(int, 6)

        async with asyncio.TaskGroup() as group:
            member = group.create_task(awaited())
        assert member.result() == 6
        with pytest.raises(ValueError, match="failed"):
            await engine.submit(fail)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_task_runs_in_the_submitters_context(threads):
    """A task sees the submitter's context variables and NumPy errstate; its own changes are not visible outside."""
    token = color.set("red")
    first = engine.submit(lambda: (color.get(), color.set("blue"))[0])
    color.reset(token)
    assert first.result() == "red"
    assert engine.submit(color.get).result() == "none"
    with np.errstate(divide="raise"):
        task = engine.submit(np.divide, 1.0, np.zeros(2))
    with pytest.raises(FloatingPointError):
        task.result()


def test_coroutine_functions_are_refused(threads):
    """A function that returns a coroutine raises EngineError at submission or when it runs."""

    async def work():
        return 1

    class Caller:
        async def __call__(self):
            return 1

    with pytest.raises(EngineError, match="async def"):
        engine.submit(Caller())
    with pytest.raises(EngineError, match="returned a coroutine"):
        engine.submit(lambda: work()).result()


def test_returned_generators_are_refused(threads):
    """A result that is a generator of which nothing has run raises EngineError; one that is under way is a result."""

    async def letters():
        yield "a"

    with pytest.raises(EngineError, match=r"returned a generator.*return list"):
        engine.submit(lambda: (number for number in range(3))).result()
    with pytest.raises(EngineError, match="returned an asynchronous generator"):
        engine.submit(lambda: letters()).result()
    with pytest.raises(EngineError, match=r"returned a map object.*return list"):
        engine.submit(map, int, ["1"]).result()
    numbers = (number for number in range(3))
    assert next(numbers) == 0
    assert list(engine.submit(lambda: numbers).result()) == [1, 2]


def test_invalid_timeout_is_refused(threads):
    """A timeout of NaN raises EngineError."""
    with pytest.raises(EngineError, match="timeout"):
        engine.submit(int).result(float("nan"))
