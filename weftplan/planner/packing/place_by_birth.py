"""Packing in order of birth: an allocator that serves each buffer from the lowest free range that fits.

This is the fallback of :func:`~weftplan.planner.packing.pack`: it takes some ten microseconds a buffer for any number
of buffers, so it is complete before other methods have begun. A few tall buffers, which find no free range among many
short ones, determine the height of its packings, so a second method places the tallest buffers before all others. Of a
million rectangles cut at random the first needs 1.5 to 1.7 times the lower bound, the second 1.45 times. The tightest
range instead of the lowest would need more than twice the bound. No function keeps state.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

import numpy as np

from weftplan.planner.packing.hard.search import fit
from weftplan.planner.packing.problem import ENDLESS, FAR, Deadline, Int64, Problem

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
        self._end_of: dict[int, int] = {}
        """End of a range by its start."""
        self.start_of: dict[int, int] = {}
        """Start of a range by its end."""

    def add(self, start: int, end: int) -> None:
        """Add a range that touches no other."""
        k = (end - start).bit_length()
        insort(self._rows[k], start)
        self._nonempty |= 1 << k
        self._end_of[start], self.start_of[end] = end, start

    def cut(self, start: int, low: int, high: int) -> None:
        """Remove ``low..high`` from the range that begins at ``start``."""
        end = self._end_of[start]
        if low > start:
            self._replace(start, end, start, low)
            if high < end:
                self.add(high, end)
        elif high < end:
            self._replace(start, end, high, end)
        else:
            self._remove(start, end)

    def release(self, low: int, high: int) -> None:
        """Add a range, and merge it with those that touch it."""
        start, end = self.start_of.get(low), self._end_of.get(high)
        if start is not None:
            if end is not None:
                self._remove(high, end)
            self._replace(start, low, start, high if end is None else end)
        elif end is not None:
            self._replace(high, end, low, end)
        else:
            self.add(low, high)

    def _remove(self, start: int, end: int) -> None:
        del self._end_of[start], self.start_of[end]
        k = (end - start).bit_length()
        row = self._rows[k]
        del row[bisect_left(row, start)]
        if not row:
            self._nonempty &= ~(1 << k)

    def _replace(self, start: int, end: int, new_start: int, new_end: int) -> None:
        """Replace a range by one with an end in common; most of these stay in their list."""
        k = (end - start).bit_length()
        if k != (new_end - new_start).bit_length():
            self._remove(start, end)
            self.add(new_start, new_end)
            return
        if start != new_start:
            row = self._rows[k]
            row[bisect_left(row, start)] = new_start
            del self._end_of[start]
        else:
            del self.start_of[end]
        self._end_of[new_start], self.start_of[new_end] = new_end, new_start

    def first(self, length: int) -> int:
        """Return the start of the lowest range of at least ``length`` units among the ranges looked at; -1: none."""
        k = length.bit_length()
        lowest = FAR
        longer = self._nonempty >> k + 1 << k + 1
        while longer:
            bit = longer & -longer
            longer ^= bit
            lowest = min(lowest, self._rows[bit.bit_length() - 1][0])
        for start in self._rows[k][:MAX_SCAN]:
            if start > lowest:
                break
            if self._end_of[start] - start >= length:
                return start
        return lowest if lowest < FAR else -1

    def last(self, length: int, limit: int) -> tuple[int, int]:
        """Return (start of a range, highest offset in it) for ``length`` units that end at ``limit`` or below it.

        Both are -1 if no range that is looked at fits.
        """
        k = length.bit_length()
        best = highest = -1
        fitting = self._nonempty >> k
        while fitting:
            bits = fitting.bit_length() - 1
            fitting ^= 1 << bits
            row = self._rows[k + bits]
            stop = bisect_right(row, limit - length)
            for start in reversed(row[max(stop - MAX_SCAN, 0) : stop]):
                offset = min(self._end_of[start], limit) - length
                if offset <= highest:
                    break
                if offset >= start:
                    best, highest = start, offset
                    break
        return best, highest


def pack_by_birth(problem: Problem, deadline: Deadline = ENDLESS) -> Int64:
    """Return offsets in units: each buffer, by birth and then the longest-lived first, in the lowest free range.

    Free ranges merge with their neighbours. If none fits, the buffer starts at the last free range if that ends at the
    top, else at the top. There is no guarantee on the height; it is usually below 1.7 times the lower bound.

    Raises:
        OutOfTime: the time limit passed.

    >>> from weftplan.planner.packing.problem import sectioned
    >>> columns = np.array([[0, 0, 1], [1, 2, 2], [8, 4, 6]])
    >>> pack_by_birth(sectioned(*columns, np.arange(3))).tolist()
    [4, 0, 4]
    """
    return _served(problem, None, 0, deadline)


def pack_tall_first(problem: Problem, deadline: Deadline = ENDLESS) -> Int64:
    """Return offsets in units: the `NUM_TALL` largest buffers hang from the top, the others follow by birth.

    Each of the others is placed as high as the tall buffers during its life and the height permit, so that the low
    addresses stay free for buffers that live under tall buffers. If there is no such range, it takes the lowest range
    that fits, and the tall buffers move up.

    Raises:
        OutOfTime: the time limit passed.
    """
    by_size = np.lexsort((problem.lo - problem.hi, -problem.size))
    tall, short = (_selected(problem, np.sort(part)) for part in np.split(by_size, [NUM_TALL]))
    depth = fit(tall, np.lexsort((tall.lo - tall.hi, -tall.size)), deadline=deadline) + tall.size
    profile = np.zeros(problem.sections, np.int64)
    for lo, hi, bottom in zip(tall.lo.tolist(), tall.hi.tolist(), depth.tolist(), strict=True):
        np.maximum(profile[lo:hi], bottom, out=profile[lo:hi])
    height = int(problem.lower_bound() * TALL_FIRST_RATIO)
    reserved = _maxima(profile, short.lo, short.hi)
    below = _served(short, height - reserved, height, deadline)
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


def _served(problem: Problem, limits: Int64 | None, height: int, deadline: Deadline) -> Int64:
    """Return the offsets of buffers that are served by birth from a slab of ``height`` units, which may grow.

    ``limits`` has the preferred maximum end of each buffer; without it each buffer takes the lowest range that fits.
    """
    births = np.lexsort((-problem.hi, problem.lo))
    by_birth = _selected(problem, births)  # in this order memory is read from one end to the other
    born, died, sizes = by_birth.lists
    ends: Iterable[int] = itertools.repeat(0) if limits is None else limits[births].tolist()
    deaths = by_birth.hi.argsort(kind="stable").tolist()
    offsets = [0] * len(sizes)
    free = _FreeRanges()
    if height:
        free.add(0, height)
    top, dead, death = height, 0, died[deaths[0]] if deaths else 0
    for i, (birth, length, limit) in enumerate(zip(born, sizes, ends, strict=False)):
        if not i & 4095:
            deadline.check()
        while death <= birth:
            j = deaths[dead]
            free.release(offsets[j], offsets[j] + sizes[j])
            dead += 1
            death = died[deaths[dead]]
        start, offset = free.last(length, limit) if limit else (-1, -1)
        if start < 0:
            start = offset = free.first(length)
        if start >= 0:
            free.cut(start, offset, offset + length)
        elif top in free.start_of:
            offset = free.start_of[top]
            free.cut(offset, offset, top)
            top = offset + length
        else:
            offset, top = top, top + length
        offsets[i] = offset
    placed = np.empty(len(offsets), np.int64)
    placed[births] = offsets
    return placed
