"""Drives the search kernel: which capacity to ask for, for how long, with which priorities.

Capacities are asked from below: the lower bound first, then part of the way to the best packing known. A packing at the
lower bound is usually found sooner than the last few percent would be proved impossible from above. Every question is
asked by several short runs with random priorities and growing limits, because the length of one run is heavy-tailed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from weftplan.planner.packing.hard import kernel
from weftplan.planner.packing.hard.kernel import Ints, Tables
from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, OutOfTime, Problem, peak_of
from weftplan.planner.packing.reuse import compressed_rows


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


# Parts of the gap between lower bound and best packing at which the decision question is put, lowest first.
LADDER = (0.0, 0.04, 0.15, 0.4, 0.75)
RULES = (kernel.FEWEST_TIGHT, kernel.FEWEST_LOW, kernel.FAILURES, kernel.FEWEST)

# Work that stands for the cost of a run outside the kernel, so that many short runs end as well.
RUN = 500

# Work a second that is expected of the first run, which a time limit cuts short: a slow machine's.
RATE = 2_000_000.0

# How many pairs of buffers a second enter the tables of the kernel.
PAIRS_PER_SECOND = 20_000_000


@dataclass(slots=True)
class Allowance:
    """The rest of the means: kernel work (deterministic), and optionally a moment in time (not so)."""

    work: int
    deadline: Deadline = ENDLESS

    def spent(self) -> bool:
        """Whether to stop now."""
        return self.work <= 0 or self.deadline.over()


def tables(problem: Problem) -> tuple[Int64, ...]:
    """The kernel's read-only tables: bounds, conflicts, and buffers by section, birth and death."""
    lo, hi, n = problem.lo, problem.hi, len(problem)
    live = (lo[:, None] < hi) & (lo < hi[:, None])
    np.fill_diagonal(live, False)
    first, second = np.nonzero(live)
    moments, every = np.arange(problem.sections), np.arange(n)
    owner, section = np.nonzero((lo[:, None] <= moments) & (moments < hi[:, None]))
    conflicts = compressed_rows(first, second, n)
    alive = compressed_rows(section, owner, problem.sections)
    births = compressed_rows(lo, every, problem.sections + 1)
    deaths = compressed_rows(hi, every, problem.sections + 1)
    return lo, hi, problem.size, *conflicts, *alive, *births, *deaths


class Searcher:
    """Working memory of the kernel for one problem of a few thousand buffers at most: its table of conflicts is
    quadratic.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.runs = 0
        self._rate = RATE  # work per second seen; only used to keep a deadline
        self._rng = np.random.default_rng(0)
        arrays = tables(problem)
        n, sections, pairs, cells = len(problem), problem.sections, len(arrays[4]), len(arrays[6])
        trail = 12 * (pairs + 2 * cells) + 4 * (n + sections)
        depth = 4 * (n + sections)
        # About the work of one straight descent: each buffer is lifted by those it meets, in each of its sections.
        self._dive = int(np.dot(np.diff(arrays[3]), problem.hi - problem.lo)) + 4 * (cells + sections)
        state = [n, n, n, sections, sections, sections, n, sections, sections, trail, trail, n, sections, 4]
        nodes = [depth] * 6 + [4 * depth + n, 4 * depth + n]
        self._tables: Tables = tuple(a.tolist() for a in arrays)
        self._state: Tables = tuple([0] * k for k in state)
        self._nodes: Tables = tuple([0] * k for k in nodes)
        self._weights = [0] * sections
        self._log_size = np.log(problem.size.astype(np.float64))
        self._log_life = np.log((problem.hi - problem.lo).astype(np.float64))

    def _priorities(self) -> Ints:
        """Larger is tried first: a random power of size times a random power of lifetime, with noise."""
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
        """Put the decision question, spending about the work of ``dives`` straight descents.

        Returns ``(kernel.SOLVED, offsets)``, ``(kernel.REFUTED, None)``, or ``(kernel.STOPPED, None)``.
        """
        left = min(dives * self._dive, allowance.work)
        attempt = 0
        while left > 0 and not allowance.spent():
            attempt += 1
            luby = min((attempt & -attempt).bit_length() - 1, 10)
            limit = min(2 * self._dive << luby, left)
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
            left -= work
            allowance.work -= work
            if verdict == kernel.SOLVED:
                return verdict, np.array(self._state[0], np.int64)
            if verdict == kernel.REFUTED:
                return verdict, None
        return kernel.STOPPED, None


def improve(problem: Problem, offsets: Int64, *, floor: int, allowance: Allowance, good_enough: float = 1.0) -> Int64:
    """Search for a packing lower than ``offsets`` until the allowance is spent or its peak is at most ``floor *
    good_enough``.

    ``floor`` is a peak below which nothing is gained: the lower bound of this part or of the whole.
    """
    best, peak = offsets, peak_of(problem, offsets)
    enough = int(floor * good_enough)
    if peak <= enough or allowance.spent():
        return best
    if allowance.deadline.moment is not None and len(problem) ** 2 > allowance.deadline.left() * PAIRS_PER_SECOND:
        return best  # the tables would not be there in time
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
                # Proved impossible: halve what is left, since one more unit would hardly help.
                floor = capacity + 1
                enough = max(enough, floor)
                refutations += 1
                step = min(refutations, len(LADDER) - 1)
            else:
                refused = capacity
        dives *= 2
    return best
