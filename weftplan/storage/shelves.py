"""Free lists ("shelves"): freed memory by requested size, for reuse without change.

Putting memory on a shelf and taking it off are single list operations without a lock. Methods of :class:`Shelves` run
under the lock of the owning ledger. Shelved memory counts as live until it is written off (:meth:`Shelves.write_off`)
or taken back (:meth:`Shelves.emptied`).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

MOST = 4096
"""Maximum number of sizes with a shelf."""
MOST_ON_ONE = 1024
"""Maximum length of a shelf, enough for loops that create that number of small arrays."""

Entry = tuple[int, int, Any, Any, int]
"""Freed memory: (order, nbytes, raw, block, size). A negative (complemented) order does not count as live."""


class Shelf(list[Entry]):
    """Freed memory of one requested size. Entries that count as live are on top."""

    __slots__ = ("listed",)

    def __init__(self) -> None:
        super().__init__()
        self.listed = False
        """Whether :attr:`Shelves.touched` lists it, perhaps while it is empty."""


class Shelves(dict[int, Shelf]):
    """Shelves by requested size. A shelf is never removed, because another thread may be about to use it."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: deque[Shelf] = deque()
        """Shelves with memory that counts as live; appended to without a lock."""
        self._written_off: dict[int, Shelf] = {}
        """Shelves with written-off memory, by id; some may also be in ``touched``."""

    def __bool__(self) -> bool:
        """Return whether a shelf may hold memory."""
        return bool(self.touched or self._written_off)

    def add(self, nbytes: int) -> None:
        """Create a shelf for ``nbytes``, unless there are too many."""
        if len(self) < MOST:
            self.setdefault(nbytes, Shelf())

    def emptied(self, size: int | None) -> list[Entry]:
        """Take and return the memory of all shelves, or of those whose entries occupy ``size`` bytes."""
        entries: list[Entry] = []
        for shelf in self._named(size):
            while shelf:
                try:
                    entries.append(shelf.pop())
                except IndexError:  # another thread took the last entry
                    break
        return entries

    def _named(self, size: int | None) -> list[Shelf]:
        """Unlist and return the shelves to be emptied. A concurrent free lists its shelf again."""
        named = []
        for _ in range(len(self.touched)):
            shelf = self.touched.popleft()
            if size is None or _holds(shelf, size):
                shelf.listed = False
                named.append(shelf)
            else:
                self.touched.append(shelf)
        for key, shelf in list(self._written_off.items()):
            if size is None or _holds(shelf, size):
                del self._written_off[key]
                named.append(shelf)
        return named

    def write_off(self) -> tuple[int, int]:
        """Stop counting the first touched shelf as live; return its requested and occupied bytes. Its memory stays."""
        if not self.touched:
            return 0, 0
        shelf = self.touched[0]
        self._written_off[id(shelf)] = shelf
        shelf.listed = False  # from here on a concurrent free lists it again
        self.touched.popleft()
        number = _counted(shelf)
        below = len(shelf) - number
        requested = allocated = 0
        taken: list[Entry] = []
        try:
            with suppress(IndexError):  # another thread took the last entry
                taken.extend(islice(iter(shelf.pop, None), number))  # one call, which Ctrl-C cannot split
            counted = [entry for entry in taken if entry[0] >= 0]
            written_off = [(min(order, ~order), nbytes, raw, block, size) for order, nbytes, raw, block, size in taken]
            requested, allocated = sum([entry[1] for entry in counted]), sum([entry[4] for entry in counted])
            taken = written_off  # no call from here until the caller has the figures
        finally:
            shelf[below:below] = taken[::-1]
        return requested, allocated

    def counted(self) -> tuple[int, int]:
        """Return requested and occupied bytes on shelves that count as live."""
        requested = allocated = 0
        for shelf in {id(shelf): shelf for shelf in self.touched.copy()}.values():
            for order, nbytes, _, _, size in shelf[:]:
                if order >= 0:
                    requested += nbytes
                    allocated += size
        return requested, allocated


def by_order(entry: Entry) -> int:
    """Return a sort key: when an entry was freed."""
    order = entry[0]
    return order if order >= 0 else ~order


def _counted(shelf: Shelf) -> int:
    """Return the number of entries on top of a shelf that count as live."""
    number = 0
    for entry in reversed(shelf):
        if entry[0] < 0:
            break
        number += 1
    return number


def _holds(shelf: Shelf, size: int) -> bool:
    """Return whether the entries of a shelf, if any, occupy ``size`` bytes each."""
    return all(entry[4] == size for entry in shelf[:1])
