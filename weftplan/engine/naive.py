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
from weftplan.engine.core import WAITER, Engine, running
from weftplan.engine.failure import Failure
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

    def _enqueue(self, op: OprBlock) -> Any:
        if op.queue is WAITER:
            op.fn()
            for ready in self._finish(op, None):
                self._enqueue(ready)
        else:
            self._ready.append(op)
            self._turn.notify_all()
        return None

    def _run_inline(self, op: OprBlock) -> None:
        nested = getattr(running, "depth", 0) > 0
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
                following = self._ready.popleft()
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
        running.depth = getattr(running, "depth", 0) + 1
        try:
            failure = self._run_async(op) if op.asynchronous else self._execute(op)
        finally:
            running.depth -= 1
        tracer = self._tracer
        if tracer is not None and start:
            me = threading.current_thread().name
            tracer(op.label, op.ctx, "inline", me, op.push_ns or start, start, time.perf_counter_ns(), op.seq)
        with self._lock:
            ctx = op.ctx or _CPU0
            self._by_context[ctx] = self._by_context.get(ctx, 0) + 1
            ready = self._finish(op, failure)
            op.failure = failure
            op.queue = _DONE
            for other in ready:
                self._enqueue(other)
            self._turn.notify_all()

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
