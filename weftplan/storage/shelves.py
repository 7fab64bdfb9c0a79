"""Free lists (shelves): freed memory by requested size, for reuse without change.

Putting memory on a shelf and taking it from there are single operations of a list, which need no lock; all that
:class:`Shelves` does itself runs under the lock of the ledger that owns it. What lies on a shelf counts as live until
somebody writes it off (:meth:`Shelves.write_off`) or takes it back (:meth:`Shelves.emptied`).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

MOST = 4096
"""Sizes that have a shelf."""
MOST_ON_ONE = 1024
"""As many small arrays as may die before their memory goes back, so that a loop that makes them is served from here."""

Entry = tuple[int, int, Any, Any, int]
"""Freed memory: (order, nbytes, raw, block, size). An order below 0, the complement of the true one, says that it does
not count as live any more."""


class Shelf(list[Entry]):
    """Freed memory of one requested size; what counts as live lies on top."""

    __slots__ = ("listed",)

    def __init__(self) -> None:
        super().__init__()
        self.listed = False
        """True where :attr:`Shelves.touched` names it; it may, when there is nothing on it."""


class Shelves(dict[int, Shelf]):
    """Shelves by requested size. None is ever taken away, since another thread may be about to use it."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: deque[Shelf] = deque()
        """Those on which memory has been put that counts as live: appended to without a lock."""
        self._written_off: dict[int, Shelf] = {}
        """Those whose memory has been written off, by id; they may be among the others, too."""

    def __bool__(self) -> bool:
        """True when there may be memory on one."""
        return bool(self.touched or self._written_off)

    def add(self, nbytes: int) -> None:
        """Let there be a shelf for so many bytes, unless there are too many."""
        if len(self) < MOST:
            self.setdefault(nbytes, Shelf())

    def emptied(self, size: int | None) -> list[Entry]:
        """What lies on all shelves, or on those whose memory occupies ``size`` bytes each, which nobody has now."""
        entries: list[Entry] = []
        for shelf in self._named(size):
            while shelf:
                try:
                    entries.append(shelf.pop())
                except IndexError:  # another thread took the last one
                    break
        return entries

    def _named(self, size: int | None) -> list[Shelf]:
        """The shelves that :meth:`emptied` empties, which are told of again by whoever frees from here on."""
        found = []
        for _ in range(len(self.touched)):
            shelf = self.touched.popleft()
            if size is None or _holds(shelf, size):
                shelf.listed = False
                found.append(shelf)
            else:
                self.touched.append(shelf)
        for key, shelf in list(self._written_off.items()):
            if size is None or _holds(shelf, size):
                del self._written_off[key]
                found.append(shelf)
        return found

    def write_off(self) -> tuple[int, int]:
        """Let what lies on the first of :attr:`touched`, if there is one, count as live no more, where it goes on
        lying; returns the bytes, as they were asked for and as they are occupied."""
        if not self.touched:
            return 0, 0
        shelf = self.touched[0]
        self._written_off[id(shelf)] = shelf
        shelf.listed = False  # from here on, whoever frees tells of it again
        self.touched.popleft()
        number = _counted(shelf)
        below = len(shelf) - number
        requested = allocated = 0
        taken: list[Entry] = []
        try:
            with suppress(IndexError):  # another thread took the last one
                taken.extend(islice(iter(shelf.pop, None), number))  # one call, which Ctrl-C cannot divide
            counted = [entry for entry in taken if entry[0] >= 0]
            written_off = [(min(order, ~order), nbytes, raw, block, size) for order, nbytes, raw, block, size in taken]
            requested, allocated = sum([entry[1] for entry in counted]), sum([entry[4] for entry in counted])
            taken = written_off  # from here on nothing is called until the caller has the figures
        finally:
            shelf[below:below] = taken[::-1]
        return requested, allocated

    def counted(self) -> tuple[int, int]:
        """Bytes on shelves that count as live, as they were asked for and as they are occupied."""
        requested = allocated = 0
        for shelf in {id(shelf): shelf for shelf in self.touched.copy()}.values():
            for order, nbytes, _, _, size in shelf[:]:
                if order >= 0:
                    requested += nbytes
                    allocated += size
        return requested, allocated


def by_order(entry: Entry) -> int:
    """When an entry was freed: a key for sorting."""
    order = entry[0]
    return order if order >= 0 else ~order


def _counted(shelf: Shelf) -> int:
    """How many entries on top of a shelf count as live."""
    number = 0
    for entry in reversed(shelf):
        if entry[0] < 0:
            break
        number += 1
    return number


def _holds(shelf: Shelf, size: int) -> bool:
    """True where the memory on a shelf, if there is any, occupies ``size`` bytes each."""
    return all(entry[4] == size for entry in shelf[:1])
