"""Free lists: freed memory by requested size, for reuse without change.

Appending memory to a free list and popping it are single list operations without a lock. Methods of
:class:`FreeLists` run under the lock of the owning ledger. Listed memory counts as live until it is written off
(:meth:`FreeLists.write_off`) or taken back (:meth:`FreeLists.emptied`).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

SIZE_LIMIT = 4096
"""Maximum number of sizes with a free list."""
LIST_LIMIT = 1024
"""Maximum length of a free list, enough for loops that create that number of small arrays."""

Entry = tuple[int, int, Any, Any, int]
"""Freed memory: (order, nbytes, raw, block, size). A negative (complemented) order does not count as live."""


class FreeList(list[Entry]):
    """Freed memory of one requested size. Entries that count as live are on top."""

    __slots__ = ("listed",)

    def __init__(self) -> None:
        super().__init__()
        self.listed = False
        """Whether :attr:`FreeLists.touched` lists it, perhaps while it is empty."""


class FreeLists(dict[int, FreeList]):
    """Free lists by requested size. A free list is never removed, because another thread may be about to use it."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: deque[FreeList] = deque()
        """Free lists with memory that counts as live; appended to without a lock."""
        self._written_off: dict[int, FreeList] = {}
        """Free lists with written-off memory, by id; some may also be in ``touched``."""

    def __bool__(self) -> bool:
        """Return whether a free list may hold memory."""
        return bool(self.touched or self._written_off)

    def add(self, nbytes: int) -> None:
        """Create a free list for ``nbytes``, unless there are too many."""
        if len(self) < SIZE_LIMIT:
            self.setdefault(nbytes, FreeList())

    def emptied(self, size: int | None) -> list[Entry]:
        """Take and return the memory of all free lists, or of those whose entries occupy ``size`` bytes."""
        entries: list[Entry] = []
        for free_list in self._named(size):
            while free_list:
                try:
                    entries.append(free_list.pop())
                except IndexError:  # another thread took the last entry
                    break
        return entries

    def _named(self, size: int | None) -> list[FreeList]:
        """Unlist and return the free lists to be emptied. A concurrent free lists its free list again."""
        named = []
        for _ in range(len(self.touched)):
            free_list = self.touched.popleft()
            if size is None or _holds(free_list, size):
                free_list.listed = False
                named.append(free_list)
            else:
                self.touched.append(free_list)
        for key, free_list in list(self._written_off.items()):
            if size is None or _holds(free_list, size):
                del self._written_off[key]
                named.append(free_list)
        return named

    def write_off(self) -> tuple[int, int]:
        """Stop counting the first touched free list as live; return its requested and occupied bytes. It keeps its
        memory."""
        if not self.touched:
            return 0, 0
        free_list = self.touched[0]
        self._written_off[id(free_list)] = free_list
        free_list.listed = False  # from here on a concurrent free lists it again
        self.touched.popleft()
        number = _counted(free_list)
        below = len(free_list) - number
        requested = allocated = 0
        entries: list[Entry] = []
        try:
            with suppress(IndexError):  # another thread took the last entry
                entries.extend(islice(iter(free_list.pop, None), number))  # one call, which Ctrl-C cannot split
            counted = [entry for entry in entries if entry[0] >= 0]
            written_off = [
                (min(order, ~order), nbytes, raw, block, size) for order, nbytes, raw, block, size in entries
            ]
            requested, allocated = sum([entry[1] for entry in counted]), sum([entry[4] for entry in counted])
            entries = written_off  # no call from here until the caller has the figures
        finally:
            free_list[below:below] = entries[::-1]
        return requested, allocated

    def counted(self) -> tuple[int, int]:
        """Return requested and occupied bytes on free lists that count as live."""
        requested = allocated = 0
        for free_list in {id(free_list): free_list for free_list in self.touched.copy()}.values():
            for order, nbytes, _, _, size in free_list[:]:
                if order >= 0:
                    requested += nbytes
                    allocated += size
        return requested, allocated


def by_order(entry: Entry) -> int:
    """Return a sort key: when an entry was freed."""
    order = entry[0]
    return order if order >= 0 else ~order


def _counted(free_list: FreeList) -> int:
    """Return the number of entries on top of a free list that count as live."""
    number = 0
    for entry in reversed(free_list):
        if entry[0] < 0:
            break
        number += 1
    return number


def _holds(free_list: FreeList, size: int) -> bool:
    """Return whether the entries of a free list, if any, occupy ``size`` bytes each."""
    return all(entry[4] == size for entry in free_list[:1])
