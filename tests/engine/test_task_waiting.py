"""Waits for arrays, from threads and from coroutines."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from weftplan import engine
from weftplan.errors import WaitInWorkerError


class TestWait:
    """``engine.wait``, ``engine.future`` and ``await``."""

    def test_readers(self, threaded):
        """``wait(array)`` ignores tasks that only read the array; ``readers=True`` waits for them, too."""
        a, hold, seen = np.zeros(1), threading.Event(), []

        def slow(array) -> None:
            hold.wait(60)
            seen.append(float(array[0]))

        engine.submit(slow, a)
        engine.wait(a)
        assert seen == []
        threading.Timer(0.05, hold.set).start()
        engine.wait(a, readers=True)
        assert seen == [0.0]

    def test_inside_a_task(self, threaded):
        """A wait inside a task raises WaitInWorkerError, whose message names ``const_vars``; it could hang."""
        a, b = np.zeros(1), np.zeros(1)
        engine.submit(lambda out: engine.wait(a), out=b)
        with pytest.raises(WaitInWorkerError, match="const_vars"):
            engine.wait(b)

    def test_future(self, driver):
        """A future of an array is done when the array is written; its result is the array."""
        a = np.zeros(2)
        engine.submit(np.add, a, 1, out=a)
        done = engine.future(a)
        engine.wait()
        assert done.result(timeout=60) is a
        assert a.tolist() == [1.0, 1.0]

    def test_future_with_a_failure(self, threaded):
        """A future raises the task's ZeroDivisionError; a later wait for all raises nothing."""
        a = np.zeros(2)
        engine.submit(lambda out: 1 / 0, out=a)
        with pytest.raises(ZeroDivisionError):
            engine.future(a).result(timeout=60)
        threaded.wait_for_all()

    def test_await(self, threaded):
        """``await var`` lets the event loop continue while the task runs, and raises the task's ZeroDivisionError."""
        a, order, hold = np.zeros(2), [], threading.Event()

        def slow(out) -> None:
            hold.wait(60)
            out += 1

        async def other() -> None:
            order.append("the loop goes on")
            hold.set()

        async def main() -> None:
            engine.submit(slow, out=a)
            beside = asyncio.create_task(other())
            var = await engine.var_of(a)
            order.append(f"version {var.version}")
            await beside
            assert await asyncio.wrap_future(engine.future(a)) is a
            engine.submit(lambda out: 1 / 0, out=a)
            with pytest.raises(ZeroDivisionError):
                await engine.var_of(a)

        asyncio.run(main())
        assert order == ["the loop goes on", "version 1"]
        assert a.tolist() == [1.0, 1.0]

    def test_awaited_stop_iteration_becomes_a_cause(self, threaded):
        """An awaited StopIteration is raised as the cause of a RuntimeError, because coroutines cannot raise it."""
        a, empty = np.zeros(1), iter(())

        async def main() -> None:
            for wanted in (lambda: _wait(engine.var_of(a)), lambda: asyncio.wrap_future(engine.future(a))):
                with pytest.raises(RuntimeError, match="raised StopIteration") as told:
                    await asyncio.wait_for(wanted(), 60)
                assert isinstance(told.value.__cause__, StopIteration)

        engine.submit(lambda out: next(empty), out=a)
        asyncio.run(main())
        with pytest.raises(StopIteration):
            engine.wait(a)

    def test_future_completes_at_exit(self, driver):
        """A future completes after notify_shutdown, although the task's function does not run."""
        a, ran = np.zeros(1), []
        engine.wait(a)
        driver.notify_shutdown()
        engine.submit(ran.append, 1, writes=[a])
        done = engine.future(a)
        engine.wait()
        assert done.result(timeout=60) is a
        assert ran == []
        driver._dropped.clear()  # otherwise exit would print it


async def _wait(var) -> None:
    await var
