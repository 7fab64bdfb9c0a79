"""The region: lock-free serialization of all changes of an engine's state (flat combining).

Whoever wants a change puts a request into ``requests`` and calls :meth:`Region.apply`. The thread that gets the
``token`` is inside: it carries out all requests, its own and the others', until none is left; a thread that does not
get it goes on, since the one inside looks again after giving the token back. This is flat combining (Hendler, Incze,
Shavit, Tzafrir, SPAA 2010), here for another reason than scaling: with a lock, each thread that the interpreter
suspends inside makes the others sleep and wake at every operation, which cost more than the operations.

A request is an operation: with ``seq`` 0 to be registered with its vars (*admission*), otherwise to release them
(*completion*). What becomes ready goes to ``ready`` and is handed over by the engine, the region's :class:`Driver`.
User code never runs inside, destructors and signal handlers excepted: those may push (a request like any other) but not
wait. Of the package's own work small copies and sums do (:meth:`Region.write_alone`). Any thread may call anything here
unless a method says that it is for the thread inside.

The token is a dictionary of one item, because ``del token[0]`` is atomic, and on the main thread cannot be separated by
a signal from the ``try`` that follows, which a call of ``acquire`` can. Interrupts come at the ends of loops, when a
function begins and after a call; so whatever belongs together is done without a call in it but for the last step, and
``_resume`` finds out how far the request at hand has come. Nothing here meets the limit of recursion: whoever asks has
made an operation, for which there must be ``room``. CPython 3.13.0 leaves a loop past the ``try`` around it where the
jump back comes right after a condition; hence loops without one in their head, and ``edge``, which is written at their
ends. The file is long because these rules hold for all that changes the state, and are best read beside it.
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

from weftplan.engine.operation import OprBlock, Waiter, ample_room
from weftplan.engine.var import Var
from weftplan.errors import EngineError

T = TypeVar("T")
ONE = (1,)
"""Added to a list of permits: giving one back."""
_TOLD = -1
"""``wait`` of a waiter whose completion has been asked for."""
PATIENCE_S = 1.0
"""How often a thread that waits looks whether it has to do something itself: the thread inside, at its limit of
recursion, had no room to answer, or no worker could be started."""
MOST_AT_ONCE = 500
"""Requests that a thread carries out before it lets another go on with them."""
PAUSE_S = 0.00005
"""How long it waits for another to come."""
_engine, _events, _readers, _waiting, _write = map(attrgetter, ("engine", "events", "readers", "waiting", "write"))
"""Of vars. To ask many of them, loops within the interpreter take a third of the time."""


class Driver(Protocol):
    """An engine, as its region sees it."""

    _any_failure: bool
    """Some var holds a failure, so every completion is to be told to ``_spread``."""
    _here: Any
    """What the thread that was inside does when it is outside again."""
    _streams_used: bool
    """Vars may have events."""

    def _dispatch(self) -> None:
        """Inside: hand over everything in ``ready``, removing each only when nothing can interrupt the rest."""

    def _spread(self, op: OprBlock) -> object:
        """Inside: give the failure of ``op`` to what it writes. Returns what is to be dropped outside."""

    def _run_here(self) -> None:
        """Outside: do what is in ``_here``."""
        return

    def _wake_all(self) -> None:
        """Inside: wake whoever has work, since an interrupt may have come before somebody was woken."""
        return


class Region:
    """Requests, and what one thread at a time does about them.

    Args:
        few: how many pending operations those who sleep in ``idle_waiters`` are to be told of.
        debug: keep every operation that is pending in ``in_flight``.

    A region does not hold its engine, which goes as soon as nobody else holds it: methods that need it are given it.
    """

    def __init__(self, *, few: int = 0, debug: bool = False) -> None:
        self.requests: deque[OprBlock] = deque()
        """Operations to admit or to complete, in order. The first stays until it is carried out."""
        self.token: dict[int, Any] = {0: 1}
        """Empty while a thread is inside; otherwise tells who was there last, as far as that one wants to know."""
        self.ready: deque[OprBlock] = deque()
        """Granted all their vars, not handed over yet; empty outside the region."""
        self.seq = 0
        """Operations admitted so far, and the number of the last."""
        self.completed = 0
        self.waits = 0
        """How many of the completed operations were waiters."""
        self.idle_waiters: list[Any] = []
        """Locks to release when no more than ``few`` are pending."""
        self.few = few
        self.debug = debug
        self.in_flight: dict[int, OprBlock] = {}
        """Debug mode: every operation that is admitted and not completed."""
        self.gate: Callable[[], None] | None = None
        """Called before each :meth:`apply` that does not pass it, outside: a fork keeps other threads waiting there."""

    def hand_over(self, queue: MutableSequence[OprBlock]) -> None:
        """Inside: ``_dispatch`` of a driver with one queue."""
        ready = self.ready
        while ready:
            op = ready[0]
            if type(op) is Waiter:
                self.tell(op)
            else:
                del ready[0]
                queue += (op,)

    # -- the region -------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Operations that are admitted and not completed. Outside the region: 0 only if there was a moment without."""
        completed = self.completed  # first: both only grow
        return self.seq - completed

    def apply(self, driver: Driver, past_gate: bool = False) -> None:
        """Carry out all requests, or leave them to the thread that is inside."""
        if self.gate is not None and not past_gate:
            self.gate()
        requests, token, ready = self.requests, self.token, self.ready
        debug, idle_waiters = self.debug, self.idle_waiters
        interrupted: BaseException | None = None
        dropped: object = None
        try:
            while True:
                if not requests:
                    break
                try:
                    del token[0]
                except KeyError:
                    break
                left = MOST_AT_ONCE
                op: OprBlock | None = None
                var: Var | None = None
                try:
                    while True:
                        if not requests or not left:
                            break
                        left -= 1
                        op = requests[0]
                        if not op.seq:
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
                            self.seq = op.seq = self.seq + 1
                            op.wait = wait
                            if debug:
                                self.in_flight[op.seq] = op
                            del requests[0]
                            if not wait:
                                granted, op = op, None  # over, should an interrupt come after the next call
                                ready.append(granted)
                        else:
                            if driver._any_failure or op.failure is not None:
                                dropped = (driver._spread(op), dropped)
                            for var in op.reads:
                                var.readers -= 1
                                if not var.readers and var.write is not None:
                                    other = var.write
                                    other.wait -= 1
                                    if not other.wait:
                                        ready.append(other)
                                edge = var
                            for var in op.writes:
                                var.version += 1
                                var.write = None
                                if var.waiting:
                                    var.grant(ready)
                                edge = var
                            self.completed += 1
                            del requests[0]
                            if debug:
                                del self.in_flight[op.seq]
                            if op.fn is not None:
                                dropped = (op, dropped)  # what it holds may have destructors: they run outside
                        op = var = None
                        if ready:
                            driver._dispatch()
                        if idle_waiters and self.seq - self.completed <= self.few:
                            self._tell_idle()
                        edge = None
                except BaseException as error:
                    interrupted = interrupted or error
                    self._resume(driver, op, var)
                finally:
                    token[0] = mine = left or [0]
                if not left:
                    sleep(PAUSE_S)  # others are to have a chance to come, or this thread would serve a storm to its end
                    if token.get(0) is not mine:
                        break  # one has, and goes on unless another has come since
                edge = None  # noqa: F841
            dropped = None
            if driver._here:
                driver._run_here()
        except BaseException as error:  # after the token was given back: there may be a request that nobody looks at
            interrupted = interrupted or error
            self.apply(driver)
        if interrupted is not None:
            raise interrupted

    def write_alone(
        self, driver: Driver, work: Callable[[], object], reads: Sequence[Var], writes: Sequence[Var]
    ) -> bool:
        """``work()``, made inside as an operation that is pushed, run and completed in one step.

        Args:
            work: takes no longer than some requests do, runs nobody's code, pushes nothing and waits for nothing.
            reads, writes: no var twice.

        Returns:
            True: it has run. False: somebody else is inside, a request comes first, or a var is not idle, or not one
            of ``driver`` on a host.
        """
        requests, token = self.requests, self.token
        done = False
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
                    done = True
            finally:
                token[0] = 1
        finally:
            if requests:  # they came while nobody else could get in
                self.apply(driver)
        return done

    def begin(self, driver: Driver, op: OprBlock) -> bool:
        """Admit ``op``, which is to be granted its vars at once, so that the caller runs it. Ctrl-C must be held back.

        Args:
            op: reads and writes no var twice.

        Returns:
            False, and nothing is done: somebody else is inside, a request comes first, or a var is not idle, or not one
            of ``driver`` on a host.
        """
        requests, token = self.requests, self.token
        done = False
        try:
            del token[0]
        except KeyError:
            return False
        try:
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
                done = True
        finally:
            token[0] = 1
            if requests:  # they came while nobody else could get in
                self.apply(driver)
        return done

    def end(self, driver: Driver, op: OprBlock) -> bool:
        """Complete ``op``, which has not failed, where nobody waits for it. Ctrl-C must be held back.

        Returns:
            False, and nothing is done: its completion is to be requested.
        """
        requests, token = self.requests, self.token
        done = False
        try:
            del token[0]
        except KeyError:
            return False
        try:
            if not requests and self.gate is None and not driver._any_failure and not self.idle_waiters:
                alone = self.seq == self.completed + 1
                if not alone and (any(map(_waiting, op.writes)) or any(map(_write, op.reads))):
                    return False
                reads, writes = iter(op.reads), iter(op.writes)
                try:
                    _release(reads, writes)
                except BaseException:  # of a signal handler; it comes at the end of a turn, and the rest is due
                    _release(reads, writes)
                    raise
                finally:
                    self.completed += 1
                done = True
        finally:
            token[0] = 1
            if requests:  # they came while nobody else could get in
                self.apply(driver)
        return done

    def tell(self, op: OprBlock) -> None:
        """Inside: ``op``, first in ``_ready``, is a waiter; it is over as soon as it is granted."""
        if not op.wait:
            # Before it is told: what the woken thread asks next is answered after this one is over. Not a call, after
            # which an interrupt could come.
            requests = self.requests
            requests += (op,)
            op.wait = _TOLD
        try:  # noqa: SIM105  # `suppress` is slow
            op.fn()
        except RuntimeError:  # told before an interrupt, or no room for it here: who asked asks again
            pass
        self.waits += 1
        del self.ready[0]

    def _tell_idle(self) -> None:
        """Inside: little or nothing is pending. Who is told looks whether it is little enough."""
        waiters = self.idle_waiters
        while waiters:
            try:  # noqa: SIM105
                waiters[0].release()
            except RuntimeError:  # told before an interrupt
                pass
            del waiters[0]

    # -- after an interrupt -----------------------------------------------------------------------------------------

    def _resume(self, driver: Driver, op: OprBlock | None, var: Var | None) -> None:
        """Inside: an exception (KeyboardInterrupt, MemoryError) broke off the region; bring the request to its end.

        Half a change would block its vars for ever. ``op`` is the request at hand (None: between two), ``var`` the last
        var it was doing. Its turn is over, except that releasing a write may have been broken off in a call.
        """
        if op is not None and not op.seq:
            self._resume_admission(op, var)
        elif op is not None:
            self._resume_completion(driver, op, var)
        if self.ready:
            driver._dispatch()
        if self.idle_waiters and self.seq - self.completed <= self.few:
            self._tell_idle()
        driver._wake_all()

    def _resume_admission(self, op: OprBlock, var: Var | None) -> None:
        reads_done = writes_done = 0
        if var is not None and var in op.writes:
            reads_done, writes_done = len(op.reads), [*op.writes].index(var) + 1
        elif var is not None:
            reads_done = op.reads.index(var) + 1
        for other in op.reads[reads_done:]:
            other.add_read(op)
        for other in [*op.writes][writes_done:]:
            other.add_write(op)
        # No grant can have come in between. A read waits exactly when its var has a write before it; a write when it is
        # not first or there are readers.
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
        reads_done = writes_done = 0
        if var is None:
            if driver._any_failure or op.failure is not None:
                driver._spread(op)
        elif var in op.writes:
            reads_done, writes_done = len(op.reads), [*op.writes].index(var) + 1
            if var.write is op:
                var.finish_write(self.ready)
            elif var.write is None and var.waiting:
                var.grant(self.ready)
        else:
            reads_done = op.reads.index(var) + 1
        for other in op.reads[reads_done:]:
            other.finish_read(self.ready)
        for other in [*op.writes][writes_done:]:
            other.finish_write(self.ready)
        self.completed += 1
        if self.debug:
            del self.in_flight[op.seq]
        del self.requests[0]

    # -- others inside ----------------------------------------------------------------------------------------------

    def ask(self, driver: Driver, waiter: Waiter) -> None:
        """Have ``waiter`` called inside, by whatever thread, when it is granted its vars."""
        self.requests.append(waiter)
        self.apply(driver)

    def exclusively(self, driver: Driver, change: Callable[[], T]) -> T:
        """``change()``, made inside after all requests so far, on whatever thread; returns or raises what it does.

        Raises:
            EngineError: called by a destructor or signal handler that interrupted this thread inside.
        """
        ample_room(30)
        self.refuse_inside()
        done = threading.Lock()
        done.acquire()
        outcome: list[Any] = []

        def make() -> None:
            if not outcome:
                ample_room()  # this thread, which may be another than the asking one, has it; or it is asked again
                # Counts without the waiter that this is.
                self.waits += 1
                self.completed += 1
                try:
                    outcome.extend((True, change()))
                except BaseException as error:
                    if outcome:  # an interrupt after the change: this is called again
                        raise
                    outcome.extend((False, error))
                finally:
                    self.waits -= 1
                    self.completed -= 1
            done.release()

        try:
            self.ask(driver, Waiter(make, (), ()))
            while not done.acquire(timeout=PATIENCE_S):
                self.ask(driver, Waiter(make, (), ()))
        except BaseException:
            outcome.append(None)  # nobody is told of it any more: if it has not been made, it is not to be
            raise
        succeeded, result = outcome
        if not succeeded:
            raise result
        return result  # type: ignore[no-any-return]

    def refuse_inside(self) -> None:
        """Raise if this thread is inside already, interrupted by what calls this: it would wait for itself."""
        if self.is_inside():
            raise EngineError(
                "a finalizer or signal handler waited while the engine was in the middle of a change on this thread"
            )

    def is_inside(self, owner: object = None, method: CodeType | None = None) -> bool:
        """True when a finalizer or signal handler calls this that has interrupted its thread inside, or in ``method``
        of ``owner`` (which may be the caller)."""
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
    """Whether all are vars of ``driver``, and on a host."""
    if driver._streams_used and not all(map(is_, map(_events, vars), repeat(None))):
        return False
    return all(map(is_, map(_engine, vars), repeat(driver)))


def _used(vars: Collection[Var]) -> bool:
    """Whether somebody uses one of these vars."""
    return any(map(_write, vars)) or any(map(_readers, vars))


def _release(reads: Iterator[Var], writes: Iterator[Var]) -> None:
    """End granted reads and writes for which nobody waits."""
    for var in reads:
        var.readers -= 1
    for var in writes:
        var.version += 1
        var.write = None


_INSIDE = tuple(method.__code__ for method in (Region.apply, Region.write_alone, Region.begin, Region.end))
