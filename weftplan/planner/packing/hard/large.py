"""Packing of many buffers: a core of the largest placed with care, the tail of small ones on top of it.

First fit looks at every buffer placed before, which is quadratic. In traces of real programs nearly all bytes belong to
few buffers. The tail is chosen so that it never holds more than a small part of the bound, and needs no care: each of
its buffers goes on the skyline where that stays under the target, and only the others look for a gap.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import numpy as np

from weftplan.planner.packing.hard.greedy import Placed, fit, orders
from weftplan.planner.packing.hard.search import Allowance, improve
from weftplan.planner.packing.problem import ENDLESS, MANY, Deadline, Int64, OutOfTime, Problem, peak_of

# Above so many buffers a core of the largest is searched before all of them.
CORED = 600

# Tail: at most this part of the bound is live in it at any time. It may stand this much above the core and the bound.
TAIL = 0.002
HEADROOM = 1.005
# At most so many buffers look for a gap, in the core and again in the tail: it is what keeps a million buffers
# feasible.
SEEKERS = 40_000
# Cores searched by the kernel: this many of the largest buffers.
CORES = (250, 500, 1000)


def by_size(problem: Problem) -> Int64:
    """Indices by falling size, then lifetime, then birth."""
    return np.lexsort((problem.lo, problem.lo - problem.hi, -problem.size))


def core_size(problem: Problem, order: Int64, *, part: float, floor: int) -> int:
    """Least k such that what comes after the first k of ``order`` never holds more than ``part * floor``."""
    few, many = 0, len(order)
    while few < many:
        k = (few + many) // 2
        if problem.take(order[k:]).lower_bound() <= part * floor:
            many = k
        else:
            few = k + 1
    return few


def complete(
    problem: Problem, core: Int64, *, core_offsets: Int64, rest: Int64, target: int, deadline: Deadline = ENDLESS
) -> Int64:
    """Keep the core where it is and place ``rest`` in the given order, under ``target`` where possible."""
    offsets = np.zeros(len(problem), np.int64)
    offsets[core] = core_offsets
    lo, hi, size = problem.lo.tolist(), problem.hi.tolist(), problem.size.tolist()
    sky = np.zeros(problem.sections, np.int64)
    for i in core.tolist():
        top = offsets[i] + size[i]
        np.maximum(sky[lo[i] : hi[i]], top, out=sky[lo[i] : hi[i]])
    late: list[int] = []
    easy: list[int] = []
    for k, i in enumerate(rest.tolist()):
        if not k & 255:
            deadline.check()
        window = sky[lo[i] : hi[i]]
        off = int(window.max())
        if off + size[i] > target and len(late) < SEEKERS:
            late.append(i)
            continue
        offsets[i] = off
        window[:] = off + size[i]
        easy.append(i)
    if late:
        known = np.concatenate([core, np.array(easy, np.int64)])
        placed = Placed(len(problem))
        placed.fill(problem.lo[known], problem.hi[known], offsets[known], offsets[known] + problem.size[known])
        placed.place_each(problem, np.array(late, np.int64), offsets=offsets, deadline=deadline)
    return offsets


def extend(problem: Problem, order: Int64, *, k: int, first: Int64, floor: int, deadline: Deadline = ENDLESS) -> Int64:
    """First fit by ``order`` for the buffers after the first ``k``, which lie at ``first``; the tail by `complete`."""
    cut = max(k, min(core_size(problem, order, part=TAIL, floor=floor), SEEKERS))
    core = order[:cut]
    placed = Placed(cut)
    placed.fill(problem.lo[order[:k]], problem.hi[order[:k]], first, first + problem.size[order[:k]])
    every = np.zeros(len(problem), np.int64)
    every[order[:k]] = first
    placed.place_each(problem, order[k:cut], offsets=every, deadline=deadline)
    offsets = every[core]
    rest = order[cut:]
    rest = rest[np.argsort((problem.lo - problem.hi)[rest], kind="stable")]  # long ones first make a flat skyline
    headroom = HEADROOM if len(problem) > MANY else 1.0
    target = int(max(floor, (offsets + problem.size[core]).max(initial=0)) * headroom)
    return complete(problem, core, core_offsets=offsets, rest=rest, target=target, deadline=deadline)


def portfolio(problem: Problem, floor: int, *, tries: int, deadline: Deadline = ENDLESS) -> Int64:
    """The best of some greedy packings; stops at peak ``floor``. With ``tries`` 1 only first fit by size.

    Raises:
        OutOfTime: before the first was there.
    """
    order = by_size(problem)
    best = extend(problem, order, k=0, first=np.zeros(0, np.int64), floor=floor, deadline=deadline)
    if tries > 1 and peak_of(problem, best) > floor * 1.02 and len(problem) <= 10_000:
        other, tightest = orders(problem)[1]
        with suppress(OutOfTime):
            offsets = fit(problem, other, best=tightest, deadline=deadline)
            best = min(best, offsets, key=partial(peak_of, problem))
    return best


def improve_core(
    problem: Problem, offsets: Int64, *, floor: int, enough: float, allowance: Allowance, jit: bool
) -> Int64:
    """Search for a better packing of the largest buffers and complete it; return the best packing seen."""
    best, peak = offsets, peak_of(problem, offsets)
    order = by_size(problem)
    if core_size(problem, order, part=TAIL, floor=floor) > SEEKERS // 2:
        return best  # sizes are too even for a core to matter
    for k in CORES:
        if peak <= enough or allowance.spent():
            break
        if k >= len(problem) * 0.8:
            continue
        core = problem.take(order[:k])
        share = Allowance(allowance.work // 2, allowance.deadline)
        allowance.work -= share.work
        try:
            start = fit(core, np.arange(k), deadline=allowance.deadline)  # by size already
            packed = improve(core, start, floor=core.lower_bound(), allowance=share, jit=jit)
            found = extend(problem, order, k=k, first=packed, floor=floor, deadline=allowance.deadline)
        except OutOfTime:
            break
        allowance.work += share.work
        if peak_of(problem, found) < peak:
            best, peak = found, peak_of(problem, found)
    return best
