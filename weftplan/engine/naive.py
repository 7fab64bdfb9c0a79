"""``NaiveEngine``: runs every push inline on the pushing thread and raises there. For debugging.

Versions, order and failed arrays agree with the threaded engines, because the core is the same. An operation pushed
from inside another that holds one of its vars runs after that one: running it immediately would be wrong, and waiting
would never end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.execution import running
from weftplan.engine.failure import Failure, Outcome
from weftplan.engine.inspection import QueueStatistics
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.engine.registry import register
from weftplan.engine.var import Var


@register
class NaiveEngine(Engine):
    """An engine that runs operations when they are pushed. A push raises the failure; this counts as observing it."""

    kind = "NaiveEngine"
    _inline = True

    def __init__(self) -> None:
        super().__init__()
        self._dispatched: deque[OprBlock] = deque()
        """Ready operations, for the next pushing thread."""
        self._next_op = iter(self._dispatched.popleft, None)
        """Iterator that takes the first operation with no signal in between, or raises IndexError."""
        self._outside = []
        """Locks of threads whose operations wait for those of other threads; released after every change."""
        self._next_sleeper = iter(self._outside.pop, None)
        self._deferred: set[OprBlock] = set()
        """Operations whose pushes, inside other operations, have returned before they ran."""
        self._by_context: dict[Context, int] = {}
        self.enlist()

    def _dispatch(self) -> None:
        self._region.dispatch_to(self._dispatched)

    def _admitted(self, op: OprBlock) -> None:
        self._region.apply(self)
        self._run_inline(op)

    def _run_outside(self) -> None:
        while True:
            try:
                for lock in self._next_sleeper:  # noqa: B007
                    break
            except IndexError:
                break
            lock.release()

    def _before_wait(self, var: Var | None = None) -> None:
        if self._deferred and self not in running.engines:
            self._run_inline(None)

    def _run_inline(self, op: OprBlock | None) -> None:
        """Run ready operations until ``op`` (None: everything) is done.

        Inside an operation, or in a destructor or signal handler that interrupted this method or the region: stop when
        nothing is ready, because ``op`` may wait for the interrupted operation. The interrupted thread then runs it, at
        the latest at the next push or wait.
        """
        raised: Failure | None = None
        while True:
            following: OprBlock | None = None
            deferred = False
            try:
                for following in self._next_op:  # noqa: B007
                    break
                assert following is not None
                deferred = following in self._deferred
                self._perform(following)
            except IndexError:
                if following is not None:
                    raise
                if op is None or op.wait == _PERFORMED:
                    break
                # Waiting here could wait for the interrupted operation itself: leave it to the interrupted loop.
                if any(engine._inline for engine in running.engines) or self._region.is_inside(self, _RUN):
                    self._deferred.add(op)
                    break
                lock = threading.Lock()  # released by the next thread that changes the region
                lock.acquire()
                self._outside.append(lock)
                # Another thread may have made it ready, or run it, before the lock was registered.
                if not self._dispatched and op.wait != _PERFORMED:
                    lock.acquire()
                continue
            except BaseException:
                # Put the taken operation back, so that the next loop runs it.
                if following is not None and following.wait != _PERFORMED:  # interrupted before it ran
                    self._dispatched.appendleft(following)
                self._region.apply(self)
                raise
            if deferred and isinstance(following.failure, Failure) and raised is None:
                raised = following.failure
        if op is not None and op.wait == _PERFORMED and isinstance(op.failure, Failure):
            raised = op.failure
        if raised is not None:
            self._raise(raised)

    def _perform(self, op: OprBlock) -> None:
        """Run one operation to its end on this thread."""
        start = time.perf_counter_ns() if self._tracer is not None else 0
        failure: Outcome = None
        requests = self._region.requests
        engines = running.engines
        running.engines = (*engines, self)
        try:
            if op.asynchronous:
                failure = self._run_async(op)
            elif op.prop is FnProperty.DELETE_VAR:
                op.fn()  # no earlier call that an interrupt could follow: a delete always runs
            else:
                failure = self._execute(op)
        except BaseException as error:  # an interrupt outside the operation's function counts as its failure
            failure = error
        finally:
            # No call before the last step: an interrupt in between would repeat the operation or leave it incomplete.
            running.engines = engines
            op.failure = failure
            op.wait = _PERFORMED
            requests += (op,)
        ctx = op.ctx or _CPU0
        self._by_context[ctx] = self._by_context.get(ctx, 0) + 1
        self._deferred.discard(op)
        self._region.apply(self)
        if start:
            self._trace(op, "inline", threading.current_thread().name, start)

    def _run_async(self, op: OprBlock) -> Outcome:
        """Start an asynchronous operation and wait for its completion."""
        completed = threading.Event()  # set on any thread
        result: list[Outcome] = []

        def complete(failure: Outcome) -> None:
            result.append(failure)
            completed.set()

        self._start_async(op, complete)
        completed.wait()
        return result[0]

    def _forget_threads(self) -> None:
        super()._forget_threads()
        self._outside.clear()
        self._deferred.clear()
        self._dispatched.clear()

    def _count_queues(self) -> Sequence[QueueStatistics]:
        return [QueueStatistics(ctx, "inline", count, 0, 0) for ctx, count in list(self._by_context.items())]


_RUN = NaiveEngine._run_inline.__code__


_CPU0 = Context("cpu", 0)
_PERFORMED = -1
"""``wait`` of an operation whose function has run."""
