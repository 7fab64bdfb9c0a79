"""The life cycle of operations: one core that every engine drives.

``_admit`` registers an operation with its vars under the engine's lock (:class:`~weftplan.engine.var.Var` keeps the
queues); what is ready goes to :meth:`Core._enqueue`, which a driver provides. Whoever runs an operation calls
:meth:`Core._finish` under the same lock when its function has returned. User code never runs under the lock.

Lock rank: this lock is the lowest of all; nothing is acquired while it is held. It is re-entrant for one reason only:
a finalizer or a signal handler may push while its own thread is inside a locked region. ``_inside`` is true exactly
there, so such a push is put into ``_deferred`` and admitted when the region is over. See ``README.md`` for the
protocol, the races, and what was rejected.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from weftplan import config
from weftplan.engine.bulk import BulkRun, BulkState
from weftplan.engine.failure import Failure
from weftplan.engine.operation import FnProperty, OprBlock
from weftplan.engine.streams import synchronize_host
from weftplan.engine.var import Var
from weftplan.errors import EngineError, UndeclaredWriteError

Tracer = Callable[..., None]

WAITER: Any = object()
"""Queue of operations that only wake a waiting thread: they are finished where they become ready."""

_DELETE = FnProperty.DELETE_VAR
_SHORT = (FnProperty.ASYNC, FnProperty.DELETE_VAR)
_NEVER_SKIPPED = (FnProperty.NO_SKIP, FnProperty.DELETE_VAR)


class _Running(threading.local):
    """What this thread executes: ``engine`` whose operation, and how many nested ones on an inline engine."""

    engine: Core | None = None
    depth = 0


running = _Running()

live_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines that a fork has to stop, and whose failures are reported at exit."""


class Core:
    """State shared by every engine; the public face is :class:`~weftplan.engine.core.Engine`."""

    kind = "Engine"
    _inline = False
    """True when a push runs what became ready on the pushing thread."""
    _short_inline = False
    """True when operations that only start or end something (ASYNC, DELETE_VAR) do so if they are ready at the push."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = False
        """Lock held, and state is in the middle of a change. Guarded by the lock."""
        self._deferred: deque[Callable[[], None]] = deque()
        """What a finalizer or signal handler wanted while ``_inside``; done by the same thread right after."""
        self._seq = 0
        self._pending = 0
        self._waits = 0
        """How many of the numbered operations only woke a waiting thread."""
        self._idle_waiters: list[Any] = []
        """Locks to release when nothing is pending."""
        self._unobserved: dict[Failure, None] = {}
        self._any_failure = False
        """Sticky: until the first failure nobody looks for failures on vars."""
        self._careful = False
        """Sticky: running an operation needs :meth:`_execute_carefully`. Set under the lock, before the operation that
        needs it can be granted, so whoever fetches that operation under the lock sees it."""
        self._completed = 0
        self._failed = 0
        self._skipped = 0
        self._dropped = 0
        """Not run because the process was ending."""
        self._bulk = BulkState()
        self._bulking = 0
        """Threads whose bulk size is not 0."""
        self._tracer: Tracer | None = None
        self._shutdown = False
        self._streams: list[Any] = []
        """Workers of asynchronous devices, each with a stream, for waits to synchronise."""
        self._streams_used = False
        """Sticky: a stream exists or existed, so vars may carry marks."""
        self._in_flight: dict[int, OprBlock] = {}
        """Debug mode: every operation that is pushed and not finished."""
        self._running_on: dict[int, int] = {}
        """Debug mode: number of a running operation -> identifier of its thread."""
        self._debug = bool(config.get("WEFTPLAN_ENGINE_DEBUG"))
        if self._debug:
            self._careful = True
        self._raise_once = config.get("WEFTPLAN_ERRORS") == "mxnet"
        live_engines.add(self)

    # -- what a driver provides -------------------------------------------------------------------------------------

    def _enqueue(self, op: OprBlock) -> None:
        """Lock held: put a ready operation where it will be run, and wake who runs it."""
        raise NotImplementedError

    def _ensure_enqueued(self, op: OprBlock) -> None:
        """Lock held: :meth:`_enqueue`, unless that has been done for ``op`` already; wake who runs it in any case."""
        raise NotImplementedError

    def _run_inline(self, op: OprBlock) -> None:
        """Drivers with ``_inline``: called without the lock after a push."""

    def _before_wait(self, var: Var | None = None) -> None:
        """Called without the lock before a wait for ``var`` (None: all) blocks; the simulator runs operations here."""

    # -- admission --------------------------------------------------------------------------------------------------

    def _admit(self, op: OprBlock) -> None:
        """Register an operation with its vars and hand it over if nothing is in its way."""
        if self._tracer is not None:
            op.push_ns = time.perf_counter_ns()
        here = False
        try:
            with self._lock:
                if self._inside:
                    self._deferred.append(partial(self._admit, op))
                    return
                self._inside = True
                writing = False
                var = None
                try:
                    self._seq = op.seq = self._seq + 1
                    self._pending += 1
                    if self._debug:
                        self._in_flight[op.seq] = op
                    wait = 0
                    for var in op.reads:
                        if var.write is None:
                            var.readers += 1
                        else:
                            wait += var.add_read(op)
                    writing = True
                    for var in op.writes:
                        if var.write is None:
                            var.write = op
                            if var.readers:
                                wait += 1
                        else:
                            wait += var.add_write(op)
                    # No grant can have come in between: grants are made under this lock.
                    op.wait = wait
                    if not wait:
                        if op.prop in _SHORT and self._short_inline and not self._streams_used:
                            here = True
                        else:
                            self._enqueue(op)
                except BaseException:
                    self._complete_admission(op, var, writing)
                    raise
                finally:
                    self._inside = False
        except BaseException:
            if here:  # interrupted between the lock and the run: nobody else would run it
                self._run_here(op)
            raise
        if here:
            self._run_here(op)
        if self._deferred:
            self._run_deferred()
        if self._inline:
            self._run_inline(op)

    def _run_here(self, op: OprBlock) -> None:
        """Run a short operation on the pushing thread."""
        before, running.engine = running.engine, self
        start = time.perf_counter_ns() if self._tracer is not None else 0
        failure: Any = None
        try:
            if op.asynchronous:
                self._start_async(op, partial(self._complete, op))
                return
            failure = self._execute(op)
            if start:
                self._trace(op, "inline", threading.current_thread().name, start)
        except BaseException as error:  # an interrupt: the operation counts as failed, and its vars go on
            failure = Failure.of(op, error)
        finally:
            running.engine = before
        self._complete(op, failure)

    def _complete(self, op: OprBlock, failure: Any) -> None:
        """Finish ``op`` outside a worker's loop, on whatever thread."""
        with self._lock:
            if self._inside:
                self._deferred.append(partial(self._complete, op, failure))
                return
            self._inside = True
            try:
                for following in self._finish(op, failure) or ():
                    self._enqueue(following)
            finally:
                self._inside = False
        if self._deferred:
            self._run_deferred()

    def _run_deferred(self) -> None:
        """Do what finalizers wanted while this thread was inside a locked region."""
        while self._deferred:
            try:
                job = self._deferred.popleft()
            except IndexError:  # another thread took the last one
                return
            job()

    def _complete_admission(self, op: OprBlock, var: Var | None, writing: bool) -> None:
        """Lock held: an exception (KeyboardInterrupt, MemoryError) broke off :meth:`_admit`; bring it to its end.

        Half an admission would block its vars for ever. ``var`` is the one being registered (``writing``: as written):
        what stands in its queue tells whether that was done. Where the interpreter can break off is at calls and at the
        end of loops, never between the two attributes of the paths without calls.
        """
        if var is None:
            if op.seq != self._seq or not op.seq:
                raise AssertionError("an exception came where no call is made")
            reads_done = writes_done = 0
        elif writing and var in op.writes:
            reads_done = len(op.reads)
            written = var.write is op or bool(var.waiting and var.waiting[-1] is op)
            writes_done = op.writes.index(var) + written
        else:
            queued = bool(var.waiting and var.waiting[-1] == (op,))
            reads_done = op.reads.index(var) + (var.write is None or queued)
            writes_done = 0
        for other in op.reads[reads_done:]:
            other.add_read(op)
        for other in op.writes[writes_done:]:
            other.add_write(op)
        # A read waits exactly when its var has a write before it; a write when it is not first or there are readers.
        op.wait = sum(v.write is not None for v in op.reads) + sum(
            v.write is not op or v.readers > 0 for v in op.writes
        )
        if not op.wait:
            self._ensure_enqueued(op)

    # -- execution: called by drivers -------------------------------------------------------------------------------

    def _obstacle(self, op: OprBlock) -> Failure | None:
        """The failure because of which ``op`` must be skipped, if any. Called by whoever runs it, without the lock:
        what an operation finds on its vars was put there before it was granted them."""
        if op.prop in _NEVER_SKIPPED:
            return None
        for var in op.reads:
            if var.failure is not None:
                return var.failure
        for var in op.writes:
            if var.failure is not None and var.failure.blocks(op.seq):
                return var.failure
        return None

    def _execute(self, op: OprBlock) -> Any:
        """Run a dispatched synchronous operation; returns its failure, a mapping of failures (bulk), or None."""
        if self._careful:
            return self._execute_carefully(op)
        try:
            result = op.fn()
        except BaseException as error:
            return Failure.of(op, error)
        return result if type(op.fn) is BulkRun else None

    def _execute_carefully(self, op: OprBlock, *, on_stream: bool = False) -> Any:
        """The same where something has failed, an asynchronous device is in use, or in debug mode or shutdown.

        ``on_stream``: the caller orders the work by events; otherwise the host waits for what streams still do.
        """
        blocked = self._hold_back(op, on_stream)
        if blocked is not None:
            return blocked
        if self._shutdown and op.prop is not _DELETE:
            self._count_dropped()
            return None
        if self._debug:
            self._running_on[op.seq] = threading.get_ident()
        try:
            result = op.fn()
        except BaseException as error:
            if self._debug and is_undeclared_write(error):
                error = undeclared_write(op, error)
            return Failure.of(op, error)
        return result if type(op.fn) is BulkRun else None

    def _hold_back(self, op: OprBlock, on_stream: bool) -> Failure | None:
        """Wait for streams if need be; returns the failure because of which ``op`` must be skipped."""
        late = synchronize_host(self, op) if self._streams_used and not on_stream else None
        blocked = self._obstacle(op) if self._any_failure else None
        return blocked or (None if op.prop in _NEVER_SKIPPED else late)

    def _start_async(self, op: OprBlock, done: Callable[[Any], None], *, on_stream: bool = False) -> None:
        """Run a dispatched asynchronous operation; ``done(failure)`` is called once, from whatever thread."""
        blocked = self._hold_back(op, on_stream)
        if blocked is not None:
            done(blocked)
            return
        if self._shutdown and op.prop is not _DELETE:
            self._count_dropped()
            done(None)
            return
        unfinished = threading.Lock()

        def on_complete(error: BaseException | None = None) -> None:
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
                with self._lock:
                    self._failed += 1
                    self._unobserved[failure] = None

    def _count_dropped(self) -> None:
        with self._lock:
            self._dropped += 1

    def _finish(self, op: OprBlock, failure: Any) -> list[OprBlock] | None:
        """Lock held: release the vars of ``op``; returns the operations that became ready, in push order per var."""
        ready: list[OprBlock] | None = None
        if failure is None and not self._any_failure:
            for var in op.reads:
                var.readers -= 1
                if not var.readers and var.write is not None:
                    other = var.write
                    other.wait -= 1
                    if not other.wait:
                        if ready is None:
                            ready = [other]
                        else:
                            ready.append(other)
            for var in op.writes:
                if var.waiting is None:
                    var.version += 1
                    var.write = None
                else:
                    if ready is None:
                        ready = []
                    var.finish_write(ready)
        else:
            ready = []
            self._finish_failing(op, failure, ready)
        self._completed += 1
        if self._debug:
            self._in_flight.pop(op.seq, None)
            self._running_on.pop(op.seq, None)
        self._pending -= 1
        if not self._pending and self._idle_waiters:
            for waiter in self._idle_waiters:
                waiter.release()
            self._idle_waiters = []
        return ready

    def _finish_failing(self, op: OprBlock, failure: Any, ready: list[OprBlock]) -> None:
        """The careful version: some operation of this engine has failed."""
        mapping = failure if isinstance(failure, dict) else None
        if self._raise_once and isinstance(failure, Failure) and failure.observed_seq is not None:
            # Skipped before the one raise, finished after it: the raise has healed this operation, too.
            self._skipped += 1
            failure = None
        if failure is not None:
            self._any_failure = self._careful = True
            if mapping is None and failure.seq != op.seq:
                self._skipped += 1
            fresh = op.fn.failures if mapping is not None else [failure]
            for one in fresh:
                if one is not None and one.observed_seq is None:
                    self._unobserved[one] = None
                if one is not None and one.seq == op.seq:
                    self._failed += 1
        for var in op.reads:
            var.finish_read(ready)
        # What is replaced here is dropped with the operation, outside the lock: an error may own anything.
        op.failure = [var.failure for var in op.writes]
        for var in op.writes:
            if mapping is not None:
                if var in mapping:
                    var.failure = mapping[var]
            elif failure is not None:
                var.failure = failure
            elif op.prop is not _DELETE:
                var.failure = None
            if self._raise_once and var.failure is not None:
                if var.failure.vars is None:
                    var.failure.vars = []
                var.failure.vars.append(var)
            var.finish_write(ready)

    def _finish_waiter(self, op: OprBlock) -> None:
        """Lock held: a waiting thread is its own worker, so its operation is over as soon as it is granted."""
        op.fn()
        self._waits += 1
        self._completed -= 1
        for ready in self._finish(op, None) or ():
            self._enqueue(ready)

    def _trace(self, op: OprBlock, queue: str, worker: str, start_ns: int) -> None:
        """Tell the tracer of an operation that has just ended. A tracer that raises is taken away: no worker dies."""
        tracer = self._tracer
        if tracer is None:
            return
        try:
            tracer(op.label, op.ctx, queue, worker, op.push_ns or start_ns, start_ns, time.perf_counter_ns(), op.seq)
        except Exception as error:
            self._tracer = None
            arguments = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(arguments))


def is_undeclared_write(error: BaseException) -> bool:
    """True for NumPy's complaint about a read-only array."""
    return isinstance(error, ValueError) and "read-only" in str(error)


def undeclared_write(op: OprBlock, error: BaseException) -> UndeclaredWriteError:
    """The error that names the operation, and the read-only arrays in the frame where it happened."""
    names: list[str] = []
    line = ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        found = [k for k, v in frame.f_locals.items() if getattr(getattr(v, "flags", None), "writeable", True) is False]
        if found:
            names, line = found, f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    what = f" ({', '.join(repr(n) for n in names)} at {line})" if names else ""
    raised = UndeclaredWriteError(
        f"operation {op.label!r} wrote to an array that it declared as read{what}; declare the array as written, or "
        f"write to a copy"
    )
    raised.__cause__ = error
    raised.__traceback__ = error.__traceback__
    return raised
