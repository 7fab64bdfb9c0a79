"""A model of one slab for the validators: which content each byte range holds.

It shares no code with the planner, whose work it judges.
"""

from __future__ import annotations

from bisect import bisect_right


class ByteMap:
    """Which content each byte range of one slab holds: disjoint ascending ranges, no content where nobody wrote."""

    __slots__ = ("contents", "ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.contents: list[tuple[int, int]] = []

    def overlapping(self, start: int, end: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(start, end, content) of the ranges that meet [start, end), clipped to it."""
        low = bisect_right(self.ends, start)
        found = []
        while low < len(self.starts) and self.starts[low] < end:
            found.append((max(start, self.starts[low]), min(end, self.ends[low]), self.contents[low]))
            low += 1
        return found

    def write(self, start: int, end: int, content: tuple[int, int]) -> None:
        """Put ``content`` into [start, end)."""
        if start >= end:
            return
        low = bisect_right(self.ends, start)
        high = low
        pieces: list[tuple[int, int, tuple[int, int]]] = []
        while high < len(self.starts) and self.starts[high] < end:
            if self.starts[high] < start:
                pieces.append((self.starts[high], start, self.contents[high]))
            if self.ends[high] > end:
                pieces.append((end, self.ends[high], self.contents[high]))
            high += 1
        pieces.append((start, end, content))
        pieces.sort()
        self.starts[low:high] = [p[0] for p in pieces]
        self.ends[low:high] = [p[1] for p in pieces]
        self.contents[low:high] = [p[2] for p in pieces]
