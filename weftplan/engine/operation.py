"""Operations: a pushed function with its vars and properties, and one scheduled execution of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from weftplan.engine.sites import Site, site_text
from weftplan.errors import DuplicateVarError, EngineError

if TYPE_CHECKING:
    from weftplan.device.context import Context
    from weftplan.engine.var import Var


class FnProperty(IntEnum):
    """Kind of work of an operation, which decides its queue (MXNet's numbers up to 7)."""

    NORMAL = 0
    COPY_FROM_GPU = 1
    COPY_TO_GPU = 2
    CPU_PRIORITIZED = 3
    ASYNC = 4
    """The function only starts asynchronous work; it may run on the pushing thread."""
    DELETE_VAR = 5
    """Deletion of a var: goes to the front of its queue, is never skipped, and runs during shutdown."""
    GPU_PRIORITIZED = 6
    NO_SKIP = 7
    """The operation runs even if an input has failed."""
    TASK = 8
    """A function on plain arrays (not in MXNet). Tasks have their own workers, one per core."""


DETAILED = ("inline", "limit", "bulk")
"""Detours of an engine that runs pushes inline, limits pending operations or collects bulks: no push is fast."""
TRACED = ("tracer",)
"""Detour of a tracer alone: NORMAL pushes stay fast. Both are compared by identity."""


def checked_property(prop: int) -> FnProperty:
    """Return ``prop`` as an FnProperty. MXNet's numbers are accepted.

    Raises:
        EngineError: it is not a valid property.
    """
    if type(prop) is FnProperty:
        return prop
    try:
        return FnProperty(prop)
    except ValueError:
        names = ", ".join(prop.name for prop in FnProperty)
        raise EngineError(f"prop must be one of FnProperty's {names}, got {prop!r}") from None


def nothing() -> None:
    """Do nothing."""


def _around(inner: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls ``inner``."""

    def call() -> None:
        inner()

    # A code object of its own: the interpreter specialises a call site that always calls the same function.
    call.__code__ = call.__code__.replace()
    return call


_NESTED = [nothing]
"""Item n makes n nested calls."""
for _ in range(30):
    _NESTED.append(_around(_NESTED[-1]))

probe_stack = _NESTED[3]
"""Make four nested calls, enough to serve a request. Raises RecursionError while nothing has changed yet."""


def require_stack(calls: int = 20) -> None:
    """Make ``calls`` nested calls (at most 30), for work that needs more stack than :data:`probe_stack` checks."""
    _NESTED[calls]()


class OprBlock:
    """One scheduled execution of a push without options, the most frequent kind.

    The region owns it until it is dispatched, then its worker. ``wait`` counts missing grants; ``seq`` is 0 until it is
    admitted.

    Every request to the region starts with the creation of a block. So the constructor checks that the stack suffices
    for the calls that follow (:data:`probe_stack`). At the recursion limit an action raises before it has any effect.
    """

    __slots__ = ("code", "failure", "fn", "lasti", "name", "reads", "seq", "wait", "writes")

    ctx: Context | None = None
    prop: FnProperty = FnProperty.NORMAL
    priority: int = 0
    asynchronous: bool = False
    internal: bool = False
    """Whether the package pushed it for itself. A waiting thread may run it; user functions run on workers."""
    push_ns: int = 0

    def __init__(
        self,
        fn: object,
        reads: Sequence[Var],
        writes: Collection[Var],
        name: str | None = None,
        code: CodeType | None = None,
        lasti: int = 0,
    ) -> None:
        probe_stack()
        self.fn: Any = fn
        self.reads = reads
        self.writes = writes
        self.name = name
        self.code = code
        self.lasti = lasti
        self.wait = 0
        self.seq = 0
        self.failure: Any = None
        """Set by the running thread: a failure, a mapping of failures (bulk) or None."""

    @property
    def site(self) -> Site:
        """Code and instruction of the push."""
        return None if self.code is None else (self.code, self.lasti)

    @property
    def label(self) -> str:
        """Its name or that of its function."""
        return label_of(self.fn, self.name)

    def location(self) -> str:
        """Return ``file:line`` of the push, or ``an unknown line``."""
        return site_text(self.site)

    def __repr__(self) -> str:
        return f"<operation {self.label!r} #{self.seq} pushed at {self.location()}, waits for {self.wait}>"


class InternalBlock(OprBlock):
    """A push by the package for itself."""

    __slots__ = ()
    internal = True


class TaskBlock(OprBlock):
    """A push of a task, which has its own workers."""

    __slots__ = ()
    prop = FnProperty.TASK


class TracedBlock(OprBlock):
    """A push with a tracer installed; records the time."""

    __slots__ = ("internal", "push_ns")


class DetailedBlock(OprBlock):
    """A push with options."""

    __slots__ = ("asynchronous", "ctx", "internal", "priority", "prop", "push_ns")

    def __init__(
        self,
        fn: object,
        reads: Sequence[Var],
        writes: Collection[Var],
        name: str | None,
        site: Site,
        ctx: Context | None = None,
        prop: FnProperty = FnProperty.NORMAL,
        priority: int = 0,
    ) -> None:
        require_stack(8)  # such a push makes more calls before it reaches the region
        self.fn: Any = fn
        self.reads = reads
        self.writes = writes
        self.name = name
        self.code, self.lasti = site or (None, 0)
        self.wait = self.seq = 0
        self.failure = None
        self.ctx = ctx
        self.prop = prop
        self.priority = priority
        self.asynchronous = self.internal = False
        self.push_ns = 0


class FutureBlock(DetailedBlock):
    """An operation that completes a future. It runs during shutdown, too, so that no thread waits for ever."""

    __slots__ = ()


class Waiter(OprBlock):
    """An operation without a worker: the region calls ``fn``, perhaps again after an interrupt, when it is granted."""

    __slots__ = ()


def label_of(fn: object, name: str | None) -> str:
    """Return ``name``, else the function's name; a callable object with an odd ``__qualname__`` is named by its class.

    Never raises: it runs on workers, where no caller could catch an error, and may call user code.
    """
    if name is None and type(fn) is FunctionType:  # fast path without user code, for traces
        qualname = fn.__qualname__
        if type(qualname) is str and qualname:
            return qualname
    with suppress(BaseException):
        if name:
            return str.__str__(str(name))
    for attribute in ("__qualname__", "__name__"):  # ufuncs of NumPy 2.0 have only the second
        with suppress(BaseException):
            qualname = getattr(fn, attribute)
            if type(qualname) is str and qualname:
                return qualname
    return _class_name(type(fn))


def runs(fn: object) -> bool:
    """Return whether ``fn`` is a plain function that :func:`check_runs` would accept."""
    return type(fn) is FunctionType and not fn.__code__.co_flags & _RUNS_NOTHING


def check_runs(fn: object, label: str) -> None:
    """Refuse functions that only create a coroutine or a generator when called.

    Raises:
        EngineError: ``fn``, or the function of a partial, is ``async def`` or contains ``yield``.
    """
    while isinstance(fn, partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    if code is None:  # an object with `__call__`
        code = getattr(getattr(type(fn), "__call__", None), "__code__", None)  # noqa: B004
    flags = getattr(code, "co_flags", 0)
    if flags & _RUNS_NOTHING:
        kind = "is a generator function" if flags & CO_GENERATOR else "is declared with async def"
        raise EngineError(
            f"{label!r} {kind}: calling it would run none of it; pass a plain function (in a coroutine, await the "
            f"arrays' vars instead)"
        )


_RUNS_NOTHING = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR

_class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
"""Getter of the name of a class, even if its metaclass overrides ``__name__``."""


class Operator:
    """A reusable operation, checked once: ``engine.push(operator)`` schedules it."""

    __slots__ = ("deleted", "engine", "fn", "name", "prop", "reads", "writes")

    def __init__(
        self,
        engine: object,
        fn: Callable[[], object],
        reads: Sequence[Var],
        writes: Collection[Var],
        prop: FnProperty,
        name: str | None,
    ) -> None:
        self.engine = engine
        self.fn: Any = fn
        self.reads = reads
        self.writes = writes
        self.prop = prop
        self.name = name
        self.deleted = False

    def __repr__(self) -> str:
        return f"<Operator {self.name!r}: {len(self.reads)} reads, {len(self.writes)} writes>"


def dedupe(reads: Sequence[Var], writes: Sequence[Var]) -> tuple[list[Var], list[Var]]:
    """Return reads and writes without duplicates, in order of first appearance. A read and written var is a write."""
    written = dict.fromkeys(writes)
    return [var for var in dict.fromkeys(reads) if var not in written], list(written)


def checked_vars(
    engine: object, const_vars: Collection[Var], mutable_vars: Collection[Var], name: str | None
) -> tuple[Sequence[Var], Collection[Var]]:
    """Return reads without duplicates, and writes. The complete check; ``push`` has a faster one for the common case.

    Raises:
        DuplicateVarError: a var is written twice, or both read and written.
        EngineError: an item is not a var, belongs to another engine, or was deleted.
    """
    what = f"operation {name!r}" if name else "the operation"
    try:
        every = (*const_vars, *mutable_vars)
    except TypeError:
        raise EngineError(f"{what}: const_vars and mutable_vars are sequences of vars: write [var] for one") from None
    for var in every:
        if getattr(var, "deleted", False):
            raise EngineError(f"{what}: {var!r} has been deleted; make a new var")
        owner = getattr(var, "engine", None)
        if owner is None:
            raise EngineError(f"{what}: expected vars made by engine.new_variable(), got {type(var).__name__}")
        if owner is not engine:
            raise EngineError(
                f"{what}: {var!r} belongs to {owner!r}, the operation was pushed to {engine!r}; make the var with this "
                f"engine's new_variable()"
            )
    reads = list(dict.fromkeys(const_vars))
    writes = list(dict.fromkeys(mutable_vars))
    if len(writes) != len(mutable_vars):
        seen: set[Var] = set()
        twice = next(v for v in mutable_vars if v in seen or seen.add(v))  # type: ignore[func-returns-value]
        raise DuplicateVarError(
            f"{what} writes {twice!r} twice, so it would wait for itself; list each var once "
            f"(weftplan.engine.dedupe(const_vars, mutable_vars) does)"
        )
    written = set(writes)
    overlap = [var for var in reads if var in written]
    if overlap:
        raise DuplicateVarError(
            f"{what} lists {overlap[0]!r} as read and as written, so it would wait for itself; list it in "
            f"mutable_vars only (weftplan.engine.dedupe(const_vars, mutable_vars) does)"
        )
    return reads, searchable(writes)


def searchable(writes: Collection[Var]) -> Collection[Var]:
    """Return ``writes`` in the same order, as a dictionary if it is long: vars test membership."""
    return writes if len(writes) < 9 or writes.__class__ is dict else dict.fromkeys(writes)
