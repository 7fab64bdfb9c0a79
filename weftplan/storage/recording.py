"""A ring buffer of pool events: allocations, frees, system blocks and failed allocations.

While nobody records, a pool looks at one attribute for each allocation and free. :func:`record` turns recording on for
all pools of the process; :mod:`weftplan.storage.snapshot` makes files and pages of it. Events are appended under
whatever lock a pool holds, and by finalizers: appending to a deque is atomic, and nothing here waits.
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

_MOST_KNOWN = 65536


class Event(NamedTuple):
    """One thing that happened. ``action`` is ``alloc``, ``free``, ``segment_alloc``, ``segment_free`` or ``oom``."""

    action: str
    time_ns: int
    context: Context
    address: int
    """Of the first byte; of ``oom`` how many bytes the device had free."""
    nbytes: int
    """Occupied, after rounding; of ``oom`` requested."""
    name: object


Record = tuple[str, int, Context, int, int, object] | tuple[str, int, Context, int, int, object, object]
"""The fields of an :class:`Event`, or those of a free with the name of whoever got the memory at once: it is made into
events when somebody asks, since that takes longer."""


class Recorder:
    """What pools call while they are recorded.

    Args:
        most: records to keep; older ones are forgotten.
    """

    def __init__(self, most: int) -> None:
        self.records: deque[Record] = deque(maxlen=most)
        self._append = self.records.append
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Parts of blocks that pools hand out again and again, by id, with their addresses: asking an array for its
        address takes longer than an allocation. An array that is gone may have left its id to another one."""
        self._blocks: dict[int, int] = {}
        """Addresses of whole blocks, by id. One that goes is told of (:meth:`shrunk`), and so is a new one with its id
        (:meth:`grown`), so nobody has to look whether it is still the same."""

    def _where(self, block: object, raw: RawArray) -> int:
        """The address of ``raw``, memory at the beginning of ``block``."""
        if block.__class__ is raw.__class__:  # a whole block of the system
            if len(self._blocks) >= _MOST_KNOWN:
                self._blocks.clear()
            return self._blocks.get(id(block)) or self._blocks.setdefault(id(block), address_of(block))
        known = self._known.get(id(raw))
        if known is not None and known[0]() is raw:
            return known[1]
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        address = address_of(raw)
        self._known[id(raw)] = weakref.ref(raw), address
        return address

    # Both are called for every allocation and free, so they share no further call.

    def allocated(self, allocation: Allocation) -> None:
        """An allocation was handed out."""
        if allocation.nbytes:
            block, raw = allocation.block, allocation.raw
            where = self._blocks.get(id(block), 0) if block.__class__ is raw.__class__ else 0
            where = where or self._where(block, raw)
            self._append(("alloc", time_ns(), allocation.context, where, allocation.size, allocation.name))

    def freed(self, allocation: Allocation, raw: RawArray) -> None:
        """An allocation, whose memory was ``raw``, came back."""
        if allocation.nbytes:
            block = allocation.block
            where = self._blocks.get(id(block), 0) if block.__class__ is raw.__class__ else 0
            where = where or self._where(block, raw)
            self._append(("free", time_ns(), allocation.context, where, allocation.size, allocation.name))

    def handed_over(self, allocation: Allocation, name: object) -> None:
        """An allocation went from its holder to the next, whose name is ``name``, without coming back."""
        where = self._where(allocation.block, allocation.raw)
        self.records.append(("free", time_ns(), allocation.context, where, allocation.size, allocation.name, name))

    def grown(self, context: Context, raw: RawArray) -> None:
        """A pool took a block from the system."""
        self._blocks.pop(id(raw), None)
        self._add("segment_alloc", context, address_of(raw), int(raw.nbytes), None)

    def shrunk(self, context: Context, raw: RawArray) -> None:
        """A pool gave a block back to the system."""
        self._blocks.pop(id(raw), None)
        self._add("segment_free", context, address_of(raw), int(raw.nbytes), None)

    def refused(self, context: Context, nbytes: int, free: int, name: object) -> None:
        """A request failed."""
        self._add("oom", context, free, nbytes, name)

    def _add(self, action: str, context: Context, address: int, nbytes: int, name: object) -> None:
        self.records.append((action, time_ns(), context, address, nbytes, name))


recorder: Recorder | None = None
"""Told of everything that any pool does; None: nobody records. Look it up each time, and once: another thread may stop
recording between two looks."""


def address_of(raw: Any) -> int:
    """The address of a flat array of NumPy or CuPy."""
    if raw.__class__ is np.ndarray and raw.flags.writeable and raw.nbytes:  # a seventh of the time of the dictionary
        return ctypes.addressof(ctypes.c_char.from_buffer(raw.data))
    described = getattr(raw, "__array_interface__", None) or raw.__cuda_array_interface__
    return int(described["data"][0])


def record(*, events: int = 100_000) -> None:
    """Record what all pools do from now on; what was recorded before is forgotten.

    Args:
        events: most to keep, about 200 bytes each; older ones are forgotten.

    Raises:
        MXNetError: ``events`` is not an integer from 1.
    """
    if isinstance(events, bool) or not isinstance(events, int) or events < 1:
        raise MXNetError(f"storage.record: the number of events must be an integer >= 1, got {events!r}")
    global recorder
    recorder = Recorder(events)


def stop_recording() -> None:
    """Record no more, and forget what was recorded."""
    global recorder
    recorder = None


def records() -> list[Record]:
    """What is known so far, oldest first; nothing where nobody records."""
    current = recorder
    return [] if current is None else list(current.records)


def events_of(found: Iterable[Record]) -> Iterator[Event]:
    """The events of records, in their order."""
    for record in found:
        yield Event(*record[:6])
        if len(record) == 7:
            yield Event("alloc", *record[1:5], record[6])


def recorded() -> list[Event]:
    """The events so far, oldest first; none where nobody records."""
    return list(events_of(records()))
