"""The engine's public class, with every public method.

It relies on the region for every change of state. Any thread may call a verb, unless its docstring says otherwise. The
file is long because the class is one, and because ``push`` checks vars without calling anything.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from types import CodeType
from typing import ClassVar, SupportsIndex, TypeVar

from weftplan import config
from weftplan.device.context import Context, cpu
from weftplan.engine.bulk import BulkGuard, BulkMember, BulkRun
from weftplan.engine.debug import start_watchdog
from weftplan.engine.edges.forking import Fork
from weftplan.engine.execution import Tracer as Tracer
from weftplan.engine.execution import running
from weftplan.engine.failure import Failure
from weftplan.engine.inspection import QueueStatistics, Statistics, dump_dot, dump_text, snapshot
from weftplan.engine.operation import (
    DetailedBlock,
    FnProperty,
    Operator,
    OprBlock,
    OwnBlock,
    TaskBlock,
    TracedBlock,
    Waiter,
    ample_room,
    check_runs,
    checked_property,
    checked_vars,
    label_of,
    nothing,
    room,
    runs,
    searchable,
)
from weftplan.engine.sites import OWN, origin, push_site
from weftplan.engine.types import ThreadCounts
from weftplan.engine.var import Order, Var
from weftplan.engine.waiting import Waiting
from weftplan.engine.yielding import others_first
from weftplan.errors import EngineError
from weftplan.locks import Lock, free_in_children

R = TypeVar("R")
new = object.__new__
NORMAL, TASK = FnProperty.NORMAL, FnProperty.TASK
_CPU0 = cpu(0)
_delete_lock = free_in_children(Lock())
"""Held for what belongs together: no call but the last one, so neither a destructor nor a signal comes in between."""


class Engine(Waiting):
    """Base of all engines. Any thread may call anything here unless a method says otherwise.

    Not made directly: use :func:`weftplan.engine.create` or :func:`weftplan.engine.get`. A subclass ends its
    ``__init__`` with :meth:`enlist`, and :func:`weftplan.engine.registry.register` makes its ``kind`` known.
    """

    options: ClassVar[tuple[str, ...]] = ()
    """Keywords that :meth:`build` takes besides the thread counts."""

    @classmethod
    def build(cls, threads: ThreadCounts, **options: object) -> Engine:
        """Make an engine of this type with the thread counts that the caller asked for; the default ignores them."""
        return cls(**options)

    def __init__(self) -> None:
        super().__init__()
        self._fork = Fork()
        self._pusher: CodeType | None = None
        """The user's code that pushed last: most pushes come from a loop."""
        patience = config.lookup("WEFTPLAN_ENGINE_WATCHDOG_S")
        if self._debug or patience.text is not None:
            start_watchdog(self, float(patience.value))

    @property
    def has_failed(self) -> bool:
        """Whether some var may hold a failure."""
        return self._any_failure

    # -- vars and operators -----------------------------------------------------------------------------------------

    def new_variable(self, name: str | None = None) -> Var:
        """A fresh var, version 0."""
        return Var(self, name)

    def new_order(self, name: str | None = None) -> Order:
        """A fresh var that carries no failure from those that write it to those that read it."""
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
        """A reusable operation; its vars are checked here, once.

        Raises:
            DuplicateVarError, EngineError: as :meth:`push`.
        """
        if not callable(fn):
            raise EngineError(f"an operation needs a function without arguments, got {type(fn).__name__}")
        reads, writes = checked_vars(self, const_vars, mutable_vars, name)
        return Operator(self, fn, reads, writes, checked_property(prop), name)

    def delete_operator(self, operator: Operator) -> None:
        """Forget ``operator`` after all its scheduled executions; pushing it again is an error."""
        if type(operator) is not Operator:
            raise EngineError(f"expected an operator made by engine.new_operator(), got {type(operator).__name__}")
        operator.deleted = True

    def delete_variable(
        self, var: Var, delete_fn: Callable[[], object] | None = None, ctx: Context | None = None
    ) -> None:
        """Run ``delete_fn`` after every operation pushed before that uses ``var``, failed or not; then ``var`` is gone.

        Raises:
            EngineError: the var belongs to another engine or has been deleted already, or ``delete_fn`` is no function.
        """
        if getattr(var, "engine", None) is not self:
            checked_vars(self, (), (var,), "delete_variable")
        _check_place(ctx, 0)
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
                var.engine = None  # every later push meets the slow check, which explains
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
        """Schedule ``fn()`` once everything pushed before that conflicts with its vars is done.

        Args:
            fn: a function without arguments, or an :class:`Operator` (which brings vars, property and name).
            const_vars: vars it reads; a duplicate counts once. A tuple is kept, any other sequence copied.
            mutable_vars: vars it writes, likewise.
            ctx: where it runs; default ``cpu(0)``.
            prop: kind of work.
            priority: larger first, in queues that honour it.
            name: for errors, traces and dumps.

        Raises:
            DuplicateVarError: a var is written twice, or read and written.
            EngineError: a var of another engine, a deleted var, or no function.
        """
        if not callable(fn):
            if type(fn) is not Operator:
                raise EngineError(f"an operation needs a function without arguments, got {type(fn).__name__}")
            if fn.engine is not self or fn.deleted:
                state = "was deleted" if fn.deleted else f"belongs to {fn.engine!r}"
                raise EngineError(f"{fn!r} {state}; make a new operator with this engine's new_operator()")
            const_vars, mutable_vars, prop, name, fn = fn.reads, fn.writes, fn.prop, fn.name, fn.fn
            if self._debug:
                checked_vars(self, const_vars, mutable_vars, name)  # vars deleted since: a stale declaration
        else:
            # Copies, because the caller may change its lists before the operation runs; a tuple is taken as it is.
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
                if count < 3 and len(mutable_vars) == 1:  # most operations: `_plain` without the call
                    var = mutable_vars[0]
                    if var.engine is self:
                        if count:
                            first, last = const_vars[0], const_vars[-1]
                            plain = (
                                first is not var
                                and first.engine is self
                                and (count == 1 or (last is not var and last is not first and last.engine is self))
                            )
                        else:
                            plain = True
                else:
                    plain = self._plain(const_vars, mutable_vars)
                    if plain and len(mutable_vars) > 8:
                        mutable_vars = searchable(mutable_vars)
            except AttributeError:  # no var at all
                pass
            if not plain:
                const_vars, mutable_vars = checked_vars(self, const_vars, mutable_vars, name)
        if ctx is not None and type(ctx) is Context and ctx.device_type == "cpu" and not ctx.device_id:
            ctx = None
        frame = sys._getframe(1)
        if ctx is None and not priority and self._unusual < (2 if prop is NORMAL else 1 if prop is TASK else 0):
            code: CodeType | None = frame.f_code
            lasti = frame.f_lasti
            kind = OprBlock if prop is NORMAL else TaskBlock
            if code is not self._pusher:
                pusher = origin(frame.f_code.co_filename)
                if pusher:
                    code, lasti = push_site() or (None, 0)
                    if pusher == OWN:
                        kind = OwnBlock
                else:
                    self._pusher = code
            region = self._region
            if not self._unusual:
                room()
                op = new(kind)  # what `OprBlock.__init__` does, without its call
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
                traced = TracedBlock(fn, const_vars, mutable_vars, name, code, lasti)
                traced.own = kind.own
                traced.push_ns = time.perf_counter_ns()
                region.requests.append(traced)
            if region.token:
                region.apply(self)
            return
        if self._bound and not running.engines and not self._region.is_inside():
            self._make_room()
        site = push_site()
        own = origin(frame.f_code.co_filename) == OWN
        priority = _check_place(ctx, priority)
        if self._bulking and self._bulk.size and not running.seated:
            if prop is NORMAL and not priority and not self._inline and self._tracer is None:
                ample_room()
                self._absorb(BulkMember(fn, const_vars, mutable_vars, ctx or _CPU0, name, site, own))
                return
            self._flush_bulk()
        prop = checked_property(prop)
        detailed = DetailedBlock(fn, const_vars, mutable_vars, name, site, ctx, prop, priority)
        detailed.own = own
        self._submit(detailed)

    def at_once(self, reads: Sequence[Var], work: Callable[..., R], *args: object) -> R | None:
        """Call small work, which writes what nobody else has yet, on this thread if no order can be seen by that.

        What it returns; None: it is to be pushed. See ``edges/at_once.py``; engines without workers run everything
        their own way.
        """
        return None

    def give_way(self) -> None:
        """Let a worker that has been woken begin, where it would wait for the interpreter until this thread waits.

        For who has pushed long work and has more to do before it waits; it costs about 60 microseconds.
        """

    def write_at_once(self, work: Callable[[], object], reads: Sequence[Var], writes: Sequence[Var]) -> bool:
        """Run small work of the package on this thread if all its vars, none of which comes twice, are idle.

        False: it is to be pushed. See ``edges/at_once.py``.
        """
        return False

    def begin(
        self, fn: Callable[..., object], reads: Sequence[Var], writes: Collection[Var], name: str, inner: int = 0
    ) -> Callable[..., None] | None:
        """Begin, on this thread, an asynchronous operation of the package all of whose vars are idle.

        Returns what ends it; None: it is to be pushed. See ``edges/at_once.py``.
        """
        return None

    def _make_room(self) -> None:
        """Wait until fewer than WEFTPLAN_ENGINE_MAX_PENDING operations are pending; then until half of them are gone.

        So that the pushing thread does not sleep and wake for each operation.
        """
        # With the requests that nobody has carried out yet: while one thread is held up inside, the others would leave
        # as many there as they like. In this order, as in wait_for_var.
        if len(self._region.requests) + self._region.pending >= self._bound:
            if self._bulking:
                self._flush_bulk()
            self._wait_idle(few=self._region.few)

    def _plain(self, reads: Sequence[Var], writes: Sequence[Var]) -> bool:
        """True when nothing has to be done to the vars: all are alive and of this engine, and none comes twice."""
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
        """As :meth:`push`, for a function that only starts work: it is called as ``fn(on_complete)``.

        ``on_complete(error=None)`` must be called exactly once, from any thread; a second call raises EngineError
        there. If ``fn`` itself raises, that counts as completion with the error.
        """
        if not callable(fn):
            raise EngineError(f"an operation needs a function of on_complete, got {type(fn).__name__}")
        if not runs(fn):
            check_runs(fn, label_of(fn, name))  # it would never say that it is done
        reads: Sequence[Var] = const_vars
        writes: Collection[Var] = mutable_vars
        try:
            plain = type(reads) is tuple and type(writes) is tuple and self._plain(reads, writes)
        except AttributeError:  # no var at all
            plain = False
        if not plain or len(writes) > 8:
            reads, writes = checked_vars(self, const_vars, mutable_vars, name)
        if self._bulking:
            self._flush_bulk()
        priority = _check_place(ctx, priority)
        op = DetailedBlock(fn, reads, writes, name, push_site(), ctx, checked_property(prop), priority)
        op.asynchronous = True
        self._submit(op)

    # -- bulk -----------------------------------------------------------------------------------------------------

    def set_bulk_size(self, size: int) -> int:
        """Collect up to ``size`` plain pushes of this thread into one operation (0: off); returns the old size.

        Nothing is collected while there is a tracer, so that it sees every operation.
        A thread that ends with members collected has them pushed when it is gone.
        """
        if isinstance(size, bool) or not isinstance(size, SupportsIndex) or (size := index(size)) < 0:
            raise EngineError(f"bulk size must be an integer >= 0, got {size!r}")
        state = self._bulk
        old = state.size
        if state.guard is None:
            state.guard = BulkGuard(self, state.members)
        state.guard.set_active(size > 0)
        state.size = size
        if len(state.members) >= size:
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
        if self._bulk.members:
            self._push_bulk(self._bulk.members)

    def _push_bulk(self, shared: list[BulkMember]) -> None:
        members = shared[:]
        run = BulkRun(self, members)
        first = members[0]
        writes = searchable(run.writes)
        op = DetailedBlock(run, run.reads, writes, "ImperativeBulk", first.site, first.ctx, FnProperty.NO_SKIP)
        op.own = all(member.own for member in members)
        run.op = op
        del shared[: len(members)]
        self._submit(op)

    # -- life of the engine -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wait for everything, then end the threads; failures stay to be raised by the next wait. Idempotent.

        A later push starts threads again. Called inside an operation of this engine it does nothing.
        """

    def _forget_threads(self) -> None:
        """Forget the threads, which do not exist in a forked child."""

    def start(self) -> None:
        """Undo :meth:`stop`; threads are made when an operation needs them."""

    def notify_shutdown(self) -> None:
        """From now on functions that have not started are not run, except deletes; futures are settled."""
        self._shutdown = self._careful = True

    def unobserved_failures(self) -> list[Failure]:
        """Failures that no wait has raised."""
        return self._exclusively(
            lambda: sorted((f for f in self._unobserved if f.observed_seq is None), key=lambda f: f.seq)
        )

    def others_first(self, patience_s: float) -> Iterator[None]:
        """For a caller that lacks memory: yields whenever pending operations have ended, while there are any.

        Inside an operation its thread runs others meanwhile; outside it waits for at most ``patience_s`` seconds.
        """
        return others_first(self, patience_s)

    @property
    def in_operation(self) -> bool:
        """True on a thread that is in the middle of an operation of this engine."""
        return self in running.engines

    def idle(self, variables: Iterable[Var]) -> bool:
        """True when every operation on these vars that was pushed before this call has ended, on the host at least;
        waits for none of them.

        Raises:
            EngineError: called by a destructor or signal handler that interrupted the engine.
        """
        chosen = list(variables)
        return self._exclusively(lambda: all(var.write is None and not var.readers for var in chosen))

    # -- looking in -----------------------------------------------------------------------------------------------

    @property
    def tracer(self) -> Tracer | None:
        """What is called after each operation with (name, ctx, queue, worker, push_ns, start_ns, end_ns, number)."""
        return self._tracer

    @tracer.setter
    def tracer(self, tracer: Tracer | None) -> None:
        if tracer is not None and not callable(tracer):
            raise EngineError(f"a tracer is a function, or None for none; got {type(tracer).__name__}")
        self._tracer = tracer
        self._note_unusual()

    def statistics(self) -> Statistics:
        """The counts so far, in all and per queue."""
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
        """What is pending and why, as ``text`` or as a ``dot`` graph; complete in debug mode only.

        Raises:
            EngineError: another format.
        """
        if format not in ("text", "dot"):
            raise EngineError(f"engine.dump: format must be 'text' or 'dot', got {format!r}")

        pending = self._exclusively(
            lambda: snapshot([op for op in self._region.in_flight.values() if type(op) is not Waiter or op.reads])
        )
        return dump_dot(pending) if format == "dot" else dump_text(repr(self), pending, hidden=self._region.pending > 0)

    def __repr__(self) -> str:
        return f"<{self.kind}: {self._region.seq - self._region.waits} pushed, {self._region.pending} pending>"


def _check_place(ctx: object, priority: SupportsIndex) -> int:
    """The priority, as a plain integer. Before anything is changed: a bad one found later would leave its vars half
    registered."""
    if ctx is not None and not isinstance(ctx, Context):
        raise EngineError(f"ctx must be a context such as mx.cpu(0), got {ctx!r}")
    try:
        return index(priority)
    except TypeError:
        raise EngineError(f"priority must be an integer, got {priority!r}") from None
