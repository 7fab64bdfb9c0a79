"""Arrays that move: elsewhere while memory is short, and back before their next use; together where it is scattered.

Where ``WEFTPLAN_SPILL`` lists homes, every array is a :class:`SpillableChunk`. A rung of storage's ladder copies those
that were used least recently to a home and gives their memory back; whoever asks such a chunk for its bytes brings them
back first, which may send others away.

When a chunk may leave. Its bytes are handed out as an array of which every view keeps a reference, so the count of
references tells whether anybody looks at them: an operation, a prepared call, whoever had them exported. The thread
that sends a chunk away

1. takes the chunk's lock and the reference to its bytes: from now on whoever wants them waits for the lock;
2. looks whether there is another reference. Then the bytes are put back;
3. copies them, gives the memory back, and lets the lock go.

So an operation never waits for more than a copy, and nothing needs the engine: what is pushed and not running yet looks
for its bytes when it runs. On devices with streams the copy waits for all their work. Where the interpreter does not
count references exactly (free-threaded builds) nothing leaves.
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
from weftplan.device.homes import HomeSpec, parse
from weftplan.device.stream import current_stream, no_stream
from weftplan.errors import OutOfMemoryError
from weftplan.ndarray import pushing
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.memory.release import drain, due
from weftplan.ndarray.spill import spill_ahead
from weftplan.storage import Allocation, Resource, homes, relief
from weftplan.storage.recording import address_of
from weftplan.support import slots

LEAST = 4096
"""Smaller chunks stay: their copies cost more time than they free memory."""
_tick = itertools.count().__next__
_homes: tuple[HomeSpec, ...] = ()
"""Where arrays may wait; empty: nowhere."""
_movable = False
"""Arrays may move within their pools though there are no homes."""
_members: dict[int, weakref.ref[SpillableChunk]] = {}
"""Chunks with memory that may leave, by id."""


def _alone(raw: Any) -> int:
    """How many references there are to ``raw`` when only the caller has it."""
    return getrefcount(raw)


class SpillableChunk(Chunk):
    """A chunk whose bytes may be elsewhere while nobody uses them."""

    __slots__ = ("_home", "_moving", "_place", "_used", "sent_away")
    movable = True
    sent_away: bool
    """It has been told to leave, and not to come back since: ``spill_ahead.py`` keeps it."""

    def __init__(self, ctx: Context, nbytes: int, **options: Any) -> None:
        self._moving = threading.Lock()
        self._home: homes.Kept | None = None
        """Where the bytes are while ``_raw`` is None. Guarded by ``_moving``."""
        self._place: tuple[Resource, Allocation] | None = None
        """What the bytes were taken from, while they may move there. Guarded by ``_moving``."""
        self._used = _tick()
        self.sent_away = False
        super().__init__(ctx, nbytes, **options)
        if self._raw is not None:
            assert isinstance(self._release, partial)
            free: Any = self._release.func
            self._place = free.__self__, self._release.args[0]
            self._raw = counted(self._raw)
            self._enrol()
            if self.may_leave:
                spill_ahead.came(self)

    @property
    def raw(self) -> Any:
        """Flat uint8 array of exactly ``nbytes``, which stay where they are as long as there is a view of it: only for
        operations that declared the var, or after a wait."""
        self._used = _tick()
        raw = self._raw
        return raw if raw is not None else self._first_use()

    @property
    def may_leave(self) -> bool:  # type: ignore[override]
        """True where it is worth a copy."""
        return self.nbytes >= LEAST

    def return_beside(self) -> None:
        """Bring the bytes back in the order of the current stream, if there is one: for operations that declared the
        var as written."""
        self._first_use(beside=True)

    def _first_use(self, *, beside: bool = False) -> Any:
        if due:
            drain()
        with self._moving:  # behind a copy that is on its way
            if self._raw is not None:
                return self._raw
        resource, allocation = self._take()
        kept = taken = None
        try:
            with self._moving:
                raw = self._raw
                if raw is None:  # else another reader was quicker
                    raw = counted(allocation.raw)
                    kept = self._home
                    if kept is not None:
                        kept.read(raw, self.context, beside=beside)
                    self._home, self._release, self._raw = None, partial(resource.free, allocation), raw
                    self._place = resource, allocation
                    taken = allocation
                    if kept is None:
                        joint_allocation.first_memory(self)
        finally:
            if taken is None:
                resource.free(allocation)
        if kept is not None:
            if beside:
                _free_behind(*kept.given_up())  # behind the copy
            else:
                kept.free()
        if taken is not None:
            self._enrol()
            if not beside and self.may_leave:
                spill_ahead.came(self)
        return raw

    def _enrol(self) -> None:
        if (_homes or _movable) and self.nbytes >= LEAST:
            _members[id(self)] = weakref.ref(self)

    def leave(self, where: tuple[HomeSpec, ...], *, beside: bool = False) -> bool:
        """Send the bytes to a home; False: somebody uses them.

        Args:
            where: homes, in order.
            beside: copy in the order of the current stream, if there is one: for operations that declared the var.
                Otherwise nothing may be pending on the device.

        Raises:
            OutOfMemoryError: no home has room. The bytes are where they were.
        """
        if not self._moving.acquire(blocking=False):
            return False
        try:
            raw, self._raw = self._raw, None
            if raw is None:
                return False
            kept = None
            try:
                stream = current_stream() if beside else None
                if stream is not None:  # what is enqueued looks at the bytes, too
                    stream.record().synchronize()
                if _alone(raw) == _ALONE:
                    kept = homes.keep(raw, self.context, where, self._origin, beside=beside)
            finally:
                if kept is None:
                    self._raw = raw
            if kept is None:
                return False
            place, release = self._place, self._release
            self._release, self._home, self._place = kept.free, kept, None
        finally:
            self._moving.release()
        del raw
        _members.pop(id(self), None)
        if not beside:
            spill_ahead.gone(self)
        if stream is not None and place is not None:
            _free_behind(*place)  # behind the copy
            return True
        if stream is not None:
            stream.synchronize()
        if release is not None:
            release()
        return True

    def relocate(self) -> int:
        """Move the bytes to a lower place of their pool; returns how many, 0 where somebody uses them or none is free.
        Nothing may be pending on the device."""
        if not self._moving.acquire(blocking=False):
            return 0
        try:
            raw, self._raw = self._raw, None
            if raw is None:
                return 0
            moved = 0
            try:
                if self._place is not None and _alone(raw) == _ALONE:
                    resource, allocation = self._place
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
        """What keeps the bytes that :attr:`raw` has now where they are."""
        return self.raw, self._release

    def drop(self) -> None:
        """Give the memory back, here or in a home; the contents are undefined afterwards. Without any, do nothing."""
        with self._moving:
            release, self._release, self._raw, self._home, self._place = self._release, None, None, None, None
        _members.pop(id(self), None)
        spill_ahead.gone(self)
        if release is not None:
            release()

    def drop_in_order(self) -> None:
        """As :meth:`drop`, behind what the current stream has been given to do, for which nothing waits."""
        with self._moving:
            place = self._place if self._raw is not None else None
            if place is not None:
                self._release = self._raw = self._place = None
        if place is None:
            self.drop()
            return
        _members.pop(id(self), None)
        spill_ahead.gone(self)
        _free_behind(*place)

    @property
    def away(self) -> bool:
        """True while the bytes are in a home."""
        return self._home is not None

    def __del__(self) -> None:
        _members.pop(id(self), None)
        spill_ahead.gone(self)
        super().__del__()


def _free_behind(resource: Resource, allocation: Allocation) -> None:
    resource.free_behind(allocation)


def counted(raw: Any) -> Any:
    """The same bytes as an array whose views refer to it, and not to what it is a view of; where nothing may leave or
    move, as they are."""
    if not _homes and not _movable:
        return raw
    if raw.__class__ is np.ndarray:
        return np.frombuffer(raw.data, np.uint8)
    return raw.__class__(raw.shape, raw.dtype, raw.data)


def _measured() -> int:
    raw = np.empty(0, np.uint8)
    return _alone(raw)


_ALONE = _measured() if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""What :func:`_alone` says where there is no other reference; 0, which it never says, where counts are not exact."""


def _settled(context: Context) -> list[SpillableChunk]:
    """The chunks of a device that may leave or move, those used least recently first; nothing is pending there."""
    known = [chunk for ref in list(_members.values()) if (chunk := ref()) is not None and chunk.context == context]
    known.sort(key=lambda chunk: chunk._used)
    place = device.get(context)
    if known and place.asynchronous:  # what is enqueued there looks at bytes, and may hold them
        with no_stream():
            place.synchronize()
    return known


def _compact(context: Context) -> int:
    """Move chunks to lower places, the highest first, until none has one; returns the bytes."""
    total, known = 0, [(address_of(raw), chunk) for chunk in _settled(context) if (raw := chunk._raw) is not None]
    known.sort(key=lambda pair: -pair[0])
    raw = None  # the last one would count as used
    while moved := sum([chunk.relocate() for _, chunk in known]):
        total += moved
    return total


def _move_together(context: Context, nbytes: int) -> bool:
    """A rung: where enough is free, but apart, arrays move together."""
    if not _members:
        return False
    resource = storage.in_use().get(context)
    return resource is not None and resource.statistics().cached_bytes >= nbytes and _compact(context) > 0


def _send_away(context: Context, nbytes: int) -> bool:
    """A rung: arrays that were used least recently go to a home, until they are ``nbytes``."""
    if not _homes:
        return False
    freed, known = 0, _settled(context)
    spill_ahead.short(context, nbytes, known)
    for chunk in known:
        try:
            if chunk.leave(_homes):
                freed += chunk.nbytes
        except OutOfMemoryError as error:
            relief.explain(f"Nothing could be sent elsewhere (WEFTPLAN_SPILL): {error}")
            break
        if freed >= nbytes:
            break
    return freed > 0


relief.add(26, _move_together)
relief.add(28, _send_away, again=True)
slots.COMPACTOR.fill(_compact)


def start(where: tuple[HomeSpec, ...], *, movable: bool = False) -> None:
    """Let arrays that are made from now on wait in these homes, and move within their pools if there are homes or
    ``movable`` says so.

    Raises:
        DeviceError: a folder has another number in this process already.
    """
    global _homes, _movable
    device.name_folders(where)
    _homes, _movable = where, movable
    spill_ahead.forget()
    slots.MAKE_ROOM.value = partial(spill_ahead.make_room, where) if where else None
    slots.TASK_MEMORY.value = pushing.holding if where else None
    slots.ARRAY_CHUNK.value = SpillableChunk if where or movable else Chunk


def active() -> bool:
    """True while arrays may wait elsewhere."""
    return bool(_homes)


def listed() -> tuple[HomeSpec, ...]:
    """Where arrays may wait now."""
    return _homes


def moving() -> bool:
    """True while arrays may wait elsewhere or move."""
    return bool(_homes or _movable)


def _first(*args: Any, **kwargs: Any) -> Chunk:
    """The first array: reads the setting. ``true``, the default, is for plans with a budget alone."""
    text = config.process("WEFTPLAN_SPILL")
    start(() if text.lower() in ("true", "1") else parse(text), movable=config.process("WEFTPLAN_STORAGE_COMPACT"))
    chunk: Chunk = slots.ARRAY_CHUNK.get()(*args, **kwargs)
    return chunk


@contextmanager
def using(text: str, *, movable: bool = False) -> Iterator[None]:
    """Let arrays that are made in the ``with`` block wait in the homes that ``text`` lists, as
    ``WEFTPLAN_SPILL`` does."""
    before_class, before, moved = slots.ARRAY_CHUNK.value, _homes, _movable
    start(parse(text), movable=movable)
    try:
        yield
    finally:
        start(before, movable=moved)
        slots.ARRAY_CHUNK.value = before_class


slots.ARRAY_CHUNK.value = _first
