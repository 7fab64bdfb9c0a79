"""Worker threads and their queues of ready operations.

A thread inside the region appends operations to a queue; workers take them without a lock, because ``deque.append`` and
``popleft`` are atomic.

Invariant: no operation stays queued while all workers sleep. A worker appends itself to ``idle``, checks the queue
again, and only then sleeps. A producer appends the operation, then looks for an idle worker. One of them sees the
other.

Throttling: while a worker is about to check the queue (``waking`` after sleep, ``looking`` after an operation),
producers wake no other. That worker wakes the next if more operations are queued.

A sleeping worker holds no reference to its engine; the wake-up passes it. An unreferenced engine can thus be collected,
and its threads exit. A waiting thread may take the place of a sleeping worker (``helping.py``); it holds the ``seat``.
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
from weftplan.engine.operation import OprBlock, label_of, require_stack
from weftplan.engine.region import PERMIT
from weftplan.engine.streams import DEFERRED, BrokenDevice, StreamWorker, enter
from weftplan.locks import Lock
from weftplan.support import core_sharing

if TYPE_CHECKING:
    from weftplan.device.context import Context
    from weftplan.engine.types import Threads

QUICK_NS = 300_000
"""Operations shorter than this cost about as much as a wake-up."""


class Worker:
    """Wake-up handle of a worker thread."""

    __slots__ = ("completed", "engine", "park")

    def __init__(self) -> None:
        self.park = threading.Lock()
        """Binary semaphore on which the worker sleeps; a producer that took it out of ``idle`` releases it."""
        self.park.acquire()
        self.engine: Threads | None = None
        """The engine, passed with the wake-up: an operation without vars would not keep it alive."""
        self.completed = 0
        """Number of operations completed. Only its own thread changes it."""


class WorkerQueue:
    """Ready operations of one kind on one device, and the threads that run them.

    Args:
        context: device of the operations (None: any).
        name: ``worker``, ``copy`` or ``priority``.
        threads: maximum number of threads. One is started if there is work and no idle thread.
        by_priority: larger priority first (push order among equals) instead of first in, first out.
    """

    __slots__ = (
        "by_priority",
        "context",
        "heap_lock",
        "helped",
        "idle",
        "items",
        "lent",
        "looking",
        "name",
        "next_op",
        "parked",
        "permits",
        "quick",
        "seat",
        "started",
        "stopping",
        "threads",
        "waking",
        "workers",
    )

    def __init__(self, context: Context | None, name: str, threads: int, *, by_priority: bool = False) -> None:
        self.context = context
        self.name = name
        self.threads = threads
        """Number of threads that may run operations at a time. It grows while a worker waits in user code."""
        self.lent = False
        """Whether a slot has ever been lent, so that there may be more workers than ``threads``."""
        self.by_priority = by_priority
        self.heap_lock = Lock()
        """Innermost lock, for the heap. Without the GIL heap functions are not atomic before Python 3.14."""
        fifo: deque[OprBlock] = deque()
        self.items: Any = [] if by_priority else fifo
        """Operations; a priority queue is a heap of (-priority, number, operation), so operations are never compared.
        """
        self.next_op = None if by_priority else iter(fifo.popleft, None)
        """``for op in taken: break`` takes the first operation, with no signal in between, or raises IndexError."""
        self.idle: list[Worker] = []
        self.parked = iter(self.idle.pop, None)
        """Iterator that takes a sleeping worker out of ``idle``, used like :attr:`next_op`."""
        self.waking = False
        """Whether a worker is between sleep and its check of ``items``; it wakes another for remaining operations."""
        self.looking = False
        """Whether a worker (of several) or the seat holder is between an operation and its check of ``items``."""
        self.permits = [1] * threads
        """One item per thread that may still be started."""
        self.seat = [1]
        """Empty while a waiting thread stands in for a worker."""
        self.quick = False
        """Whether the last measured operation was short: the first after a wake-up, or one run in the seat."""
        self.helped = 0
        """Operations run in the seat; only the seat holder changes it."""
        self.stopping = False
        self.started: list[threading.Thread] = []
        self.workers: list[Worker] = []

    def take(self) -> OprBlock:
        """Return the next operation, or raise IndexError. For threads that receive no signals."""
        if self.by_priority:
            with self.heap_lock:
                return heapq.heappop(self.items)[2]  # type: ignore[no-any-return]
        return self.items.popleft()  # type: ignore[no-any-return]

    def wake(self, engine: Threads) -> None:
        """Wake one sleeping worker or start a new one. Do nothing if all are busy."""
        if self.busy() >= self.threads:
            return  # the seat holder wakes a worker when it leaves; a worker checks the queue before it sleeps
        # No signal can arrive between taking a worker and the release: a worker outside `idle` must be woken.
        try:
            for worker in self.parked:  # noqa: B007
                break
        except IndexError:
            # All workers are busy, or about to check the queue after this point.
            if self.permits and not self.stopping:
                self._start(engine)
        else:
            self.waking = True  # set only now: without a woken worker the seat holder would believe that all are asleep
            worker.engine = engine
            worker.park.release()

    def revive(self, engine: Threads) -> None:
        """Allow new workers after a finalizer has resurrected an unreferenced engine to push a delete.

        Not for a queue that ``stop`` has removed: its workers run the remaining operations and must see ``stopping``.
        """
        self.stopping = False
        self.started.clear()
        self.workers.clear()
        self.permits[:] = [1] * self.threads
        engine._end_with_engine()

    def _start(self, engine: Threads) -> None:
        try:
            del self.permits[0]
        except IndexError:  # another thread took the last permit
            return
        thread: threading.Thread | None = None
        try:
            require_stack()
            device_text = "" if self.context is None else f" {self.context}"
            name = f"weftplan{device_text} {self.name} {len(self.started)}"
            # The thread empties the list. `Thread` keeps its arguments until it ends, and would keep the engine alive.
            thread = threading.Thread(target=_work, args=(self, [engine]), name=name, daemon=True)
            self.started.append(thread)
            self.waking = True
            thread.start()
        except BaseException as error:
            if thread is None or thread.ident is None:
                self.permits += PERMIT
                self.waking = False
                if thread in self.started:
                    self.started.remove(thread)
                if isinstance(error, (RuntimeError, MemoryError)):
                    engine._no_thread = error  # existing workers suffice, or the next push or wait retries
                    return
            raise

    def measure(self, start_ns: int) -> None:
        """Record the duration of an operation that began at ``start_ns`` and has ended."""
        self.quick = perf_counter_ns() - start_ns < QUICK_NS

    def busy(self) -> int:
        """Return the number of occupied slots: awake workers and the seat holder."""
        return len(self.started) - len(self.idle) + (not self.seat)

    def crowded(self) -> bool:
        """Return whether an awake worker must sleep, because a seat holder or a returned worker has its slot."""
        return self.busy() > self.threads

    def lend(self, engine: Threads) -> None:
        """Let another worker run while the calling one waits in user code. :meth:`reclaim` ends this.

        The other worker, started if none sleeps, goes to sleep when it has no slot any more; a later loan wakes it.
        """
        with self.heap_lock:
            self.lent = True
            self.threads += 1
            if not self.idle:
                self.permits += PERMIT
        if self.items and not self.waking:
            self.wake(engine)

    def reclaim(self) -> None:
        """Return from :meth:`lend`."""
        with self.heap_lock:
            self.threads -= 1
            with suppress(IndexError):  # the permit was used
                del self.permits[0]

    def all_asleep(self) -> bool:
        """Return whether no worker is running or about to check the queue, except a woken one not started yet."""
        return len(self.started) - len(self.idle) - self.waking <= 0

    def end(self, engine: Threads | None = None) -> None:
        """Stop the workers when the queue is empty. ``engine`` is None if no reference to the engine is left."""
        self.stopping = True
        with suppress(IndexError):
            for worker in self.parked:
                # With the engine the worker checks the queue again before it exits: operations may have been left to
                # it.
                worker.engine = engine
                worker.park.release()

    def join(self) -> None:
        """Wait until all workers have exited, after :meth:`end`."""
        for thread in self.started:  # grows if a busy worker was about to start another
            while thread in self.started:
                try:
                    thread.join()
                    break
                except RuntimeError:  # the thread is being started
                    time.sleep(0.0001)

    def statistics(self) -> QueueStatistics:
        """Return the counts of this queue."""
        completed = self.helped + sum(worker.completed for worker in self.workers)
        return QueueStatistics(self.context, self.name, completed, len(self.items), len(self.started))


def _work(queue: WorkerQueue, box: list[Threads]) -> None:
    """Run a worker thread. No signal handler interrupts this code: Python runs handlers on the main thread only."""
    engine: Threads = box.pop()
    me = Worker()
    queue.workers.append(me)
    name = threading.current_thread().name
    items, idle, take = queue.items, queue.idle, queue.take if queue.by_priority else queue.items.popleft
    is_sole = queue.threads == 1
    requests, token, apply = engine._region.requests, engine._region.token, engine._region.apply
    running.engines = (engine,)
    core_sharing.enter_worker(alone=engine._single_worker)
    device = enter(engine, queue.context)
    running.worker = queue, me, name, device
    execute = engine._execute
    queue.waking = False
    stand_back = queue.crowded()
    woken = perf_counter_ns()
    while True:
        try:
            if not is_sole:
                # Cleared before the check: an operation queued while it was set is seen by this check.
                queue.looking = False
                if queue.lent:
                    stand_back = queue.crowded()
            # Another thread has this worker's slot: sleep without taking an operation.
            if stand_back:
                raise IndexError
            op = take()
        except IndexError:
            if device is not None and device.has_deferred_deletes():
                _finish_deletes(engine, me, device, block=True)
                continue
            # Publish as idle, then check again: a producer appends first and looks for idle workers second, so that one
            # of the two sees the other.
            idle.append(me)
            if queue.stopping or (items and queue.busy() < queue.threads):
                with suppress(ValueError):  # a producer has taken it out and will wake this worker
                    idle.remove(me)
                    stand_back = queue.crowded()
                    if queue.stopping and not items:
                        break
                    continue
            # Drop every reference to the engine before sleeping, so that it can be collected.
            del execute, engine
            running.engines = ()
            waker = _sleep(queue, me)
            if waker is None:
                if device is not None:
                    device.close(None)
                return
            engine = waker
            running.engines = (engine,)
            del waker
            execute = engine._execute
            queue.waking = False
            stand_back = queue.crowded()
            woken = perf_counter_ns()
            continue
        try:  # the operation completes and the worker survives, whatever is raised
            # Wake the next worker before running: the remaining operations must not wait for this operation.
            if not is_sole and items and not queue.waking and (idle or queue.permits):
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
                        op.fn = None  # drop its objects here, not inside the region
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
        if not is_sole:  # newly ready operations wait for this worker, which checks next and wakes another for the rest
            queue.looking = True
        # Request the completion. If another thread is inside, it serves the request (README, race 1).
        requests.append(op)
        del op
        if token:
            try:
                apply(engine, True)
            except BaseException as error:  # raised by a destructor or tracer; the region is consistent
                report(error)
    if device is not None:
        device.close(engine)
    running.engines = ()


def _run(
    engine: Threads, queue: WorkerQueue, me: Worker, name: str, device: StreamWorker | BrokenDevice | None, op: OprBlock
) -> bool:
    """Run an ``op`` that needs more than a function call. Return False if it is completed elsewhere."""
    start = perf_counter_ns()
    if op.asynchronous:
        me.completed += 1
        complete = completion(engine, queue.name, op, start)
        try:
            if device is not None:
                device.start(engine, op, complete)
            else:
                engine._start_async(op, complete)
        except BaseException as error:
            complete(Failure.of(op, error))
        return False
    failure = engine._execute(op) if device is None else device.run(engine, op)
    if failure is not DEFERRED:
        me.completed += 1
        op.failure = failure
        engine._trace(op, queue.name, name, start)
        if failure is None and type(op.fn) is not BulkRun:
            op.fn = None  # drop its objects before any thread can see it as completed
    succeeded = failure is not DEFERRED
    del op, failure  # the traceback's frames hold this frame
    if device is not None and device.has_deferred_deletes():
        _finish_deletes(engine, me, device, block=False)
    return succeeded


def run_another(
    engine: Threads, queue: WorkerQueue, me: Worker, name: str, device: StreamWorker | BrokenDevice | None
) -> bool:
    """Run the next operation of ``queue`` inside another, or complete deferred deletes; False: there is neither."""
    try:
        op = queue.take()
    except IndexError:
        if device is None or not device.has_deferred_deletes():
            return False
        _finish_deletes(engine, me, device, block=True)
        return True
    if _run(engine, queue, me, name, device, op):
        engine._complete(op, op.failure)
    return True


def _sleep(queue: WorkerQueue, me: Worker) -> Threads | None:
    """Sleep until woken. Return the engine, or None if the worker must exit. Holds no engine reference meanwhile."""
    while True:
        me.park.acquire()
        engine, me.engine = me.engine, None
        if engine is not None or queue.stopping:
            return engine
        queue.idle.append(me)


def _finish_deletes(engine: Threads, me: Worker, device: StreamWorker | BrokenDevice, *, block: bool) -> None:
    for op, failure in device.finish_deletes(engine, block=block):
        me.completed += 1
        try:
            engine._complete(op, failure)
        except BaseException as error:
            report(error)


def completion(engine: Threads, queue_name: str, op: OprBlock, start_ns: int) -> Callable[[Outcome], None]:
    """Return the completion callback of an asynchronous operation; only its first call counts."""

    def complete(failure: Outcome) -> None:
        engine._trace(op, queue_name, threading.current_thread().name, start_ns)
        engine._complete(op, failure)

    return once(complete)
