"""Address ranges of entries, for finding the entries that overlap a memory range.

Relies on a lock, which its caller holds. Inside it, any allocation or call may run a finalizer that calls these methods
again. Such a nested call runs to its end first, so a method counts the changes and repeats a search during which the
list has changed. Between the comparison of the counts and the next statement no finalizer can run.

An entry that has ended stays while its memory is in use: its only array may have been a temporary that has died while
an operation on it is still pending. NumPy 2.5 frees the memory of an array before weak references report its death,
so an entry may also end later than its memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class AddressRanges(Generic[T]):
    """Address ranges, each belonging to one entry; ranges may overlap.

    Args:
        in_use: whether an array or a pending operation uses the memory of an entry.
    """

    def __init__(self, in_use: Callable[[T], bool]) -> None:
        self._in_use = in_use
        self._ranges: list[tuple[int, int, int, T]] = []
        """Low address, high address, identity of the entry, and the entry, ordered."""
        self._changes = 0
        self._of: dict[int, list[tuple[int, int, int, T]]] = {}
        """The ranges of each entry, by its identity."""
        self._ended: dict[int, T] = {}
        self._longest = 0
        """The length of the longest range; a search begins that far below its lowest address."""

    def add(self, entry: T, low: int, high: int) -> None:
        """Record that ``entry`` has the bytes from ``low`` up to ``high``."""
        if high - low > self._longest:
            self._longest = high - low
        added = low, high, id(entry), entry
        self._ended.pop(id(entry), None)
        self._of.setdefault(id(entry), []).append(added)
        insort(self._ranges, added)
        self._changes += 1

    def overlapping(self, low: int, high: int) -> list[T]:
        """Return the entries that have bytes from ``low`` up to ``high``, also those that are about to end."""
        for entry in list(self._ended.values()):
            if not self._in_use(entry):
                self.remove(entry)
        while True:
            changes = self._changes
            begin = bisect_left(self._ranges, (low - self._longest,))
            stop = bisect_left(self._ranges, (high,))
            entries = {number: entry for _, end, number, entry in self._ranges[begin:stop] if end > low}
            if self._changes == changes:
                return [entry for number, entry in entries.items() if number in self._of]

    def end(self, entry: T) -> None:
        """Remove ``entry`` as soon as its memory is no longer in use."""
        if id(entry) in self._of:
            self._ended[id(entry)] = entry
            if not self._in_use(entry):
                self.remove(entry)

    def remove(self, entry: T) -> None:
        """Remove ``entry``, unless a nested call has removed it already."""
        self._ended.pop(id(entry), None)
        for removed in self._of.pop(id(entry), ()):
            while True:
                changes = self._changes
                index = bisect_left(self._ranges, removed)
                if self._changes == changes:
                    del self._ranges[index]
                    self._changes += 1
                    break
