"""Chunks: one allocation joined to one engine var; and how work on them is pushed.

The chunk of a result takes its memory inside the operation that writes it first (``delay_alloc``), as in MXNet: what is
pushed and not run yet needs none, so a loop that nobody waits for takes no more memory than one that waits. A refusal
of memory is then a failure of that operation, raised at the wait. Hence work is pushed as a *kernel* and the arrays
that it gets (:func:`work`): their memory is looked up when the operation runs.

A chunk's memory may go back to storage only when every operation that was pushed on its var has run, so it is freed by
the engine: ``delete_variable(var, free)``, or at once where nobody else has the var, since no operation can be pending
then. A chunk is collected at moments nobody chooses, possibly inside a lock of the engine or of storage; its finalizer
therefore only appends to a deque, which a later push or new chunk empties.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from sys import getrefcount
from typing import Any, Self

import numpy as np

from weftplan import device, engine, storage
from weftplan.device.context import Context, cpu
from weftplan.engine import FnProperty
from weftplan.errors import EngineError, MXNetError, OutOfMemoryError
from weftplan.locks import Lock, whole_in_children
from weftplan.ndarray.origin import origin_of
from weftplan.storage import Allocation, Resource, relief

_dead: deque[tuple[Any, Any, Context, Callable[[], object]]] = deque()
"""(engine, var, context, what to do when the var is idle) of collected chunks."""
_due: deque[None] = deque()
"""Not empty when ``_dead`` is more than a few small chunks. Arithmetic on small arrays, one push after the other, looks
at this only: most chunks will be given back without an operation then, because those on their vars are over."""
_SMALL, _FEW = 4096, 1024
"""Bytes, chunks: together the most that waits, 4 MiB."""
_coming: deque[None] = deque()
"""One element for each memory that the engine will give back when the operations on it are over."""
_PATIENCE_S = 10.0
_delay_lock = whole_in_children(Lock())
_NONE = object()


class Chunk:
    """Bytes on one context, and the var that orders access to them.

    Args:
        ctx: where.
        nbytes: how many, at least 0.
        delay_alloc: take the memory at first use of :attr:`raw` instead of now.
        name: shown in out-of-memory reports and by the engine.
        prompt: first give back what is dead, all of it; False: a few small chunks may wait (see :data:`_due`).

    Attributes:
        var: the engine var; every operation on the bytes declares it.
        engine: the engine that made the var.

    Raises:
        OutOfMemoryError: storage cannot serve the request, even after freeing what is dead.
    """

    __slots__ = (
        "__weakref__",
        "_origin",
        "_raw",
        "_release",
        "_resource",
        "_small",
        "context",
        "engine",
        "name",
        "nbytes",
        "var",
    )
    _origin: object
    """What its memory is for, in reports."""
    _raw: Any
    _release: Callable[[], object] | None
    _resource: Resource | None
    """Where memory that is taken later comes from: what was in force when the chunk was made, whoever runs when."""
    _small: bool
    """It keeps at most ``_SMALL`` bytes from going back: not known of memory that others own."""
    movable = False
    """True where the memory may change: typed views of it must not be kept beyond an operation."""

    def __init__(
        self, ctx: Context, nbytes: int, *, delay_alloc: bool = False, name: str | None = None, prompt: bool = True
    ) -> None:
        if _dead and (prompt or _due):
            drain()
        self.context = ctx
        self.nbytes = nbytes
        self.name = name
        self._small = nbytes <= _SMALL
        self._origin = origin_of(name, nbytes)
        if delay_alloc and nbytes:  # no bytes are there at once: nothing is gained by waiting
            self._release = self._raw = None
            self._resource = _in_force(ctx)
        else:
            self._resource = None
            resource, allocation = take(ctx, nbytes, self._origin)
            self._release = partial(resource.free, allocation)
            self._raw = allocation.raw
        current = engine.get()
        self.engine = current
        self.var: Any = current.new_variable(name)

    def _take(self) -> tuple[Resource, Allocation]:
        return take(self.context, self.nbytes, self._origin, self._resource)

    @property
    def raw(self) -> Any:
        """Flat uint8 array of exactly ``nbytes``: only for operations that declared the var, or after a wait."""
        return self._raw if self._raw is not None else self._first_use()

    def _first_use(self) -> Any:
        if _due:  # the loop that pushed this may be over, so that nobody else gives back what is dead
            drain()
        resource, allocation = self._take()
        # Not allocated under the lock: that may take until others have ended. Two readers of what was never written
        # may both have got this far.
        with _delay_lock:
            if self._raw is None:
                self._release = partial(resource.free, allocation)
                self._raw = allocation.raw
                return self._raw
        resource.free(allocation)
        return self._raw

    @property
    def keeper(self) -> object:
        """What keeps the bytes that :attr:`raw` has now from going back to storage, even if the chunk moves."""
        return self._release

    def close(self) -> None:
        """Give the memory back now: for owners that know that no operation is pending and nobody else looks at it."""
        release, self._release, self._raw = self._release, nothing, None
        if release is not None:
            release()

    @property
    def allocated(self) -> bool:
        """False for a delayed chunk that nobody has used yet."""
        return self._raw is not None

    @classmethod
    def wrap(cls, ctx: Context, raw: Any, *, name: str | None = None) -> Chunk:
        """A chunk over memory that somebody else owns; ``raw`` (flat uint8) is kept alive until the var is idle."""
        return cls._over(ctx, raw, raw, name)

    def part(self, offset: int, nbytes: int) -> Chunk:
        """A chunk over ``nbytes`` bytes from ``offset`` of this one, with a var of its own.

        It keeps this chunk's memory alive. The engine sees no relation between the two vars: whoever uses parts that
        overlap, or a part and the whole, must order them.

        Raises:
            MXNetError: the part does not lie within this chunk.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MXNetError(f"part [{offset}, {offset + nbytes}) does not lie within {self!r}")
        return Chunk._over(self.context, self.raw[offset : offset + nbytes], self, self.name)

    @classmethod
    def _over(cls, ctx: Context, raw: Any, owner: Any, name: str | None) -> Self:
        if _dead:
            drain()
        chunk = cls.__new__(cls)
        # The reference to the owner lives in the release, so it ends only after the var's last operation.
        chunk._release = partial(_let_go, owner)
        chunk._raw = raw
        chunk._small = False
        chunk.context = ctx
        chunk.nbytes = int(raw.nbytes)
        chunk.name = name
        chunk.engine = engine.get()
        chunk.var = chunk.engine.new_variable(name)
        return chunk

    def __del__(self) -> None:
        # Only append: this may run inside any lock.
        try:
            _dead.append((self.engine, self.var, self.context, self._release or nothing))
            if not self._small or len(_dead) > _FEW:
                _due.append(None)
        except (AttributeError, TypeError):  # its construction failed, or the interpreter has cleared this module
            return

    def __repr__(self) -> str:
        return f"<Chunk {self.name or ''} of {self.nbytes:,} bytes on {self.context}>"


class MovableChunk(Chunk):
    """A range of somebody's memory that may be put elsewhere; the var, and with it every array on it, stays."""

    __slots__ = ("_watchers",)
    movable = True
    _watchers: list[weakref.WeakMethod[Callable[[], object]]]

    @classmethod
    def over(cls, ctx: Context, raw: Any, owner: Any, *, name: str | None = None) -> Self:
        """A chunk of the bytes ``raw`` (flat uint8), which ``owner`` keeps from going back to storage; the chunk holds
        ``owner`` until the var's last operation."""
        chunk = cls._over(ctx, raw, owner, name)
        chunk._watchers = []
        return chunk

    def watch(self, method: Callable[[], object]) -> None:
        """Call a bound method, as long as its object exists, whenever the bytes have moved: views of the old are dead.

        Whoever keeps typed views beyond an operation needs this.
        """
        self._watchers.append(weakref.WeakMethod(method))

    def move(self, raw: Any, owner: Any) -> None:
        """From now on the bytes are ``raw``, kept by ``owner``; the caller has copied the contents.

        Only while no operation on the var is pending: one that was pushed before may have taken the old bytes.

        Raises:
            MXNetError: ``raw`` is smaller than what arrays on this chunk may use.
        """
        if raw.nbytes < self.nbytes:
            raise MXNetError(f"{self!r} cannot move to {raw.nbytes:,} bytes: they must be at least as many")
        self._raw, self.nbytes, self._release = raw, int(raw.nbytes), partial(_let_go, owner)
        self._tell()

    def leave(self) -> None:
        """Let go of the bytes; until the next :meth:`move` the chunk cannot be used."""
        self._raw = self._release = None
        self._tell()

    def _tell(self) -> None:
        for method in [found for ref in self._watchers if (found := ref()) is not None]:
            method()
        self._watchers = [ref for ref in self._watchers if ref() is not None]

    def _take(self) -> tuple[Resource, Allocation]:
        raise OutOfMemoryError(
            f"{self!r} has lost its memory: it was given back to make room for a larger executor of the same pool, and "
            f"could not be taken again; free memory and bind again"
        )


def _in_force(ctx: Context) -> Resource | None:
    """The resource of a context; None where the device is not there, which is an error of the operation."""
    try:
        return storage.get(ctx)
    except MXNetError:
        return None


def take(ctx: Context, nbytes: int, origin: object, resource: Resource | None = None) -> tuple[Resource, Allocation]:
    """Memory from a resource (by default the one in force), and where to give it back.

    After a refusal what is pending may end first.

    Raises:
        OutOfMemoryError: there is none even then.
    """
    if resource is None:
        resource = storage.get(ctx)
    others: Iterator[None] | None = None
    while True:
        try:
            return resource, resource.allocate(nbytes, name=origin)
        except OutOfMemoryError:
            # What is dead, and frees that wait, have been tried on the ladder of storage.
            others = engine.get().others_first(_PATIENCE_S) if others is None else others
            if next(others, _NONE) is _NONE:
                raise
            drain()


def _let_go(owner: Any) -> None:
    """Hold ``owner`` until called."""


def nothing() -> None:
    """The work of an operation that only orders others, and the release of a chunk that never had memory."""


def _next(dead: deque[tuple[Any, Any, Context, Callable[[], object]]]) -> tuple[Any, Any, Context, Any, int]:
    """The first entry of ``dead``, taken out, and how many references its var has, those of this call included."""
    owner, var, context, release = dead.popleft()
    return owner, var, context, release, getrefcount(var)


_ALONE = _next(deque([(None, object(), cpu(), nothing)]))[4] if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""The count where there is no other reference; 0, which no count is, without a GIL: there it may not be exact."""


def drain() -> None:
    """Give the memory of every collected chunk back, after the operations pending on its var; cheap without any.

    Each pending operation holds its vars. So when nobody but this function has the var (CPython with a GIL counts
    that exactly) there is none, and the memory goes back at once; else the engine deletes the var in its turn.
    """
    _due.clear()
    while _dead:
        try:
            owner, var, context, release, count = _next(_dead)
        except IndexError:  # another thread took the last one
            return
        if count == _ALONE and var.failure is None and var.events is None:
            release()
            continue
        _coming.append(None)
        try:
            owner.delete_variable(var, partial(_arrive, release), context)
        except EngineError:
            # The engine has stopped for good: nothing can be pending.
            _arrive(release)


def _arrive(release: Callable[[], object]) -> None:
    """Give memory back whose var the engine has deleted."""
    try:
        release()
    finally:
        _coming.pop()


def _give_dead_back(context: Context) -> bool:
    """A rung of the ladder: what is dead."""
    if not _dead:
        return False
    drain()
    return True


def _collect_cycles(context: Context) -> bool:
    """A rung: arrays that only cycles hold."""
    gc.collect()
    return _give_dead_back(context)


def _await_frees(context: Context) -> bool:
    """A rung: frees that wait for pending operations. Where none does, or in an operation, there is no wait."""
    coming = len(_coming)
    try:
        return coming > 0 and (engine.get().settle(_PATIENCE_S) or len(_coming) < coming)
    except EngineError:  # the engine has stopped, or this thread is in the middle of its work
        return False


relief.add(10, _give_dead_back)
relief.add(30, _collect_cycles)
relief.add(40, _await_frees)


class Value:
    """Something that a kernel gets as it is, among arrays: a number, an array of NumPy."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def raw(self) -> Any:
        """The value."""
        return self.value


def work(ctx: Context, kernel: Callable[..., object], operands: list[Any]) -> Callable[[], object]:
    """The function of an operation on ``ctx``: ``kernel`` of the raw arrays of ``operands``, which have a method
    ``raw``; it empties the list when it fails."""
    if ctx.device_type == "cpu":
        return partial(compute, kernel, operands)
    place = device.get(ctx)
    return partial(compute, partial(_launch, place, kernel) if place.asynchronous else kernel, operands)


def compute(kernel: Callable[..., object], operands: list[Any]) -> None:
    """``kernel`` of the raw arrays of ``operands``; empties the list when it fails."""
    # The error is kept by the var, and by its frames keeps what they have: without the arrays, or each would keep
    # itself, its memory and that of the others.
    try:
        kernel(*[operand.raw() for operand in operands])
    except OutOfMemoryError as error:
        operands.clear()
        raise error.with_traceback(None)  # noqa: B904
    except BaseException:
        operands.clear()
        raise


def _launch(place: Any, kernel: Callable[..., object], *raws: Any) -> None:
    """Enqueue the kernel on a device whose memory has been taken on the host's time."""
    place.launch(partial(kernel, *raws))


def push_kernel(
    kernel: Callable[..., object],
    operands: list[Any],
    reads: Sequence[Any],
    writes: Sequence[Any],
    ctx: Context,
    *,
    priority: int = 0,
    name: str | None = None,
) -> None:
    """Push :func:`work`, with duplicates among the vars settled.

    Args:
        reads, writes: vars; one in both counts as written.
    """
    _push(work(ctx, kernel, operands), reads, writes, ctx, FnProperty.NORMAL, priority, name)


def push(
    fn: Callable[[], object],
    reads: Sequence[Any],
    writes: Sequence[Any],
    ctx: Context,
    *,
    prop: FnProperty = FnProperty.NORMAL,
    priority: int = 0,
    name: str | None = None,
) -> None:
    """Push ``fn``, which touches memory that is there already, launched on the device of ``ctx``; as
    :func:`push_kernel`."""
    place = device.get(ctx)
    if place.asynchronous:
        fn = partial(place.launch, fn)
    _push(fn, reads, writes, ctx, prop, priority, name)


def _push(
    fn: Callable[[], object],
    reads: Sequence[Any],
    writes: Sequence[Any],
    ctx: Context,
    prop: FnProperty,
    priority: int,
    name: str | None,
) -> None:
    if _dead:
        drain()
    if len(reads) + len(writes) > 1:
        reads, writes = engine.dedupe(reads, writes)
    engine.get().push(fn, reads, writes, ctx, prop=prop, priority=priority, name=name)


def typed(raw: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """The bytes of flat ``raw`` from ``offset`` as an array of ``shape`` and ``dtype``."""
    if raw.__class__ is np.ndarray and 0 not in shape:
        return np.ndarray(shape, dtype, raw, offset)  # a quarter of the time of the general way
    return raw[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
