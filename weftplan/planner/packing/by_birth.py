"""Packing in order of birth: an allocator that serves each buffer from the tightest free range.

This is the fallback of :func:`~weftplan.planner.packing.pack`: it needs O(n log n) comparisons, so it is complete for
any number of buffers before other methods have begun, and its packings do not degrade with the number of buffers as
those of a sweep with few holes do. No function keeps state.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from weftplan.planner.packing.problem import Int64, Problem


def pack_by_birth(problem: Problem) -> Int64:
    """Return offsets in units: each buffer, by birth and then the largest first, in the tightest free range.

    Free ranges merge with their neighbours. If none fits, the buffer starts at the last free range if that ends at the
    top, else at the top. There is no guarantee on the height; it is usually below 2.5 times the lower bound.

    >>> from weftplan.planner.packing.problem import sectioned
    >>> columns = np.array([[0, 0, 1], [1, 2, 2], [8, 4, 6]])
    >>> pack_by_birth(sectioned(*columns, np.arange(3))).tolist()
    [0, 8, 0]
    """
    lo, hi, size = problem.lists
    births = np.lexsort((-problem.size, problem.lo)).tolist()
    deaths = problem.hi.argsort(kind="stable").tolist()
    offsets = [0] * len(lo)
    free: list[tuple[int, int]] = []  # (length, start), ascending
    end_of: dict[int, int] = {}  # free range by its start
    start_of: dict[int, int] = {}  # and by its end
    top = dead = 0
    for i in births:
        while hi[deaths[dead]] <= lo[i]:
            j = deaths[dead]
            dead += 1
            start = offsets[j]
            end = start + size[j]
            if end in end_of:
                after = end_of.pop(end)
                del free[bisect_left(free, (after - end, end))]
                end = after
            if start in start_of:
                before = start_of[start]
                del free[bisect_left(free, (start - before, before))]
                del start_of[start]
                start = before
            insort(free, (end - start, start))
            end_of[start], start_of[end] = end, start
        need = size[i]
        k = bisect_left(free, (need, -1))
        if k < len(free):
            length, start = free.pop(k)
            end = start + length
            if length > need:
                insort(free, (length - need, start + need))
                end_of[start + need], start_of[end] = end, start + need
            else:
                del start_of[end]
            del end_of[start]
        elif top in start_of:
            start = start_of.pop(top)
            del free[bisect_left(free, (top - start, start))], end_of[start]
            top = start + need
        else:
            start, top = top, top + need
        offsets[i] = start
    return np.array(offsets, np.int64)
