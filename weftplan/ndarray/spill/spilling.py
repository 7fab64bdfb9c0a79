"""Chunks that can be offloaded while memory is short, and compacted while it is fragmented.

If ``WEFTPLAN_SPILL`` lists offload targets, every array has a :class:`SpillableChunk`. A step of storage's ladder
copies the least recently used chunks to a target and frees their memory. A reader of such a chunk first brings the
bytes back, which may offload others.

A chunk may be offloaded only while it has no views. Its bytes are handed out as an array to which every view refers, so
the reference count tells whether an operation, a prepared call or an exported array still uses them. The offloading
thread

1. takes the chunk's lock and the reference to its bytes: from now on readers wait for the lock;
2. checks for another reference; if there is one, it puts the bytes back;
3. copies the bytes, frees the memory, and releases the lock.

So an operation never waits for more than a copy, and the engine is not involved: a pending operation looks up its bytes
when it runs. On devices with streams the copy waits for all enqueued kernels. If the interpreter does not count
references exactly (free-threaded builds), no chunk is offloaded.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from sys import getrefcount
from typing import Any

import numpy as np

from weftplan import config, device, storage
from weftplan.device.context import Context
from weftplan.device.offload_targets import OffloadTarget, parse
from weftplan.device.stream import current_stream, no_stream
from weftplan.errors import OutOfMemoryError
from weftplan.ndarray import pushing
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.memory.release import dead, drain
from weftplan.ndarray.spill import spill_ahead
from weftplan.storage import Allocation, Resource, offload, relief
from weftplan.storage.recording import address_of
from weftplan.support import slots
from weftplan.support.array_types import RawArray

LEAST = 4096
"""Smaller chunks stay: their copies cost more time than they free memory."""
_tick = itertools.count().__next__


class _Setting:
    """The effect of :func:`start`."""

    def __init__(self) -> None:
        self.targets: tuple[OffloadTarget, ...] = ()
        """Offload targets; empty: no array is offloaded."""
        self.movable = False
        """Whether arrays may move within their pools even without offload targets."""


_setting = _Setting()
_members: dict[int, weakref.ref[SpillableChunk]] = {}
"""Chunks with memory that may be offloaded or moved, by id."""


def _reference_count(raw: object) -> int:
    """Return the reference count of ``raw``; compare it with :data:`_ALONE`."""
    return getrefcount(raw)


class SpillableChunk(Chunk):
    """A chunk whose bytes may be offloaded while they have no views."""

    __slots__ = ("_allocation", "_moving", "_target", "_used", "is_offloading")
    movable = True
    is_offloading: bool
    """Whether ``spill_ahead.py`` has scheduled an offload and no return since; only that module sets it."""

    def __init__(self, ctx: Context, nbytes: int, **options: Any) -> None:
        # Held while the bytes move. A mover that cannot acquire it leaves the chunk alone; an access waits for it.
        self._moving = threading.Lock()
        self._target: offload.Offloaded | None = None
        """The offloaded bytes while ``_raw`` is None. Guarded by ``_moving``."""
        self._allocation: tuple[Resource, Allocation] | None = None
        """The resource and allocation of the bytes, while they may move there. Guarded by ``_moving``."""
        self._used = _tick()
        self.is_offloading = False
        super().__init__(ctx, nbytes, **options)
        if self._raw is not None:
            assert isinstance(self._release, partial)
            free: Any = self._release.func
            self._allocation = free.__self__, self._release.args[0]
            self._raw = counted(self._raw)
            self._enrol()
            if self.may_leave:
                spill_ahead.came(self)

    @property
    def raw(self) -> RawArray:
        """A flat uint8 array of exactly ``nbytes``, which do not move while a view of it exists.

        Only operations that declared the var may use it, or a thread that has waited for the var.
        """
        self._used = _tick()
        raw = self._raw
        return raw if raw is not None else self._first_use()

    @property
    def may_leave(self) -> bool:  # type: ignore[override]
        """Whether the chunk is large enough to be worth a copy."""
        return self.nbytes >= LEAST

    def return_beside(self) -> None:
        """Bring the bytes back in the order of the current stream, if there is one.

        Only operations that declared the var as written may call this.
        """
        self._first_use(stream_ordered=True)

    def _first_use(self, *, stream_ordered: bool = False) -> RawArray:
        if dead.pending:
            drain()
        with self._moving:  # wait for a copy in progress
            if self._raw is not None:
                return self._raw
        resource, allocation = self._take()
        offloaded = used = None
        try:
            with self._moving:
                raw = self._raw
                if raw is None:  # else another reader was faster
                    raw = counted(allocation.raw)
                    offloaded = self._target
                    if offloaded is not None:
                        offloaded.read(raw, self.context, stream_ordered=stream_ordered)
                    self._target, self._release, self._raw = None, partial(resource.free, allocation), raw
                    self._allocation = resource, allocation
                    used = allocation
                    if offloaded is None:
                        joint_allocation.first_memory(self)
        finally:
            if used is None:
                resource.free(allocation)
        if offloaded is not None:
            if stream_ordered:
                _free_behind(*offloaded.given_up())  # after the copy
            else:
                offloaded.free()
        if used is not None:
            self._enrol()
            if not stream_ordered and self.may_leave:
                spill_ahead.came(self)
        return raw

    def _enrol(self) -> None:
        if (_setting.targets or _setting.movable) and self.nbytes >= LEAST:
            _members[id(self)] = weakref.ref(self)

    def leave(self, targets: tuple[OffloadTarget, ...], *, stream_ordered: bool = False) -> bool:
        """Offload the bytes; return False if they are in use.

        Args:
            targets: offload targets, in order of preference.
            stream_ordered: copy in the order of the current stream, if any, for operations that declared the var.
                Otherwise nothing may be pending on the device.

        Raises:
            OutOfMemoryError: no target has room. The bytes stay in place.
        """
        if not self._moving.acquire(blocking=False):
            return False
        try:
            raw, self._raw = self._raw, None
            if raw is None:
                return False
            offloaded = None
            try:
                stream = current_stream() if stream_ordered else None
                if stream is not None:  # enqueued kernels use the bytes, too
                    stream.record().synchronize()
                if _reference_count(raw) == _ALONE:
                    offloaded = offload.offload(raw, self.context, targets, self._origin, stream_ordered=stream_ordered)
            finally:
                if offloaded is None:
                    self._raw = raw
            if offloaded is None:
                return False
            reservation, release = self._allocation, self._release
            self._release, self._target, self._allocation = offloaded.free, offloaded, None
        finally:
            self._moving.release()
        del raw
        _members.pop(id(self), None)
        if not stream_ordered:
            spill_ahead.gone(self)
        if stream is not None and reservation is not None:
            _free_behind(*reservation)  # after the copy
            return True
        if stream is not None:
            stream.synchronize()
        if release is not None:
            release()
        return True

    def relocate(self) -> int:
        """Move the bytes to a lower address of their pool; return the bytes moved, 0 if in use or if no room is free.

        Nothing may be pending on the device.
        """
        if not self._moving.acquire(blocking=False):
            return 0
        try:
            raw, self._raw = self._raw, None
            if raw is None:
                return 0
            moved = 0
            try:
                if self._allocation is not None and _reference_count(raw) == _ALONE:
                    resource, allocation = self._allocation
                    moved = resource.relocate(allocation)
                    if moved:
                        raw = counted(allocation.raw)
            finally:
                self._raw = raw
            return moved
        finally:
            self._moving.release()

    @property
    def keeper(self) -> object:
        """An object that keeps the current bytes of :attr:`raw` in place while it is referenced."""
        return self.raw, self._release

    def drop(self) -> None:
        """Free the memory, on the device or at an offload target; do nothing if there is none.

        The contents are undefined afterwards.
        """
        with self._moving:
            release, self._release, self._raw, self._target, self._allocation = self._release, None, None, None, None
        _members.pop(id(self), None)
        spill_ahead.gone(self)
        if release is not None:
            release()

    def drop_in_order(self) -> None:
        """Free the memory as :meth:`drop` does, in the order of the current stream, without waiting for it."""
        with self._moving:
            reservation = self._allocation if self._raw is not None else None
            if reservation is not None:
                self._release = self._raw = self._allocation = None
        if reservation is None:
            self.drop()
            return
        _members.pop(id(self), None)
        spill_ahead.gone(self)
        _free_behind(*reservation)

    @property
    def is_offloaded(self) -> bool:
        """Whether the bytes are offloaded."""
        return self._target is not None

    def __del__(self) -> None:
        _members.pop(id(self), None)
        spill_ahead.gone(self)
        super().__del__()


def _free_behind(resource: Resource, allocation: Allocation) -> None:
    resource.free_behind(allocation)


def counted(raw: RawArray) -> RawArray:
    """Return the same bytes as an array to which all its views refer, so that its reference count includes them.

    NumPy views otherwise refer to the base of ``raw``. If nothing may be offloaded or moved, return ``raw`` unchanged.
    """
    if not _setting.targets and not _setting.movable:
        return raw
    if raw.__class__ is np.ndarray:
        return np.frombuffer(raw.data, np.uint8)
    return raw.__class__(raw.shape, raw.dtype, raw.data)


def _measured() -> int:
    raw = np.empty(0, np.uint8)
    return _reference_count(raw)


_ALONE = _measured() if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""Value of :func:`_reference_count` without other references; 0, which it never returns, if counts are not exact."""


def _settled(context: Context) -> list[SpillableChunk]:
    """Synchronize a device and return its chunks that may be offloaded or moved, least recently used first."""
    chunks = [chunk for ref in list(_members.values()) if (chunk := ref()) is not None and chunk.context == context]
    chunks.sort(key=lambda chunk: chunk._used)
    chunk_device = device.get(context)
    if chunks and chunk_device.asynchronous:  # enqueued kernels use bytes, and may hold references
        with no_stream():
            chunk_device.synchronize()
    return chunks


def _compact(context: Context) -> int:
    """Move chunks to lower addresses, the highest first, until no chunk can move; return the bytes moved."""
    total, chunks = 0, [(address_of(raw), chunk) for chunk in _settled(context) if (raw := chunk._raw) is not None]
    chunks.sort(key=lambda pair: -pair[0])
    raw = None  # a remaining reference would make the last chunk count as used
    while moved := sum([chunk.relocate() for _, chunk in chunks]):
        total += moved
    return total


def _move_together(context: Context, nbytes: int) -> bool:
    """Compact the pool if enough bytes are free but fragmented; a step of the ladder."""
    if not _members:
        return False
    resource = storage.in_use().get(context)
    return resource is not None and resource.statistics().cached_bytes >= nbytes and _compact(context) > 0


def _offload_arrays(context: Context, nbytes: int) -> bool:
    """Offload the least recently used arrays until ``nbytes`` are freed; a step of the ladder."""
    if not _setting.targets:
        return False
    freed, chunks = 0, _settled(context)
    spill_ahead.short(context, nbytes, chunks)
    for chunk in chunks:
        try:
            if chunk.leave(_setting.targets):
                freed += chunk.nbytes
        except OutOfMemoryError as error:
            relief.explain(f"Nothing could be sent elsewhere (WEFTPLAN_SPILL): {error}")
            break
        if freed >= nbytes:
            break
    return freed > 0


relief.add(26, _move_together)
relief.add(28, _offload_arrays, retries=True)
slots.COMPACTOR.fill(_compact)


def start(targets: tuple[OffloadTarget, ...], *, movable: bool = False) -> None:
    """Let new arrays be offloaded to these targets; with targets or ``movable``, also let them move within their pools.

    Raises:
        DeviceError: a folder has another number in this process already.
    """
    device.name_folders(targets)
    _setting.targets, _setting.movable = targets, movable
    spill_ahead.forget()
    slots.MAKE_ROOM.value = partial(spill_ahead.make_room, targets) if targets else None
    slots.TASK_MEMORY.value = pushing.holding if targets else None
    slots.ARRAY_CHUNK.value = SpillableChunk if targets or movable else Chunk


def active() -> bool:
    """Return whether arrays may be offloaded."""
    return bool(_setting.targets)


def listed() -> tuple[OffloadTarget, ...]:
    """Return the current offload targets."""
    return _setting.targets


def moving() -> bool:
    """Return whether arrays may be offloaded or moved."""
    return bool(_setting.targets or _setting.movable)


def _first_chunk(*args: Any, **kwargs: Any) -> Chunk:
    """Make the first array's chunk after reading the setting; ``true``, the default, concerns only budgeted plans."""
    text = config.process("WEFTPLAN_SPILL")
    start(() if text.lower() in ("true", "1") else parse(text), movable=config.process("WEFTPLAN_STORAGE_COMPACT"))
    chunk: Chunk = slots.ARRAY_CHUNK.get()(*args, **kwargs)
    return chunk


@contextmanager
def using(text: str, *, movable: bool = False) -> Iterator[None]:
    """Offload arrays made in the ``with`` block to the targets that ``text`` lists, as in ``WEFTPLAN_SPILL``."""
    before_class, previous, moved = slots.ARRAY_CHUNK.value, _setting.targets, _setting.movable
    start(parse(text), movable=movable)
    try:
        yield
    finally:
        start(previous, movable=moved)
        slots.ARRAY_CHUNK.value = before_class


slots.ARRAY_CHUNK.value = _first_chunk
