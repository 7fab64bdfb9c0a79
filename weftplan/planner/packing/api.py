"""`pack`: offsets for buffers with known lifetimes, close to the least memory possible."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weftplan.planner.packing import compiled, greedy, large
from weftplan.planner.packing.glue import glue
from weftplan.planner.packing.problem import Int64, Packing, PackingError, Problem, check_input, sectioned
from weftplan.planner.packing.search import Budget, improve

Effort = Literal["fast", "normal", "max"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one effort spends.

    Attributes:
        work: search work with the plain kernel, about 5e6 per second.
        compiled: the same with the numba kernel, about 2e8 per second; 0: numba is not even imported.
        good_enough: search only while peak / lower bound is above this.
        largest: parts with more buffers than this are not searched (their conflict table is quadratic).
        tries: greedy packings tried before the search.
    """

    work: int
    compiled: int
    good_enough: float
    largest: int
    tries: int


EFFORTS: dict[str, Plan] = {
    "fast": Plan(work=400_000, compiled=0, good_enough=1.005, largest=600, tries=3),
    "normal": Plan(work=13_000_000, compiled=1_200_000_000, good_enough=1.001, largest=3000, tries=5),
    "max": Plan(work=80_000_000, compiled=2_800_000_000, good_enough=1.0, largest=6000, tries=5),
}

# How far buffers are glued together before packing: to the end, then one round only.
GLUE_ROUNDS = (1 << 30, 1)

# The budget grows with the largest part up to this many times: a descent costs more where there are more buffers.
BUFFERS_PER_BUDGET, MOST_BUDGETS = 450, 3


def pack(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    alignment: int = 1,
    time_limit: float | None = None,
    effort: Effort | None = None,
) -> Packing:
    """Give every buffer an offset such that buffers alive at the same time do not overlap, in little memory.

    The work is counted in steps, not seconds, so the same input gives the same offsets on every machine with the same
    extras installed. ``time_limit`` only cuts that work short.

    Args:
        lower: first time at which each buffer is alive; integers.
        upper: first time at which it is dead again; ``lower < upper``.
        size: bytes of each buffer, positive; all together less than 2**62.
        alignment: offsets are multiples of it, and sizes are rounded up to it.
        time_limit: seconds after which the best packing so far is returned. None: no limit on time.
        effort: ``"fast"``: greedy, and a short search while more than 0.5 % above the lower bound; milliseconds for
            ordinary graphs. ``"normal"`` (the default): search towards the lower bound; seconds on hard inputs, none on
            easy ones. ``"max"``: longer. With numba (the ``fast`` extra) the last two search a hundred times more.

    Returns:
        The offsets, the peak they need, and the lower bound. Work stops at once when the two are equal.

    Raises:
        PackingError: an array or option is not acceptable; nothing has been done then.

    >>> packing = pack([0, 1, 3], [2, 4, 5], [10, 20, 10])
    >>> packing.peak, packing.lower_bound
    (30, 30)
    >>> packing.offsets.tolist()
    [20, 0, 20]
    """
    began = time.perf_counter()
    lo, up, sz = check_input(lower, upper, size, alignment)
    if time_limit is not None and not time_limit > 0:
        raise PackingError(f"time_limit: expected a positive number of seconds or None, got {time_limit!r}")
    effort = "normal" if effort is None else effort
    if effort not in EFFORTS:
        raise PackingError(f"effort: expected one of {', '.join(EFFORTS)}, got {effort!r}")
    units = -(-sz // alignment)
    scale = int(np.gcd.reduce(units)) if len(units) else 1
    problem = sectioned(lo, up, units // scale, np.arange(len(lo)))
    bound = problem.lower_bound()
    deadline = None if time_limit is None else began + time_limit
    offsets = solve(problem, bound, EFFORTS[effort], deadline)
    peak = greedy.peak_of(problem, offsets)
    scale *= alignment
    offsets *= scale
    offsets.flags.writeable = False
    return Packing(offsets, peak * scale, bound * scale)


def solve(problem: Problem, bound: int, plan: Plan, deadline: float | None) -> Int64:
    """Offsets in units for a checked problem; ``bound`` is its lower bound.

    Every independent part is packed on its own. Only a part that rises above what the others need anyway is searched.
    """
    offsets = np.zeros(len(problem), np.int64)
    use_jit = plan.compiled > 0 and compiled.available()
    leaves = leaf_parts(problem)
    scale = min(max(max((len(part) for _, part in leaves), default=0) / BUFFERS_PER_BUDGET, 1.0), MOST_BUDGETS)
    budget = Budget(int((plan.compiled if use_jit else plan.work) * scale), deadline)
    for base, part in leaves:
        quick = greedy if len(part) <= large.THRESHOLD else large
        best = quick.portfolio(part, bound - base, plan.tries)
        if greedy.peak_of(part, best) + base > bound * plan.good_enough:
            best = refine(part, best, bound - base, plan, budget, jit=use_jit)
        offsets[part.index] = best + base
    return offsets


def refine(part: Problem, offsets: Int64, floor: int, plan: Plan, budget: Budget, *, jit: bool) -> Int64:
    """Search: first among packings of glued pieces, which are fewer; then the largest buffers; then all."""
    best, peak = offsets, greedy.peak_of(part, offsets)
    enough = floor * plan.good_enough
    count = len(part)
    for rounds in GLUE_ROUNDS:
        glued = glue(part, rounds)
        if peak <= enough or len(glued.problem) == count:
            break
        count = len(glued.problem)
        found = glued.expand(pack_pieces(glued.problem, floor, plan, budget, original=len(part), jit=jit))
        if greedy.peak_of(part, found) < peak:
            best, peak = found, greedy.peak_of(part, found)
    if peak > enough and len(part) > large.CORED:
        best = large.improve_core(part, best, floor, enough, budget, jit=jit)
        peak = greedy.peak_of(part, best)
    if peak > enough and len(part) <= plan.largest:
        best = improve(part, best, floor, budget, jit=jit, good_enough=plan.good_enough)
    return best


def pack_pieces(pieces: Problem, floor: int, plan: Plan, budget: Budget, *, original: int, jit: bool) -> Int64:
    """Pack glued pieces with a share of the budget, the larger the more ``original`` buffers were glued."""
    start = (greedy if len(pieces) <= large.THRESHOLD else large).portfolio(pieces, floor, plan.tries)
    if len(pieces) > plan.largest:
        return start
    share = Budget(budget.work // (3 if 2 * len(pieces) < original else 10), budget.deadline)
    budget.work -= share.work
    start = improve(pieces, start, floor, share, jit=jit, good_enough=plan.good_enough)
    budget.work += share.work
    return start


def leaf_parts(problem: Problem) -> list[tuple[int, Problem]]:
    """Cut a problem into (units below it, part): at moments where nothing lives, and by taking away what always lives.

    A buffer that lives as long as its part conflicts with everything in it, so it can lie at the bottom and the rest
    is packed above it; without it there may be new moments to cut at. The buffers taken away are parts of their own.
    """
    leaves: list[tuple[int, Problem]] = []
    todo = [(0, problem)] if len(problem) else []
    while todo:
        base, whole = todo.pop()
        for part in whole.parts():
            always = (part.lo == 0) & (part.hi == part.sections)
            if always.all() or not always.any():
                leaves.append((base, part))
                continue
            ground = part.take(always)
            leaves.append((base, ground))
            todo.append((base + int(ground.size.sum()), part.take(~always)))
    return leaves
