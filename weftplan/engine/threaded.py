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
from weftplan.engine.edges.at_once import at_once, begin, write_at_once
from weftplan.engine.edges.helping import help_all, help_var, run_next
from weftplan.engine.execution import running
from weftplan.engine.failure import Outcome
from weftplan.engine.inspection import QueueStatistics
from weftplan.engine.operation import FnProperty, OprBlock, OwnBlock, TaskBlock, TracedBlock, Waiter, ample_room
from weftplan.engine.registry import register
from weftplan.engine.types import ThreadCounts
from weftplan.engine.var import Var
from weftplan.engine.workers import WorkerQueue, run_another
from weftplan.errors import EngineError
from weftplan.support import slots

_COPIES = (FnProperty.COPY_FROM_GPU, FnProperty.COPY_TO_GPU)
_SHORT = (FnProperty.ASYNC, FnProperty.DELETE_VAR)
_DELETE, _NO_SKIP = FnProperty.DELETE_VAR, FnProperty.NO_SKIP
PLAIN = (OprBlock, OwnBlock, TaskBlock, TracedBlock)
"""Pushes without options: those of a class have one queue."""


class ThreadedBase(Engine):
    """Queues and threads. A subclass implements :meth:`queue_key` and :meth:`make_queue`, and may set
    :attr:`short_inline`; its ``__init__`` ends with :meth:`enlist`."""

    at_once = at_once
    write_at_once = write_at_once
    begin = begin
    _alone = False
    """True when the user has asked for one worker: what it runs is not split over idle cores."""
    short_inline = False
    """True when operations that only start or end something (ASYNC, DELETE_VAR, NO_SKIP of ``push_async``) run on the
    thread that finds them ready, after it has left the region."""

    def __init__(self) -> None:
        super().__init__()
        self._waiters_help = str(config.get("WEFTPLAN_ENGINE_WAITERS_HELP"))
        self._no_thread: BaseException | None = None
        """Why a worker could not be started."""
        self._by_route: dict[tuple[object, ...], WorkerQueue] = {}
        self._plain_queues: dict[type[OprBlock], WorkerQueue] = {}
        """The queues of pushes without options, by their class; each is made with the first of its operations."""
        self._all_queues: list[WorkerQueue] = []
        """Every queue with threads, in the order in which they were made; outlives the engine in its finalizer."""
        self._next_here = iter(self._here.popleft, None)
        """Takes the first of ``_here``, in a way that no signal can come in between; IndexError when there is none."""
        self._finalizer: Any = weakref.finalize(self, _end, self._all_queues)
        self._finalizer.atexit = False

    def _forget_threads(self) -> None:
        super()._forget_threads()
        # stop() took the queues away, but a push that was on its way may have made new ones and been run since: their
        # workers exist in the parent only, and waking one here would wake nobody.
        self._all_queues.clear()
        self._by_route.clear()
        self._plain_queues.clear()
        self._streams.clear()

    def _end_with_engine(self) -> None:
        """When nobody holds this engine any more, its threads end; to be called when it has been brought back."""
        if not self._finalizer.alive:
            self._finalizer = _End(self._all_queues)

    def queue_key(self, op: OprBlock) -> tuple[object, ...]:
        """Return the properties of an operation that decide its queue; the subclass implements this."""
        raise NotImplementedError

    def make_queue(self, *key: Any) -> WorkerQueue:
        """Return :meth:`new_queue` of a new key; the subclass implements this. Called inside the region."""
        raise NotImplementedError

    def new_queue(self, context: Context | None, name: str, threads: int, *, by_priority: bool = False) -> WorkerQueue:
        """Return a new queue with worker threads of its own, a priority queue with ``by_priority``."""
        queue = WorkerQueue(context, name, threads, by_priority=by_priority)
        self._end_with_engine()
        self._all_queues.append(queue)
        return queue

    def _count_queues(self) -> Sequence[QueueStatistics]:
        return [queue.statistics() for queue in self._all_queues]

    def _dispatch(self) -> None:
        # No call may stand between taking an operation out of `ready` and the one that puts it into its queue.
        ready, here, plain = self._region.ready, self._here, self._plain_queues
        while ready:
            op = ready[0]
            queue, urgent = plain.get(type(op)), False
            if queue is None:
                if type(op) is Waiter:
                    self._region.tell(op)
                    continue
                if (
                    self.short_inline
                    and (op.prop in _SHORT or (op.asynchronous and op.prop is _NO_SKIP))
                    and not self._streams_used
                ):
                    del ready[0]
                    here += (op,)
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
                # The order of the program, as far as that is to be had: who reads a result before anything else is
                # made runs before it, and the result can go.
                del ready[0]
                try:
                    if items and (urgent or items[0].seq > op.seq):
                        items.appendleft(op)
                    else:
                        items.append(op)
                except IndexError:  # a worker has just taken the first
                    items.append(op)
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
        """The same, and start the workers that could not be had before.

        Raises:
            EngineError: there are none at all for what is to be run.
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

    def _run_here(self) -> None:
        """Run short operations on the thread that found them ready, not nested: one may free what frees the next."""
        if running.short is self:
            return
        try:
            ample_room(8)
        except RecursionError:  # the next thread that comes by has it
            return
        engines, short = running.engines, running.short
        running.engines, running.short = (*engines, self), self
        try:
            more = True
            while True:  # no condition in the head, none at the end: see `region.py`
                if not more or not self._here:
                    break
                more = self._run_short()
        finally:
            running.engines, running.short = engines, short

    def _run_short(self) -> bool:
        """Run the first of them; False when another thread took the last one."""
        start = time.perf_counter_ns() if self._tracer is not None else 0
        requests, due = self._region.requests, [1]
        op: Any = None
        failure: Outcome = None

        def done(outcome: Outcome) -> None:
            try:
                del due[0]
            except IndexError:  # an interrupt has ended it
                return
            op.failure = outcome
            requests.append(op)
            if start:
                self._trace(op, "inline", threading.current_thread().name, start)
            self._region.apply(self, past_gate=True)  # of a fork, which waits for the end of this operation

        # An interrupt counts as the failure of the operation, so that its vars go on. No signal can come between taking
        # it and the inner try, nor between the end of that and the request.
        try:
            for op in self._next_here:  # noqa: B007
                break
            try:
                if op.asynchronous:
                    self._start_async(op, done)
                elif op.prop is _DELETE:
                    op.fn()  # no other call before it, in which an interrupt could come: it runs in any case
                else:
                    failure = self._execute(op)
            except BaseException as error:
                failure = error
            finally:
                if failure is not None or not op.asynchronous:
                    try:
                        del due[0]
                    except IndexError:  # it had said that it was done
                        pass
                    else:
                        op.failure = failure
                        requests += (op,)  # not a call, in which an interrupt could come
        except IndexError:
            if op is None:
                return False
            raise
        self._region.apply(self)
        if start and not op.asynchronous:
            self._trace(op, "inline", threading.current_thread().name, start)
        return True

    def _run_another(self) -> bool:
        if running.place is not None:
            return run_another(self, *running.place)
        return any(queue.items and self._can_help(queue) and run_next(self, queue) for queue in self._all_queues)

    def _at_work(self) -> int:
        # Who has the seat of a queue, too; a worker that is on its way meanwhile goes back to sleep.
        found = 0
        for queue in self._all_queues:  # no generator: every operation that may be split asks
            busy = len(queue.started) - len(queue.idle) + (not queue.seat)
            found += busy if busy < queue.threads else queue.threads
        return found

    def give_way(self) -> None:
        """As every engine's."""
        for queue in list(self._all_queues):
            if queue.waking:
                # Any sleep lets go of the interpreter, and the shortest one takes longer than to take hold of it.
                time.sleep(1e-6)
                return

    def _before_wait(self, var: Var | None = None) -> None:
        if self._no_thread is not None:
            self._look_after_workers()
        if self._waiters_help == "0":
            return
        for help_out in slots.WAIT_HELPERS.get():
            help_out()
        if var is None:
            help_all(self)
        else:
            help_var(self, var)

    def _can_help(self, queue: WorkerQueue) -> bool:
        """True when a waiting thread may run operations of ``queue``."""
        where = queue.context
        return queue.taken is not None and (where is None or not where.has_streams)

    def _queue_with(self, op: OprBlock) -> WorkerQueue | None:
        """The queue that ``op`` is or was in, if it is one where a waiting thread may help."""
        if not op.own and self._waiters_help != "all":
            return None
        queue = self._plain_queues.get(type(op)) or self._by_route.get(self.queue_key(op))
        return queue if queue is not None and self._can_help(queue) else None

    def stop(self) -> None:
        if self in running.engines:
            return
        self._wait_idle()
        for stream in list(self._streams):
            stream.drain(self)
        for queue in self._exclusively(self._take_queues):
            queue.join()

    def _take_queues(self) -> list[WorkerQueue]:
        """Inside: what is pushed from here on makes new queues. What was pushed before is run: a worker goes only when
        its queue is empty."""
        queues = self._all_queues[:]
        for queue in queues:  # first, since a call may fail at the limit of recursion: then this is done once more
            queue.end(self)
        self._plain_queues.clear()
        self._by_route.clear()
        self._all_queues.clear()
        return queues


def _end(queues: list[WorkerQueue]) -> None:
    """End the workers. Nobody holds the engine, so nothing runs or is pending, and all are parked or about to be."""
    for queue in queues:
        queue.end()


class _End:
    """Held by an engine that a destructor has brought back: when that lets go of it, the threads end.

    No weak reference: one that is made while garbage is collected is cleared without its callback (CPython 3.14).
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
    """One queue with ``workers`` threads, one with a single thread for copies; priorities are ignored, and an
    operation that only starts something (ASYNC) goes to the queue like any other; a delete goes to its front.

    Operations of every context share the threads, so work on an asynchronous device has no stream of its own and is
    finished within the operation.
    """

    kind = "ThreadedEngine"

    def __init__(self, *, workers: int = 16, copy_workers: int = 1) -> None:
        super().__init__()
        self._workers = workers
        self._copy_workers = copy_workers
        self.enlist()

    @classmethod
    def build(cls, threads: ThreadCounts, **options: object) -> ThreadedEngine:
        """Make an engine with 16 workers and one copy thread, unless the caller asked for other counts."""
        engine = cls(workers=threads.cpu_workers or 16, copy_workers=threads.copy_workers or 1, **options)
        engine._alone = threads.cpu_workers == 1
        return engine

    def queue_key(self, op: OprBlock) -> tuple[object, ...]:
        return (op.prop in _COPIES,)

    def make_queue(self, *key: Any) -> WorkerQueue:
        name, threads = ("copy", self._copy_workers) if key[0] else ("worker", self._workers)
        return self.new_queue(None, name, threads)


_CPU0 = Context("cpu", 0)


def context_of(op: OprBlock) -> Context:
    """Where an operation runs."""
    return op.ctx if op.ctx is not None else _CPU0
