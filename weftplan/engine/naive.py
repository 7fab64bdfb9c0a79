"""``NaiveEngine``: every push runs at once on the pushing thread and raises there. For debugging.

The core is the same, so versions, order and which arrays fail agree with the threaded engines. An operation that is
pushed from inside another and needs one of its vars runs when that one is finished: at once would be wrong, and
waiting would never end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.failure import Failure
from weftplan.engine.life import WAITER, running
from weftplan.engine.operation import OprBlock
from weftplan.engine.statistics import QueueStatistics


class NaiveEngine(Engine):
    """Runs operations where they are pushed; a push raises the failure, which counts as the wait that raised it."""

    kind = "NaiveEngine"
    _inline = True

    def __init__(self) -> None:
        super().__init__()
        self._ready: deque[OprBlock] = deque()
        self._turn = threading.Condition(self._lock)
        """Notified when an operation finishes, for threads whose own operation waits for another thread's."""
        self._by_context: dict[Context, int] = {}

    def _enqueue(self, op: OprBlock) -> None:
        if op.queue is WAITER:
            self._finish_waiter(op)
        else:
            self._ready.append(op)
            self._turn.notify_all()

    def _ensure_enqueued(self, op: OprBlock) -> None:
        if op not in self._ready:
            self._ready.append(op)
        self._turn.notify_all()

    def _run_inline(self, op: OprBlock) -> None:
        """Run what is ready until ``op`` is done; inside an operation: until nothing is ready, since what ``op`` still
        waits for may be that operation itself."""
        nested = running.depth > 0
        raised: Failure | None = None
        while True:
            with self._lock:
                if not self._ready:
                    if op.queue is _DONE:
                        break
                    if nested:
                        op.queue = _DEFERRED
                        break
                    self._turn.wait()
                    continue
                # In this order, an interrupt between the two lines runs the operation twice at worst in theory; taking
                # it and being interrupted before it has a name would lose it.
                following = self._ready[0]
                self._ready.popleft()
            deferred = following.queue is _DEFERRED
            self._perform(following)
            if deferred and following.failure is not None and raised is None:
                raised = following.failure
        if op.queue is _DONE and op.failure is not None:
            raised = op.failure
        if raised is not None:
            self._raise(raised)

    def _perform(self, op: OprBlock) -> None:
        """Run one operation to its end on this thread."""
        start = time.perf_counter_ns() if self._tracer is not None else 0
        failure: Any = None
        running.depth += 1
        try:
            failure = self._run_async(op) if op.asynchronous else self._execute(op)
        except BaseException as error:  # an interrupt outside the operation's function: it counts as its failure
            failure = Failure.of(op, error)
        finally:
            running.depth -= 1
        if start:
            self._trace(op, "inline", threading.current_thread().name, start)
        with self._lock:
            self._inside = True
            try:
                ctx = op.ctx or _CPU0
                self._by_context[ctx] = self._by_context.get(ctx, 0) + 1
                ready = self._finish(op, failure)
                op.failure = failure
                op.queue = _DONE
                for other in ready or ():
                    self._enqueue(other)
                self._turn.notify_all()
            finally:
                self._inside = False
        if self._deferred:
            self._run_deferred()

    def _run_async(self, op: OprBlock) -> Any:
        """Start an asynchronous operation and wait until it says that it is done."""
        done = threading.Event()
        result: list[Any] = []

        def complete(failure: Any) -> None:
            result.append(failure)
            done.set()

        self._start_async(op, complete)
        done.wait()
        return result[0]

    def _after_fork(self) -> None:
        super()._after_fork()
        self._turn = threading.Condition(self._lock)

    def _queues(self) -> Sequence[Any]:
        return [_Inline(ctx, count) for ctx, count in self._by_context.items()]


class _Inline:
    """Stands for the pushing threads in statistics."""

    def __init__(self, context: Context, completed: int) -> None:
        self._context = context
        self._completed = completed

    def statistics(self) -> QueueStatistics:
        """Counts of one context."""
        return QueueStatistics(self._context, "inline", self._completed, 0, 0)


_DONE: Any = object()
_DEFERRED: Any = object()
_CPU0 = Context("cpu", 0)
