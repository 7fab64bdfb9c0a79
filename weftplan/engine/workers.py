"""Worker threads and their queues.

A queue belongs to the engine's lock. A worker takes the lock once per operation: to finish the last one and to fetch
the next. With nothing to fetch it parks on a lock of its own, which it puts into ``idle`` first, so a push that finds
an idle worker knows that it will look again after being released.

At most one worker of a queue is on its way from parking to looking (``waking``): the one that looks wakes the next if
more is there. A parked worker does not hold its engine: whoever wakes it hands it over (``keep``). So an engine that
nobody else holds goes, and its threads end.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from weftplan.engine import blas
from weftplan.engine.life import WAITER, running
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.engine.statistics import QueueStatistics
from weftplan.engine.streams import LATER, enter

if TYPE_CHECKING:
    from weftplan.device.context import Context
    from weftplan.engine.threaded import ThreadedBase

_DELETE = FnProperty.DELETE_VAR


class WorkerQueue:
    """Ready operations of one kind on one device, and the threads that run them. Guarded by the engine's lock.

    Args:
        context: device of the operations (None: any).
        name: ``worker``, ``copy`` or ``priority``.
        threads: how many at most; each is started when there is work and no idle one.
        by_priority: larger priority first (push order among equals) instead of first in, first out.
    """

    __slots__ = (
        "by_priority",
        "completed",
        "context",
        "idle",
        "items",
        "keep",
        "name",
        "started",
        "stopping",
        "threads",
        "waking",
    )

    def __init__(self, context: Context | None, name: str, threads: int, *, by_priority: bool = False) -> None:
        self.context = context
        self.name = name
        self.threads = threads
        self.by_priority = by_priority
        self.items: Any = [] if by_priority else deque()
        self.idle: list[Any] = []
        self.waking = False
        self.keep: ThreadedBase | None = None
        """The engine, from waking a worker until it looks: operations without vars would not keep it alive."""
        self.completed = 0
        self.stopping = False
        self.started: list[threading.Thread] = []

    def add(self, op: OprBlock) -> None:
        """Queue a ready operation; waking somebody is the caller's."""
        if self.by_priority:
            heapq.heappush(self.items, op)
        elif op.prop is _DELETE:
            self.items.appendleft(op)
        else:
            self.items.append(op)

    def put(self, op: OprBlock, engine: ThreadedBase) -> None:
        """Queue a ready operation and see to it that a worker of ``engine`` looks."""
        if op.prop is NORMAL and not self.by_priority:
            self.items.append(op)
        else:
            self.add(op)
        if not self.waking:
            self.wake(engine)

    def wake(self, engine: ThreadedBase) -> None:
        """Release one parked worker, or start one more; nothing when all are at work."""
        if self.idle:
            # An exception (KeyboardInterrupt) can come after the release and before the rest: then a worker that runs
            # still stands in `idle`, and a later release finds its lock open. It looks again in any case.
            park = self.idle[-1]
            self.keep = engine
            with suppress(RuntimeError):
                park.release()
            self.waking = True
            del self.idle[-1]
            return
        if self.stopping:
            # Nobody held the engine, its workers went; then a finalizer brought it back to life, for one more delete.
            self.stopping = False
            self.started.clear()
            engine._end_with_engine()
        if len(self.started) < self.threads:
            self._start(engine)

    def _start(self, engine: ThreadedBase) -> None:
        where = "" if self.context is None else f" {self.context}"
        name = f"weftplan{where} {self.name} {len(self.started)}"
        # In a list that the thread empties: Thread keeps its arguments, and with them the engine, until it ends.
        thread = threading.Thread(target=_work, args=(self, [engine], engine._lock), name=name, daemon=True)
        self.started.append(thread)
        self.waking = True
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had: others of this queue will do, if there are any
            self.started.remove(thread)
            self.waking = False
            if not self.started:
                raise

    def end(self) -> None:
        """Tell the workers to go when nothing is left. Also called, without the lock, when nobody holds the engine."""
        self.stopping = True
        for park in self.idle:
            with suppress(RuntimeError):
                park.release()
        self.idle.clear()

    def statistics(self) -> QueueStatistics:
        """Counts."""
        return QueueStatistics(self.context, self.name, self.completed, len(self.items), len(self.started))


NORMAL = FnProperty.NORMAL


def _work(queue: WorkerQueue, box: list[ThreadedBase], lock: Any) -> None:
    """A worker's life."""
    engine: ThreadedBase = box.pop()
    items = queue.items
    by_priority = queue.by_priority
    me = threading.current_thread().name
    park = threading.Lock()
    park.acquire()
    running.engine = engine
    blas.enter_worker()
    device = enter(engine, queue.context)
    execute, finish = engine._execute, engine._finish
    op: OprBlock | None = None
    failure: Any = None
    woken = True
    while True:
        last = op
        # Invariant: between here and the end of the block no exception can come: no user code runs, and signals are
        # for the main thread only.
        with lock:
            engine._inside = True
            if last is not None:
                queue.completed += 1
                ready = finish(last, failure)
                if ready is not None:
                    for following in ready:
                        if following.queue is WAITER:
                            engine._finish_waiter(following)
                            continue
                        target = engine._queue_of(following)
                        if target is queue:
                            queue.add(following)  # this worker looks next, and wakes another if there is more
                        else:
                            target.put(following, engine)
                    following = ready = None  # type: ignore[assignment]
            if woken:
                woken = queue.waking = False
                queue.keep = None
            if items:
                op = heapq.heappop(items) if by_priority else items.popleft()
                if items and not queue.waking:
                    queue.wake(engine)
            else:
                op = None
                if queue.stopping:
                    engine._inside = False
                    break
                if (device is None or not device.has_graves()) and park not in queue.idle:
                    queue.idle.append(park)
            engine._inside = False
        # What the operation held dies here, outside the lock.
        last = failure = None
        if engine._deferred:
            engine._run_deferred()
        if op is None:
            if device is not None and device.has_graves():
                _bury(engine, queue, device, block=True)
                continue
            del execute, finish, engine
            running.engine = None
            found = _park(queue, park, lock)
            if found is None:
                if device is not None:
                    device.close(None)
                return
            engine = running.engine = found
            del found
            execute, finish = engine._execute, engine._finish
            woken = True
        elif op.asynchronous:
            done = _completion(engine, queue, op, time.perf_counter_ns() if engine._tracer is not None else 0)
            if device is not None:
                device.start(engine, op, done)
            else:
                engine._start_async(op, done)
            op = done = None
        elif device is not None:
            start = time.perf_counter_ns()
            failure = device.run(engine, op)
            if failure is LATER:
                op = failure = None
            elif engine._tracer is not None:
                engine._trace(op, queue.name, me, start)
            if device.has_graves():
                _bury(engine, queue, device, block=False)
        elif engine._tracer is None:
            failure = execute(op)
        else:
            start = time.perf_counter_ns()
            failure = execute(op)
            engine._trace(op, queue.name, me, start)
    if device is not None:
        device.close(engine)
    running.engine = None


def _park(queue: WorkerQueue, park: Any, lock: Any) -> ThreadedBase | None:
    """Sleep until woken; returns the engine, or None when it is time to go. Nothing here holds the engine meanwhile."""
    while True:
        park.acquire()
        with lock:
            if queue.keep is not None:
                return queue.keep
            if queue.stopping:
                return None
            # Released twice, and the first look took all that was there.
            if park not in queue.idle:
                queue.idle.append(park)


def _bury(engine: ThreadedBase, queue: WorkerQueue, device: Any, *, block: bool) -> None:
    for op, failure in device.bury(engine, block=block):
        _completion(engine, queue, op)(failure)


def _completion(engine: ThreadedBase, queue: WorkerQueue, op: OprBlock, start_ns: int = 0) -> Any:
    """What ends an operation outside a worker's loop, on whatever thread calls it."""

    def done(failure: Any) -> None:
        if start_ns:
            engine._trace(op, queue.name, threading.current_thread().name, start_ns)
        with engine._lock:
            queue.completed += 1
        engine._complete(op, failure)

    return done
