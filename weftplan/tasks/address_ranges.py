"""Address ranges of registry entries, for finding the entries that overlap a memory range.

Relies on the registry's lock, which its caller holds. An entry whose arrays have died stays until no pending operation
uses its memory, since a temporary array may have been the only object that represented it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class AddressRanges(Generic[T]):
    """Address ranges, each belonging to one entry; ranges may overlap.

    Args:
        pending: whether operations still use the memory of an entry that has ended.
    """

    def __init__(self, pending: Callable[[T], bool]) -> None:
        self._pending = pending
        self._starts: list[tuple[int, int, int]] = []
        """Low address, high address and identity of the entry, ordered."""
        self._entries: dict[int, T] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self._ended: dict[int, T] = {}
        self._longest = 0
        """The length of the longest range; a search begins that far below its lowest address."""

    def add(self, entry: T, low: int, high: int) -> tuple[int, int]:
        """Record that ``entry`` has the bytes from ``low`` up to ``high``; return the range covering all its bytes."""
        known = self._spans.get(id(entry))
        if known is not None:
            self._remove(entry)
            low, high = min(low, known[0]), max(high, known[1])
        insort(self._starts, (low, high, id(entry)))
        self._entries[id(entry)] = entry
        self._spans[id(entry)] = low, high
        self._longest = max(self._longest, high - low)
        return low, high

    def overlapping(self, low: int, high: int) -> Iterator[T]:
        """Yield the entries that have bytes from ``low`` up to ``high``."""
        for entry in [one for one in self._ended.values() if not self._pending(one)]:
            self._remove(entry)
        place = bisect_left(self._starts, (low - self._longest, 0, 0))
        while place < len(self._starts) and self._starts[place][0] < high:
            if self._starts[place][1] > low:
                yield self._entries[self._starts[place][2]]
            place += 1

    def end(self, entry: T) -> None:
        """Remove ``entry``, whose arrays have died, as soon as no operation on it is pending."""
        if id(entry) in self._spans:
            self._ended[id(entry)] = entry
            if not self._pending(entry):
                self._remove(entry)

    def _remove(self, entry: T) -> None:
        low, high = self._spans.pop(id(entry))
        del self._starts[bisect_left(self._starts, (low, high, id(entry)))]
        del self._entries[id(entry)]
        self._ended.pop(id(entry), None)
