"""Waiting for arrays, from threads and from coroutines."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from weftplan import engine
from weftplan.errors import WaitInWorkerError


class TestWait:
    """Waiting from threads and from coroutines."""

    def test_readers(self, threaded):
        """``readers=True`` waits for a task that only reads."""
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
        """A wait inside a task could hang for ever, so it raises with the fix."""
        a, b = np.zeros(1), np.zeros(1)
        engine.submit(lambda out: engine.wait(a), out=b)
        with pytest.raises(WaitInWorkerError, match="const_vars"):
            engine.wait(b)

    def test_future(self, driver):
        """A future of an array is done when it is written."""
        a = np.zeros(2)
        engine.submit(np.add, a, 1, out=a)
        done = engine.future(a)
        engine.wait()
        assert done.result(timeout=60) is a
        assert a.tolist() == [1.0, 1.0]

    def test_future_with_a_failure(self, threaded):
        """A future carries what the task raised, which then counts as seen."""
        a = np.zeros(2)
        engine.submit(lambda out: 1 / 0, out=a)
        with pytest.raises(ZeroDivisionError):
            engine.future(a).result(timeout=60)
        threaded.wait_for_all()

    def test_await(self, threaded):
        """``await var`` gives the loop back while the task runs; a failure is raised in the coroutine."""
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

    def test_await_what_raises_stop_iteration(self, threaded):
        """No coroutine can be resumed with a StopIteration: it is the cause of what is raised, as in a generator."""
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

    def test_a_future_while_the_process_ends(self, driver):
        """It is settled, though no function is run any more."""
        a, ran = np.zeros(1), []
        engine.wait(a)
        driver.notify_shutdown()
        engine.submit(ran.append, 1, writes=[a])
        done = engine.future(a)
        engine.wait()
        assert done.result(timeout=60) is a
        assert ran == []
        driver._dropped.clear()  # or the end of the process would tell of it


async def _wait(var) -> None:
    await var
