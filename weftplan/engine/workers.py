"""Worker threads and their queues.

A queue belongs to the engine's lock. A worker takes the lock once per operation: to finish the last one and to fetch
the next. With nothing to fetch it parks on a lock of its own, which it puts into ``idle`` under the engine's lock, so a
push that finds an idle worker knows that it will look again after being released: no wake-up is lost.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from weftplan.engine.core import WAITER, running
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.engine.statistics import QueueStatistics

if TYPE_CHECKING:
    from weftplan.device.context import Context
    from weftplan.engine.threaded import ThreadedBase

_DELETE = FnProperty.DELETE_VAR


class WorkerQueue:
    """Ready operations of one kind on one device, and the threads that run them.

    Args:
        engine: owner.
        context: device of the operations (None: any).
        name: ``worker``, ``copy`` or ``priority``.
        threads: how many, started at the first operation.
        by_priority: larger priority first (push order among equals) instead of first in, first out.
    """

    __slots__ = (
        "by_priority",
        "completed",
        "context",
        "engine",
        "idle",
        "items",
        "name",
        "started",
        "stopping",
        "threads",
    )

    def __init__(
        self, engine: ThreadedBase, context: Context | None, name: str, threads: int, *, by_priority: bool = False
    ) -> None:
        self.engine = engine
        self.context = context
        self.name = name
        self.threads = threads
        self.by_priority = by_priority
        self.items: Any = [] if by_priority else deque()
        self.idle: list[Any] = []
        self.completed = 0
        self.stopping = False
        self.started: list[threading.Thread] = []

    def put(self, op: OprBlock) -> Any:
        """Lock held: queue a ready operation; returns a parked worker's lock to release, or None."""
        if self.by_priority:
            heapq.heappush(self.items, op)
        elif op.prop == _DELETE:
            self.items.appendleft(op)
        else:
            self.items.append(op)
        if not self.started:
            self._start()
            return None
        return self.idle.pop() if self.idle else None

    def _start(self) -> None:
        """Lock held: make the threads. They wait for the lock first, so they find the queue complete."""
        where = "" if self.context is None else f" {self.context}"
        for i in range(self.threads):
            thread = threading.Thread(target=self._work, name=f"weftplan{where} {self.name} {i}", daemon=True)
            self.started.append(thread)
            thread.start()

    def statistics(self) -> QueueStatistics:
        """Lock held: counts."""
        return QueueStatistics(self.context, self.name, self.completed, len(self.items), len(self.started))

    def _work(self) -> None:
        """A worker's life."""
        engine, items = self.engine, self.items
        lock, execute, finish, enqueue = engine._lock, engine._execute, engine._finish, engine._enqueue
        take = (lambda: heapq.heappop(items)) if self.by_priority else items.popleft
        me = threading.current_thread().name
        park = threading.Lock()
        park.acquire()
        running.engine = engine
        device = engine._enter_worker(self)
        op: OprBlock | None = None
        failure: Any = None
        while True:
            wakes = None
            with lock:
                if op is not None:
                    self.completed += 1
                    for ready in finish(op, failure):
                        wake = enqueue(ready)
                        if wake is not None:
                            if wakes is None:
                                wakes = [wake]
                            else:
                                wakes.append(wake)
                if items:
                    op = take()
                elif self.stopping:
                    op = None
                    break
                else:
                    op = None
                    self.idle.append(park)
            if wakes is not None:
                for wake in wakes:
                    wake.release()
            if op is None:
                failure = None
                park.acquire()
                continue
            if op.asynchronous:
                engine._start_async(op, _completion(engine, self, op))
                op = failure = None
                continue
            if device is not None:
                failure = device.run(op)
            elif engine._tracer is None:
                failure = execute(op)
            else:
                start = time.perf_counter_ns()
                failure = execute(op)
                tracer = engine._tracer
                if tracer is not None:
                    tracer(op.label, op.ctx, self.name, me, op.push_ns or start, start, time.perf_counter_ns(), op.seq)
        if wakes is not None:
            for wake in wakes:
                wake.release()
        if device is not None:
            device.close()


def _completion(engine: ThreadedBase, queue: WorkerQueue, op: OprBlock) -> Any:
    """What ends an asynchronous operation, on whatever thread calls it."""

    def done(failure: Any) -> None:
        wakes = []
        with engine._lock:
            queue.completed += 1
            for ready in engine._finish(op, failure):
                wake = engine._enqueue(ready)
                if wake is not None:
                    wakes.append(wake)
        for wake in wakes:
            wake.release()

    return done


def finish_waiter(op: OprBlock) -> bool:
    """True when ``op`` only wakes a waiting thread."""
    return op.queue is WAITER
