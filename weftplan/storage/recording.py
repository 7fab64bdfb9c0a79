"""Ring buffer of pool events: allocations, frees, system blocks and failed allocations.

:func:`record` turns recording on for all pools; until then each allocation and free costs one attribute lookup.
:mod:`weftplan.storage.snapshot` turns events into files and pages. Pools under a lock and finalizers append events:
appending to a deque is atomic, and nothing here blocks.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from time import time_ns
from typing import Any, NamedTuple

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import MXNetError
from weftplan.storage.base import Allocation
from weftplan.support.array_types import RawArray

_CACHE_LIMIT = 65536
"""Maximum number of entries of each cache of a recorder."""


class StorageEvent(NamedTuple):
    """One pool event. ``action`` is ``alloc``, ``free``, ``segment_alloc``, ``segment_free`` or ``oom``."""

    action: str
    time_ns: int
    context: Context
    address: int
    """Address of the first byte; for ``oom`` the free bytes of the device."""
    nbytes: int
    """Occupied bytes, after rounding; for ``oom`` requested bytes."""
    name: object


Record = tuple[str, int, Context, int, int, object] | tuple[str, int, Context, int, int, object, object]
"""Fields of an :class:`StorageEvent`; for a free followed by reuse also the next holder.

Converted on demand, which is slow.
"""


class StorageRecorder:
    """Callbacks of pools while recording is on.

    Args:
        max_records: number of records to retain; older records are dropped.
    """

    def __init__(self, max_records: int) -> None:
        self.records: deque[Record] = deque(maxlen=max_records)
        self._append = self.records.append
        self._view_addresses: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Address cache of block views, by id. The weak reference detects a reused id."""
        self._blocks: dict[int, int] = {}
        """Address cache of whole blocks, by id; :meth:`shrunk` and :meth:`grown` invalidate it."""

    def _address(self, block: object, raw: RawArray) -> int:
        """Return the address of ``raw``, memory at the start of ``block``."""
        if block.__class__ is raw.__class__:  # a whole system block
            if len(self._blocks) >= _CACHE_LIMIT:
                self._blocks.clear()
            return self._blocks.get(id(block)) or self._blocks.setdefault(id(block), address_of(block))
        cached = self._view_addresses.get(id(raw))
        if cached is not None and cached[0]() is raw:
            return cached[1]
        if len(self._view_addresses) >= _CACHE_LIMIT:
            self._view_addresses.clear()
        address = address_of(raw)
        self._view_addresses[id(raw)] = weakref.ref(raw), address
        return address

    # The next two methods run for every allocation and free, so they inline the common case.

    def allocated(self, allocation: Allocation) -> None:
        """Record an allocation."""
        if allocation.nbytes:
            block, raw = allocation.block, allocation.raw
            address_ = self._blocks.get(id(block), 0) if block.__class__ is raw.__class__ else 0
            address_ = address_ or self._address(block, raw)
            self._append(("alloc", time_ns(), allocation.context, address_, allocation.size, allocation.name))

    def freed(self, allocation: Allocation, raw: RawArray) -> None:
        """Record a free of an allocation whose memory was ``raw``."""
        if allocation.nbytes:
            block = allocation.block
            address_ = self._blocks.get(id(block), 0) if block.__class__ is raw.__class__ else 0
            address_ = address_ or self._address(block, raw)
            self._append(("free", time_ns(), allocation.context, address_, allocation.size, allocation.name))

    def handed_over(self, allocation: Allocation, name: object) -> None:
        """Record that an allocation passed to its next holder, ``name``, without a free."""
        address_ = self._address(allocation.block, allocation.raw)
        self.records.append(("free", time_ns(), allocation.context, address_, allocation.size, allocation.name, name))

    def grown(self, context: Context, raw: RawArray) -> None:
        """Record a block taken from the system."""
        self._blocks.pop(id(raw), None)
        self._add("segment_alloc", context, address_of(raw), int(raw.nbytes), None)

    def shrunk(self, context: Context, raw: RawArray) -> None:
        """Record a block returned to the system."""
        self._blocks.pop(id(raw), None)
        self._add("segment_free", context, address_of(raw), int(raw.nbytes), None)

    def refused(self, context: Context, nbytes: int, free: int, name: object) -> None:
        """Record a failed request."""
        self._add("oom", context, free, nbytes, name)

    def _add(self, action: str, context: Context, address: int, nbytes: int, name: object) -> None:
        self.records.append((action, time_ns(), context, address, nbytes, name))


recorder: StorageRecorder | None = None
"""The recorder of all pools; None while recording is off. Read it once per use: another thread may stop recording.
A variable of the module, because every allocation reads it; it is replaced as a whole."""


def address_of(raw: RawArray) -> int:
    """Return the address of a flat NumPy or CuPy array."""
    # takes a seventh of the time of the dictionary
    if raw.__class__ is np.ndarray and raw.flags.writeable and raw.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(raw.data))
    array: Any = raw
    described = getattr(raw, "__array_interface__", None) or array.__cuda_array_interface__
    return int(described["data"][0])


def record(*, events: int = 100_000) -> None:
    """Start recording pool events; drop earlier records.

    Args:
        events: maximum number of records, about 200 bytes each; older records are dropped.

    Raises:
        MXNetError: ``events`` is not a positive integer.
    """
    if isinstance(events, bool) or not isinstance(events, int) or events < 1:
        raise MXNetError(f"storage.record: the number of events must be an integer >= 1, got {events!r}")
    global recorder
    recorder = StorageRecorder(events)


def stop_recording() -> None:
    """Stop recording and drop all records."""
    global recorder
    recorder = None


def records() -> list[Record]:
    """Return the records, oldest first; empty while recording is off."""
    current = recorder
    return [] if current is None else list(current.records)


def events_of(records: Iterable[Record]) -> Iterator[StorageEvent]:
    """Convert records to events, in order."""
    for record in records:
        yield StorageEvent(*record[:6])
        if len(record) == 7:
            yield StorageEvent("alloc", *record[1:5], record[6])


def recorded() -> list[StorageEvent]:
    """Return the events so far, oldest first; empty while recording is off."""
    return list(events_of(records()))
