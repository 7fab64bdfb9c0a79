"""The owners of the addresses of simulated memory.

All simulated devices share one address table. ``simulated_device.py`` accesses it under its global lock; this module
takes no lock.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from weftplan.device.links import HOST
from weftplan.support.address_ranges import AddressRanges
from weftplan.support.array_types import RawArray


class _Memory:
    """One allocation of a simulated device; ``owner`` refers to the array that owns the bytes."""

    __slots__ = ("device_index", "owner")

    def __init__(self, device_index: int, owner: weakref.ref[object]) -> None:
        self.device_index = device_index
        self.owner = owner


class Addresses:
    """Address ranges of the memory of all simulated devices; used under the global lock of simulated work.

    A user's finalizer may call each method in the middle of another, on the same thread.
    """

    def __init__(self) -> None:
        self._ranges: AddressRanges[_Memory] = AddressRanges(lambda memory: memory.owner() is not None)
        self._memories: dict[int, _Memory] = {}
        """By the identity of the reference to the owner."""
        self._dead: deque[weakref.ref[object]] = deque()
        """Owners collected without :meth:`remove`, for example with a dropped pool; their addresses may be reused."""
        # Weak-reference callbacks may run inside any code: they only append here, and the next method removes ranges.

    def __len__(self) -> int:
        self._remove_dead()
        return len(self._memories)

    def add(self, raw: RawArray, number: int) -> None:
        """Register ``raw`` as memory of simulated device number ``number``."""
        self._remove_dead()
        owning: object = raw if raw.base is None else raw.base
        owner = weakref.ref(owning, self._dead.append)
        memory = self._memories[id(owner)] = _Memory(number, owner)
        self._ranges.add(memory, raw.ctypes.data, raw.ctypes.data + raw.nbytes)

    def remove(self, raw: RawArray) -> None:
        """Remove the range of ``raw``, which its device frees."""
        self._remove_dead()
        for memory in self._ranges.overlapping(raw.ctypes.data, raw.ctypes.data + 1):
            self._remove(memory.owner)

    def _remove(self, owner: weakref.ref[object]) -> None:
        memory = self._memories.get(id(owner))
        if memory is not None:
            self._ranges.remove(memory)
            self._memories.pop(id(owner), None)

    def _remove_dead(self) -> None:
        """Remove the ranges whose owners were garbage-collected, each before its notice."""
        while self._dead:
            owner = self._dead[0]
            self._remove(owner)
            if self._dead and self._dead[0] is owner:  # else a nested call has removed it
                self._dead.popleft()

    def device_index(self, array: RawArray) -> int:
        """Return the number of the simulated device whose memory ``array`` is in, or :data:`HOST`."""
        if not isinstance(array, np.ndarray):
            return HOST
        self._remove_dead()
        memories = self._ranges.overlapping(array.ctypes.data, array.ctypes.data + 1)
        return next((memory.device_index for memory in memories if memory.owner() is not None), HOST)
