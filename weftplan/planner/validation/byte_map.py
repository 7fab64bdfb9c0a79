"""A model of one slab for the validators: which content each byte range holds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class ByteMap:
    """Which content each byte range of one slab holds: disjoint ascending ranges, no content where nobody wrote."""

    __slots__ = ("contents", "ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.contents: list[tuple[int, int]] = []

    def overlapping(self, start: int, end: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(start, end, content) of the ranges that meet [start, end), clipped to it."""
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        ranges = zip(self.starts[low:high], self.ends[low:high], self.contents[low:high], strict=True)
        return [(max(start, first), min(end, last), content) for first, last, content in ranges]

    def write(self, start: int, end: int, content: tuple[int, int]) -> None:
        """Put ``content`` into [start, end)."""
        if start >= end:
            return
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        pieces = [(start, end, content)]
        if low < high and self.starts[low] < start:
            pieces.insert(0, (self.starts[low], start, self.contents[low]))
        if low < high and self.ends[high - 1] > end:
            pieces.append((end, self.ends[high - 1], self.contents[high - 1]))
        self.starts[low:high] = [first for first, _, _ in pieces]
        self.ends[low:high] = [last for _, last, _ in pieces]
        self.contents[low:high] = [held for _, _, held in pieces]
