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
from weftplan.engine.execution import running
from weftplan.engine.failure import Failure
from weftplan.engine.operation import OprBlock, Waiter
from weftplan.engine.statistics import QueueStatistics


class NaiveEngine(Engine):
    """Runs operations where they are pushed; a push raises the failure, which counts as the wait that raised it."""

    kind = "NaiveEngine"
    _inline = True

    def __init__(self) -> None:
        super().__init__()
        self._dispatched: deque[OprBlock] = deque()
        """Ready, for whichever pushing thread comes first."""
        self._taken = iter(self._dispatched.popleft, None)
        """Takes the first of them, in a way that no signal can come in between."""
        self._turn = threading.Condition()
        """Notified after every change, for threads whose own operation waits for another thread's."""
        self._unfinished: dict[OprBlock, bool] = {}
        """Operations that a push is to run; True: that push was inside another operation and has returned."""
        self._by_context: dict[Context, int] = {}

    def _dispatch(self) -> None:
        self._dispatch_to(self._dispatched)

    def _admit(self, op: OprBlock) -> None:
        if type(op) is Waiter:
            self._requests.append(op)
            self._apply()
        else:
            self._unfinished[op] = False
            self._requests.append(op)
            self._apply()
            self._run_inline(op)

    def _apply(self) -> None:
        super()._apply()
        with self._turn:
            self._turn.notify_all()

    def _run_inline(self, op: OprBlock) -> None:
        """Run what is ready until ``op`` is done; inside an operation: until nothing is ready, since what ``op`` still
        waits for may be that operation itself."""
        nested = running.depth > 0
        raised: Failure | None = None
        while True:
            following: OprBlock | None = None
            deferred = False
            try:
                for following in self._taken:  # noqa: B007
                    break
                assert following is not None
                deferred = self._unfinished.get(following, False)
                self._perform(following)
            except IndexError:
                if following is not None:
                    raise
                with self._turn:
                    if self._dispatched:
                        continue
                    if op not in self._unfinished:
                        break
                    if nested:
                        self._unfinished[op] = True
                        break
                    self._turn.wait()
                continue
            except BaseException:
                if following is not None and following in self._unfinished:  # an interrupt before it was performed
                    self._dispatched.appendleft(following)
                raise
            if deferred and isinstance(following.failure, Failure) and raised is None:
                raised = following.failure
        if op not in self._unfinished and isinstance(op.failure, Failure):
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
        ctx = op.ctx or _CPU0
        self._by_context[ctx] = self._by_context.get(ctx, 0) + 1
        self._unfinished.pop(op, None)
        self._complete(op, failure)

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
        self._turn = threading.Condition()
        self._unfinished.clear()
        self._dispatched.clear()

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


_CPU0 = Context("cpu", 0)
