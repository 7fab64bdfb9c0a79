"""Public engine class with every public method.

Every change of state goes through the region. Any thread may call any method, unless its docstring says otherwise.
The file is long because it holds one class, and because ``push`` checks vars without a single call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import index
from types import CodeType
from typing import ClassVar, SupportsIndex, TypeVar

from weftplan import config
from weftplan.device.context import Context, cpu
from weftplan.engine.bulk import BulkMember
from weftplan.engine.debug import start_watchdog
from weftplan.engine.edges.forking import Fork
from weftplan.engine.execution import Tracer as Tracer
from weftplan.engine.execution import running, traced_name
from weftplan.engine.failure import Failure
from weftplan.engine.inspection import QueueStatistics, Statistics, dump_dot, dump_text, snapshot
from weftplan.engine.operation import (
    TRACED,
    DetailedBlock,
    FnProperty,
    InternalBlock,
    Operator,
    OprBlock,
    TaskBlock,
    TracedBlock,
    Waiter,
    check_runs,
    checked_property,
    checked_vars,
    label_of,
    nothing,
    probe_stack,
    require_stack,
    runs,
    searchable,
)
from weftplan.engine.sites import INTERNAL, origin, push_site
from weftplan.engine.types import ThreadCounts
from weftplan.engine.var import Order, Var
from weftplan.engine.waiting import Waiting
from weftplan.engine.yielding import retries_after_progress
from weftplan.errors import EngineError
from weftplan.locks import Lock, free_in_children

R = TypeVar("R")
new = object.__new__
NORMAL, TASK = FnProperty.NORMAL, FnProperty.TASK
_CPU0 = cpu(0)
_delete_lock = free_in_children(Lock())
"""Lock under which a var is marked as deleted and its delete queued: no call in between, so nothing can interleave."""


class Engine(Waiting):
    """Base class of all engines. Any thread may call any method unless its docstring says otherwise.

    Do not instantiate it: use :func:`weftplan.engine.create` or :func:`weftplan.engine.get`. A subclass calls
    :meth:`enlist` at the end of ``__init__`` and adds its ``kind`` with :func:`weftplan.engine.registry.register`.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Keywords that :meth:`~weftplan.engine.core.Engine.build` accepts in addition to the thread counts."""

    @classmethod
    def build(cls, threads: ThreadCounts, **options: object) -> Engine:
        """Create an engine of this type. The default ignores the caller's thread counts.

        :meta private:
        """
        return cls(**options)

    def __init__(self) -> None:
        super().__init__()
        self._fork = Fork()
        self._pusher: CodeType | None = None
        """The user's code object that pushed last. Most pushes come from a loop, so the next one usually matches."""
        patience = config.lookup("WEFTPLAN_ENGINE_WATCHDOG_S")
        if self._debug or patience.text is not None:
            start_watchdog(self, float(patience.value))

    @property
    def has_failed(self) -> bool:
        """Whether any var may hold a failure.

        :meta private:
        """
        return self._any_failure

    # -- vars and operators -----------------------------------------------------------------------------------------

    def new_variable(self, name: str | None = None) -> Var:
        """Return a new var at version 0."""
        return Var(self, name)

    def new_order(self, name: str | None = None) -> Order:
        """Return a new var that orders operations but carries no failure from writer to reader.

        :meta private:
        """
        return Order(self, name)

    def new_operator(
        self,
        fn: Callable[[], object],
        const_vars: Sequence[Var] = (),
        mutable_vars: Sequence[Var] = (),
        *,
        prop: FnProperty = NORMAL,
        name: str | None = None,
    ) -> Operator:
        """Create a reusable operation and check its vars once.

        Args:
            fn: called without arguments at every execution.
            const_vars: vars that it reads.
            mutable_vars: vars that it writes.
            prop: kind of the operation, which selects its queue.
            name: shown in traces and errors; None: that of ``fn``.

        Raises:
            DuplicateVarError, EngineError: as :meth:`push`.
        """
        if not callable(fn):
            raise EngineError(f"an operation needs a function without arguments, got {type(fn).__name__}")
        reads, writes = checked_vars(self, const_vars, mutable_vars, name)
        return Operator(self, fn, reads, writes, checked_property(prop), name)

    def delete_operator(self, operator: Operator) -> None:
        """Delete ``operator`` after all its scheduled executions. Pushing it later is an error."""
        if type(operator) is not Operator:
            raise EngineError(f"expected an operator made by engine.new_operator(), got {type(operator).__name__}")
        operator.deleted = True

    def delete_variable(
        self, var: Var, delete_fn: Callable[[], object] | None = None, ctx: Context | None = None
    ) -> None:
        """Run ``delete_fn`` after all operations on ``var`` pushed so far, failed or not, and mark the var as deleted.

        Args:
            var: the var.
            delete_fn: called without arguments; None: nothing is called.
            ctx: the device whose worker calls it.

        Raises:
            EngineError: the var belongs to another engine or is already deleted, or ``delete_fn`` is not callable.
        """
        if getattr(var, "engine", None) is not self:
            checked_vars(self, (), (var,), "delete_variable")
        _checked_target(ctx, 0)
        if delete_fn is None:
            delete_fn = nothing
        elif not callable(delete_fn):
            raise EngineError(f"delete_variable needs a function without arguments, got {type(delete_fn).__name__}")
        if self._bulking:
            self._flush_bulk()
        op = DetailedBlock(delete_fn, (), (var,), "DeleteVariable", push_site(), ctx, FnProperty.DELETE_VAR)
        if self._tracer is not None:
            op.push_ns = time.perf_counter_ns()
        with _delete_lock:
            mine, var.deleted = not var.deleted, True
            if mine:
                var.engine = None  # later pushes fail the fast check, and the slow check explains why
                self._region.requests.append(op)
        if not mine:
            checked_vars(self, (), (var,), "delete_variable")
        self._admitted(op)

    # -- push -----------------------------------------------------------------------------------------------------

    def push(
        self,
        fn: Callable[[], object] | Operator,
        const_vars: Sequence[Var] = (),
        mutable_vars: Collection[Var] = (),
        ctx: Context | None = None,
        *,
        prop: FnProperty = NORMAL,
        priority: int = 0,
        name: str | None = None,
    ) -> None:
        """Schedule ``fn()`` to run after all conflicting operations pushed before it.

        Args:
            fn: a function without arguments, or an :class:`Operator` (which brings its own vars, property and name).
            const_vars: vars that ``fn`` reads; duplicates count once. A tuple is used as is, other sequences are
            copied.
            mutable_vars: vars that ``fn`` writes, treated likewise.
            ctx: the device to run on; default ``cpu(0)``.
            prop: the kind of work.
            priority: larger runs first, in queues that honour it.
            name: shown in errors, traces and dumps.

        Raises:
            DuplicateVarError: a var is written twice, or both read and written.
            EngineError: a var is deleted or belongs to another engine, or ``fn`` is not callable.
        """
        if not callable(fn):
            if type(fn) is not Operator:
                raise EngineError(f"an operation needs a function without arguments, got {type(fn).__name__}")
            if fn.engine is not self or fn.deleted:
                state = "was deleted" if fn.deleted else f"belongs to {fn.engine!r}"
                raise EngineError(f"{fn!r} {state}; make a new operator with this engine's new_operator()")
            const_vars, mutable_vars, prop, name, fn = fn.reads, fn.writes, fn.prop, fn.name, fn.fn
            if self._debug:
                checked_vars(self, const_vars, mutable_vars, name)  # a var may have been deleted since the declaration
        else:
            # Copy lists, because the caller may change them before the operation runs. A tuple is used as it is.
            if type(const_vars) is not tuple or type(mutable_vars) is not tuple:
                try:
                    const_vars, mutable_vars = tuple(const_vars), tuple(mutable_vars)
                except TypeError:
                    raise EngineError(
                        "const_vars and mutable_vars are sequences of vars: write [var] for one"
                    ) from None
            count = len(const_vars)
            plain = False
            try:
                if count < 3 and len(mutable_vars) == 1:  # the common case: `_plain` inlined
                    var = mutable_vars[0]
                    if var.engine is self:
                        if count:
                            first_read, last_read = const_vars[0], const_vars[-1]
                            plain = (
                                first_read is not var
                                and first_read.engine is self
                                and (
                                    count == 1
                                    or (
                                        last_read is not var
                                        and last_read is not first_read
                                        and last_read.engine is self
                                    )
                                )
                            )
                        else:
                            plain = True
                else:
                    plain = self._plain(const_vars, mutable_vars)
                    if plain and len(mutable_vars) > 8:
                        mutable_vars = searchable(mutable_vars)
            except AttributeError:  # not a var
                pass
            if not plain:
                const_vars, mutable_vars = checked_vars(self, const_vars, mutable_vars, name)
        if ctx is not None and type(ctx) is Context and ctx.device_type == "cpu" and not ctx.device_id:
            ctx = None
        frame = sys._getframe(1)
        detours = self._detours  # read once: both uses must agree while another thread sets a tracer
        # A traced block has one class and so one queue: with a tracer only NORMAL work takes the fast path.
        is_fast = (prop is NORMAL or prop is TASK) if not detours else prop is NORMAL and detours is TRACED
        if is_fast and ctx is None and not priority:
            code: CodeType | None = frame.f_code
            lasti = frame.f_lasti
            kind = OprBlock if prop is NORMAL else TaskBlock
            if code is not self._pusher:
                pusher = origin(frame.f_code.co_filename)
                if pusher:
                    code, lasti = push_site() or (None, 0)
                    if pusher == INTERNAL:
                        kind = InternalBlock
                else:
                    self._pusher = code
            region = self._region
            if not detours:
                # `OprBlock.__init__` inlined. `probe_stack()` has raised already if the recursion limit is too close.
                probe_stack()
                op = new(kind)
                op.fn = fn
                op.reads = const_vars
                op.writes = mutable_vars
                op.name = name
                op.code = code
                op.lasti = lasti
                op.wait = op.seq = 0
                op.failure = None
                region.requests.append(op)
            else:
                traced = TracedBlock(fn, const_vars, mutable_vars, traced_name(fn, name), code, lasti)
                traced.internal = kind.internal
                traced.push_ns = time.perf_counter_ns()
                region.requests.append(traced)
            if region.token:
                region.apply(self)
            return
        # An operation must not wait: it is pending itself. Nor may a destructor that interrupted the region.
        if self._bound and not running.engines and not self._region.is_inside():
            self._wait_for_capacity()
        site = push_site()
        internal = origin(frame.f_code.co_filename) == INTERNAL
        priority = _checked_target(ctx, priority)
        # Only plain pushes join a bulk; any other push flushes it first, to keep the order.
        if self._bulking and self._bulk.size and not running.seated:
            if prop is NORMAL and not priority and not self._inline and self._tracer is None:
                require_stack()
                self._absorb(BulkMember(fn, const_vars, mutable_vars, ctx or _CPU0, name, site, internal))
                return
            self._flush_bulk()
        prop = checked_property(prop)
        detailed = DetailedBlock(fn, const_vars, mutable_vars, name, site, ctx, prop, priority)
        detailed.internal = internal
        self._submit(detailed)

    def run_inline(self, reads: Sequence[Var], work: Callable[..., R], *args: object) -> R | None:
        """Run small work inline on this thread if that cannot change the observable order.

        The work may write only memory that no other code has seen yet. See ``edges/inline.py``. An engine
        without worker threads returns None.

        Returns:
            The result of ``work``; None if the caller must push it instead.

        :meta private:
        """
        return None

    def yield_to_worker(self) -> None:
        """Yield the interpreter to a worker that has been woken but has not started yet. Costs about 60 µs.

        Call this after pushing long work when the caller has more to do before it waits.

        :meta private:
        """

    def write_inline(self, work: Callable[[], object], reads: Sequence[Var], writes: Sequence[Var]) -> bool:
        """Run small work of the package inline if all its vars are idle. Return False if the caller must push it.

        See ``edges/inline.py``.

        :meta private:
        """
        return False

    def begin(
        self, fn: Callable[..., object], reads: Sequence[Var], writes: Collection[Var], name: str, inner: int = 0
    ) -> Callable[..., None] | None:
        """Start an asynchronous package operation inline if all its vars are idle. See ``edges/inline.py``.

        Returns:
            The completion callback; None if the caller must push the operation instead.

        :meta private:
        """
        return None

    def _wait_for_capacity(self) -> None:
        """Block while WEFTPLAN_ENGINE_MAX_PENDING operations are pending, until half of them are done."""
        # Count unserved requests too: while one thread is held up inside the region, the others could queue any number.
        # Read `requests` before `pending`, as in wait_for_var.
        if len(self._region.requests) + self._region.pending >= self._bound:
            if self._bulking:
                self._flush_bulk()
            # Waiting for half of them saves a sleep and a wake-up per push.
            self._wait_idle(few=self._region.few)

    def _plain(self, reads: Sequence[Var], writes: Sequence[Var]) -> bool:
        """Return whether the fast path may use the vars: all alive, all of this engine, no duplicates."""
        for var in writes:
            if var.engine is not self:
                return False
        count = len(writes)
        written = writes if count < 9 else set(writes)
        for var in reads:
            if var.engine is not self or var in written:
                return False
        if count > 1 and (writes[0] is writes[1] if count == 2 else len(set(writes)) != count):
            return False
        count = len(reads)
        return count < 2 or (reads[0] is not reads[1] if count == 2 else len(set(reads)) == count)

    def push_async(
        self,
        fn: Callable[[Callable[..., None]], object],
        const_vars: Sequence[Var] = (),
        mutable_vars: Sequence[Var] = (),
        ctx: Context | None = None,
        *,
        prop: FnProperty = NORMAL,
        priority: int = 0,
        name: str | None = None,
    ) -> None:
        """Schedule ``fn(on_complete)``, which only starts work; otherwise as :meth:`push`.

        Call ``on_complete(error=None)`` exactly once, from any thread; a second call raises EngineError. If ``fn``
        raises, the operation completes with that error.

        Args:
            fn: called with ``on_complete``.
            const_vars: vars that it reads.
            mutable_vars: vars that it writes.
            ctx: the device whose worker calls it; None: ``cpu(0)``.
            prop: kind of the operation, which selects its queue.
            priority: operations with a higher priority run first among those that are ready.
            name: shown in traces and errors; None: that of ``fn``.
        """
        if not callable(fn):
            raise EngineError(f"an operation needs a function of on_complete, got {type(fn).__name__}")
        if not runs(fn):
            check_runs(fn, label_of(fn, name))  # a coroutine or generator would never call on_complete
        reads: Sequence[Var] = const_vars
        writes: Collection[Var] = mutable_vars
        try:
            plain = type(reads) is tuple and type(writes) is tuple and self._plain(reads, writes)
        except AttributeError:  # not a var
            plain = False
        if not plain or len(writes) > 8:
            reads, writes = checked_vars(self, const_vars, mutable_vars, name)
        if self._bulking:
            self._flush_bulk()
        priority = _checked_target(ctx, priority)
        op = DetailedBlock(fn, reads, writes, name, push_site(), ctx, checked_property(prop), priority)
        op.asynchronous = True
        self._submit(op)

    # -- life of the engine -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait until nothing is pending, then stop the threads. Idempotent.

        Failures remain and the next wait raises them. A later push starts threads again. Inside an operation of this
        engine the call does nothing.
        """

    def _forget_threads(self) -> None:
        """Drop references to the threads; they do not exist in a forked child."""

    def start(self) -> None:
        """Undo :meth:`stop`. Threads start when an operation needs them."""

    def notify_shutdown(self) -> None:
        """Stop running new functions, except deletes; futures still complete.

        :meta private:
        """
        self._shutdown = self._careful = True

    def unobserved_failures(self) -> list[Failure]:
        """Return the failures that no wait has raised."""
        return self._exclusively(
            lambda: sorted((f for f in self._unobserved if f.observed_seq is None), key=lambda f: f.seq)
        )

    def retries_after_progress(self, patience_s: float) -> Iterator[None]:
        """Yield each time pending operations have completed, for a caller whose allocation failed.

        Inside an operation this thread runs others meanwhile; outside it waits for at most ``patience_s`` seconds.

        :meta private:
        """
        return retries_after_progress(self, patience_s)

    @property
    def in_operation(self) -> bool:
        """Whether this thread is inside an operation of this engine.

        :meta private:
        """
        return self in running.engines

    def idle(self, variables: Iterable[Var]) -> bool:
        """Return whether all operations pushed so far on these vars have completed on the host. Does not wait.

        Raises:
            EngineError: called by a destructor or signal handler that interrupted the engine.

        :meta private:
        """
        chosen = list(variables)
        return self._exclusively(lambda: all(var.write is None and not var.readers for var in chosen))

    # -- inspection -------------------------------------------------------------------------------------------------

    @property
    def tracer(self) -> Tracer | None:
        """Callback after each operation, with (name, ctx, queue, worker, push_ns, start_ns, end_ns, number)."""
        return self._tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        if tracer is not None and not callable(tracer):
            raise EngineError(f"a tracer is a function, or None for none; got {type(tracer).__name__}")
        self._tracer = tracer
        self._update_detours()

    def statistics(self) -> Statistics:
        """Return the operation counts so far, in total and per queue."""
        return self._exclusively(self._count)

    def _count(self) -> Statistics:
        return Statistics(
            pushed=self._region.seq - self._region.waits,
            completed=self._region.completed - self._region.waits,
            failed=self._failed,
            skipped=self._skipped,
            pending=self._region.pending,
            queues=tuple(self._count_queues()),
        )

    def _count_queues(self) -> Sequence[QueueStatistics]:
        return ()

    def dump(self, format: str = "text") -> str:
        """Return the pending operations and their blockers, as ``text`` or a ``dot`` graph.

        Complete in debug mode only.

        Raises:
            EngineError: the format is neither.
        """
        if format not in ("text", "dot"):
            raise EngineError(f"engine.dump: format must be 'text' or 'dot', got {format!r}")

        pending = self._exclusively(
            lambda: snapshot([op for op in self._region.in_flight.values() if type(op) is not Waiter or op.reads])
        )
        return dump_dot(pending) if format == "dot" else dump_text(repr(self), pending, hidden=self._region.pending > 0)

    def __repr__(self) -> str:
        return f"<{self.kind}: {self._region.seq - self._region.waits} pushed, {self._region.pending} pending>"


def _checked_target(ctx: object, priority: SupportsIndex) -> int:
    """Check a push's context, and return its priority as a plain integer."""
    if ctx is not None and not isinstance(ctx, Context):
        raise EngineError(f"ctx must be a context such as mx.cpu(0), got {ctx!r}")
    try:
        return index(priority)
    except TypeError:
        raise EngineError(f"priority must be an integer, got {priority!r}") from None
