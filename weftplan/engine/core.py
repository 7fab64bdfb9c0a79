"""The life cycle of operations: one core that every engine drives.

``push`` decides under the engine's lock (:class:`~weftplan.engine.var.Var` keeps the queues), and what became ready
is handed to :meth:`Engine._enqueue`, which a driver provides. A worker calls :meth:`Engine._finish` under the same lock
when a function has returned. User code never runs under the lock.

Lock rank: this lock is the lowest of all; nothing is acquired while it is held. What runs on which thread is the
driver's. See ``README.md`` beside this file for the protocol, the races, and what was rejected.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from weftplan import config
from weftplan.device.context import Context, cpu
from weftplan.engine.bulk import BulkMember, BulkRun, BulkState
from weftplan.engine.dump import dump_dot, dump_text
from weftplan.engine.failure import Failure
from weftplan.engine.operation import FnProperty, Operator, OprBlock, Site, checked_vars
from weftplan.engine.statistics import Statistics
from weftplan.engine.var import Var
from weftplan.errors import EngineError, WaitInWorkerError

NORMAL = FnProperty.NORMAL
_NEVER_SKIPPED = (FnProperty.NO_SKIP, FnProperty.DELETE_VAR)
_CPU0 = cpu(0)

Tracer = Callable[..., None]

running = threading.local()
"""``running.engine`` is the engine whose operation this thread executes, if any."""

live_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines that a fork has to stop and start, and whose failures are reported at exit."""


def _is_internal(filename: str, cache: dict[str, bool] = {}) -> bool:  # noqa: B006 - a cache on purpose
    known = cache.get(filename)
    if known is None:
        known = cache[filename] = filename.startswith(_PACKAGE)
    return known


_PACKAGE = __file__.rsplit("engine", 1)[0]


def push_site(depth: int = 2) -> Site:
    """Code and instruction of the innermost frame outside this package."""
    frame: Any = sys._getframe(depth)
    code = frame.f_code
    while _is_internal(code.co_filename):
        back = frame.f_back
        if back is None:
            break
        frame = back
        code = frame.f_code
    return code, frame.f_lasti


class Engine:
    """Base of all engines. Any thread may call anything here unless a method says otherwise.

    Not made directly: use :func:`weftplan.engine.create` or :func:`weftplan.engine.get`.
    """

    kind = "Engine"
    _inline = False
    """True when a push runs what became ready on the pushing thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._pending = 0
        self._progress = 0
        """Operations finished so far, whatever became of them."""
        self._idle_waiters: list[Any] = []
        """Locks to release when nothing is pending."""
        self._unobserved: list[Failure] = []
        self._any_failure = False
        """Sticky: until the first failure nobody looks for failures on vars."""
        self._counts = [0, 0, 0]
        """Completed, failed, skipped operations."""
        self._bulk = BulkState()
        self._bulking = 0
        """Threads whose bulk size is not 0."""
        self._tracer: Tracer | None = None
        self._shutdown = False
        self._in_flight: dict[int, OprBlock] = {}
        """Debug mode: every operation that is pushed and not finished."""
        self._debug = bool(config.get("WEFTPLAN_ENGINE_DEBUG"))
        self._raise_once = config.get("WEFTPLAN_ERRORS") == "mxnet"
        live_engines.add(self)

    # -- what a driver provides -------------------------------------------------------------------------------------

    def _enqueue(self, op: OprBlock) -> Any:
        """Lock held: put a ready operation where it will be run; returns a parked worker's lock to release, or None."""
        raise NotImplementedError

    def _run_inline(self, op: OprBlock) -> None:
        """Drivers with ``_inline``: called without the lock after a push."""

    def _before_wait(self, var: Var | None = None) -> None:
        """Called without the lock before a wait for ``var`` (None: all) blocks; the simulator runs operations here."""

    # -- vars and operators -----------------------------------------------------------------------------------------

    def new_variable(self, name: str | None = None) -> Var:
        """A fresh var, version 0."""
        return Var(self, name)

    def new_operator(
        self,
        fn: Callable[[], Any],
        const_vars: Sequence[Var] = (),
        mutable_vars: Sequence[Var] = (),
        *,
        prop: FnProperty = NORMAL,
        name: str | None = None,
    ) -> Operator:
        """A reusable operation; its vars are checked here, once.

        Raises:
            DuplicateVarError, EngineError: as :meth:`push`.
        """
        if not callable(fn):
            raise EngineError(f"an operation needs a function without arguments, got {type(fn).__name__}")
        reads, writes = checked_vars(self, const_vars, mutable_vars, name)
        return Operator(self, fn, reads, writes, prop, name)

    def delete_operator(self, operator: Operator) -> None:
        """Forget ``operator`` after all its scheduled executions; pushing it again is an error."""
        operator.deleted = True

    def delete_variable(self, var: Var, delete_fn: Callable[[], Any] | None = None, ctx: Context | None = None) -> None:
        """Run ``delete_fn`` after every operation pushed before that uses ``var``, failed or not; then ``var`` is gone.

        Raises:
            EngineError: the var belongs to another engine or has been deleted already.
        """
        checked_vars(self, (), (var,), "delete_variable")
        if self._bulking:
            self._flush_bulk()
        site = push_site()
        op = OprBlock(delete_fn or _nothing, (), (var,), ctx, FnProperty.DELETE_VAR, 0, "DeleteVariable", site)
        var.deleted = True
        var.engine = None  # type: ignore[assignment]  # every later push meets the slow check, which explains
        self._admit(op)

    # -- push -----------------------------------------------------------------------------------------------------

    def push(
        self,
        fn: Callable[[], Any] | Operator,
        const_vars: Sequence[Var] = (),
        mutable_vars: Sequence[Var] = (),
        ctx: Context | None = None,
        *,
        prop: FnProperty = NORMAL,
        priority: int = 0,
        name: str | None = None,
    ) -> None:
        """Schedule ``fn()`` once everything pushed before that conflicts with its vars is done.

        Args:
            fn: a function without arguments, or an :class:`Operator` (which brings vars, property and name).
            const_vars: vars it reads; a duplicate counts once.
            mutable_vars: vars it writes.
            ctx: where it runs; default ``cpu(0)``.
            prop: kind of work.
            priority: larger first, in queues that honour it.
            name: for errors, traces and dumps.

        Raises:
            DuplicateVarError: a var is written twice, or read and written.
            EngineError: a var of another engine, a deleted var, or no function.
        """
        if type(fn) is Operator:
            if fn.engine is not self or fn.deleted:
                state = "was deleted" if fn.deleted else f"belongs to {fn.engine!r}"
                raise EngineError(f"{fn!r} {state}; make a new operator with this engine's new_operator()")
            const_vars, mutable_vars, prop, name, fn = fn.reads, fn.writes, fn.prop, fn.name, fn.fn
        else:
            for var in mutable_vars:
                if var.engine is not self or var in const_vars:
                    const_vars, mutable_vars = checked_vars(self, const_vars, mutable_vars, name)
            for var in const_vars:
                if var.engine is not self:
                    checked_vars(self, const_vars, mutable_vars, name)
            if len(mutable_vars) > 1 or len(const_vars) > 1:
                if len(set(mutable_vars)) != len(mutable_vars):
                    checked_vars(self, const_vars, mutable_vars, name)
                if len(set(const_vars)) != len(const_vars):
                    const_vars = list(dict.fromkeys(const_vars))
            if not callable(fn):
                raise EngineError(f"an operation needs a function without arguments, got {type(fn).__name__}")
        frame = sys._getframe(1)
        code = frame.f_code
        site = (code, frame.f_lasti) if not _is_internal(code.co_filename) else push_site()
        if self._bulking and self._bulk.size:
            if prop is NORMAL and not priority and not self._inline:
                self._absorb(BulkMember(fn, const_vars, mutable_vars, ctx or _CPU0, name, site))
                return
            self._flush_bulk()
        op = OprBlock(fn, const_vars, mutable_vars, ctx, prop, priority, name, site)
        self._admit(op)

    def push_async(
        self,
        fn: Callable[[Callable[..., None]], Any],
        const_vars: Sequence[Var] = (),
        mutable_vars: Sequence[Var] = (),
        ctx: Context | None = None,
        *,
        prop: FnProperty = NORMAL,
        priority: int = 0,
        name: str | None = None,
    ) -> None:
        """As :meth:`push`, for a function that only starts work: it is called as ``fn(on_complete)``.

        ``on_complete(error=None)`` must be called exactly once, from any thread; a second call raises EngineError
        there. If ``fn`` itself raises, that counts as completion with the error.
        """
        if not callable(fn):
            raise EngineError(f"an operation needs a function of on_complete, got {type(fn).__name__}")
        reads, writes = checked_vars(self, const_vars, mutable_vars, name)
        if self._bulking:
            self._flush_bulk()
        op = OprBlock(fn, reads, writes, ctx, prop, priority, name, push_site())
        op.asynchronous = True
        self._admit(op)

    def _admit(self, op: OprBlock) -> None:
        """Register an operation with its vars and hand it over if nothing is in its way."""
        if self._tracer is not None:
            op.push_ns = time.perf_counter_ns()
        wake = None
        with self._lock:
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
            for var in op.writes:
                if var.write is None:
                    var.write = op
                    if var.readers:
                        wait += 1
                else:
                    wait += var.add_write(op)
            # No grant can come in between: grants are made under this lock.
            op.wait = wait
            if not wait:
                wake = self._enqueue(op)
        if wake is not None:
            wake.release()
        if self._inline:
            self._run_inline(op)

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
        if self._any_failure:
            blocked = self._obstacle(op)
            if blocked is not None:
                self._counts[2] += 1
                return blocked
        if self._shutdown and op.prop != FnProperty.DELETE_VAR:
            return None
        try:
            result = op.fn()
        except BaseException as error:
            return Failure.of(op, error)
        return result if type(op.fn) is BulkRun else None

    def _start_async(self, op: OprBlock, done: Callable[[Any], None]) -> None:
        """Run a dispatched asynchronous operation; ``done(failure)`` is called once, from whatever thread."""
        blocked = self._obstacle(op) if self._any_failure else None
        if blocked is not None:
            self._counts[2] += 1
            done(blocked)
            return
        if self._shutdown and op.prop != FnProperty.DELETE_VAR:
            done(None)
            return
        finished: list[bool] = []
        guard = threading.Lock()

        def on_complete(error: BaseException | None = None) -> None:
            with guard:
                if finished:
                    raise EngineError(f"on_complete of {op!r} was called twice; call it exactly once")
                finished.append(True)
            done(None if error is None else Failure.of(op, error))

        try:
            op.fn(on_complete)
        except BaseException as error:
            with guard:
                if finished:
                    raise
                finished.append(True)
            done(Failure.of(op, error))

    def _finish(self, op: OprBlock, failure: Any) -> list[OprBlock]:
        """Lock held: release the vars of ``op``; returns the operations that became ready, in push order per var."""
        ready: list[OprBlock] = []
        if failure is None and not self._any_failure:
            for var in op.reads:
                var.readers -= 1
                if not var.readers and var.write is not None:
                    other = var.write
                    other.wait -= 1
                    if not other.wait:
                        ready.append(other)
            for var in op.writes:
                if var.waiting is None:
                    var.version += 1
                    var.write = None
                else:
                    var.finish_write(ready)
        else:
            self._finish_failing(op, failure, ready)
        self._counts[0] += 1
        if self._debug:
            self._in_flight.pop(op.seq, None)
        self._progress += 1
        self._pending -= 1
        if not self._pending and self._idle_waiters:
            for waiter in self._idle_waiters:
                waiter.release()
            self._idle_waiters = []
        return ready

    def _finish_failing(self, op: OprBlock, failure: Any, ready: list[OprBlock]) -> None:
        """The careful version: some operation of this engine has failed."""
        mapping = failure if isinstance(failure, dict) else None
        if failure is not None:
            self._any_failure = True
            fresh = list(dict.fromkeys(mapping.values())) if mapping is not None else [failure]
            for one in fresh:
                if one is not None and one.observed_seq is None and one not in self._unobserved:
                    self._unobserved.append(one)
                if one is not None and one.seq == op.seq:
                    self._counts[1] += 1
        for var in op.reads:
            var.finish_read(ready)
        for var in op.writes:
            if mapping is not None:
                if var in mapping:
                    var.failure = mapping[var]
            elif failure is not None:
                var.failure = failure
            elif op.prop != FnProperty.DELETE_VAR:
                var.failure = None
            if self._raise_once and var.failure is not None:
                if var.failure.vars is None:
                    var.failure.vars = []
                var.failure.vars.append(var)
            var.finish_write(ready)

    # -- waiting --------------------------------------------------------------------------------------------------

    def _forbid_wait(self, what: str) -> None:
        owner = getattr(running, "engine", None)
        if owner is not None and not owner._inline:
            raise WaitInWorkerError(
                f"{what} was called inside an engine operation: the worker would wait for work that may need this "
                f"worker. Declare the var in const_vars of the operation instead, or push the rest as its own operation."
            )

    def wait_for_var(self, var: Var) -> None:
        """Block until every write of ``var`` pushed before is done; raise its failure if it has one.

        Reads that are still running are not waited for (push an operation that writes the var for that).

        Raises:
            WaitInWorkerError: called inside an operation.
            BaseException: whatever the failed operation raised, with a note that names it and the line of its push.
        """
        self._forbid_wait("wait_for_var")
        if self._bulking:
            self._flush_bulk()
        if var.engine is not self:
            checked_vars(self, (var,), (), "wait_for_var")
        if var.write is not None:
            self._before_wait(var)
            done = threading.Lock()
            done.acquire()
            op = OprBlock(done.release, (var,), (), None, FnProperty.NO_SKIP, 0, "WaitForVar", None)
            with self._lock:
                if var.write is not None:
                    self._seq = op.seq = self._seq + 1
                    self._pending += 1
                    op.queue = WAITER
                    op.wait = var.add_read(op)
                else:
                    done.release()
            done.acquire()
        if var.failure is not None:
            self._raise(var.failure)

    def wait_for_all(self) -> None:
        """Block until nothing is pending; raise every failure that no wait has raised, the first in push order.

        The others are in its notes. Work that another thread has put into a bulk but not flushed is not waited for.
        """
        self._forbid_wait("wait_for_all")
        if self._bulking:
            self._flush_bulk()
        self._before_wait()
        self._wait_idle()
        with self._lock:
            failures = sorted((f for f in self._unobserved if f.observed_seq is None), key=lambda f: f.seq)
            self._unobserved = []
            for failure in failures:
                self._observe(failure)
        if failures:
            first = failures[0].error
            for other in failures[1:]:
                first.add_note(f"another operation failed: {other.describe()}")
            raise first

    def _wait_idle(self, timeout: float = -1) -> bool:
        while True:
            with self._lock:
                if not self._pending:
                    return True
                done = threading.Lock()
                done.acquire()
                self._idle_waiters.append(done)
            if not done.acquire(timeout=timeout):
                return False

    def throw(self, var: Var) -> None:
        """Raise the failure of ``var`` if it has one, without waiting."""
        if var.failure is not None:
            self._raise(var.failure)

    def _raise(self, failure: Failure) -> None:
        with self._lock:
            self._observe(failure)
            if failure in self._unobserved:
                self._unobserved.remove(failure)
        raise failure.error

    def _observe(self, failure: Failure) -> None:
        """Lock held: the user has been told. From here on new operations may heal what failed."""
        if failure.observed_seq is None:
            failure.observed_seq = self._seq
            if self._raise_once:
                failure.heal_everywhere()

    def future(self, var: Var) -> Future[Var]:
        """A future that is done when ``var`` is readable; its exception is the var's failure."""
        result: Future[Var] = Future()

        def settle() -> None:
            if var.failure is not None:
                with self._lock:
                    self._observe(var.failure)
                    if var.failure in self._unobserved:
                        self._unobserved.remove(var.failure)
                result.set_exception(var.failure.error)
            else:
                result.set_result(var)

        self.push(settle, (var,), (), None, prop=FnProperty.NO_SKIP, name="future")
        return result

    # -- bulk -----------------------------------------------------------------------------------------------------

    def set_bulk_size(self, size: int) -> int:
        """Collect up to ``size`` plain pushes of this thread into one operation (0: off); returns the old size."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise EngineError(f"bulk size must be an integer >= 0, got {size!r}")
        old = self._bulk.size
        if (size > 0) != (old > 0):
            with self._lock:
                self._bulking += 1 if size > 0 else -1
        self._bulk.size = size
        if len(self._bulk.members) >= size:
            self._flush_bulk()
        return old

    @contextmanager
    def bulk(self, size: int) -> Iterator[None]:
        """``set_bulk_size(size)`` for the block of a ``with``."""
        old = self.set_bulk_size(size)
        try:
            yield
        finally:
            self.set_bulk_size(old)

    def _absorb(self, member: BulkMember) -> None:
        state = self._bulk
        if state.members and state.members[0].ctx != member.ctx:
            self._flush_bulk()
        state.members.append(member)
        if len(state.members) >= state.size:
            self._flush_bulk()

    def _flush_bulk(self) -> None:
        members, self._bulk.members = self._bulk.members, []
        if members:
            run = BulkRun(self, members)
            op = OprBlock(
                run, run.reads, run.writes, members[0].ctx, FnProperty.NO_SKIP, 0, "ImperativeBulk", members[0].site
            )
            run.op = op
            self._admit(op)

    # -- life of the engine -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait for everything, then end the threads; failures stay to be raised by the next wait. Idempotent."""

    def start(self) -> None:
        """Undo :meth:`stop`."""

    def notify_shutdown(self) -> None:
        """From now on functions that have not started are not run, except deletes."""
        self._shutdown = True

    def unobserved_failures(self) -> list[Failure]:
        """Failures that no wait has raised."""
        with self._lock:
            return sorted((f for f in self._unobserved if f.observed_seq is None), key=lambda f: f.seq)

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def tracer(self) -> Tracer | None:
        """Called after each operation with (name, ctx, queue, worker, push_ns, start_ns, end_ns, number)."""
        return self._tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def statistics(self) -> Statistics:
        """Counts so far, and per queue."""
        with self._lock:
            return Statistics(
                pushed=self._seq,
                completed=self._counts[0],
                failed=self._counts[1],
                skipped=self._counts[2],
                pending=self._pending,
                queues=tuple(queue.statistics() for queue in self._queues()),
            )

    def _queues(self) -> Sequence[Any]:
        return ()

    def dump(self, format: str = "text") -> str:
        """What is pending and why, as ``text`` or as a ``dot`` graph; complete in debug mode only."""
        with self._lock:
            ops = list(self._in_flight.values())
        return dump_dot(self, ops) if format == "dot" else dump_text(self, ops)

    def __repr__(self) -> str:
        return f"<{self.kind}: {self._seq} pushed, {self._pending} pending>"


def _nothing() -> None:
    """Deletes a var that needs no work."""


WAITER: Any = object()
"""Queue of operations that only wake a waiting thread: they are finished where they become ready."""
