"""Parts of simulated hardware: the cost model, the owners of addresses, and the schedules of wires.

All simulated devices share one address table and one schedule. ``simulated_device.py`` accesses both under its global
lock; this module takes no lock.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weftplan.device.links import HOST, Interconnect
from weftplan.support.address_ranges import AddressRanges
from weftplan.support.array_types import RawArray


@dataclass(frozen=True, slots=True)
class CostModel:
    """Virtual seconds of simulated work.

    Attributes:
        launch: default seconds of a kernel.
        latency: seconds before a copy's first byte.
        bandwidth: bytes per second of a copy.
        share: factor for the planner's estimated seconds of a bound graph's kernel, which are added to ``launch``; 0
            makes every kernel take ``launch``.
    """

    launch: float = 5e-6
    latency: float = 10e-6
    bandwidth: float = 12e9
    share: float = 1.0

    def kernel(self, modelled: float) -> float:
        """Return the seconds of a kernel that the planner's model estimates at ``modelled`` seconds."""
        return self.launch + self.share * modelled

    def copy(self, nbytes: int) -> float:
        """Return the seconds of copying ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


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


class Wires:
    """Schedule of copies on each wire, in virtual time; used under the global lock of simulated work.

    Each copy takes the first gap that is long enough on all its wires. Wires therefore stay free for other copies while
    a copy that was enqueued early waits for its event.
    """

    def __init__(self) -> None:
        self._links: Interconnect | None = None
        self._busy: list[list[tuple[float, float]]] = []
        """Per wire, sorted (begin, end) of its last copies; the first entry covers all earlier copies."""

    def copy(self, links: Interconnect, source: int, target: int, nbytes: int, begin: float) -> float:
        """Schedule a copy that may begin at ``begin`` and return the virtual second at which it ends.

        A copy within a device, or of a device that ``links`` does not know, uses no wire.
        """
        if links is not self._links:
            self._links, self._busy = links, [[(0.0, 0.0)] for _ in links.wires]
        if source == target or max(source, target) >= links.count:
            return begin + WITHIN_S
        for hop in links.hops(source, target):
            spans = [(self._busy[wire], nbytes / links.wires[wire]) for wire in hop.wires]
            previous = -1.0
            while previous != begin:  # until all wires of the hop are free at the same time
                previous = begin
                for busy, length in spans:
                    begin = _first_gap(busy, begin, length)
            for busy, length in spans:
                bisect.insort(busy, (begin, begin + length))
                if len(busy) > _COPIES:
                    busy[:2] = [(busy[0][0], busy[1][1])]
            begin += hop.latency + nbytes / min(links.wires[wire] for wire in hop.wires)
        return begin


WITHIN_S = 5e-6
"""Virtual seconds of a copy within a device, or of a device without known links."""

_COPIES = 256
"""Maximum number of entries per wire; older copies are merged into the first entry, without their gaps."""


def _first_gap(busy: Sequence[tuple[float, float]], begin: float, length: float) -> float:
    """Return the first time from ``begin`` at which a wire is free for ``length`` seconds."""
    index = max(0, bisect.bisect(busy, (begin, float("inf"))) - 1)
    for start, end in busy[index:]:
        if start >= begin + length:
            break
        begin = max(begin, end)
    return begin
