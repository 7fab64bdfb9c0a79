"""Many threads call every method of one engine: no operation is lost, pending or out of order at the end."""

import asyncio
import random
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from weftplan import engine
from weftplan.device.context import cpu, sim
from weftplan.engine import FnProperty
from weftplan.errors import EngineError

pytestmark = pytest.mark.stress

SECONDS = 3
THREADS = 6
SHARED = 8


class Boom(Exception):
    """The error of failing operations."""


class Load:
    """The random calls of one thread, with a log of the operations on its own var, which no other thread writes."""

    def __init__(self, eng, number, shared, over):
        self.eng, self.shared, self.over = eng, shared, over
        self.rng = random.Random(number)
        self.mine, self.log, self.pushed, self.deletes = eng.new_variable(), [], 0, []
        self.error = None

    def run(self):
        """Call random methods until ``over`` is set; record an exception in ``error``."""
        verbs = [self.push] * 12 + [self.bulk, self.wait, self.wait_all, self.delete, self.future, self.fail]
        verbs += [self.asynchronous, self.look, self.awaits, self.operator, self.trace, self.stop]
        try:
            while not self.over.is_set():
                self.rng.choice(verbs)()
            self.eng.set_bulk_size(0)
        except BaseException as error:
            self.error = error

    def note(self):
        """Return a function that logs the number of its push."""
        self.pushed += 1
        return lambda number=self.pushed: self.log.append(number)

    def others(self):
        """Return up to three of the vars shared by all threads."""
        return self.rng.sample(self.shared, self.rng.randint(0, 3))

    def push(self):
        prop = self.rng.choice((FnProperty.NORMAL,) * 4 + (FnProperty.CPU_PRIORITIZED, FnProperty.NO_SKIP))
        ctx = self.rng.choice((None, cpu(1), sim(0)))
        self.eng.push(self.note(), self.others(), [self.mine], ctx, prop=prop, priority=self.rng.randint(-2, 2))
        self.eng.push(_nothing, [self.mine], self.others())

    def bulk(self):
        with self.eng.bulk(self.rng.randint(1, 5)):
            for _ in range(4):
                self.eng.push(self.note(), self.others(), [self.mine])

    def operator(self):
        self.eng.push(self.eng.new_operator(self.note(), self.others(), [self.mine]))

    def asynchronous(self):
        note = self.note()

        def start(on_complete):
            threading.Timer(0.0005, lambda: (note(), on_complete())).start()

        prop = self.rng.choice((FnProperty.NORMAL, FnProperty.ASYNC))
        self.eng.push_async(start, self.others(), [self.mine], prop=prop)

    def fail(self):
        """Push a failing operation and a dependant on private vars, and check that both waits raise."""
        a, b = self.eng.new_variable(), self.eng.new_variable()
        self.eng.push(_fail, self.others(), [a])
        self.eng.push(_nothing, [a], [b])
        for var in (b, a):
            with pytest.raises(Boom):
                self.eng.wait_for_var(var)

    def delete(self):
        var, log = self.eng.new_variable(), []
        self.deletes.append(log)
        self.eng.push(lambda: log.append("used"), self.others(), [var])
        self.eng.delete_variable(var, lambda: log.append("deleted"))
        with pytest.raises(EngineError, match="deleted"):
            self.eng.push(_nothing, [var])

    def wait(self):
        self.eng.wait_for_var(self.mine)
        assert len(self.log) == self.pushed

    def wait_all(self):
        with suppress(Boom):  # another thread's failure, which it has not awaited yet
            self.eng.wait_for_all()

    def future(self):
        future = self.eng.future(self.mine)
        if self.rng.random() < 0.5:
            future.cancel()
        with suppress(CancelledError):
            assert future.result(60) is self.mine
            assert len(self.log) == self.pushed

    def awaits(self):
        async def main():
            await self.mine

        asyncio.run(main())
        assert len(self.log) == self.pushed

    def look(self):
        counts = self.eng.statistics()
        assert 0 <= counts.pending == counts.pushed - counts.completed
        self.eng.dump(self.rng.choice(("text", "dot")))
        repr(self.eng)
        self.eng.unobserved_failures()

    def trace(self):
        self.eng.tracer = self.rng.choice((None, lambda *record: None))

    def stop(self):
        if self.rng.random() < 0.1:
            self.eng.stop()
            self.eng.start()


def _nothing():
    """Do nothing."""


def _fail():
    raise Boom("boom")


@pytest.mark.parametrize("interval", [0.005, 1e-6])
@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_all_verbs_concurrently(monkeypatch, kind, debug, interval):
    """The operations of each thread run once and in order, deletes come last, and no operation stays pending."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", debug)
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        eng, over = engine.create(kind, cpu_workers=3), threading.Event()
        shared = [eng.new_variable() for _ in range(SHARED)]
        loads = [Load(eng, number, shared, over) for number in range(THREADS)]
        threads = [threading.Thread(target=load.run, daemon=True) for load in loads]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS)
        over.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), eng.dump()
        for load in loads:
            if load.error is not None:
                raise load.error
        with suppress(Boom):
            eng.wait_for_all()
        eng.wait_for_all()
        for load in loads:
            assert load.log == list(range(1, load.pushed + 1))
            assert load.mine.version == load.pushed
            assert all(log == ["used", "deleted"] for log in load.deletes)
        assert all(var.state == "IDLE" for var in shared)
        counts = eng.statistics()
        assert (counts.pending, counts.pushed) == (0, counts.completed)
        assert counts.pushed > 500
        eng.stop()
    finally:
        sys.setswitchinterval(before)
