"""Driver of the search kernel: chooses the capacities, the work limits and the priorities of its runs.

Capacities are tried from below: the lower bound first, then fractions of the gap to the best known packing. Finding a
packing at the lower bound is usually faster than refuting the last few percent from above. Each capacity is tried in
several short runs with random priorities and growing limits, because the length of one run is heavy-tailed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.packing.hard import kernel
from weftplan.planner.packing.hard.kernel import Ints, Tables
from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, OutOfTime, Problem, peak_of
from weftplan.planner.packing.reuse import compressed_rows


class Placed:
    """The placed buffers, sorted by offset, so that one mask selects the live ones in stacking order."""

    def __init__(self, capacity: int) -> None:
        self._count = 0
        self._lo = np.zeros(capacity, np.int32)
        self._hi = np.zeros(capacity, np.int32)
        self._off = np.zeros(capacity, np.int64)
        self._top = np.zeros(capacity, np.int64)

    def gap(self, lo: int, hi: int, size: int, *, best: bool) -> int:
        """Return the lowest offset at which ``size`` units fit during ``lo..hi``; with ``best``, the tightest gap's."""
        n = self._count
        live = ((self._lo[:n] < hi) & (self._hi[:n] > lo)).nonzero()[0]
        if not len(live):
            return 0
        off = self._off[live]
        reach = np.maximum.accumulate(self._top[live])
        widths = np.empty(len(live), np.int64)
        widths[0] = off[0]
        np.subtract(off[1:], reach[:-1], out=widths[1:])
        fits = widths >= size
        if best and fits.any():
            k = int(np.where(fits, widths, np.iinfo(np.int64).max).argmin())
        else:
            k = int(fits.argmax())
        if not fits[k]:
            return int(reach[-1])
        return int(reach[k - 1]) if k else 0

    def insert(self, lo: int, hi: int, off: int, top: int) -> None:
        """Add a buffer that lives during ``lo..hi`` in units ``off..top``."""
        n = self._count
        at = int(self._off[:n].searchsorted(off, side="right"))
        for column, value in ((self._lo, lo), (self._hi, hi), (self._off, off), (self._top, top)):
            column[at + 1 : n + 1] = column[at:n]
            column[at] = value
        self._count = n + 1


def fit(problem: Problem, order: Int64, *, best: bool = False, deadline: Deadline = ENDLESS) -> Int64:
    """Place buffers one by one in ``order``, each in the lowest gap (``best``: the tightest); return the offsets."""
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
    """Return the portfolio of (order, whether to use best fit); the first is usually the best."""
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
    """Return the best of the first ``tries`` greedy packings; stop as soon as a peak is at most ``floor``.

    Raises:
        OutOfTime: time was over before the first packing was complete.
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


# Candidate capacities, as fractions of the gap between the lower bound and the best packing.
LADDER = (0.0, 0.04, 0.15, 0.4, 0.75)
RULES = (kernel.FEWEST_TIGHT, kernel.FEWEST_LOW, kernel.FAILURES, kernel.FEWEST)

# Work charged for the overhead of one run outside the kernel, so that many short runs also use up the allowance.
RUN = 500

# Estimated work per second before the first run, for a slow machine; used only with a time limit.
RATE = 2_000_000.0

# Estimated number of pairs of buffers per second when the kernel's tables are built.
PAIRS_PER_SECOND = 20_000_000


@dataclass(slots=True)
class Allowance:
    """The remaining kernel work, which is deterministic, and an optional deadline, which is not."""

    work: int
    deadline: Deadline = ENDLESS

    def spent(self) -> bool:
        """Return whether the work is used up or the deadline has passed."""
        return self.work <= 0 or self.deadline.over()


MAX_CELLS = 4_000_000
"""Maximum number of cells (`table_cells`) of a problem that is searched: its tables take about 100 bytes a cell."""


def table_cells(problem: Problem) -> int:
    """Return the cells of a search's tables: one per ordered pair of conflicting buffers, two per buffer and section.

    >>> from weftplan.planner.packing.problem import sectioned
    >>> table_cells(sectioned(*np.array([[0, 1, 2], [2, 3, 4], [1, 1, 1]]), np.arange(3)))
    14
    """
    born, dead = np.sort(problem.lo), np.sort(problem.hi)
    alive = born.searchsorted(problem.hi) - dead.searchsorted(problem.lo, side="right")  # during its life, with itself
    return int(alive.sum() - len(problem) + 2 * (problem.hi - problem.lo).sum())


def tables(problem: Problem) -> Tables:
    """Return the kernel's read-only tables: bounds, conflicts, and buffers by section, birth and death.

    Rows are built one by one and share their integers, so that memory is linear in the number of cells.
    """
    lo, hi, sections = problem.lo, problem.hi, problem.sections
    every = np.arange(len(problem))
    conflicts = ((lo < end) & (hi > begin) & (every != k) for k, begin, end in zip(every, lo, hi, strict=True))
    alive = ((lo <= moment) & (hi > moment) for moment in range(sections))
    births = (array.tolist() for array in compressed_rows(lo, every, sections + 1))
    deaths = (array.tolist() for array in compressed_rows(hi, every, sections + 1))
    bounds = (column.tolist() for column in (lo, hi, problem.size))
    return *bounds, *_rows(conflicts, len(problem)), *_rows(alive, len(problem)), *births, *deaths


def _rows(masks: Iterable[NDArray[np.bool_]], count: int) -> tuple[list[int], list[int]]:
    """Return the numbers below ``count`` that each mask selects, in compressed row format."""
    numbers = list(range(count))
    pointers, values = [0], list[int]()
    for mask in masks:
        values += compress(numbers, mask.tolist())
        pointers.append(len(values))
    return pointers, values


class Searcher:
    """The tables and state of the kernel for one problem of at most `MAX_CELLS` cells."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.runs = 0
        self._rate = RATE  # measured work per second; used only to meet a deadline
        self._rng = np.random.default_rng(0)
        self._tables = arrays = tables(problem)
        n, sections, cells = len(problem), problem.sections, len(arrays[6])
        depth = 4 * (n + sections)
        # Estimated work of a descent without backtracking: each buffer is lifted by its conflicts, in all its sections.
        self._dive = int(np.dot(np.diff(np.array(arrays[3])), problem.hi - problem.lo)) + 4 * (cells + sections)
        state = [n, n, n, sections, sections, sections, n, sections, sections, 0, 0, n, sections, 3]
        nodes = [depth] * 6 + [4 * depth + n, 4 * depth + n]
        self._state: Tables = tuple([0] * k for k in state)
        self._nodes: Tables = tuple([0] * k for k in nodes)
        self._weights = [0] * sections
        self._log_size = np.log(problem.size.astype(np.float64))
        self._log_life = np.log((problem.hi - problem.lo).astype(np.float64))

    def _priorities(self) -> Ints:
        """Return the priority of each buffer: the rank of size to a random power times lifetime to another, with noise.

        The kernel tries buffers of higher priority first. The first two runs use fixed powers.
        """
        if self.runs < 2:
            score = self._log_size + self._log_life * (0.3 if self.runs == 0 else 1.0)
        else:
            by_size, by_life = self._rng.uniform(0.0, 1.5, 2)
            noise = float(self._rng.choice([0.05, 0.2, 0.5]))
            score = self._log_size * by_size + self._log_life * by_life
            score = score + noise * self._rng.standard_normal(len(score))
        rank = np.empty(len(score), np.int64)
        rank[np.argsort(score, kind="stable")] = np.arange(len(score))
        ranks: Ints = rank.tolist()
        return ranks

    def ask(self, capacity: int, dives: int, *, allowance: Allowance) -> tuple[int, Int64 | None]:
        """Decide whether all buffers fit under ``capacity``, with about the work of ``dives`` descents.

        Returns:
            ``(kernel.SOLVED, offsets)``, ``(kernel.REFUTED, None)``, or ``(kernel.STOPPED, None)``.
        """
        work_left = min(dives * self._dive, allowance.work)
        attempt = 0
        while work_left > 0 and not allowance.spent():
            attempt += 1
            luby = min((attempt & -attempt).bit_length() - 1, 10)
            limit = min(2 * self._dive << luby, work_left)
            if allowance.deadline.moment is not None:
                limit = min(limit, max(1, int(allowance.deadline.left() * self._rate)))
            rule = RULES[self.runs % len(RULES)]
            if rule == kernel.FAILURES:
                for t in range(self.problem.sections):
                    self._weights[t] = 0
            began = time.perf_counter()
            verdict, _ = kernel.search(
                self._tables, self._state, self._nodes, self._priorities(), self._weights, capacity, limit, rule
            )
            work = int(self._state[-1][kernel.WORK]) + RUN
            self._rate = work / max(time.perf_counter() - began, 1e-6)
            self.runs += 1
            work_left -= work
            allowance.work -= work
            if verdict == kernel.SOLVED:
                return verdict, np.array(self._state[0], np.int64)
            if verdict == kernel.REFUTED:
                return verdict, None
        return kernel.STOPPED, None


def improve(problem: Problem, offsets: Int64, *, floor: int, allowance: Allowance, good_enough: float = 1.0) -> Int64:
    """Search for a packing lower than ``offsets``; return the best.

    Args:
        problem: the buffers.
        offsets: the packing to start from.
        floor: peak at which the search stops: the lower bound of this part or, if higher, of the whole problem.
        allowance: work and time to spend.
        good_enough: stop as soon as the peak is at most ``floor * good_enough``.
    """
    best, peak = offsets, peak_of(problem, offsets)
    enough = int(floor * good_enough)
    if peak <= enough or allowance.spent():
        return best
    if allowance.deadline.moment is not None and len(problem) ** 2 > allowance.deadline.left() * PAIRS_PER_SECOND:
        return best  # building the tables would take longer than the remaining time
    searcher = Searcher(problem)
    dives = 2
    refutations = 0
    while peak > enough and not allowance.spent():
        refused = -1
        step = 0
        while step < len(LADDER) and peak > enough and not allowance.spent():
            capacity = floor + int((peak - floor) * LADDER[step])
            step += 1
            if capacity <= refused or capacity >= peak:
                continue
            verdict, solution = searcher.ask(capacity, dives, allowance=allowance)
            if solution is not None:
                best, peak = solution, peak_of(problem, solution)
                step = 0
            elif verdict == kernel.REFUTED:
                # Refuted: continue from larger fractions of the gap, because one more unit would hardly help.
                floor = capacity + 1
                enough = max(enough, floor)
                refutations += 1
                step = min(refutations, len(LADDER) - 1)
            else:
                refused = capacity
        dives *= 2
    return best
