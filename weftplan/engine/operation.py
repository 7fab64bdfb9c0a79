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
    """What kind of work an operation is: it decides the queue (MXNet's numbers up to 7)."""

    NORMAL = 0
    COPY_FROM_GPU = 1
    COPY_TO_GPU = 2
    CPU_PRIORITIZED = 3
    ASYNC = 4
    """The function only starts asynchronous work; it may run on the pushing thread."""
    DELETE_VAR = 5
    """The destruction of a var: it jumps queues, is never skipped, and runs during shutdown, too."""
    GPU_PRIORITIZED = 6
    NO_SKIP = 7
    """The operation runs even when an input has failed."""
    TASK = 8
    """A function on plain arrays (not MXNet's): it has workers of its own, as many as there are cores."""


def checked_property(prop: int) -> FnProperty:
    """``prop`` as an FnProperty; MXNet's numbers are taken, too.

    Raises:
        EngineError: it is none.
    """
    if type(prop) is FnProperty:
        return prop
    try:
        return FnProperty(prop)
    except ValueError:
        names = ", ".join(one.name for one in FnProperty)
        raise EngineError(f"prop must be one of FnProperty's {names}, got {prop!r}") from None


def nothing() -> None:
    """Does nothing."""


def _around(inner: Callable[[], None]) -> Callable[[], None]:
    """A function that calls ``inner``.

    It has code of its own, since the interpreter is quick where a line of code always calls the same function.
    """

    def call() -> None:
        inner()

    call.__code__ = call.__code__.replace()
    return call


_NESTED = [nothing]
"""At index n: a function that makes n calls within each other."""
for _ in range(30):
    _NESTED.append(_around(_NESTED[-1]))

room = _NESTED[3]
"""Make four calls within each other, this one included, since what carries out a request needs no more. It raises
RecursionError where the thread is too close to its limit, and then nothing has happened yet."""


def ample_room(calls: int = 20) -> None:
    """Make as many calls within each other (at most 30) as something else than a request needs; see :data:`room`."""
    _NESTED[calls]()


class OprBlock:
    """One scheduled execution. Changed inside the engine's region until it is dispatched, then owned by its worker.

    ``wait`` counts the grants that are missing; ``seq`` is 0 until the operation is registered with its vars. This
    class is a push without options, the most frequent one: what such a push cannot set is the same for all.

    Making one is the first step of everything that asks something of the region, so it is made only where there is
    ``room`` for the rest: an act at the limit of recursion raises before anything has happened, or happens.
    """

    __slots__ = ("code", "failure", "fn", "lasti", "name", "reads", "seq", "wait", "writes")

    ctx: Context | None = None
    prop: FnProperty = FnProperty.NORMAL
    priority: int = 0
    asynchronous: bool = False
    own: bool = False
    """The package pushed it for itself: a waiting thread may run it. A user's function runs on workers."""
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
        room()
        self.fn: Any = fn
        self.reads = reads
        self.writes = writes
        self.name = name
        self.code = code
        self.lasti = lasti
        self.wait = 0
        self.seq = 0
        self.failure: Any = None
        """Set by whoever ran it: a failure, a mapping of failures (bulk), or None."""

    @property
    def site(self) -> Site:
        """Where it was pushed."""
        return None if self.code is None else (self.code, self.lasti)

    @property
    def label(self) -> str:
        """Its name, or its function's."""
        return label_of(self.fn, self.name)

    def where(self) -> str:
        """``file:line`` of the push, or ``an unknown line``."""
        return site_text(self.site)

    def __repr__(self) -> str:
        return f"<operation {self.label!r} #{self.seq} pushed at {self.where()}, waits for {self.wait}>"


class OwnBlock(OprBlock):
    """A push of the package for itself."""

    __slots__ = ()
    own = True


class TaskBlock(OprBlock):
    """A push of a function that has workers of its own."""

    __slots__ = ()
    prop = FnProperty.TASK


class TracedBlock(OprBlock):
    """A push while there is a tracer; it notes the time."""

    __slots__ = ("own", "push_ns")


class DetailedBlock(OprBlock):
    """A push that says more than function, vars and name."""

    __slots__ = ("asynchronous", "ctx", "own", "priority", "prop", "push_ns")

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
        ample_room(8)  # more is done before such a push gets into the region
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
        self.asynchronous = self.own = False
        self.push_ns = 0


class FutureBlock(DetailedBlock):
    """Settles a future: it runs while the process ends, too, or whoever waits for the future would wait for ever."""

    __slots__ = ()


class Waiter(OprBlock):
    """An operation that no worker runs: ``fn`` is called inside the region, where it is granted its vars.

    ``fn`` may be called again after an interrupt (an open lock refuses a second release, which is ignored).
    """

    __slots__ = ()


def label_of(fn: object, name: str | None) -> str:
    """``name``, or the function's own; a callable object with an odd ``__qualname__`` is named by its class.

    Never raises: this runs on workers, where nobody would catch it, and what it asks may be the user's code.
    """
    if name is None and type(fn) is FunctionType:  # nothing of the user's: a trace asks this of each operation
        own = fn.__qualname__
        if type(own) is str and own:
            return own
    with suppress(BaseException):
        if name:
            return str.__str__(str(name))
    for attribute in ("__qualname__", "__name__"):  # NumPy 2.0's ufuncs have the second only
        with suppress(BaseException):
            own = getattr(fn, attribute)
            if type(own) is str and own:
                return own
    return _class_name(type(fn))


def runs(fn: object) -> bool:
    """True where ``fn`` is a plain function, of which :func:`check_runs` would say nothing."""
    return type(fn) is FunctionType and not fn.__code__.co_flags & _RUNS_NOTHING


def check_runs(fn: object, label: str) -> None:
    """Refuse functions of which a call runs nothing: it only makes a coroutine or a generator.

    Raises:
        EngineError: ``fn``, or what it is a partial of, is ``async def`` or has a ``yield``.
    """
    while isinstance(fn, partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    if code is None:  # an object with a method for its calls
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
"""The name of a class, whatever its metaclass makes of ``__name__``."""


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
    """Each var once; a var that is read and written counts as written. Order of first appearance is kept."""
    kept = dict.fromkeys(writes)
    return [var for var in dict.fromkeys(reads) if var not in kept], list(kept)


def checked_vars(
    engine: object, const_vars: Collection[Var], mutable_vars: Collection[Var], name: str | None
) -> tuple[Sequence[Var], Collection[Var]]:
    """Reads without duplicates, and writes; the slow, complete check behind the fast one in ``push``.

    Raises:
        DuplicateVarError: a var is written twice, or read and written.
        EngineError: something is no var, belongs to another engine, or was deleted.
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
    kept = set(writes)
    both = [var for var in reads if var in kept]
    if both:
        raise DuplicateVarError(
            f"{what} lists {both[0]!r} as read and as written, so it would wait for itself; list it in "
            f"mutable_vars only (weftplan.engine.dedupe(const_vars, mutable_vars) does)"
        )
    return reads, searchable(writes)


def searchable(writes: Collection[Var]) -> Collection[Var]:
    """``writes`` in the same order, in a form in which one is found quickly: a var asks whether it is among them."""
    return writes if len(writes) < 9 or writes.__class__ is dict else dict.fromkeys(writes)
