"""Greedy packings: first fit in several orders, best fit by birth.

They need NumPy alone and take any number of buffers.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, OutOfTime, Problem, peak_of


class Placed:
    """Buffers placed so far, by offset, so that those alive with a new one come out of one mask in stacking order."""

    def __init__(self, capacity: int) -> None:
        self._count = 0
        self._lo = np.zeros(capacity, np.int32)
        self._hi = np.zeros(capacity, np.int32)
        self._off = np.zeros(capacity, np.int64)
        self._top = np.zeros(capacity, np.int64)

    def gap(self, lo: int, hi: int, size: int, *, best: bool) -> int:
        """Lowest offset where ``size`` units fit during ``lo..hi``; with ``best`` the tightest gap instead."""
        n = self._count
        live = ((self._lo[:n] < hi) & (self._hi[:n] > lo)).nonzero()[0]
        if not len(live):
            return 0
        off = self._off[live]
        reach = np.maximum.accumulate(self._top[live])
        room = np.empty(len(live), np.int64)
        room[0] = off[0]
        np.subtract(off[1:], reach[:-1], out=room[1:])
        fits = room >= size
        if best and fits.any():
            k = int(np.where(fits, room, np.iinfo(np.int64).max).argmin())
        else:
            k = int(fits.argmax())
        if not fits[k]:
            return int(reach[-1])
        return int(reach[k - 1]) if k else 0

    def insert(self, lo: int, hi: int, off: int, top: int) -> None:
        """Add a placed buffer."""
        n = self._count
        at = int(self._off[:n].searchsorted(off, side="right"))
        for column, value in ((self._lo, lo), (self._hi, hi), (self._off, off), (self._top, top)):
            column[at + 1 : n + 1] = column[at:n]
            column[at] = value
        self._count = n + 1


def fit(problem: Problem, order: Int64, *, best: bool = False, deadline: Deadline = ENDLESS) -> Int64:
    """Place buffers one by one in ``order``, each at the lowest (or tightest) gap among those alive with it."""
    offsets = np.zeros(len(problem), np.int64)
    placed = Placed(len(problem))
    lo, hi, size = (column[order].tolist() for column in (problem.lo, problem.hi, problem.size))
    for k, i in enumerate(order.tolist()):
        if not k & 63:
            deadline.check()
        offsets[i] = off = placed.gap(lo[k], hi[k], size[k], best=best)
        placed.insert(lo[k], hi[k], off, off + size[k])
    return offsets


def orders(problem: Problem) -> list[tuple[Int64, bool]]:
    """(order, best fit?) of the portfolio, the usually best first."""
    life = problem.hi - problem.lo
    every = np.arange(len(problem))
    return [
        (np.lexsort((every, -life, -problem.size)), False),
        (np.lexsort((every, -problem.size, problem.lo)), True),
        (np.lexsort((every, -(problem.size.astype(np.float64) * life))), False),
        (np.lexsort((every, -problem.size, -life)), False),
        (np.lexsort((every, -problem.size, -problem.hi)), True),
    ]


def portfolio(problem: Problem, floor: int, *, tries: int, deadline: Deadline = ENDLESS) -> Int64:
    """The best of the first ``tries`` greedy packings; stops at peak ``floor``.

    Raises:
        OutOfTime: before the first was there.
    """
    packings: list[Int64] = []
    for order, tightest in orders(problem)[:tries]:
        try:
            packings.append(fit(problem, order, best=tightest, deadline=deadline))
        except OutOfTime:
            if not packings:
                raise
            break
        if peak_of(problem, packings[-1]) <= floor:
            break
    return min(packings, key=partial(peak_of, problem))
