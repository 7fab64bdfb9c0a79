"""Execution of ready operations by a waiting thread, in place of a sleeping worker.

Waking a worker and being woken by it costs two thread switches, more than most operations. A thread that is about to
sleep in a wait therefore checks whether all workers of the queue are asleep. If so, it takes the place of one (the
queue's ``seat``) and runs operations itself. The order and the maximum number of concurrent operations do not change.

* It runs only operations that the package pushes for itself (``op.internal``). A user function could observe the
  difference: the waiting thread's context, event loop, thread-local state, locks and recursion depth.
  WEFTPLAN_ENGINE_WAITERS_HELP=all includes user functions; 0 leaves everything to workers.
* It runs only in queues whose last measured operation was shorter than ``QUICK_NS`` (``queue.quick``). For a long
  operation the thread switch is negligible, and a worker is out of reach of Ctrl-C.
* ``wait_for_var`` runs only the operation that will write the var, if that is first in its queue. In a queue with one
  worker it also runs the operations before it.
* ``wait_for_all`` runs everything that is ready.

An operation runs in a ``contextvars`` context of its own, as on a worker: ``errstate`` of the waiting thread does not
apply. Ctrl-C is deferred until the function has returned (``shield.py``). A function that turns out to be long is
interrupted and fails with KeyboardInterrupt. Queues of asynchronous devices are left to their workers, which own the
streams. Pushes of the operation do not join a bulk of the waiting thread.
"""

from __future__ import annotations

import threading
from contextvars import Context as Variables
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from weftplan.engine.execution import running
from weftplan.engine.failure import Failure
from weftplan.engine.operation import OprBlock, require_stack
from weftplan.engine.shield import NEVER, clock, shield, shielded, undisturbed
from weftplan.engine.types import Threads
from weftplan.engine.workers import WorkerQueue, completion
from weftplan.support import blas_threads, core_sharing

if TYPE_CHECKING:
    from weftplan.engine.var import Var


class Helped(Threads, Protocol):
    """Interface of an engine towards a thread that stands in for its workers."""

    _all_queues: list[WorkerQueue]

    def _can_help(self, queue: WorkerQueue) -> bool: ...
    def _queue_with(self, op: OprBlock) -> WorkerQueue | None: ...


class _Scene(threading.local):
    """Per-thread state for operations that run during a wait."""

    def __init__(self) -> None:
        self.variables = [Variables()]
        """Empty while an operation uses the context: it may wait for another engine and run its operations.
        """
        blas_threads.enter_worker()


_scene = _Scene()


def help_var(engine: Helped, var: Var) -> None:
    """Run the operations that ``var`` waits for, unless a worker already runs them."""
    last_seq = engine._region.seq
    while True:
        op = var.write
        # Nothing to write, not ready, or pushed after the wait began.
        if op is None or op.wait or op.seq > last_seq:
            return
        queue = engine._queue_with(op)
        if queue is None or not queue.quick or not queue.items:
            return
        try:
            # With several workers an operation further back is left to them: running it first would change the order.
            if queue.threads > 1 and queue.items[0] is not op:
                return
        except IndexError:  # a worker was faster
            return
        if not _stand_in(engine, queue, 1):
            return


def help_all(engine: Helped) -> None:
    """Run ready operations of queues whose workers are all asleep."""
    progress = True
    while progress and engine._region.pending:
        progress = False
        for queue in list(engine._all_queues):
            # Repeat until no queue makes progress: each operation may make operations of another queue ready.
            if queue.quick and queue.items and engine._can_help(queue):
                progress = _stand_in(engine, queue, 0) or progress


def _stand_in(engine: Threads, queue: WorkerQueue, limit: int) -> bool:
    """Run up to ``limit`` operations of ``queue`` in a worker's place (0: all). Return False if none ran.

    Raises:
        KeyboardInterrupt: deferred while they ran, or raised by an interrupted operation.
    """
    if not queue.all_asleep():
        return False
    require_stack(6)
    seat = queue.seat
    count = 0
    with shielded():  # up to the very end: the seat holder must wake a worker for the remaining operations
        try:
            del seat[0]
        except IndexError:
            return False
        previous = core_sharing.sit(None if engine._single_worker else undisturbed)
        try:
            more = queue.all_asleep()  # check again, now that no other thread can take the seat
            while True:  # no condition in the loop head: see `region.py`
                if not more or not queue.items or not queue.quick or shield.held or 0 < limit <= count:
                    break
                more = run_next(engine, queue)
                count += more
        finally:
            core_sharing.sit(previous)
            queue.looking = False
            # Give the seat back, then check again: a worker that found it taken went back to sleep (README, race 11).
            seat.append(1)
            if queue.items and not queue.waking and (queue.idle or queue.permits):
                queue.wake(engine)
    return count > 0


def run_next(engine: Threads, queue: WorkerQueue) -> bool:
    """Run the first operation of ``queue``. Return False if a worker was faster."""
    op: Any = None
    failure: Any = None
    mine = running.__dict__  # fetched once: each thread-local lookup costs as much as a call
    engines, seated = mine.get("engines", ()), mine.get("seated")
    internal_only = engine._waiters_help != "all"
    clock.since = start = perf_counter_ns()
    # No signal can arrive between taking an operation and the inner try, shielded or not.
    try:
        if internal_only and not queue.items[0].internal:
            return False
        for op in queue.next_op:  # type: ignore[union-attr]  # noqa: B007
            break
        if internal_only and not op.internal:  # a worker has taken the previous operation
            queue.items.appendleft(op)
            return False
        try:
            mine["engines"], mine["seated"] = (*engines, engine), queue
            queue.looking = False
            if queue.threads > 1 and queue.items and queue.idle:
                queue.wake(engine)
            if op.asynchronous:
                starting, op = op, None
                engine._start_async(starting, completion(engine, queue.name, starting, start))
                return True
            contexts = _scene.variables
            variables = contexts.pop() if contexts else Variables()
            failure = variables.run(engine._execute, op)
            contexts.append(variables)
        except BaseException as error:
            if op is None:
                raise
            failure = error
        finally:
            clock.since = NEVER  # from here on an interrupt waits, however long the function took
            mine["engines"], mine["seated"] = engines, seated
            if op is not None:
                op.failure = failure
                queue.looking = True  # newly ready operations need no worker: the seat holder checks next
                requests = engine._region.requests
                requests += (op,)  # not a call: no interrupt can arrive
                queue.helped += 1
                queue.measure(start)
                engine._region.apply(engine, past_gate=True)  # a fork waits for this operation: pass its gate
    except IndexError:
        if op is None:
            return False
        raise
    if engine._tracer is not None:
        engine._trace(op, queue.name, threading.current_thread().name, start)
    failure = op.failure
    if failure is None:
        return True
    raised = failure.error if isinstance(failure, Failure) and failure.seq == op.seq else failure
    if issubclass(type(raised), KeyboardInterrupt):  # `isinstance` would call user code of an odd class
        if failure is raised:  # the region will make a failure of it on another thread
            raise raised
        engine._raise(failure)
    return True
