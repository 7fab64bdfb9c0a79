"""Packing in order of birth: an allocator that serves each buffer from the lowest free range that fits.

This is the fallback of :func:`~weftplan.planner.packing.pack`: it takes some ten microseconds a buffer for any number
of buffers, so it is complete before other methods have begun. Its packings degrade little with the number of buffers:
rectangles cut at random need 1.47 times the lower bound at 100,000 and 1.49 times at 1,000,000 buffers. The tightest
range instead of the lowest would need 1.98 and 2.26 times. No function keeps state.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from weftplan.planner.packing.problem import Int64, Problem

MAX_SCAN = 64
"""Maximum number of free ranges that are compared with a buffer of at least half their size."""


class _FreeRanges:
    """Free address ranges, in one list per power of two of their lengths.

    Invariant: ranges neither touch nor overlap. Each list ascends by address, so of longer ranges only the first of
    each list is looked at.
    """

    def __init__(self) -> None:
        self._rows: list[list[int]] = [[] for _ in range(64)]
        self._nonempty = 0
        """Bit ``k`` is set if list ``k`` has ranges."""
        self.end_of: dict[int, int] = {}
        """End of a range by its start."""
        self.start_of: dict[int, int] = {}
        """Start of a range by its end."""

    def add(self, start: int, end: int) -> None:
        """Add a range that touches no other."""
        k = (end - start).bit_length()
        insort(self._rows[k], start)
        self._nonempty |= 1 << k
        self.end_of[start], self.start_of[end] = end, start

    def remove(self, start: int) -> int:
        """Remove the range that begins at ``start``, and return its end."""
        end = self.end_of.pop(start)
        del self.start_of[end]
        k = (end - start).bit_length()
        row = self._rows[k]
        del row[bisect_left(row, start)]
        if not row:
            self._nonempty &= ~(1 << k)
        return end

    def first(self, length: int) -> int:
        """Return the start of the lowest range of at least ``length`` units among the ranges looked at; -1: none."""
        k = length.bit_length()
        lowest = -1
        for start in self._rows[k][:MAX_SCAN]:
            if self.end_of[start] - start >= length:
                lowest = start
                break
        longer = self._nonempty >> k + 1 << k + 1
        while longer:
            bit = longer & -longer
            longer ^= bit
            start = self._rows[bit.bit_length() - 1][0]
            if start < lowest or lowest < 0:
                lowest = start
        return lowest


def pack_by_birth(problem: Problem) -> Int64:
    """Return offsets in units: each buffer, by birth and then the largest first, in the lowest free range that fits.

    Free ranges merge with their neighbours. If none fits, the buffer starts at the last free range if that ends at the
    top, else at the top. There is no guarantee on the height; it is usually below 1.7 times the lower bound.

    >>> from weftplan.planner.packing.problem import sectioned
    >>> columns = np.array([[0, 0, 1], [1, 2, 2], [8, 4, 6]])
    >>> pack_by_birth(sectioned(*columns, np.arange(3))).tolist()
    [0, 8, 0]
    """
    lo, hi, size = problem.lists
    births = np.lexsort((-problem.size, problem.lo)).tolist()
    deaths = problem.hi.argsort(kind="stable").tolist()
    offsets = [0] * len(lo)
    free = _FreeRanges()
    top = dead = 0
    for i in births:
        born = lo[i]
        while hi[deaths[dead]] <= born:
            j = deaths[dead]
            dead += 1
            start = offsets[j]
            end = start + size[j]
            if end in free.end_of:
                end = free.remove(end)
            if start in free.start_of:
                start = free.start_of[start]
                free.remove(start)
            free.add(start, end)
        length = size[i]
        start = free.first(length)
        if start >= 0:
            end = free.remove(start)
            if end - start > length:
                free.add(start + length, end)
        elif top in free.start_of:
            start = free.start_of[top]
            free.remove(start)
            top = start + length
        else:
            start, top = top, top + length
        offsets[i] = start
    return np.array(offsets, np.int64)
