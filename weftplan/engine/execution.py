"""Execution of one operation: skipping, failure, asynchronous completion, tracing.

Nothing here changes vars or queues; that is the region's (``region.py``). What an operation finds on its vars was
put there before it was granted them, so it is read outside the region.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, MutableSet
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

from weftplan import config
from weftplan.device.context import cpu
from weftplan.engine.bulk import BulkRun, BulkState
from weftplan.engine.failure import MOST_UNTOLD, Failure, Outcome, traceback_of
from weftplan.engine.operation import DetailedBlock, FnProperty, FutureBlock, OprBlock, ample_room
from weftplan.engine.region import Driver, Region
from weftplan.engine.shield import shielded
from weftplan.engine.streams import StreamPool, synchronize_host
from weftplan.engine.var import Order, Var
from weftplan.errors import EngineError
from weftplan.locks import ReentrantLock, whole_in_children
from weftplan.support.read_only_views import undeclared_write

T = TypeVar("T")
_seq = attrgetter("seq")
Tracer = Callable[..., None]

_CPU0 = cpu(0)

_DELETE = FnProperty.DELETE_VAR
_NEVER_SKIPPED = (FnProperty.NO_SKIP, FnProperty.DELETE_VAR)


class _Running(threading.local):
    """What this thread executes."""

    engines: tuple[Any, ...] = ()
    """Whose operations it is inside of, the innermost last."""
    seated = False
    """It waits and stands in for a worker: what it runs must not find what belongs to the wait."""
    short: Execution | None = None
    """The engine in whose loop that runs short operations this thread is."""
    place: Any = None
    """A worker's queue and what it runs its operations with."""
    nested = 0
    """How many operations this thread runs for want of memory within another."""


running = _Running()

live_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines that a fork has to stop, and whose failures are reported at exit."""


class Execution(Driver):
    """State that decides how operations run; the public face is :class:`~weftplan.engine.core.Engine`."""

    kind = "Engine"
    _inline = False
    """True when a push runs what became ready on the pushing thread."""

    def __init__(self) -> None:
        self._unobserved: dict[Failure, None] = {}
        """The first failures that no wait has raised."""
        self._untold_more = 0
        """How many others there were."""
        self._failed_vars: MutableSet[Var] = weakref.WeakSet()
        """Vars that hold a failure."""
        self._any_failure = False
        self._careful = False
        """Running an operation needs :meth:`_execute_carefully`. Set inside the region, before the operation that needs
        it can be granted, so whoever fetches that operation sees it."""
        self._failed = 0
        self._skipped = 0
        self._counted = 0
        """The operation whose failures and skips were counted last."""
        self._dropped: list[int] = []
        """Numbers of the user's operations that were not run because the process was ending."""
        self._bulk = BulkState()
        self._bulking: list[object] = []
        """A guard for each thread whose bulk size is not 0."""
        self._tracer: Tracer | None = None
        self._unusual_lock = whole_in_children(ReentrantLock())
        self._bound = int(config.get("WEFTPLAN_ENGINE_MAX_PENDING"))
        """How many operations may be pending before a push waits; 0: any number."""
        self._unusual = 2 if self._inline or self._bound else 0
        """What a push has to look at: 1 a tracer; 2 a bulk, a bound on what is pending, or an engine that runs what is
        pushed at once."""
        self._shutdown = False
        self._streams: list[StreamPool] = []
        """Workers of asynchronous devices, each with a stream, for waits to synchronise."""
        self._streams_used = False
        """Sticky: a stream exists or existed, so vars may carry marks."""
        self._running_on: dict[int, int] = {}
        """Debug mode: number of a running operation -> identifier of its thread."""
        self._lacking: list[object] = []
        """A mark for each thread that waits inside an operation for memory."""
        self._debug = bool(config.get("WEFTPLAN_ENGINE_DEBUG"))
        if self._debug:
            self._careful = True
        self._raise_once = config.get("WEFTPLAN_ERRORS") == "mxnet"
        self._region = Region(few=self._bound // 2, debug=self._debug)
        self._here: Any = deque()

    def enlist(self) -> None:
        """Make forks and the end of the process see this engine: the last step of a subclass's ``__init__``.

        :meta private:
        """
        live_engines.add(self)

    def _note_unusual(self) -> None:
        """Called after every change of what it depends on, so the last caller leaves the truth.

        Under a lock: whoever has looked before another's change must not store after it. No call in there, so no
        destructor or signal handler comes between.
        """
        with self._unusual_lock:
            self._unusual = 2 if self._inline or self._bulking or self._bound else 0 if self._tracer is None else 1

    @property
    def waits_in_push(self) -> bool:
        """True if a push returns when its operation is over: what the operation waits for must be queued before.

        :meta private:
        """
        return self._inline

    has_threads = True
    """False if only a thread that waits runs operations: one thread at a time may use the engine."""

    def _run_another(self) -> bool:
        """Inside an operation: run one that is ready; False when there is none that this thread may run."""
        return False

    def drive(self, over: Callable[[], bool]) -> bool:
        """Run operations on this thread until ``over()`` or until none is ready, if no thread of the engine does it.

        For a caller that waits for the effect of operations, but for no var.

        Returns:
            True if the caller is to call again: operations that are pending may become ready meanwhile.

        :meta private:
        """
        return False

    def _at_work(self) -> int:
        """How many threads run operations, or are about to."""
        return 0

    def _exclusively(self, change: Callable[[], T]) -> T:
        """Make a change of state inside the region, after all requests so far; see ``region.py``."""
        return self._region.exclusively(self, change)

    def _submit(self, op: DetailedBlock) -> None:
        """Push what is not the usual."""
        if self._tracer is not None:
            op.push_ns = time.perf_counter_ns()
        self._region.requests.append(op)
        self._admitted(op)

    def _admitted(self, op: OprBlock) -> None:
        """Called when ``op`` has just been put into the region's ``requests``."""
        self._region.apply(self)

    def _complete(self, op: OprBlock, failure: Outcome) -> None:
        """Complete ``op``, which has run on whatever thread."""
        op.failure = failure
        self._region.requests.append(op)
        self._region.apply(self, past_gate=True)  # of a fork, which waits for the end of this operation

    def _obstacle(self, op: OprBlock) -> Failure | None:
        """The failure because of which ``op`` must be skipped, if any. Called by whoever runs it, outside the region:
        what an operation finds on its vars was put there before it was granted them."""
        if op.prop in _NEVER_SKIPPED:
            return None
        failure: Failure | None
        for var in op.reads:
            failure = var.failure
            if failure is not None:
                return failure
        for var in op.writes:
            failure = var.failure
            if failure is not None and failure.blocks(op.seq, var, op.fn):
                return failure
        return None

    def _execute(self, op: OprBlock) -> Outcome:
        """Run a dispatched synchronous operation; returns its failure, a mapping of failures (bulk), or None."""
        try:
            if self._careful:
                return self._execute_carefully(op)
            result = op.fn()
            return result if type(op.fn) is BulkRun else None
        except BaseException as error:
            return Failure.of(op, error, keep_locals=self._inline)
        finally:
            del op  # frames of a traceback hold this one, and the operation holds the error

    def _execute_carefully(self, op: OprBlock, *, on_stream: bool = False) -> Outcome:
        """The same where something has failed, an asynchronous device is in use, or in debug mode or shutdown.

        ``on_stream``: the caller orders the work by events; otherwise the host waits for what streams still do.
        """
        blocked = self._hold_back(op, on_stream)
        if blocked is not None:
            return blocked
        if self._shutdown and op.prop is not _DELETE and type(op) is not FutureBlock:
            if not op.own:  # what an array would have held goes with the process
                self._dropped.append(op.seq)
            return None
        if self._debug:
            self._running_on[op.seq] = threading.get_ident()
        try:
            result = op.fn()
        except BaseException as error:
            if self._debug:
                error = undeclared_write(op.label, error)
            return Failure.of(op, error, keep_locals=self._inline or self._debug)
        else:
            return result if type(op.fn) is BulkRun else None
        finally:
            self._running_on.pop(op.seq, None)
            del op  # as in _execute

    def _hold_back(self, op: OprBlock, on_stream: bool) -> Failure | None:
        """Wait for streams if need be; returns the failure because of which ``op`` must be skipped."""
        late = synchronize_host(self, op) if self._streams_used and not on_stream else None
        blocked = self._obstacle(op) if self._any_failure else None
        return blocked or (None if op.prop in _NEVER_SKIPPED else late)

    def _start_async(self, op: OprBlock, done: Callable[[Outcome], None], *, on_stream: bool = False) -> None:
        """Run a dispatched asynchronous operation; ``done(failure)`` is called once, from whatever thread."""
        blocked = self._hold_back(op, on_stream)
        if blocked is not None:
            done(blocked)
            return
        if self._shutdown and op.prop is not _DELETE:
            if not op.own:  # what an array would have held goes with the process
                self._dropped.append(op.seq)
            done(None)
            return
        unfinished = threading.Lock()

        def on_complete(error: BaseException | None = None) -> None:
            ample_room()
            with shielded():
                # The lock is a flag that only one caller can take: atomic without a second lock.
                if not unfinished.acquire(blocking=False):
                    raise EngineError(f"on_complete of {op!r} was called twice; call it exactly once")
                if error is not None and not isinstance(error, BaseException):
                    error = EngineError(f"on_complete of {op!r} expects an exception or nothing, got {error!r}")
                done(None if error is None else Failure.of(op, error))

        try:
            op.fn(on_complete)
        except BaseException as error:
            failure = Failure.of(op, error)
            if unfinished.acquire(blocking=False):
                done(failure)
            else:
                # It said that it was done, then raised: its vars may be in use already, so only wait_for_all can tell.
                self._exclusively(lambda: self._add_unobserved(failure))

    def _add_unobserved(self, failure: Failure) -> None:
        """Inside the region: note a failure that is on no var."""
        self._failed += 1
        self._untold_more += not self._keep_untold(failure)

    def _keep_untold(self, failure: Failure) -> bool:
        """Inside the region: keep a failure that no wait has raised; False when that leaves one out, the one pushed
        last. May be repeated."""
        self._unobserved[failure] = None
        if len(self._unobserved) <= MOST_UNTOLD:
            return True
        del self._unobserved[max(self._unobserved, key=_seq)]
        return False

    def _hold(self, var: Var, failure: Failure) -> None:
        """Inside the region: ``var`` lacks what ``failure`` should have written. May be repeated."""
        self._any_failure = self._careful = True
        var.failure = failure
        self._failed_vars.add(var)
        if self._raise_once:
            if failure.vars is None:
                failure.vars = []
            failure.vars.append(var)

    def _is_healed(self, failure: Failure) -> bool:
        """Whether the one raise of ``failure`` has healed all that it concerns (WEFTPLAN_ERRORS=mxnet)."""
        return self._raise_once and failure.observed_seq is not None

    def _spread(self, op: OprBlock) -> list[Failure | None]:
        """Inside the region: a failure exists; give that of ``op`` to what it writes, or heal it. May be repeated.

        Returns the failures that are replaced, to be dropped outside: an error may own anything.
        """
        failed = skipped = untold = 0
        failure = op.failure
        if isinstance(failure, BaseException):  # noted by whoever ran it, who may have had no room for more
            failure = op.failure = Failure(failure, op.name, op.site, op.seq, op.fn)
        mapping = failure if isinstance(failure, dict) else None
        if isinstance(failure, Failure) and self._is_healed(failure):
            # Skipped before the one raise, finished after it: the raise has healed this operation, too.
            skipped += 1
            failure = None
        if failure is not None:
            self._any_failure = self._careful = True
            if mapping is None and failure.seq != op.seq:
                skipped += 1
            fresh = op.fn.failures if mapping is not None else [failure]
            for one in fresh:
                if one is not None and one.observed_seq is None and (one.seq == op.seq or one in self._unobserved):
                    untold += not self._keep_untold(one)
                if one is not None and one.seq == op.seq:
                    failed += 1
        replaced = [var.failure for var in op.writes]
        for var in op.writes:
            if type(var) is Order:
                continue
            if mapping is not None:
                if var in mapping:
                    var.failure = mapping[var]
            elif failure is not None:
                var.failure = failure
            elif op.prop is not _DELETE:
                var.failure = None
            if var.failure is None or (op.prop is _DELETE and var.deleted):
                self._failed_vars.discard(var)
                continue
            self._hold(var, var.failure)
        if not self._failed_vars:
            self._all_well()
        if self._counted != op.seq:  # the first time; no call in between, so no interrupt
            self._failed += failed
            self._untold_more += untold
            self._skipped += skipped
            self._counted = op.seq
        return replaced

    def _all_well(self) -> None:
        """Inside the region: note that no var holds a failure."""
        self._any_failure = self._careful = False
        # Looked at after the change: whoever sets one of these sets `_careful` afterwards.
        if self._debug or self._shutdown or self._streams_used:
            self._careful = True

    def _trace(self, op: OprBlock, queue: str, worker: str, start_ns: int) -> None:
        """Tell the tracer of an operation that has just ended. A tracer that raises is taken away: no worker dies."""
        tracer = self._tracer
        if tracer is None:
            return
        name = op.name
        try:
            tracer(
                name if type(name) is str and name else op.label,
                op.ctx or _CPU0,
                queue,
                worker,
                op.push_ns or start_ns,
                start_ns,
                time.perf_counter_ns(),
                op.seq,
            )
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C, not the tracer's
            self._tracer = None
            self._note_unusual()
            report(error)


def once(done: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
    """``done`` for the first call; later ones, on whatever thread, do nothing."""
    due = [1]

    def first(failure: Outcome) -> None:
        try:
            del due[0]
        except IndexError:
            return
        done(failure)

    return first


def report(error: BaseException) -> None:
    """Tell of ``error`` where nobody can catch it."""
    with suppress(BaseException):  # of the user's own hook
        arguments = (type(error), error, traceback_of(error), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(arguments))
