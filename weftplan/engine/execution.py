"""Execution of one operation: calling it or skipping it, asynchronous completion, tracing.

Nothing here changes vars or queues; the region does (``region.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from weftplan import config
from weftplan.device.context import cpu
from weftplan.engine.bulk import BulkRun, Bulks
from weftplan.engine.failure import NEVER_SKIPPED, Failure, FailureSpread, Outcome, traceback_of
from weftplan.engine.operation import (
    DETAILED,
    TRACED,
    DetailedBlock,
    FnProperty,
    FutureBlock,
    OprBlock,
    label_of,
    require_stack,
)
from weftplan.engine.region import Region
from weftplan.engine.shield import shielded
from weftplan.engine.streams import StreamPool, synchronize_host
from weftplan.errors import EngineError
from weftplan.locks import ReentrantLock, consistent_in_children
from weftplan.support.read_only_views import undeclared_write

T = TypeVar("T")
Tracer = Callable[..., None]

_CPU0 = cpu(0)

_DELETE = FnProperty.DELETE_VAR


class _Running(threading.local):
    """State of the current thread."""

    engines: tuple[Any, ...] = ()
    """Engines whose operations the thread is inside of, innermost last."""
    seated: Any = None
    """The queue of the worker for which the thread stands in during a wait; operations must not see the state of the
    wait."""
    short: Execution | None = None
    """The engine whose inline short operations this thread is running."""
    worker: Any = None
    """A worker's queue and the objects it runs operations with."""
    nested = 0
    """Depth of operations that this thread runs inside another because an allocation failed."""
    user_depth = 0
    """Number of ``engines`` when the innermost :func:`~weftplan.engine.user_code` began."""

    pusher = ""
    """The name of the user code that pushes, which a traced push shows before its own."""

    def in_user_code(self) -> bool:
        """Return whether the thread runs user code that may wait inside an operation."""
        return 0 < self.user_depth == len(self.engines)


running = _Running()


def traced_name(fn: object, name: str | None) -> str | None:
    """Return the name of a push for the tracer: user code inside an operation stands before it, with ``::``."""
    return f"{running.pusher}::{label_of(fn, name)}" if running.pusher else name


live_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines that a fork stops and whose failures are reported at exit."""


class Execution(Bulks, FailureSpread):
    """Execution state of an engine; :class:`~weftplan.engine.core.Engine` adds the public methods."""

    kind = "Engine"
    _inline = False
    """Whether a push runs ready operations on the pushing thread."""

    def __init__(self) -> None:
        Bulks.__init__(self)
        FailureSpread.__init__(self)
        self._dropped: list[int] = []
        """Numbers of user operations that were dropped at exit."""
        self._tracer: Tracer | None = None
        self._detours_lock = consistent_in_children(ReentrantLock())
        """Makes reading the reasons for a detour and storing ``_detours`` one step; no call is made under it."""
        self._bound = int(config.get("WEFTPLAN_ENGINE_MAX_PENDING"))
        """Pending operations at which a push waits; 0: no limit."""
        self._detours: tuple[str, ...] = ()
        """Why pushes leave the fast path: empty, :data:`TRACED` or :data:`DETAILED`."""
        self._update_detours()
        self._shutdown = False
        self._streams: list[StreamPool] = []
        """Streams of asynchronous devices, which waits synchronise."""
        self._streams_used = False
        """Whether a stream exists or existed, so vars may carry marks. Never reset."""
        self._running_on: dict[int, int] = {}
        """Thread identifier by number of the running operation (debug mode only)."""
        self._starved: list[object] = []
        """One token per thread that waits for memory inside an operation."""
        self._debug = bool(config.get("WEFTPLAN_ENGINE_DEBUG"))
        if self._debug:
            self._careful = True
        self._region = Region(few=self._bound // 2, debug=self._debug)
        self._outside: Any = deque()

    def enlist(self) -> None:
        """Register this engine for forks and exit. The last step of a subclass's ``__init__``.

        :meta private:
        """
        live_engines.add(self)

    def _update_detours(self) -> None:
        """Recompute ``_detours`` after a change of its inputs."""
        with self._detours_lock:
            # Reads the inputs and stores the result in one step. The lock guards no call, so neither a destructor nor a
            # signal handler can interleave.
            if self._inline or self._bulking or self._bound:
                self._detours = DETAILED
            else:
                self._detours = () if self._tracer is None else TRACED

    has_threads = True
    """Whether threads of its own run operations. If False, only one thread at a time may use the engine."""

    def _run_another(self) -> bool:
        """Inside an operation: run another ready operation. Return False if this thread may run none."""
        return False

    def drive(self, over: Callable[[], bool]) -> bool:
        """Run operations on this thread until ``over()`` or until none is ready, for a wait without a var.

        Engines with threads do nothing.

        Returns:
            True if the caller should call again, because pending operations may become ready.

        :meta private:
        """
        return False

    def _at_work(self) -> int:
        """Return the number of threads that run operations or are about to."""
        return 0

    def _exclusively(self, change: Callable[[], T]) -> T:
        """Run ``change()`` inside the region, after all requests so far."""
        return self._region.exclusively(self, change)

    def _submit(self, op: DetailedBlock) -> None:
        """Push an operation that the fast path does not handle."""
        if self._tracer is not None:
            op.push_ns = time.perf_counter_ns()
            op.name = traced_name(op.fn, op.name)
        self._region.requests.append(op)
        self._admitted(op)

    def _admitted(self, op: OprBlock) -> None:
        """Serve ``op``, which was just appended to the region's ``requests``."""
        self._region.apply(self)

    def _complete(self, op: OprBlock, failure: Outcome) -> None:
        """Complete ``op``, which has run on any thread."""
        op.failure = failure
        self._region.requests.append(op)
        self._region.apply(self, past_gate=True)  # a fork waits for this operation: do not block in its gate

    def _execute(self, op: OprBlock) -> Outcome:
        """Run a synchronous operation. Return its failure, a mapping of failures (bulk) or None."""
        try:
            if self._careful:
                return self._execute_carefully(op)
            result = op.fn()
            return result if type(op.fn) is BulkRun else None
        except BaseException as error:
            return Failure.of(op, error, keep_locals=self._inline)
        finally:
            del op  # the traceback's frames hold this frame, and the operation holds the error

    def _execute_carefully(self, op: OprBlock, *, on_stream: bool = False) -> Outcome:
        """Run ``op`` if something has failed, or with an asynchronous device, in debug mode or at shutdown.

        ``on_stream``: the caller orders the work by events. Otherwise the host waits for pending work on streams.
        """
        blocked = self._check_inputs(op, on_stream)
        if blocked is not None:
            return blocked
        if self._shutdown and op.prop is not _DELETE and type(op) is not FutureBlock:
            if not op.internal:  # the memory of arrays goes with the process anyway
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

    def _check_inputs(self, op: OprBlock, on_stream: bool) -> Failure | None:
        """Wait for streams if necessary. Return the failure that makes ``op`` skip, if any."""
        stream_failure = synchronize_host(self, op) if self._streams_used and not on_stream else None
        blocked = self._blocking_failure(op) if self._any_failure else None
        return blocked or (None if op.prop in NEVER_SKIPPED else stream_failure)

    def _start_async(self, op: OprBlock, on_outcome: Callable[[Outcome], None], *, on_stream: bool = False) -> None:
        """Run an asynchronous operation. ``on_outcome(failure)`` is called once, from any thread."""
        blocked = self._check_inputs(op, on_stream)
        if blocked is not None:
            on_outcome(blocked)
            return
        if self._shutdown and op.prop is not _DELETE:
            if not op.internal:  # the memory of arrays goes with the process anyway
                self._dropped.append(op.seq)
            on_outcome(None)
            return
        unfinished = threading.Lock()  # acquired by the first completion; a later call cannot acquire it

        def on_complete(error: BaseException | None = None) -> None:
            require_stack()
            with shielded():
                # The lock is a flag that only one caller can take: atomic without another lock.
                if not unfinished.acquire(blocking=False):
                    raise EngineError(f"on_complete of {op!r} was called twice; call it exactly once")
                if error is not None and not isinstance(error, BaseException):
                    error = EngineError(f"on_complete of {op!r} expects an exception or nothing, got {error!r}")
                on_outcome(None if error is None else Failure.of(op, error))

        try:
            op.fn(on_complete)
        except BaseException as error:
            failure = Failure.of(op, error)
            if unfinished.acquire(blocking=False):
                on_outcome(failure)
            else:
                # It reported completion, then raised. Its vars may be in use already, so only wait_for_all can report
                # the error.
                self._exclusively(lambda: self._add_unobserved(failure))

    def _trace(self, op: OprBlock, queue: str, worker: str, start_ns: int) -> None:
        """Call the tracer for an operation that has just ended. Remove a tracer that raises, so no worker dies."""
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
                raise  # Ctrl-C, not an error of the tracer
            self._tracer = None
            self._update_detours()
            report(error)


def once(on_outcome: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
    """Return a function that calls ``on_outcome`` on its first call and does nothing later, on any thread."""
    pending = [1]

    def report_once(failure: Outcome) -> None:
        try:
            del pending[0]
        except IndexError:
            return
        on_outcome(failure)

    return report_once


def report(error: BaseException) -> None:
    """Report ``error`` through ``threading.excepthook``; no caller can catch it."""
    with suppress(BaseException):  # raised by the user's hook
        arguments = (type(error), error, traceback_of(error), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(arguments))
