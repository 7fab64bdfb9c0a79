"""Worker threads and their queues of ready operations.

Operations are put into a queue inside the engine's region and taken out of it by any number of workers without a lock:
``deque.append`` and ``popleft`` are atomic. A worker that finds its queue empty puts itself into ``idle``, looks once
more, and sleeps on a lock of its own; whoever puts an operation into the queue and then finds somebody in ``idle``
takes it out and opens that lock. One of the two sees the other, so no operation stays behind.

While a worker is on its way to its next look (``waking`` from sleep, ``looking`` after an operation) nobody else is
woken: it wakes the next if more is there. A sleeping worker does not hold its engine: whoever wakes it hands it over.
So an engine that nobody else holds goes, and its threads end.

A thread that waits may take the place of a worker when all of them sleep (``helping.py``): it has the ``seat``.
"""

from __future__ import annotations

import heapq
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from weftplan.engine.bulk import BulkRun
from weftplan.engine.execution import once, report, running
from weftplan.engine.failure import Failure, Outcome, release_frames
from weftplan.engine.inspection import QueueStatistics
from weftplan.engine.operation import OprBlock, ample_room, label_of
from weftplan.engine.region import ONE
from weftplan.engine.streams import LATER, BrokenDevice, StreamWorker, enter
from weftplan.locks import Lock
from weftplan.support import core_sharing

if TYPE_CHECKING:
    from weftplan.device.context import Context
    from weftplan.engine.types import Threads

QUICK_NS = 300_000
"""Below this waking a worker is a good part of what an operation costs."""


class Worker:
    """What a sleeping thread is woken by."""

    __slots__ = ("completed", "engine", "park")

    def __init__(self) -> None:
        self.park = threading.Lock()
        self.park.acquire()
        self.engine: Threads | None = None
        """Handed over with the wake-up: operations without vars would not keep it alive."""
        self.completed = 0
        """Changed by its own thread only."""


class WorkerQueue:
    """Ready operations of one kind on one device, and the threads that run them.

    Args:
        context: device of the operations (None: any).
        name: ``worker``, ``copy`` or ``priority``.
        threads: how many at most; each is started when there is work and no idle one.
        by_priority: larger priority first (push order among equals) instead of first in, first out.
    """

    __slots__ = (
        "by_priority",
        "context",
        "heap_lock",
        "helped",
        "idle",
        "items",
        "looking",
        "name",
        "parked",
        "permits",
        "quick",
        "seat",
        "started",
        "stopping",
        "taken",
        "threads",
        "waking",
        "workers",
    )

    def __init__(self, context: Context | None, name: str, threads: int, *, by_priority: bool = False) -> None:
        self.context = context
        self.name = name
        self.threads = threads
        self.by_priority = by_priority
        self.heap_lock = Lock()
        """A leaf, for the heap: without the GIL its functions are not atomic before Python 3.14."""
        fifo: deque[OprBlock] = deque()
        self.items: Any = [] if by_priority else fifo
        """Operations; in a priority queue a heap of (-priority, number, operation), which compares no operations."""
        self.taken = None if by_priority else iter(fifo.popleft, None)
        """``for op in taken: break`` takes the first; IndexError when there is none. On the main thread no signal can
        come between taking and having, as it could after a call of ``popleft``."""
        self.idle: list[Worker] = []
        self.parked = iter(self.idle.pop, None)
        """Takes a sleeping worker out of ``idle``, in the same way."""
        self.waking = False
        """A worker is on its way from sleep to a look at ``items``; it will wake another for what it leaves."""
        self.looking = False
        """So is a worker (of several) or the seat that has run an operation."""
        self.permits = [1] * threads
        """One for each thread that may still be started."""
        self.seat = [1]
        """Empty while a waiting thread stands in for a worker."""
        self.quick = False
        """The operation measured last, the first after a worker woke or one run in the seat, was short."""
        self.helped = 0
        """Operations run in the seat; changed by who has it."""
        self.stopping = False
        self.started: list[threading.Thread] = []
        self.workers: list[Worker] = []

    def take(self) -> OprBlock:
        """The next operation; IndexError when there is none. For threads that get no signals."""
        if self.by_priority:
            with self.heap_lock:
                return heapq.heappop(self.items)[2]  # type: ignore[no-any-return]
        return self.items.popleft()  # type: ignore[no-any-return]

    def wake(self, engine: Threads) -> None:
        """Wake one sleeping worker, or start one more; nothing when all are at work."""
        if not self.seat and len(self.started) - len(self.idle) + 1 >= self.threads:
            return  # it would find no room; who has the seat wakes it when leaving
        # From taking a worker to the release no signal can come: one that is out of ``idle`` must be woken.
        try:
            for worker in self.parked:  # noqa: B007
                break
        except IndexError:
            # All are at work, or on their way to a look that comes after this one.
            if self.permits and not self.stopping:
                self._start(engine)
        else:
            self.waking = True  # not before: for nobody it would make the seat believe that all are asleep
            worker.engine = engine
            worker.park.release()

    def revive(self, engine: Threads) -> None:
        """Let workers come again: nobody held the engine, they went, and a finalizer brought it back for a delete.

        Not for a queue that ``stop`` has taken away: its workers run what is left and must see ``stopping``.
        """
        self.stopping = False
        self.started.clear()
        self.workers.clear()
        self.permits[:] = [1] * self.threads
        engine._end_with_engine()

    def _start(self, engine: Threads) -> None:
        try:
            del self.permits[0]
        except IndexError:  # another thread took the last one
            return
        thread: threading.Thread | None = None
        try:
            ample_room()
            where = "" if self.context is None else f" {self.context}"
            name = f"weftplan{where} {self.name} {len(self.started)}"
            # In a list that the thread empties: Thread keeps its arguments, and with them the engine, until it ends.
            thread = threading.Thread(target=_work, args=(self, [engine]), name=name, daemon=True)
            self.started.append(thread)
            self.waking = True
            thread.start()
        except BaseException as error:
            if thread is None or thread.ident is None:
                self.permits += ONE
                self.waking = False
                if thread in self.started:
                    self.started.remove(thread)
                if isinstance(error, (RuntimeError, MemoryError)):
                    engine._no_thread = error  # others of this queue will do, or the next push or wait tries again
                    return
            raise

    def measure(self, start_ns: int) -> None:
        """Count an operation that began at ``start_ns`` and has ended."""
        self.quick = perf_counter_ns() - start_ns < QUICK_NS

    def standing_in(self) -> bool:
        """For a worker that has just been woken: True when a waiting thread has the seat and leaves no room for it."""
        return not self.seat and len(self.started) - len(self.idle) >= self.threads

    def all_asleep(self) -> bool:
        """True when no worker runs or is about to look, except one that has not got as far."""
        return len(self.started) - len(self.idle) - self.waking <= 0

    def end(self, engine: Threads | None = None) -> None:
        """Tell the workers to go when nothing is left. Also called when nobody holds the engine (None): nothing is.

        A worker that gets the engine looks once more before it goes: what it had not seen was left to it.
        """
        self.stopping = True
        with suppress(IndexError):
            for worker in self.parked:
                worker.engine = engine
                worker.park.release()

    def join(self) -> None:
        """After :meth:`end`: wait until all workers have gone."""
        for thread in self.started:  # grows when one that is at work was just about to start another
            while thread in self.started:
                try:
                    thread.join()
                    break
                except RuntimeError:  # being started
                    time.sleep(0.0001)

    def statistics(self) -> QueueStatistics:
        """The counts of the queue."""
        completed = self.helped + sum(worker.completed for worker in self.workers)
        return QueueStatistics(self.context, self.name, completed, len(self.items), len(self.started))


def _work(queue: WorkerQueue, box: list[Threads]) -> None:
    """A worker's life. Threads other than the main one get no signals, so any place here may call anything."""
    engine: Threads = box.pop()
    me = Worker()
    queue.workers.append(me)
    name = threading.current_thread().name
    items, idle, take = queue.items, queue.idle, queue.take if queue.by_priority else queue.items.popleft
    alone = queue.threads == 1
    requests, token, apply = engine._region.requests, engine._region.token, engine._region.apply
    running.engines = (engine,)
    core_sharing.enter_worker(alone=engine._alone)
    device = enter(engine, queue.context)
    running.place = queue, me, name, device
    execute = engine._execute
    queue.waking = False
    stand_back = queue.standing_in()
    woken = perf_counter_ns()
    while True:
        try:
            if not alone:
                queue.looking = False
            if stand_back:
                raise IndexError
            op = take()
        except IndexError:
            if device is not None and device.has_graves():
                _bury(engine, me, device, block=True)
                continue
            idle.append(me)
            if queue.stopping or (items and not (stand_back and not queue.seat)):
                with suppress(ValueError):  # taken out by somebody who wakes this worker: sleep does not last
                    idle.remove(me)
                    stand_back = queue.standing_in()
                    if queue.stopping and not items:
                        break
                    continue
            del execute, engine
            running.engines = ()
            found = _sleep(queue, me)
            if found is None:
                if device is not None:
                    device.close(None)
                return
            engine = found
            running.engines = (engine,)
            del found
            execute = engine._execute
            queue.waking = False
            stand_back = queue.standing_in()
            woken = perf_counter_ns()
            continue
        try:  # whatever comes out of this, the operation ends and the worker goes on
            if not alone and items and not queue.waking and (idle or queue.permits):
                queue.wake(engine)
            if device is not None or op.asynchronous or engine._tracer is not None:
                if not _run(engine, queue, me, name, device, op):
                    del op
                    continue
            else:
                fn = op.fn
                if engine._careful or type(fn) is BulkRun:
                    op.failure = execute(op)
                    if op.failure is None and type(fn) is not BulkRun:
                        op.fn = None
                else:
                    try:
                        fn()
                        op.fn = None  # what the function holds is dropped here, not inside the region
                    except BaseException as error:
                        release_frames(error, sys._getframe())
                        op.failure = error
                        op.name = label_of(fn, op.name)
                        op.fn = None
                fn = None
                me.completed += 1
                if woken:
                    queue.measure(woken)
                    woken = 0
        except BaseException as error:
            op.failure = error
        if not alone:  # what becomes ready is for this worker, which looks next and wakes another for the rest
            queue.looking = True
        requests.append(op)
        del op
        if token:
            try:
                apply(engine, True)
            except BaseException as error:  # of a destructor's or a tracer's: the region has been left in order
                report(error)
    if device is not None:
        device.close(engine)
    running.engines = ()


def _run(
    engine: Threads, queue: WorkerQueue, me: Worker, name: str, device: StreamWorker | BrokenDevice | None, op: OprBlock
) -> bool:
    """Run ``op`` where more than its function is to be called; False when it is completed elsewhere."""
    start = perf_counter_ns()
    if op.asynchronous:
        me.completed += 1
        done = completion(engine, queue.name, op, start)
        try:
            if device is not None:
                device.start(engine, op, done)
            else:
                engine._start_async(op, done)
        except BaseException as error:
            done(Failure.of(op, error))
        return False
    failure = engine._execute(op) if device is None else device.run(engine, op)
    if failure is not LATER:
        me.completed += 1
        op.failure = failure
        engine._trace(op, queue.name, name, start)
        if failure is None and type(op.fn) is not BulkRun:
            op.fn = None  # what it holds goes before anybody is told that it is over
    succeeded = failure is not LATER
    del op, failure  # frames of a traceback hold this one
    if device is not None and device.has_graves():
        _bury(engine, me, device, block=False)
    return succeeded


def run_another(
    engine: Threads, queue: WorkerQueue, me: Worker, name: str, device: StreamWorker | BrokenDevice | None
) -> bool:
    """Run the next operation of ``queue`` on its worker ``me``, inside another, or end deletes that its stream holds
    up; False when there is neither."""
    try:
        op = queue.take()
    except IndexError:
        if device is None or not device.has_graves():
            return False
        _bury(engine, me, device, block=True)
        return True
    if _run(engine, queue, me, name, device, op):
        engine._complete(op, op.failure)
    return True


def _sleep(queue: WorkerQueue, me: Worker) -> Threads | None:
    """Sleep until woken; returns the engine, or None when it is time to go. Nothing here holds the engine meanwhile."""
    while True:
        me.park.acquire()
        engine, me.engine = me.engine, None
        if engine is not None or queue.stopping:
            return engine
        queue.idle.append(me)


def _bury(engine: Threads, me: Worker, device: StreamWorker | BrokenDevice, *, block: bool) -> None:
    for op, failure in device.bury(engine, block=block):
        me.completed += 1
        try:
            engine._complete(op, failure)
        except BaseException as error:
            report(error)


def completion(engine: Threads, queue_name: str, op: OprBlock, start_ns: int) -> Callable[[Outcome], None]:
    """What ends an asynchronous operation, on whatever thread calls it first."""

    def done(failure: Outcome) -> None:
        engine._trace(op, queue_name, threading.current_thread().name, start_ns)
        engine._complete(op, failure)

    return once(done)
