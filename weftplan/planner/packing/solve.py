"""How a checked problem is packed: which methods, in which order, until the peak is close enough to the bound."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weftplan.planner.packing import compiled, greedy, large
from weftplan.planner.packing.clock import Clock, OutOfTime
from weftplan.planner.packing.edges import reuse_edges
from weftplan.planner.packing.glue import glue
from weftplan.planner.packing.outward import VARIANTS, pack_outwards
from weftplan.planner.packing.peel import peel
from weftplan.planner.packing.precedence import Precedence
from weftplan.planner.packing.problem import Int64, Problem
from weftplan.planner.packing.search import Budget, improve

# How far buffers are glued together before packing: to the end, then one round only.
GLUE_ROUNDS = (1 << 30, 1)

# A sweep from the fullest moment is given up above this many times the floor: other methods do better there.
WORTH_A_SWEEP = 1.05

# Where memory may be spent on waiting less, so many times more places are looked at.
PATIENCE = 8

# Holes that are looked at when time is over.
HOLES_IN_A_HURRY = 64

# With less time left than this many seconds numba is not loaded.
TIME_FOR_NUMBA = 2.0

# Work of the plain kernel before the compiled one is loaded.
FIRST_WORK = 1_000_000

# The budget grows with the largest part up to this many times: a descent costs more where there are more buffers.
BUFFERS_PER_BUDGET, MOST_BUDGETS = 450, 3.0
# Where the compiled kernel spends most of a user's patience already, only up to this many times.
MOST_LONG_BUDGETS, LONG = 1.4, 2_000_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What one effort spends.

    Attributes:
        work: search work with the plain kernel, about 5e6 per second.
        compiled: the same with the numba kernel, about 2e8 per second; 0: numba is not even imported.
        good_enough: search only while peak / lower bound is above this.
        large_enough: the same for parts of more than a few thousand buffers, if that is more.
        largest: parts with more buffers than this are not searched (their conflict table is quadratic).
        tries: greedy packings tried before the search.
    """

    work: int
    compiled: int
    good_enough: float
    large_enough: float
    largest: int
    tries: int


def solve(problem: Problem, bound: int, plan: Plan, clock: Clock, order: Precedence | None = None) -> Int64:
    """Offsets in units for a checked problem; ``bound`` is its lower bound.

    Every independent part is packed on its own. Only a part that rises above what the others need anyway is searched.
    ``order`` is that of the buffers of the problem that the user gave.
    """
    offsets = np.zeros(len(problem), np.int64)
    use_jit = plan.compiled > 0 and compiled.available() and (clock.deadline is None or clock.left() > TIME_FOR_NUMBA)
    leaves = leaf_parts(problem)
    middling = max((len(part) for _, part in leaves if len(part) <= large.THRESHOLD), default=0)
    work = plan.compiled if use_jit else plan.work
    most = MOST_LONG_BUDGETS if use_jit and work > LONG else MOST_BUDGETS
    budget = Budget(int(work * min(max(middling / BUFFERS_PER_BUDGET, 1.0), most)), clock)
    for base, part in leaves:
        floor = bound - base
        best = Incumbent(part, order)
        try:
            if use_jit and len(part) <= large.THRESHOLD:
                # What the plain kernel finds at once is not worth the half second that loading numba costs.
                pack_part(best, floor, plan, Budget(FIRST_WORK, clock), jit=False)
            if best.peak > enough_for(part, floor, plan):
                pack_part(best, floor, plan, budget, jit=use_jit)
            best.wait_less(floor, clock)
        except OutOfTime:
            best.hurry(floor)
        offsets[part.index] = best.offsets + base
    return offsets


def spread(problem: Problem, offsets: Int64, room: int, order: Precedence, clock: Clock) -> Int64:
    """The packing of at most ``room`` units with the fewest waits that sweeps find, or ``offsets``."""
    best = order.waits(*reuse_edges(problem.lo, problem.hi, problem.size, offsets))
    for variant in VARIANTS:
        if not best:
            break
        try:
            found = pack_outwards(problem, room, room, variant, order, clock, patience=PATIENCE)
        except OutOfTime:
            break
        if found is not None and found[1] < best:
            offsets, best = found
    return offsets


class Incumbent:
    """The best packing of a part so far: the lowest, and of equally low ones one whose buffers wait for few others."""

    def __init__(self, part: Problem, order: Precedence | None = None) -> None:
        self.part = part
        self.offsets: Int64 = np.cumsum(part.size) - part.size  # one on the other: valid, and never better than any
        self.peak = int(part.size.sum())
        self.order = None if order is None else order.take(part.index)
        self.found = False
        self.waits: int | None = None
        """How many reuses make somebody wait; None: not counted, or nobody asked."""

    def offer(self, offsets: Int64) -> None:
        """Keep ``offsets`` if they are lower."""
        peak = greedy.peak_of(self.part, offsets)
        self.found = True
        if peak < self.peak:
            self.offsets, self.peak, self.waits = offsets, peak, None

    def hurry(self, floor: int) -> None:
        """Have some packing, when time was over before there was any."""
        if not self.found:
            quick = pack_outwards(self.part, floor, self.peak, VARIANTS[0], most_holes=HOLES_IN_A_HURRY)
            if quick is not None:
                self.offer(quick[0])

    def sweep(self, floor: int, enough: float, clock: Clock) -> None:
        """Build packings outwards from the fullest moment, until one is low enough.

        They are given up above what other methods reach.
        """
        worth = int(floor * WORTH_A_SWEEP)
        tries = len(VARIANTS) if len(self.part) <= large.THRESHOLD else 2
        for order in (None,) if self.order is None else (self.order, None):
            for variant in VARIANTS[: tries if order is None else 1]:
                if self.peak <= enough:
                    return
                found = pack_outwards(self.part, floor, min(self.peak - 1, worth), variant, order, clock)
                if found is not None:
                    self.found = True
                    self.offsets, self.peak = found[0], greedy.peak_of(self.part, found[0])
                    self.waits = None if order is None else found[1]

    def wait_less(self, floor: int, clock: Clock) -> None:
        """Look for packings that are as low but in which buffers wait for fewer others."""
        if self.order is None or self.waits is not None:
            return
        self.waits = self.order.waits(*reuse_edges(self.part.lo, self.part.hi, self.part.size, self.offsets))
        for variant in VARIANTS:
            if not self.waits:
                return
            found = pack_outwards(self.part, floor, self.peak, variant, self.order, clock)
            if found is not None and found[1] < self.waits:
                self.offsets, self.waits = found
                self.peak = greedy.peak_of(self.part, self.offsets)
                return


def enough_for(part: Problem, floor: int, plan: Plan) -> float:
    """Peak at which work on a part stops."""
    small = len(part) <= large.THRESHOLD
    return floor * (plan.good_enough if small else max(plan.good_enough, plan.large_enough))


def pack_part(best: Incumbent, floor: int, plan: Plan, budget: Budget, *, jit: bool) -> None:
    """Improve ``best``: sweeps, greedy packings, then searches: of glued pieces, of the largest buffers, of all.

    Nothing more is tried once the peak is close enough to ``floor``.
    """
    part = best.part
    small = len(part) <= large.THRESHOLD
    enough = enough_for(part, floor, plan)
    clock = budget.clock
    best.sweep(floor, floor if small else enough, clock)
    if best.peak <= (floor if small else enough):
        return
    if small:
        # Where nearly everything can be set aside, greedy packings of the rest are enough.
        peel_first(best, floor, plan, budget, jit=jit, at_most=len(part) // 4)
        best.offer(greedy.portfolio(part, floor, plan.tries, clock))
        peel_first(best, floor, plan, budget, jit=jit, at_most=3 * len(part) // 4)
    count = len(part)
    # Among many buffers gluing is tried only where two rounds take away a good part.
    promising = small or 5 * len(glue(part, 2, clock).problem) < 4 * count
    for rounds in GLUE_ROUNDS if promising else ():
        if best.peak <= enough:
            return
        glued = glue(part, rounds, clock)
        if len(glued.problem) == count:
            break
        count = len(glued.problem)
        best.offer(glued.expand(pack_pieces(glued.problem, floor, plan, budget, original=len(part), jit=jit)))
    if best.peak > enough and not small:
        best.offer(large.portfolio(part, floor, plan.tries, clock))
        peel_first(best, floor, plan, budget, jit=jit, at_most=large.CORED)
    if best.peak > enough and len(part) > large.CORED:
        best.offer(large.improve_core(part, best.offsets, floor, enough, budget, jit=jit))
        if not small:
            peel_first(best, floor, plan, budget, jit=jit, at_most=large.THRESHOLD)
    if best.peak > enough and len(part) <= plan.largest:
        best.offer(improve(part, best.offsets, floor, budget, jit=jit, good_enough=plan.good_enough))


def peel_first(best: Incumbent, floor: int, plan: Plan, budget: Budget, *, jit: bool, at_most: int) -> None:
    """Where peeling leaves parts of at most ``at_most`` buffers, pack these, and the others around them.

    Peeling a little is worse than nothing: it loosens what fits together exactly.
    """
    if best.peak <= enough_for(best.part, floor, plan):
        return
    peeled = peel(best.part, floor, budget.clock)
    leaves = list(leaf_parts(best.part.take(peeled.core)))
    if max((len(part) for _, part in leaves), default=0) > at_most:
        return
    core_offsets = np.zeros(len(peeled.core), np.int64)
    row = dict(zip(best.part.index[peeled.core].tolist(), range(len(peeled.core)), strict=True))
    for base, part in leaves:
        inner = Incumbent(part)
        pack_part(inner, floor - base, plan, budget, jit=jit)
        core_offsets[[row[k] for k in part.index.tolist()]] = inner.offsets + base
    best.offer(peeled.restore(best.part, core_offsets, budget.clock))


def pack_pieces(pieces: Problem, floor: int, plan: Plan, budget: Budget, *, original: int, jit: bool) -> Int64:
    """Pack glued pieces with a share of the budget, the larger the more ``original`` buffers were glued."""
    start: Int64 = (greedy if len(pieces) <= large.THRESHOLD else large).portfolio(
        pieces, floor, plan.tries, budget.clock
    )
    if len(pieces) > plan.largest:
        return start
    share = Budget(budget.work // (3 if 2 * len(pieces) < original else 10), budget.clock)
    budget.work -= share.work
    start = improve(pieces, start, floor, share, jit=jit, good_enough=plan.good_enough)
    budget.work += share.work
    return start


def leaf_parts(problem: Problem) -> list[tuple[int, Problem]]:
    """Cut a problem into (units below it, part): at moments where nothing lives, and by taking away what always lives.

    A buffer that lives as long as its part conflicts with everything in it, so it can lie at the bottom and the rest
    is packed above it; without it there may be new moments to cut at. The buffers taken away are parts of their own.

    All layers come from one sort. By birth, and of one birth the longest-lived first, every part is a range of
    buffers, and those that always live are its first ones. A part may be cut before a birth that only what was taken
    away below it outlives; how many buffers outlive a birth is counted once.
    """
    if not len(problem):
        return []
    order = np.lexsort((-problem.hi, problem.lo))
    lo, hi, size = problem.lo[order], problem.hi[order], problem.size[order]
    over = np.arange(len(order)) - np.searchsorted(np.sort(hi), lo, side="right")
    over[1:][lo[1:] == lo[:-1]] = -1  # nothing is cut between buffers of one birth
    by_count = np.argsort(over, kind="stable")
    bounds = np.searchsorted(over[by_count], np.arange(-1, len(order) + 1))
    begin, end, nbytes = lo.tolist(), hi.tolist(), size.tolist()
    leaves: list[tuple[int, Problem]] = []
    todo = [(0, 0, len(order), 0)]
    while todo:
        base, first, last, below = todo.pop()
        places = by_count[bounds[below + 1] : bounds[below + 2]]
        cuts = places[np.searchsorted(places, first, side="right") : np.searchsorted(places, last)].tolist()
        for start, stop in pairwise([first, *cuts, last]):
            rest, height = start, 0
            while rest < stop and begin[rest] == begin[start] and end[rest] > begin[stop - 1]:
                height += nbytes[rest]
                rest += 1
            ground = stop if rest == start else rest
            leaves.append((base, problem.take(np.sort(order[start:ground]))))
            if ground < stop:
                todo.append((base + height, rest, stop, below + rest - start))
    return leaves
