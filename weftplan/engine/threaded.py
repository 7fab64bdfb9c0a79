"""Base class of engines with worker threads, and ``ThreadedEngine``, which has a single pool."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from heapq import heappush
from typing import Any

from weftplan import config
from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.edges.helping import help_all, help_var, run_next
from weftplan.engine.edges.inline import begin, run_inline, write_inline
from weftplan.engine.execution import running
from weftplan.engine.failure import Outcome
from weftplan.engine.inspection import QueueStatistics
from weftplan.engine.operation import FnProperty, InternalBlock, OprBlock, TaskBlock, TracedBlock, Waiter, require_stack
from weftplan.engine.registry import register
from weftplan.engine.types import ThreadCounts
from weftplan.engine.var import Var
from weftplan.engine.workers import WorkerQueue, run_another
from weftplan.errors import EngineError
from weftplan.support import slots

_COPIES = (FnProperty.COPY_FROM_GPU, FnProperty.COPY_TO_GPU)
_SHORT = (FnProperty.ASYNC, FnProperty.DELETE_VAR)
_DELETE, _NO_SKIP = FnProperty.DELETE_VAR, FnProperty.NO_SKIP
PLAIN = (OprBlock, InternalBlock, TaskBlock, TracedBlock)
"""Classes of pushes without options. Each class has one queue."""


class ThreadedBase(Engine):
    """Queues and threads of an engine.

    A subclass implements :meth:`queue_key` and :meth:`make_queue` and calls :meth:`enlist` at the end of ``__init__``.
    """

    run_inline = run_inline
    write_inline = write_inline
    begin = begin
    _single_worker = False
    """Whether the user asked for one worker; operations are then not split over idle cores."""
    short_inline = False
    """Whether short operations (ASYNC, DELETE_VAR, NO_SKIP of ``push_async``) run on the thread that readies them."""

    def __init__(self) -> None:
        super().__init__()
        self._waiters_help = str(config.get("WEFTPLAN_ENGINE_WAITERS_HELP"))
        self._no_thread: BaseException | None = None
        """Error that prevented the start of a worker, if any."""
        self._by_route: dict[tuple[object, ...], WorkerQueue] = {}
        self._plain_queues: dict[type[OprBlock], WorkerQueue] = {}
        """Queues of pushes without options by class, each created for its first operation."""
        self._all_queues: list[WorkerQueue] = []
        """Every queue with threads, in order of creation. The finalizer keeps it after the engine is gone."""
        self._next_outside = iter(self._outside.popleft, None)
        """Iterator that takes the first item of ``_outside`` with no signal in between, or raises IndexError."""
        self._finalizer: Any = weakref.finalize(self, _end, self._all_queues)
        self._finalizer.atexit = False

    def _forget_threads(self) -> None:
        super()._forget_threads()
        # stop() removed the queues, but a concurrent push may have created new queues. Their workers exist in the
        # parent only, so a wake-up here would be lost.
        self._all_queues.clear()
        self._by_route.clear()
        self._plain_queues.clear()
        self._streams.clear()

    def _end_with_engine(self) -> None:
        """Stop the threads when the engine is collected. Called again if a finalizer has resurrected it."""
        if not self._finalizer.alive:
            self._finalizer = _End(self._all_queues)

    def queue_key(self, op: OprBlock) -> tuple[object, ...]:
        """Return the properties of an operation that decide its queue."""
        raise NotImplementedError

    def make_queue(self, *key: object) -> WorkerQueue:
        """Return :meth:`new_queue` for a new key. Called inside the region."""
        raise NotImplementedError

    def new_queue(self, context: Context | None, name: str, threads: int, *, by_priority: bool = False) -> WorkerQueue:
        """Return a new queue with its own worker threads; ``by_priority`` makes it a priority queue."""
        queue = WorkerQueue(context, name, threads, by_priority=by_priority)
        self._end_with_engine()
        self._all_queues.append(queue)
        return queue

    def _count_queues(self) -> Sequence[QueueStatistics]:
        return [queue.statistics() for queue in self._all_queues]

    def _dispatch(self) -> None:
        # No call may stand between removing an operation from `ready` and the call that puts it into its queue.
        ready, outside, plain = self._region.ready, self._outside, self._plain_queues
        while ready:
            op = ready[0]
            queue, urgent = plain.get(type(op)), False
            if queue is None:
                if type(op) is Waiter:
                    self._region.notify(op)
                    continue
                if (
                    self.short_inline
                    and (op.prop in _SHORT or (op.asynchronous and op.prop is _NO_SKIP))
                    and not self._streams_used
                ):
                    del ready[0]
                    outside += (op,)
                    continue
                key, urgent = self.queue_key(op), op.prop is _DELETE
                queue = self._by_route.get(key)
                if queue is None:
                    queue = self._by_route[key] = self.make_queue(*key)
                if type(op) in PLAIN:
                    plain[type(op)] = queue
            items = queue.items
            if queue.by_priority:
                entry = (-op.priority, op.seq, op)
                with queue.heap_lock:
                    del ready[0]
                    heappush(items, entry)
            else:
                # Prefer program order: an early reader of a result then runs before later operations, and the result is
                # freed early.
                del ready[0]
                try:
                    if items and (urgent or items[0].seq > op.seq):
                        items.appendleft(op)
                    else:
                        items.append(op)
                except IndexError:  # a worker has just taken the first
                    items.append(op)
            # A waking or checking worker will see this operation; otherwise wake one.
            if not queue.waking and not queue.looking and (queue.idle or queue.permits or queue.stopping):
                if queue.stopping:
                    queue.revive(self)
                queue.wake(self)

    def _wake_all(self) -> None:
        for queue in self._all_queues:
            if queue.items:
                if queue.stopping:
                    queue.revive(self)
                queue.wake(self)

    def _look_after_workers(self) -> None:
        """Wake workers for queued operations, and retry starting workers that failed to start.

        Raises:
            EngineError: no worker can be started for a queued operation.
        """
        super()._look_after_workers()
        self._no_thread = None
        for queue in list(self._all_queues):
            if queue.items and not queue.stopping:
                queue.wake(self)
                if self._no_thread is not None and not queue.started:
                    raise EngineError(
                        f"no thread can be started for the operations of {queue.name!r}, which stay queued: "
                        f"{self._no_thread}; end other threads, then wait again"
                    ) from self._no_thread

    def _run_outside(self) -> None:
        """Run short operations on the thread that made them ready, without nesting: each may make the next ready."""
        if running.short is self:
            return
        try:
            require_stack(8)
        except RecursionError:  # no stack here: the next thread that leaves the region runs them
            return
        engines, short = running.engines, running.short
        running.engines, running.short = (*engines, self), self
        try:
            more = True
            while True:  # no condition in the loop head: see `region.py`
                if not more or not self._outside:
                    break
                more = self._run_short()
        finally:
            running.engines, running.short = engines, short

    def _run_short(self) -> bool:
        """Run the first short operation. Return False if another thread took the last operation."""
        start = time.perf_counter_ns() if self._tracer is not None else 0
        requests, pending = self._region.requests, [1]
        op: Any = None
        failure: Outcome = None

        def complete(outcome: Outcome) -> None:
            try:
                del pending[0]
            except IndexError:  # already completed by an interrupt
                return
            op.failure = outcome
            requests.append(op)
            if start:
                self._trace(op, "inline", threading.current_thread().name, start)
            self._region.apply(self, past_gate=True)  # a fork waits for this operation: do not block in its gate

        # An interrupt counts as the failure of the operation, so that its vars are released. No signal can arrive
        # between taking it and the inner try, nor between the end of that and the request.
        try:
            for op in self._next_outside:  # noqa: B007
                break
            try:
                if op.asynchronous:
                    self._start_async(op, complete)
                elif op.prop is _DELETE:
                    op.fn()  # no earlier call that an interrupt could follow: a delete always runs
                else:
                    failure = self._execute(op)
            except BaseException as error:
                failure = error
            finally:
                if failure is not None or not op.asynchronous:
                    try:
                        del pending[0]
                    except IndexError:  # it had already reported completion
                        pass
                    else:
                        op.failure = failure
                        requests += (op,)  # not a call: no interrupt can arrive
        except IndexError:
            if op is None:
                return False
            raise
        self._region.apply(self)
        if start and not op.asynchronous:
            self._trace(op, "inline", threading.current_thread().name, start)
        return True

    def _run_another(self) -> bool:
        if running.worker is not None:
            return run_another(self, *running.worker)
        return any(queue.items and self._can_help(queue) and run_next(self, queue) for queue in self._all_queues)

    def _at_work(self) -> int:
        # The seat holder counts, too; a worker that wakes up meanwhile goes back to sleep.
        total = 0
        for queue in self._all_queues:  # no generator: every splittable operation asks
            busy = len(queue.started) - len(queue.idle) + (not queue.seat)
            total += busy if busy < queue.threads else queue.threads
        return total

    def yield_to_worker(self) -> None:
        """Sleep for the shortest time if a woken worker is waiting for the interpreter.

        :meta private:
        """
        for queue in list(self._all_queues):
            if queue.waking:
                # Any sleep releases the interpreter, and the shortest one is longer than a worker needs to take it.
                time.sleep(1e-6)
                return

    def _before_wait(self, var: Var | None = None) -> None:
        if self._no_thread is not None:
            self._look_after_workers()
        if self._waiters_help == "0" or running.in_user_code():
            return
        for help_out in slots.WAIT_HELPERS.get():
            help_out()
        if var is None:
            help_all(self)
        else:
            help_var(self, var)

    def _can_help(self, queue: WorkerQueue) -> bool:
        """Return whether a waiting thread may run operations of ``queue``."""
        context = queue.context
        return queue.next_op is not None and (context is None or not context.has_streams)

    def _queue_with(self, op: OprBlock) -> WorkerQueue | None:
        """Return the queue of ``op`` if a waiting thread may run its operations, else None."""
        if not op.internal and self._waiters_help != "all":
            return None
        queue = self._plain_queues.get(type(op)) or self._by_route.get(self.queue_key(op))
        return queue if queue is not None and self._can_help(queue) else None

    def stop(self) -> None:
        if self in running.engines:
            return
        self._wait_idle()
        # For the engine an operation on a stream is over when its kernels are enqueued.
        for stream in list(self._streams):
            stream.drain(self)
        # Removed inside, joined outside: a worker may need the region for its last operation.
        for queue in self._exclusively(self._take_queues):
            queue.join()

    def _take_queues(self) -> list[WorkerQueue]:
        """Inside: remove all queues. Later pushes create new queues; old workers exit when theirs is empty."""
        queues = self._all_queues[:]
        for queue in queues:  # first: a call may fail at the recursion limit, and then this is repeated
            queue.end(self)
        self._plain_queues.clear()
        self._by_route.clear()
        self._all_queues.clear()
        return queues


def _end(queues: list[WorkerQueue]) -> None:
    """Stop the workers. The engine is unreferenced, so nothing is pending and all are asleep or about to be."""
    for queue in queues:
        queue.end()


class _End:
    """Finalizer for an engine that a destructor has resurrected: its threads stop when the engine is dropped.

    Not a weak reference: if one is created during garbage collection, it is cleared without its callback (CPython
    3.14).
    """

    __slots__ = ("alive", "queues")

    def __init__(self, queues: list[WorkerQueue]) -> None:
        self.alive = True
        self.queues = queues

    def __del__(self) -> None:
        self.alive = False
        _end(self.queues)


@register
class ThreadedEngine(ThreadedBase):
    """Engine with one queue for all work and one for copies.

    Priorities are ignored. ASYNC operations queue like any other; deletes go to the front. Operations of all contexts
    share the threads, so work on an asynchronous device has no stream of its own and finishes within the operation.
    """

    kind = "ThreadedEngine"

    def __init__(self, *, workers: int = 16, copy_workers: int = 1) -> None:
        super().__init__()
        self._workers = workers
        self._copy_workers = copy_workers
        self.enlist()

    @classmethod
    def build(cls, threads: ThreadCounts, **options: object) -> ThreadedEngine:
        """Create an engine with these numbers of workers and copy threads; it has no other threads.

        :meta private:
        """
        engine = cls(workers=threads.cpu_workers or 1, copy_workers=threads.copy_workers or 1, **options)
        engine._single_worker = threads.single_worker
        return engine

    def queue_key(self, op: OprBlock) -> tuple[object, ...]:
        return (op.prop in _COPIES,)

    def make_queue(self, *key: object) -> WorkerQueue:
        name, threads = ("copy", self._copy_workers) if key[0] else ("worker", self._workers)
        return self.new_queue(None, name, threads)


_CPU0 = Context("cpu", 0)


def context_of(op: OprBlock) -> Context:
    """Return the device of an operation."""
    return op.ctx if op.ctx is not None else _CPU0
