"""Region: lock-free serialization of all changes of an engine's state (flat combining).

A thread appends a request to ``requests`` and calls :meth:`Region.apply`. The thread that takes the ``token`` is
*inside*: it serves all requests until none is left. Other threads return immediately: the thread inside checks
``requests`` again after it has put the token back. Flat combining (Hendler, Incze, Shavit, Tzafrir, SPAA 2010) is used
here to avoid convoys: under a lock, a thread that the interpreter suspends makes all others sleep and wake per
operation.

A request is an operation. If its ``seq`` is 0, it is admitted: registered with its vars. Otherwise it is completed: it
releases its vars. Operations with all grants go to ``ready``; the engine (:class:`Driver`) dispatches them.

Rules for code inside the region:

* No user code runs, except destructors and signal handlers. They may push but not wait.
* The token is a one-item dictionary because ``del token[0]`` is atomic. On the main thread no signal can arrive between
  it and the following ``try``; a call of ``acquire`` would allow one.
* An interrupt can arrive at the end of a loop, at function entry and after a call. Steps that belong together
  therefore contain no call except the last; ``_resume`` derives how far a broken request has come.
* Nothing hits the recursion limit: ``room`` was checked when the operation was created.
* CPython 3.13.0 leaves the enclosing ``try`` of a loop if the backward jump follows a condition. Loops therefore start
  with ``while True``, and a dummy store to ``edge`` ends their body.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableSequence, Sequence
from itertools import repeat
from operator import attrgetter, is_
from time import sleep
from types import CodeType
from typing import Any, Protocol, TypeVar

from weftplan.engine.operation import OprBlock, Waiter, require_stack
from weftplan.engine.var import Var
from weftplan.errors import EngineError

T = TypeVar("T")
PERMIT = (1,)
"""Item to append to a list of permits, which returns one permit."""
_NOTIFIED = -1
"""``wait`` of a waiter whose completion is already requested."""
PATIENCE_S = 1.0
"""Seconds after which a waiting thread serves requests itself, in case the thread inside could not notify it."""
MAX_SERVED = 500
"""Requests that a thread serves before it offers the token to others."""
PAUSE_S = 0.00005
"""Seconds that a thread pauses so that another thread can take the token."""
_engine, _events, _readers, _waiting, _write = map(attrgetter, ("engine", "events", "readers", "waiting", "write"))
"""Attribute getters of vars. With ``map`` they take a third of the time of a Python loop."""


class Driver(Protocol):
    """Interface of an engine towards its region."""

    _any_failure: bool
    """Whether a var holds a failure; every completion then calls ``_spread``."""
    _outside: Any
    """Work for the thread that leaves the region."""
    _streams_used: bool
    """Whether vars may have stream events."""

    def _dispatch(self) -> None:
        """Inside: dispatch everything in ``ready``. Remove each item only when no interrupt can lose it."""

    def _spread(self, op: OprBlock) -> object:
        """Inside: set the failure of ``op`` on the vars it writes. Return objects to drop outside."""

    def _run_outside(self) -> None:
        """Outside: process ``_outside``."""
        return

    def _wake_all(self) -> None:
        """Inside: wake workers for all queued operations; an interrupt may have skipped a wake-up."""
        return


# Guarantees of a region:
# * Every request is served exactly once and in order, whatever is raised: the head of ``requests`` is removed last, and
#   ``_resume`` finishes a request that an exception has cut short.
# * One thread is inside at a time: it holds the only item of ``token``, whose removal from a dict is atomic in CPython.
# * A request never stays unserved: a thread appends first and then tries the token; the thread inside puts the token
#   back first and then looks at the queue. One of the two sees the other.
# * No user code, destructor or wait runs inside; ``_run_outside`` and the drops come after the token is back.
# Fixed: ``requests``, ``token``, ``ready``, ``idle_waiters``, ``in_flight`` (the objects), ``few``, ``debug``.
# Changing, inside only: ``seq``, ``completed``, ``waits``, and the fields of vars; at any time ``gate``, by a fork.
class Region:
    """Request queue, and the code that serves it on one thread at a time.

    Args:
        few: notify ``idle_waiters`` when at most this number of operations is pending.
        debug: record pending operations in ``in_flight``.

    A region holds no reference to its engine, so the engine can be collected; methods take it as ``driver``.
    """

    def __init__(self, *, few: int = 0, debug: bool = False) -> None:
        self.requests: deque[OprBlock] = deque()
        """Operations to admit or to complete, in order. The head is removed only when it has been served."""
        self.token: dict[int, Any] = {0: 1}
        """Empty while a thread is inside. A pausing thread stores a unique value, to see whether another took it."""
        self.ready: deque[OprBlock] = deque()
        """Operations with all grants, not dispatched yet. Empty outside the region."""
        self.seq = 0
        """Number of operations admitted; also the number of the last."""
        self.completed = 0
        self.waits = 0
        """Number of completed operations that were waiters."""
        self.idle_waiters: list[Any] = []
        """Locks to release when at most ``few`` operations are pending."""
        self.few = few
        self.debug = debug
        self.in_flight: dict[int, OprBlock] = {}
        """Operations that are admitted and not completed (debug mode only)."""
        self.gate: Callable[[], None] | None = None
        """Function called at the start of :meth:`apply` unless ``past_gate``. A fork blocks other threads in it."""

    def dispatch_to(self, queue: MutableSequence[OprBlock]) -> None:
        """Inside: ``_dispatch`` for a driver with one queue."""
        ready = self.ready
        while ready:
            op = ready[0]
            if type(op) is Waiter:
                self.notify(op)
            else:
                del ready[0]
                queue += (op,)

    # -- the region -------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of operations admitted and not completed.

        Outside the region, 0 proves that there was an idle moment.
        """
        completed = self.completed  # read first: both counters only grow
        return self.seq - completed

    def apply(self, driver: Driver, past_gate: bool = False) -> None:
        """Serve all requests, or leave them to the thread that is inside."""
        if self.gate is not None and not past_gate:
            self.gate()
        requests, token, ready = self.requests, self.token, self.ready
        debug, idle_waiters = self.debug, self.idle_waiters
        interrupted: BaseException | None = None
        dropped: object = None
        try:
            while True:
                # Another thread that appends after this check finds the token and enters itself.
                if not requests:
                    break
                try:
                    del token[0]
                except KeyError:
                    break
                # Inside. No call may stand between the removal and the inner `try`: an interrupt would keep the token
                # for ever.
                budget = MAX_SERVED
                op: OprBlock | None = None
                var: Var | None = None
                try:
                    while True:
                        if not requests or not budget:
                            break
                        budget -= 1
                        op = requests[0]
                        if not op.seq:
                            # Admission: a read is granted unless a write comes first. A write becomes `write`, and
                            # waits for readers if there are any. Everything else queues in `waiting`.
                            wait = 0
                            for var in op.reads:
                                if var.write is None:
                                    var.readers += 1
                                else:
                                    wait += 1
                                    if var.waiting is None:
                                        var.waiting = [op]
                                    else:
                                        var.waiting.append(op)
                                edge: Var | None = var
                            for var in op.writes:
                                if var.write is None:
                                    var.write = op
                                    if var.readers:
                                        wait += 1
                                else:
                                    wait += 1
                                    if var.waiting is None:
                                        var.waiting = [op]
                                    else:
                                        var.waiting.append(op)
                                edge = var
                            # No call from here to `append`: an interrupt finds the request either unregistered or
                            # removed.
                            self.seq = op.seq = self.seq + 1
                            op.wait = wait
                            if debug:
                                self.in_flight[op.seq] = op
                            del requests[0]
                            if not wait:
                                granted, op = op, None  # served: an interrupt after the next call must not resume it
                                ready.append(granted)
                        else:
                            # Completion: spread the failure before any grant, so that each successor finds it on its
                            # vars.
                            if driver._any_failure or op.failure is not None:
                                dropped = (driver._spread(op), dropped)
                            for var in op.reads:
                                # The last reader grants the write that waits for it.
                                var.readers -= 1
                                if not var.readers and var.write is not None:
                                    writer = var.write
                                    writer.wait -= 1
                                    if not writer.wait:
                                        ready.append(writer)
                                edge = var
                            for var in op.writes:
                                var.version += 1
                                # The next operations are granted before this request is removed; a repeated call
                                # resumes at `head`.
                                var.write = None
                                if var.waiting:
                                    var.grant(ready)
                                edge = var
                            self.completed += 1
                            del requests[0]
                            if debug:
                                del self.in_flight[op.seq]
                            if op.fn is not None:
                                dropped = (op, dropped)  # its objects may have destructors, which must run outside
                        op = var = None
                        # Dispatch after each request: workers start while later requests are served.
                        if ready:
                            driver._dispatch()
                        if idle_waiters and self.seq - self.completed <= self.few:
                            self._notify_idle()
                        edge = None
                except BaseException as error:
                    interrupted = interrupted or error
                    # Ctrl-C or MemoryError: bring the interrupted request to its end before the token is put back.
                    self._resume(driver, op, var)
                finally:
                    # A list of its own identifies this thread, if it stopped at the limit; otherwise a number suffices.
                    token[0] = mine = budget or [0]
                if not budget:
                    sleep(PAUSE_S)  # let another thread take over, or a request storm never ends for this thread
                    if token.get(0) is not mine:
                        break  # another thread took over and serves the remaining requests
                edge = None  # noqa: F841
            # Destructors run here, outside the region.
            dropped = None
            if driver._outside:
                driver._run_outside()
        except BaseException as error:  # after the token was put back: requests may have arrived unseen
            interrupted = interrupted or error
            self.apply(driver)
        if interrupted is not None:
            raise interrupted

    def write_alone(
        self, driver: Driver, work: Callable[[], object], reads: Sequence[Var], writes: Sequence[Var]
    ) -> bool:
        """Run ``work()`` inside, as an operation that is pushed, run and completed in one step.

        Args:
            work: short; runs no user code, pushes nothing and waits for nothing.
            reads, writes: vars without duplicates.

        Returns:
            False, with nothing done, if another thread is inside, a request is queued, or a var is busy, on a device or
            not one of ``driver``.
        """
        requests, token = self.requests, self.token
        succeeded = False
        try:
            try:
                del token[0]
            except KeyError:
                return False
            try:
                if not requests and self.gate is None and not driver._any_failure:
                    for var in reads:
                        if var.write is not None or var.engine is not driver or var.events is not None:
                            return False
                    for var in writes:
                        if var.write is not None or var.readers or var.engine is not driver or var.events is not None:
                            return False
                    work()
                    for var in writes:
                        var.version += 1
                    self.seq += 1
                    self.completed += 1
                    succeeded = True
            finally:
                token[0] = 1
        finally:
            if requests:  # requests that arrived while this thread held the token
                self.apply(driver)
        return succeeded

    def begin(self, driver: Driver, op: OprBlock) -> bool:
        """Admit ``op`` with all grants, for the caller to run. The caller holds Ctrl-C back around this call.

        Args:
            op: an operation without duplicate vars.

        Returns:
            False, with nothing done; conditions as in :meth:`write_alone`.
        """
        requests, token = self.requests, self.token
        succeeded = False
        try:
            del token[0]
        except KeyError:
            return False
        try:
            # Nothing pending means that no var is in use, so the vars need no check.
            if not requests and self.gate is None and not driver._any_failure:
                reads, writes = op.reads, op.writes
                if self.seq != self.completed and (any(map(_write, reads)) or _used(writes)):
                    return False
                if not _ours(driver, reads) or not _ours(driver, writes):
                    return False
                for var in reads:
                    var.readers += 1
                for var in writes:
                    var.write = op
                self.seq = op.seq = self.seq + 1
                succeeded = True
        finally:
            token[0] = 1
            if requests:  # requests that arrived while this thread held the token
                self.apply(driver)
        return succeeded

    def end(self, driver: Driver, op: OprBlock) -> bool:
        """Complete ``op``, which has not failed, if no operation waits for it; False: request the completion.

        Hold Ctrl-C back around the call.
        """
        requests, token = self.requests, self.token
        succeeded = False
        try:
            del token[0]
        except KeyError:
            return False
        try:
            if not requests and self.gate is None and not driver._any_failure and not self.idle_waiters:
                is_sole = self.seq == self.completed + 1
                if not is_sole and (any(map(_waiting, op.writes)) or any(map(_write, op.reads))):
                    return False
                reads, writes = iter(op.reads), iter(op.writes)
                try:
                    _release(reads, writes)
                except BaseException:  # raised by a signal handler at a loop end: release the remaining vars
                    _release(reads, writes)
                    raise
                finally:
                    self.completed += 1
                succeeded = True
        finally:
            token[0] = 1
            if requests:  # requests that arrived while this thread held the token
                self.apply(driver)
        return succeeded

    def notify(self, op: OprBlock) -> None:
        """Inside: notify the waiter at the head of ``ready`` and request its completion."""
        if not op.wait:
            # Queue the completion before notifying: a later request of the woken thread is then served after it. `+=`
            # is not a call, so no interrupt can follow it.
            requests = self.requests
            requests += (op,)
            op.wait = _NOTIFIED
        try:  # noqa: SIM105  # `suppress` is slow
            op.fn()
        except RuntimeError:  # already notified before an interrupt, or no stack here: the waiting thread asks again
            pass
        self.waits += 1
        del self.ready[0]

    def _notify_idle(self) -> None:
        """Inside: notify threads that wait for an idle engine. Each checks the count itself."""
        waiters = self.idle_waiters
        while waiters:
            try:  # noqa: SIM105
                waiters[0].release()
            except RuntimeError:  # already notified before an interrupt
                pass
            del waiters[0]

    # -- after an interrupt -----------------------------------------------------------------------------------------

    def _resume(self, driver: Driver, op: OprBlock | None, var: Var | None) -> None:
        """Inside: finish a request that an exception (KeyboardInterrupt, MemoryError) interrupted.

        Half a change would block its vars for ever. ``op`` is the interrupted request (None: between two requests) and
        ``var`` the last var that the loop reached. Only the release of a write may be incomplete for that var.
        """
        if op is not None and not op.seq:
            self._resume_admission(op, var)
        elif op is not None:
            self._resume_completion(driver, op, var)
        # `ready` may hold operations of the interrupted request.
        if self.ready:
            driver._dispatch()
        if self.idle_waiters and self.seq - self.completed <= self.few:
            self._notify_idle()
        # An interrupt may have come between queueing an operation and waking its worker.
        driver._wake_all()

    def _resume_admission(self, op: OprBlock, var: Var | None) -> None:
        reads_served = writes_served = 0
        if var is not None and var in op.writes:
            reads_served, writes_served = len(op.reads), [*op.writes].index(var) + 1
        elif var is not None:
            reads_served = op.reads.index(var) + 1
        for other in op.reads[reads_served:]:
            other.add_read(op)
        for other in [*op.writes][writes_served:]:
            other.add_write(op)
        # No grant can have happened in between. A read waits if its var has an earlier write; a write waits if it is
        # not first or if there are readers.
        op.wait = sum(v.write is not None for v in op.reads) + sum(
            v.write is not op or v.readers > 0 for v in op.writes
        )
        self.seq = op.seq = self.seq + 1
        if self.debug:
            self.in_flight[op.seq] = op
        del self.requests[0]
        if not op.wait:
            self.ready.append(op)

    def _resume_completion(self, driver: Driver, op: OprBlock, var: Var | None) -> None:
        reads_served = writes_served = 0
        if var is None:
            if driver._any_failure or op.failure is not None:
                driver._spread(op)
        elif var in op.writes:
            reads_served, writes_served = len(op.reads), [*op.writes].index(var) + 1
            if var.write is op:
                var.finish_write(self.ready)
            elif var.write is None and var.waiting:
                var.grant(self.ready)
        else:
            reads_served = op.reads.index(var) + 1
        for other in op.reads[reads_served:]:
            other.finish_read(self.ready)
        for other in [*op.writes][writes_served:]:
            other.finish_write(self.ready)
        self.completed += 1
        if self.debug:
            del self.in_flight[op.seq]
        del self.requests[0]

    # -- requests with a result -----------------------------------------------------------------------------------

    def ask(self, driver: Driver, waiter: Waiter) -> None:
        """Queue ``waiter``; a thread inside calls it when its vars are granted."""
        self.requests.append(waiter)
        self.apply(driver)

    def exclusively(self, driver: Driver, change: Callable[[], T]) -> T:
        """Run ``change()`` inside, after all earlier requests and on any thread. Return its result or raise its error.

        Raises:
            EngineError: called by a destructor or signal handler that interrupted this thread inside.
        """
        require_stack(30)
        self.refuse_inside()
        served = threading.Lock()  # a binary semaphore: the serving thread releases it, this thread waits for it
        served.acquire()
        outcome: list[Any] = []

        def make() -> None:
            if not outcome:
                require_stack()  # the serving thread may have less stack than the caller; after a failure, ask again
                # Hide the waiter that runs this from the counts.
                self.waits += 1
                self.completed += 1
                try:
                    outcome.extend((True, change()))
                except BaseException as error:
                    if outcome:  # an interrupt after the change: the repeated call must not change again
                        raise
                    outcome.extend((False, error))
                finally:
                    self.waits -= 1
                    self.completed -= 1
            served.release()

        try:
            self.ask(driver, Waiter(make, (), ()))
            # The thread inside may have had no stack for the request: repeat it. `outcome` keeps a second call
            # harmless.
            while not served.acquire(timeout=PATIENCE_S):
                self.ask(driver, Waiter(make, (), ()))
        except BaseException:
            outcome.append(None)  # withdraw the request: no thread reads the result any more
            raise
        succeeded, result = outcome
        if not succeeded:
            raise result
        return result  # type: ignore[no-any-return]

    def refuse_inside(self) -> None:
        """Raise if the caller interrupted this thread inside the region: it would wait for itself."""
        if self.is_inside():
            raise EngineError(
                "a finalizer or signal handler waited while the engine was in the middle of a change on this thread"
            )

    def is_inside(self, owner: object = None, method: CodeType | None = None) -> bool:
        """Return whether this thread, now in a finalizer or signal handler, was interrupted inside the region.

        Also if it was interrupted inside ``method`` of ``owner``, which may be the calling method itself.
        """
        frame = None if self.token and method is None else sys._getframe(1)
        if method is not None and frame is not None:
            frame = frame.f_back
        while frame is not None:
            code = frame.f_code
            if code in _INSIDE and frame.f_locals.get("self") is self:
                return True
            if code is method and frame.f_locals.get("self") is owner:
                return True
            frame = frame.f_back
        return False


def _ours(driver: Driver, vars: Collection[Var]) -> bool:
    """Return whether all are host vars of ``driver``."""
    if driver._streams_used and not all(map(is_, map(_events, vars), repeat(None))):
        return False
    return all(map(is_, map(_engine, vars), repeat(driver)))


def _used(vars: Collection[Var]) -> bool:
    """Return whether any of these vars has a reader or a write."""
    return any(map(_write, vars)) or any(map(_readers, vars))


def _release(reads: Iterator[Var], writes: Iterator[Var]) -> None:
    """Release granted reads and writes that no operation waits for."""
    for var in reads:
        var.readers -= 1
    for var in writes:
        var.version += 1
        var.write = None


_INSIDE = tuple(method.__code__ for method in (Region.apply, Region.write_alone, Region.begin, Region.end))
