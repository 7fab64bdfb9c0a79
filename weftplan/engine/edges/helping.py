"""Execution of ready operations by a waiting thread, in place of a sleeping worker.

Waking a worker and being woken by it costs two changes of thread, which is more than most operations. So a thread that
is about to sleep in a wait looks first whether all workers of the queue it depends on are asleep (or on their way from
sleep); then it takes the place of one, the queue's ``seat``, and runs what the worker would have run. Never more
operations of a queue run at a time than it has workers, and they are taken in the same order.

* Only operations that the package pushes for itself (``op.own``). A user's function could find out: it would see the
  waiting thread's context, event loop and thread-local state, get past a lock that this thread holds, and have less
  room for recursion. WEFTPLAN_ENGINE_WAITERS_HELP=all runs these, too; 0 leaves everything to workers.
* Only where the operation that was measured last in that queue took less than ``QUICK_NS`` (``queue.quick``): the
  change of thread is nothing to a long one, which is better left where Ctrl-C does not reach it.
* ``wait_for_var`` runs only what the var waits for: the operation that is to write it, when that is the first of its
  queue (or behind others, when the queue has one worker, which would have run those first, too).
* ``wait_for_all`` runs whatever is ready.
* What runs here may have idle cores help as on the worker (``support/core_sharing.py``), and is not interrupted
  meanwhile.

The function runs in a context of its own (``contextvars``), as on a worker: NumPy's ``errstate`` of the waiting thread
does not reach it. Ctrl-C on the main thread is held back until the function has returned, so nothing is left half
written (``shield.py``); only when the function turns out to take long is it interrupted, and then fails with
KeyboardInterrupt. Queues of asynchronous devices are left to their workers, which own the streams.
What it pushes is not collected into a bulk of the waiting thread.
"""

from __future__ import annotations

import threading
from contextvars import Context as Variables
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from weftplan.engine.execution import running
from weftplan.engine.failure import Failure
from weftplan.engine.operation import ample_room
from weftplan.engine.shield import NEVER, clock, shield, shielded, undisturbed
from weftplan.engine.workers import WorkerQueue, completion
from weftplan.support import blas_threads, core_sharing

if TYPE_CHECKING:
    from weftplan.engine.types import Threads
    from weftplan.engine.var import Var


class _Scene(threading.local):
    """What a thread keeps for running operations while it waits."""

    def __init__(self) -> None:
        self.variables = [Variables()]
        """Without them while an operation runs in them: it may wait for another engine and run one of that."""
        blas_threads.enter_worker()


_scene = _Scene()


def help_var(engine: Threads, var: Var) -> None:
    """Run what ``var`` waits for, as long as no worker would be quicker."""
    last = engine._region.seq
    while True:
        op = var.write
        if op is None or op.wait or op.seq > last:
            return
        queue = engine._queue_with(op)
        if queue is None or not queue.quick or not queue.items:
            return
        try:
            if queue.threads > 1 and queue.items[0] is not op:
                return
        except IndexError:  # a worker was quicker
            return
        if not _stand_in(engine, queue, 1):
            return


def help_all(engine: Threads) -> None:
    """Run what is ready in queues whose workers are all asleep."""
    found = True
    while found and engine._region.pending:
        found = False
        for queue in list(engine._all_queues):
            if queue.quick and queue.items and engine._can_help(queue):
                found = _stand_in(engine, queue, 0) or found


def _stand_in(engine: Threads, queue: WorkerQueue, most: int) -> bool:
    """Run operations of ``queue`` in a worker's place, ``most`` of them (0: until none is left); False when none was.

    Raises:
        KeyboardInterrupt: held back while they ran, or an operation was interrupted.
    """
    if not queue.all_asleep():
        return False
    ample_room(6)
    seat = queue.seat
    count = 0
    with shielded():  # to the very end: who has had the seat must wake a worker for what it leaves
        try:
            del seat[0]
        except IndexError:
            return False
        before = core_sharing.sit(None if engine._alone else undisturbed)
        try:
            more = queue.all_asleep()  # looked at again, now that no other comes
            while True:  # no condition in the head: see `region.py`
                if not more or not queue.items or not queue.quick or shield.held or 0 < most <= count:
                    break
                more = run_next(engine, queue)
                count += more
        finally:
            core_sharing.sit(before)
            queue.looking = False
            seat.append(1)
            if queue.items and not queue.waking and (queue.idle or queue.permits):
                queue.wake(engine)
    return count > 0


def run_next(engine: Threads, queue: WorkerQueue) -> bool:
    """Run the first operation of ``queue``; False when a worker was quicker."""
    op: Any = None
    failure: Any = None
    mine = running.__dict__  # looked for once: a look into what a thread has for itself costs as much as a call
    engines, seated = mine.get("engines", ()), mine.get("seated", False)
    own_only = engine._waiters_help != "all"
    clock.since = start = perf_counter_ns()
    # From having taken an operation to the inner try no signal can come, whether it is shielded or not.
    try:
        if own_only and not queue.items[0].own:
            return False
        for op in queue.taken:  # type: ignore[union-attr]  # noqa: B007
            break
        if own_only and not op.own:  # a worker has taken the one before
            queue.items.appendleft(op)
            return False
        try:
            mine["engines"], mine["seated"] = (*engines, engine), True
            queue.looking = False
            if queue.threads > 1 and queue.items and queue.idle:
                queue.wake(engine)
            if op.asynchronous:
                starting, op = op, None
                engine._start_async(starting, completion(engine, queue.name, starting, start))
                return True
            kept = _scene.variables
            variables = kept.pop() if kept else Variables()
            failure = variables.run(engine._execute, op)
            kept.append(variables)
        except BaseException as error:
            if op is None:
                raise
            failure = error
        finally:
            clock.since = NEVER  # from here on an interrupt waits, however long the function took
            mine["engines"], mine["seated"] = engines, seated
            if op is not None:
                op.failure = failure
                queue.looking = True  # no worker need be woken for what this makes ready: the seat looks next
                requests = engine._region.requests
                requests += (op,)  # not a call, in which an interrupt could come
                queue.helped += 1
                queue.measure(start)
                engine._region.apply(engine, past_gate=True)  # of a fork, which waits for this operation
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
    if issubclass(type(raised), KeyboardInterrupt):  # `isinstance` asks the object, which may be odd
        if failure is raised:  # another thread is to make a failure of it
            raise raised
        engine._raise(failure)
    return True
