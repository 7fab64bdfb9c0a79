"""Chunks: one memory allocation together with one engine var.

The chunk of a result allocates inside the operation that writes it first (``delay_alloc``), as in MXNet. A pending
operation needs no memory for its result, so a loop that never waits takes no more memory than a loop that waits. If the
allocation fails, that operation fails, and the error is raised at the wait.

Any thread may make and drop chunks. The bytes may be accessed only by an operation that declared the var, or by a
thread that has waited for it. ``release.py`` returns the memory of a dead chunk, ``pushing.py`` pushes operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from sys import getrefcount
from typing import Any, Self, TypeVar

from weftplan import engine, storage
from weftplan.device.context import Context
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.locks import Lock, consistent_in_children
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.memory.origin import origin_of
from weftplan.ndarray.memory.release import CLOSED, FEW, SMALL, ArrayFreeList, dead, drain, sweep
from weftplan.storage import Allocation, Resource, relief
from weftplan.support.array_types import RawArray
from weftplan.support.slots import ARRAY_CHUNK

Watcher = TypeVar("Watcher", bound=Callable[[], object])
Returner = TypeVar("Returner", bound=Callable[[Context], bool])
_delay_lock = consistent_in_children(Lock())
"""Makes the test of ``_raw`` and its first assignment one step: two operations may use a delayed chunk at a time."""


class Chunk:
    """Bytes on one context, and the var that orders access to them.

    Args:
        ctx: the context of the memory.
        nbytes: the number of bytes, at least 0.
        delay_alloc: allocate at first use of :attr:`raw` instead of now.
        name: shown in out-of-memory reports and by the engine.
        prompt: first free all dead chunks; False: a few small dead chunks may wait (see :class:`DeadChunks`).

    Attributes:
        var: the engine var; every operation on the bytes declares it.
        engine: the engine that made the var.

    Raises:
        OutOfMemoryError: storage cannot serve the request, even after freeing dead chunks.
    """

    __slots__ = (
        "__weakref__",
        "_free_list",
        "_origin",
        "_raw",
        "_release",
        "_resource",
        "_view",
        "context",
        "engine",
        "name",
        "nbytes",
        "var",
    )
    _origin: object
    """The origin of the memory, for reports."""
    _raw: RawArray | None
    _release: Callable[[], object] | None
    _resource: Resource | None
    """The resource for a delayed allocation: the resource in force when the chunk was made."""
    _free_list: ArrayFreeList | None
    """The free list that takes var and memory when the chunk dies. None if another object owns the memory; the chunk
    then may keep more memory alive than ``nbytes``."""
    _view: Any
    """If its free list has room: all its bytes as an array of the free list's shape and dtype."""
    may_leave = False
    """Whether the bytes may be offloaded and are worth a copy."""
    movable = False
    """Whether the memory may move: typed views of it must not be kept beyond an operation."""

    def __init__(
        self, ctx: Context, nbytes: int, *, delay_alloc: bool = False, name: str | None = None, prompt: bool = True
    ) -> None:
        if dead.queue and (prompt or dead.pending):
            sweep()
        self.context = ctx
        self.nbytes = nbytes
        self.name = name
        self._free_list = CLOSED
        self._origin = origin_of(name, nbytes)
        if delay_alloc and nbytes:  # zero bytes are allocated now: a delay gains nothing
            self._release = self._raw = None
            try:
                self._resource = storage.get(ctx)
            except MXNetError:  # the device is absent; the operation will report that error
                self._resource = None
        else:
            self._resource = None
            resource, allocation = take(ctx, nbytes, self._origin)
            self._release = partial(resource.free, allocation)
            self._raw = allocation.raw
        current = engine.get()
        self.engine = current
        self.var = current.new_variable(name)

    def _take(self) -> tuple[Resource, Allocation]:
        return take(self.context, self.nbytes, self._origin, self._resource)

    @property
    def raw(self) -> RawArray:
        """A flat uint8 array of exactly ``nbytes``; only for operations that declared the var, or after a wait."""
        raw = self._raw  # read once: another thread may take it meanwhile
        return raw if raw is not None else self._first_use()

    def _first_use(self) -> RawArray:
        if dead.pending:  # the loop that pushed this may be over, so that no later push frees the dead chunks
            sweep()
        resource, allocation = self._take()
        # Allocate without the lock, because allocation may wait for other operations. Two readers of a chunk that was
        # never written may both get this far.
        with _delay_lock:
            if self._raw is None:
                self._release = partial(resource.free, allocation)
                self._raw = allocation.raw
                return self._raw
        resource.free(allocation)
        return self._raw

    @property
    def address(self) -> int:
        """A number that identifies the current bytes while :attr:`raw` is referenced."""
        return id(self._raw)

    @property
    def keeper(self) -> object:
        """An object that keeps the current bytes of :attr:`raw` allocated while referenced, even if the chunk moves."""
        return self._release

    def close(self) -> None:
        """Free the memory now; the owner must know that no operation is pending and that no views exist."""
        release, self._release, self._raw = self._release, nothing, None
        if release is not None:
            release()

    @property
    def allocated(self) -> bool:
        """Whether memory is allocated; False for a delayed chunk before its first use."""
        return self._raw is not None

    @classmethod
    def wrap(cls, ctx: Context, raw: RawArray, *, name: str | None = None) -> Chunk:
        """Make a chunk over memory with another owner; ``raw`` (flat uint8) is kept alive until the var is idle."""
        return cls._over(ctx, raw, raw, name)

    def part(self, offset: int, nbytes: int) -> Chunk:
        """Make a chunk with its own var over ``nbytes`` bytes of this chunk from ``offset``.

        It keeps this chunk's memory alive. The engine sees no relation between the two vars: a caller that uses
        overlapping parts, or a part and the whole, must order them.

        Raises:
            MXNetError: the part does not lie within this chunk.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise MXNetError(f"part [{offset}, {offset + nbytes}) does not lie within {self!r}")
        return Chunk._over(self.context, self.raw[offset : offset + nbytes], self, self.name)

    def cut(self, sizes: Iterable[int]) -> list[Chunk]:
        """Make consecutive parts with these sizes from the start of this chunk; they must fit in it.

        This is faster than :meth:`part` for the hundreds of parts that a bind makes.
        """
        raw, parts, begin = self.raw, [], 0
        for nbytes in sizes:
            parts.append(raw[begin : begin + nbytes])
            begin += nbytes
        return Chunk._each_over(self.context, parts, self, self.name)

    @classmethod
    def _over(cls, ctx: Context, raw: RawArray, owner: object, name: str | None) -> Self:
        return cls._each_over(ctx, (raw,), owner, name)[0]

    @classmethod
    def _each_over(cls, ctx: Context, parts: Iterable[RawArray], owner: object, name: str | None) -> list[Self]:
        """Make a chunk over each of ``parts``, flat uint8; each holds ``owner`` until its var's last operation."""
        if dead.queue:
            sweep()
        current = engine.get()
        chunks = []
        for raw in parts:
            chunk = cls.__new__(cls)
            # The reference to the owner lives in the release, so it ends only after the var's last operation.
            chunk._release, chunk._raw, chunk._free_list = partial(_let_go, owner), raw, None
            chunk.context, chunk.nbytes, chunk.name = ctx, int(raw.nbytes), name
            chunk.engine, chunk.var = current, current.new_variable(name)
            chunks.append(chunk)
        return chunks

    def __del__(self) -> None:
        # Only append: this may run inside any lock.
        try:
            free_list, var = self._free_list, self.var
            if (
                free_list is not None
                and len(free_list.entries) < free_list.capacity
                and getrefcount(var) == _ALONE
                and getrefcount(self._view) <= _VIEWED
                and var.failure is None
                and var.events is None
            ):
                free_list.entries.append((var, self._release, self._raw, self._view))
                return
            dead.queue.append((self.engine, var, self.context, self._release or nothing))
            if free_list is None or self.nbytes > SMALL or len(dead.queue) > FEW:
                dead.pending.append(self.nbytes)
        except (AttributeError, TypeError):  # its construction failed, or the interpreter has cleared this module
            return

    def __repr__(self) -> str:
        return f"<Chunk {self.name or ''} of {self.nbytes:,} bytes on {self.context}>"


class MovableChunk(Chunk):
    """A chunk over a range of another owner's memory that may move; its var and the arrays on it stay."""

    __slots__ = ("_bring_back", "_watchers")
    movable = True
    _watchers: list[weakref.WeakMethod[Any]]
    _bring_back: weakref.WeakMethod[Any] | None
    """The owner's method that brings the bytes of a context back to memory."""

    @classmethod
    def over(cls, ctx: Context, raw: RawArray, owner: object, *, name: str | None = None) -> Self:
        """Make a chunk of the bytes ``raw`` (flat uint8), which ``owner`` keeps allocated.

        The chunk holds ``owner`` until the var's last operation.
        """
        return cls.several(ctx, (raw,), owner=owner, name=name)[0]

    @classmethod
    def several(cls, ctx: Context, parts: Iterable[RawArray], *, owner: object, name: str | None = None) -> list[Self]:
        """Make a chunk as :meth:`over` does for each of ``parts``; a bind makes thousands."""
        chunks = cls._each_over(ctx, parts, owner, name)
        for chunk in chunks:
            chunk._watchers, chunk._bring_back = [], None
        return chunks

    def watch(self, method: weakref.WeakMethod[Watcher]) -> None:
        """Call a bound method, as long as its object exists, whenever the bytes have moved: old views are invalid then.

        An object that keeps typed views beyond an operation needs this. It passes the same reference to all its chunks.
        """
        self._watchers.append(method)

    def move(self, raw: RawArray, owner: object) -> None:
        """Use ``raw``, kept by ``owner``, as the bytes from now on; the caller has copied the contents.

        No operation on the var may be pending, because it may have looked up the old bytes.

        Raises:
            MXNetError: ``raw`` is smaller than the bytes that arrays on this chunk may use.
        """
        if raw.nbytes < self.nbytes:
            raise MXNetError(f"{self!r} cannot move to {raw.nbytes:,} bytes: they must be at least as many")
        self._raw, self.nbytes, self._release = raw, int(raw.nbytes), partial(_let_go, owner)
        self._tell()

    def leave(self) -> None:
        """Release the bytes; the chunk cannot be used until the next :meth:`move`."""
        self._raw = self._release = None
        self._tell()

    def withhold(self) -> RawArray | None:
        """Take the bytes away and return them; the next user calls the method set by :meth:`returned_by`."""
        raw, self._raw = self._raw, None
        return raw

    def returned_by(self, method: weakref.WeakMethod[Returner]) -> None:
        """Call a bound method with the context, as long as its object exists, when absent bytes are used.

        It returns whether the bytes have been back since then.
        """
        self._bring_back = method

    def _first_use(self) -> RawArray:
        method = None if self._bring_back is None else self._bring_back()
        # The bytes may be leaving again, or withheld by a thread that will notice that they are needed here.
        while method is not None and method(self.context):
            raw = self._raw
            if raw is not None:
                return raw
        return super()._first_use()

    def forget_views(self) -> None:
        """Make the watchers drop their views of the bytes."""
        self._tell()

    def _tell(self) -> None:
        for method in [watcher for ref in self._watchers if (watcher := ref()) is not None]:
            method()
        self._watchers = [ref for ref in self._watchers if ref() is not None]

    def _take(self) -> tuple[Resource, Allocation]:
        raise lost(self)


class _Counted:
    """A model of a chunk whose var and view are referenced only by the chunk and the dying array."""

    __slots__ = ("_view", "var")

    def __init__(self) -> None:
        self.var, self._view = object(), object()

    def __call__(self) -> tuple[int, int]:
        var = self.var
        return getrefcount(var), getrefcount(self._view) + 1


_ALONE, _VIEWED = _Counted()()
"""The reference counts with which a finalizer may put var and view on a free list."""
ARRAY_CHUNK.fill(Chunk)


def take(ctx: Context, nbytes: int, origin: object, resource: Resource | None = None) -> tuple[Resource, Allocation]:
    """Allocate from a resource (by default the resource in force); return the resource and the allocation.

    If the allocation fails, it waits for pending operations and retries, and executor runs that have not begun are
    delayed meanwhile. Inside a joint allocation (``joint_allocation.py``) it fails immediately instead.

    Raises:
        OutOfMemoryError: there is no room even then.
    """
    if resource is None:
        resource = storage.get(ctx)
    try:
        return resource, resource.allocate(nbytes, name=origin)
    except OutOfMemoryError:  # storage's ladder has already tried dead chunks and pending frees
        if joint_allocation.refused(ctx):
            raise
    with relief.Starved(ctx):
        return resource, joint_allocation.patiently(partial(_allocate_after_progress, resource, nbytes, origin), ctx)


def _allocate_after_progress(resource: Resource, nbytes: int, origin: object) -> Allocation:
    """Allocate after freeing the chunks that have died meanwhile."""
    drain(everything=True)
    return resource.allocate(nbytes, name=origin)


def lost(what: object) -> OutOfMemoryError:
    """Return the error for a use of bytes that could not be allocated again."""
    return OutOfMemoryError(
        f"{what!r} has lost its memory: it was given back to make room for a larger executor of the same pool, and "
        f"could not be taken again; free memory and bind again"
    )


def _let_go(owner: object) -> None:
    """Do nothing; a ``partial`` of this function keeps ``owner`` alive until it is dropped."""


def nothing() -> None:
    """Do nothing: for an operation that only orders others, and for the release of a chunk that never had memory."""
