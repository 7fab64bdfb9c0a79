"""Packing in order of birth: an allocator that serves each buffer from the lowest free range that fits.

This is the fallback of :func:`~weftplan.planner.packing.pack`: it takes some ten microseconds a buffer for any number
of buffers, so it is complete before other methods have begun. A few tall buffers, which find no free range among many
short ones, determine the height of its packings, so a second method places the tallest buffers before all others. Of a
million rectangles cut at random the first needs 1.5 to 1.7 times the lower bound, the second 1.45 times. The tightest
range instead of the lowest would need more than twice the bound. No function keeps state.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from weftplan.planner.packing.hard.search import fit
from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, Problem

MAX_SCAN = 64
"""Maximum number of free ranges that are compared with a buffer of at least half their size."""

NUM_TALL = 1 << 14
"""Number of buffers that are placed before all others, by first fit: this takes a second."""

TALL_FIRST_RATIO = 1.45
"""Height of the slab for tall buffers and others, as a multiple of the lower bound; 1.4 gives some higher packings."""


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

    def last(self, length: int, limit: int) -> tuple[int, int]:
        """Return (start of a range, highest offset in it) for ``length`` units that end at ``limit`` or below it.

        Both are -1 if no range that is looked at fits.
        """
        k = length.bit_length()
        best = highest = -1
        fitting = self._nonempty >> k << k
        while fitting:
            bit = fitting & -fitting
            fitting ^= bit
            row = self._rows[bit.bit_length() - 1]
            stop = bisect_right(row, limit - length)
            for position in range(stop - 1, max(stop - MAX_SCAN, 0) - 1, -1):
                start = row[position]
                end = min(self.end_of[start], limit)
                if end - start >= length:
                    if end - length > highest:
                        best, highest = start, end - length
                    break
        return best, highest


def pack_by_birth(problem: Problem) -> Int64:
    """Return offsets in units: each buffer, by birth and then the longest-lived first, in the lowest free range.

    Free ranges merge with their neighbours. If none fits, the buffer starts at the last free range if that ends at the
    top, else at the top. There is no guarantee on the height; it is usually below 1.7 times the lower bound.

    >>> from weftplan.planner.packing.problem import sectioned
    >>> columns = np.array([[0, 0, 1], [1, 2, 2], [8, 4, 6]])
    >>> pack_by_birth(sectioned(*columns, np.arange(3))).tolist()
    [4, 0, 4]
    """
    return _served(problem, None, 0)


def pack_tall_first(problem: Problem, deadline: Deadline = ENDLESS) -> Int64:
    """Return offsets in units: the `NUM_TALL` largest buffers hang from the top, the others follow by birth.

    Each of the others is placed as high as the tall buffers during its life and the height permit, so that the low
    addresses stay free for buffers that live under tall buffers. If there is no such range, it takes the lowest range
    that fits, and the tall buffers move up.

    Raises:
        OutOfTime: the time limit passed before the tall buffers were placed.
    """
    by_size = np.lexsort((problem.lo - problem.hi, -problem.size))
    tall, short = (_selected(problem, np.sort(part)) for part in np.split(by_size, [NUM_TALL]))
    depth = fit(tall, np.lexsort((tall.lo - tall.hi, -tall.size)), deadline=deadline) + tall.size
    profile = np.zeros(problem.sections, np.int64)
    for lo, hi, bottom in zip(tall.lo.tolist(), tall.hi.tolist(), depth.tolist(), strict=True):
        np.maximum(profile[lo:hi], bottom, out=profile[lo:hi])
    height = int(problem.lower_bound() * TALL_FIRST_RATIO)
    reserved = _maxima(profile, short.lo, short.hi)
    below = _served(short, (height - reserved).tolist(), height)
    peak = max(int((below + short.size + reserved).max(initial=0)), int(depth.max(initial=0)))
    offsets = np.empty(len(problem), np.int64)
    offsets[tall.index], offsets[short.index] = peak - depth, below
    return offsets


def _selected(problem: Problem, members: Int64) -> Problem:
    """Return the problem of some buffers in the sections of ``problem``; its index is their number in ``problem``."""
    return Problem(problem.lo[members], problem.hi[members], problem.size[members], problem.sections, members)


def _maxima(values: Int64, lo: Int64, hi: Int64) -> Int64:
    """Return the maximum of ``values[lo:hi]`` for each pair of bounds; no range is empty.

    Ranges of ``2**k`` to ``2**(k + 1) - 1`` items are covered by two ranges of ``2**k`` items, whose maxima are stored.
    """
    lengths, maxima, span = hi - lo, np.zeros(len(lo), np.int64), 1
    while len(values):
        pairs = ((lengths >= span) & (lengths < 2 * span)).nonzero()[0]
        maxima[pairs] = np.maximum(values[lo[pairs]], values[hi[pairs] - span])
        values = np.maximum(values[:-span], values[span:])
        span *= 2
    return maxima


def _served(problem: Problem, limits: list[int] | None, height: int) -> Int64:
    """Return the offsets of buffers that are served by birth from a slab of ``height`` units, which may grow.

    ``limits`` has the preferred maximum end of each buffer; without it each buffer takes the lowest range that fits.
    """
    lo, hi, size = problem.lists
    births = np.lexsort((-problem.hi, problem.lo)).tolist()
    deaths = problem.hi.argsort(kind="stable").tolist()
    offsets = [0] * len(lo)
    free = _FreeRanges()
    if height:
        free.add(0, height)
    top, dead = height, 0
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
        start, offset = (-1, -1) if limits is None else free.last(length, limits[i])
        if start < 0:
            start = offset = free.first(length)
        if start >= 0:
            end = free.remove(start)
            if offset > start:
                free.add(start, offset)
            if end > offset + length:
                free.add(offset + length, end)
        elif top in free.start_of:
            offset = free.start_of[top]
            free.remove(offset)
            top = offset + length
        else:
            offset, top = top, top + length
        offsets[i] = offset
    return np.array(offsets, np.int64)
