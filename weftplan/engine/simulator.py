"""Simulator: a single-threaded engine with a seeded choice among ready operations, for tests.

Nothing runs at a push; a wait runs operations until its condition holds. With ``choose`` a test can enumerate every
order of a small program.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from weftplan.engine.core import Engine
from weftplan.engine.execution import once, running
from weftplan.engine.failure import Outcome
from weftplan.engine.operation import FutureBlock, OprBlock
from weftplan.engine.registry import register
from weftplan.engine.var import Var

Choose = Callable[[Sequence[OprBlock]], int]


@register
class Simulator(Engine):
    """Engine on one thread that runs operations in any legal order.

    Args:
        seed: seed of the choices; the same seed and program give the same order.
        choose: receives the ready operations (in the order they became ready) and returns the index of the next.
    """

    kind = "Simulator"
    has_threads = False
    options = ("seed", "choose")

    def __init__(self, *, seed: int = 0, choose: Choose | None = None) -> None:
        super().__init__()
        rng = random.Random(seed)
        self._choose: Choose = choose or (lambda ready: rng.randrange(len(ready)))
        self._dispatched: list[OprBlock] = []
        self._asynchronous: set[int] = set()
        """Numbers of asynchronous operations that have started and not completed."""
        self._arrived = threading.Semaphore(0)
        """Released for each asynchronous completion; a wait without ready operations acquires it."""
        self.history: list[int] = []
        """Numbers of the operations in execution order."""
        self.enlist()

    def _dispatch(self) -> None:
        self._region.dispatch_to(self._dispatched)

    def stop(self) -> None:
        if self not in running.engines:
            self._before_wait()

    def notify_shutdown(self) -> None:
        super().notify_shutdown()
        if self not in running.engines:
            self._before_wait()  # runs deletes; no thread would

    def step(self) -> bool:
        """Run one ready operation. Return False if there is none."""
        if not self._dispatched:
            return False
        chosen = self._choose(tuple(self._dispatched))
        failure: Outcome
        on_outcome: Callable[[Outcome], None] | None
        start = time.perf_counter_ns() if self._tracer is not None else 0
        op, engines, failure, on_outcome = self._dispatched[chosen], running.engines, None, None
        running.engines = (*engines, self)
        # An interrupt counts as the failure of the operation; none can arrive between taking it and the try.
        try:
            del self._dispatched[chosen]
            self.history.append(op.seq)
            if op.asynchronous:
                on_outcome = once(partial(self._arrive, op, start))
                self._asynchronous.add(op.seq)
                self._start_async(op, on_outcome)
                return True
            failure = self._execute(op)
        except BaseException as error:
            failure = error
        finally:
            running.engines = engines
        if on_outcome is not None:
            on_outcome(failure)
        else:
            self._complete(op, failure)
            if start:
                self._trace(op, "simulated", "simulator", start)
        return True

    def _run_another(self) -> bool:
        return self.step()

    def drive(self, over: Callable[[], bool]) -> bool:
        if self in running.engines:
            return False
        if self._bulking:
            self._flush_bulk()
        self._region.apply(self)
        while not over() and self.step():
            pass
        return not over() and bool(self._region.pending)

    def _arrive(self, op: OprBlock, start_ns: int, failure: Outcome) -> None:
        """Complete an asynchronous operation; called from any thread."""
        if start_ns:
            self._trace(op, "simulated", threading.current_thread().name, start_ns)
        self._complete(op, failure)
        self._asynchronous.discard(op.seq)
        self._arrived.release()

    def _drive(self, var: Var) -> None:
        if self not in running.engines and not self._region.is_inside():
            self._before_wait(var)
            while self._has_ready_futures() and self.step():
                pass

    def _has_ready_futures(self) -> bool:
        """Return whether a ready operation completes a future."""
        return any(type(op) is FutureBlock for op in self._dispatched)

    def _before_wait(self, var: Var | None = None) -> None:
        while self._region.requests or (var.write is not None if var is not None else self._region.pending):
            # Counted before the step: if another thread completes an operation, its successors are dispatched first.
            started = len(self._asynchronous)
            # Nothing ran and nothing asynchronous is pending: no progress is possible on this thread.
            if not self.step() and not started:
                break
            if self._asynchronous and not self._dispatched:
                self._arrived.acquire()  # another thread completes an operation, and more may become ready
