"""State shared by all simulated devices: costs of work, owners of addresses, and schedules of wires.

Only ``simulated_device.py`` uses it, under the lock that models hardware doing one thing at a time; this module takes
no lock.
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
        share: seconds of a bound graph's node beyond ``launch``, as a share of the planner's modelled seconds for an
            accelerator; 0: every kernel takes ``launch``, whatever its size.
    """

    launch: float = 5e-6
    latency: float = 10e-6
    bandwidth: float = 12e9
    share: float = 1.0

    def kernel(self, modelled: float) -> float:
        """Seconds of a kernel that by the planner's model works for so long."""
        return self.launch + self.share * modelled

    def copy(self, nbytes: int) -> float:
        """Seconds of copying ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


class _Memory:
    """One allocation of a simulated device; ``owner`` refers to the array that owns the bytes."""

    __slots__ = ("owner", "place")

    def __init__(self, place: int, owner: weakref.ref[object]) -> None:
        self.place = place
        self.owner = owner


class Addresses:
    """Which simulated device has which addresses; changed and asked under the lock of simulated work.

    A user's finalizer may call each method in the middle of another, on the same thread.
    """

    def __init__(self) -> None:
        self._ranges: AddressRanges[_Memory] = AddressRanges(lambda memory: memory.owner() is not None)
        self._memories: dict[int, _Memory] = {}
        """By the identity of the reference to the owner."""
        self._dead: deque[weakref.ref[object]] = deque()
        """Owners that died without a free, as with a dropped pool: other arrays may soon reuse their addresses.
        Appended by weak-reference callbacks only."""

    def __len__(self) -> int:
        self._bury()
        return len(self._memories)

    def add(self, raw: RawArray, place: int) -> None:
        """``raw`` is memory of this device from now on."""
        self._bury()
        owning: object = raw if raw.base is None else raw.base
        owner = weakref.ref(owning, self._dead.append)
        memory = self._memories[id(owner)] = _Memory(place, owner)
        self._ranges.add(memory, raw.ctypes.data, raw.ctypes.data + raw.nbytes)

    def remove(self, raw: RawArray) -> None:
        """``raw`` is given back."""
        self._bury()
        for memory in self._ranges.overlapping(raw.ctypes.data, raw.ctypes.data + 1):
            self._end(memory.owner)

    def _end(self, owner: weakref.ref[object]) -> None:
        memory = self._memories.get(id(owner))
        if memory is not None:
            self._ranges.remove(memory)
            self._memories.pop(id(owner), None)

    def _bury(self) -> None:
        """Forget the addresses of owners that died, each before its notice."""
        while self._dead:
            owner = self._dead[0]
            self._end(owner)
            if self._dead and self._dead[0] is owner:  # else a nested call has removed it
                self._dead.popleft()

    def place(self, array: RawArray) -> int:
        """The number of the simulated device whose memory this is, or HOST."""
        if not isinstance(array, np.ndarray):
            return HOST
        self._bury()
        there = self._ranges.overlapping(array.ctypes.data, array.ctypes.data + 1)
        return next((memory.place for memory in there if memory.owner() is not None), HOST)


class Wires:
    """Busy times of each wire; used under the lock of simulated work.

    A copy takes the first gap that is long enough. A copy that is enqueued early and waits for an event therefore
    leaves the wires free until it begins.
    """

    def __init__(self) -> None:
        self._links: Interconnect | None = None
        self._busy: list[list[tuple[float, float]]] = []
        """Per wire, (begin, end) of its last copies, in order; the first entry stands for all earlier copies."""

    def copy(self, links: Interconnect, source: int, target: int, nbytes: int, begin: float) -> float:
        """Return when a copy ends that may begin at ``begin``; it keeps its wires busy."""
        if links is not self._links:
            self._links, self._busy = links, [[(0.0, 0.0)] for _ in links.wires]
        if source == target or max(source, target) >= links.count:
            return begin + WITHIN_S
        for hop in links.hops(source, target):
            spans = [(self._busy[wire], nbytes / links.wires[wire]) for wire in hop.wires]
            before = -1.0
            while before != begin:  # until all wires have a gap from there
                before = begin
                for busy, length in spans:
                    begin = _first_gap(busy, begin, length)
            for busy, length in spans:
                bisect.insort(busy, (begin, begin + length))
                if len(busy) > _COPIES:
                    busy[:2] = [(busy[0][0], busy[1][1])]
            begin += hop.latency + nbytes / min(links.wires[wire] for wire in hop.wires)
        return begin


WITHIN_S = 5e-6
"""Seconds of a copy within a device, which takes no wire."""

_COPIES = 256
"""Copies per wire whose gaps are remembered."""


def _first_gap(busy: Sequence[tuple[float, float]], begin: float, length: float) -> float:
    """Return when a wire is free for so long, at ``begin`` at the earliest."""
    place = max(0, bisect.bisect(busy, (begin, float("inf"))) - 1)
    for start, end in busy[place:]:
        if start >= begin + length:
            break
        begin = max(begin, end)
    return begin
