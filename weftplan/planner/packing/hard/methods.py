"""Which method is tried after which on a part that sweeps leave above its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weftplan.planner.packing.deadline import Deadline
from weftplan.planner.packing.hard import compiled, greedy, large
from weftplan.planner.packing.hard.merging import glue
from weftplan.planner.packing.hard.peel import peel
from weftplan.planner.packing.hard.search import Allowance, improve
from weftplan.planner.packing.incumbent import Incumbent, Spending, enough_for
from weftplan.planner.packing.problem import MANY, Int64, Problem, leaf_parts

# How far buffers are glued together before packing: to the end, then one round only.
GLUE_ROUNDS = (1 << 30, 1)

# With less time left than this many seconds numba is not loaded.
TIME_FOR_NUMBA = 2.0

# Work of the plain kernel before the compiled one is loaded.
FIRST_WORK = 1_000_000

# The allowance grows with the largest part up to this many times: a descent costs more where there are more buffers.
BUFFERS_PER_ALLOWANCE, MOST_ALLOWANCES = 450, 3.0
# Where the compiled kernel spends most of a user's patience already, only up to this many times.
MOST_LONG_ALLOWANCES, LONG = 1.4, 2_000_000_000


def improver(spending: Spending, deadline: Deadline, sizes: Sequence[int]) -> Callable[[Incumbent, int], None]:
    """What improves the packing of one part after the other, within one allowance.

    Args:
        spending: how much work altogether.
        deadline: time limit.
        sizes: numbers of buffers of all parts of the problem.

    Returns:
        A function of the packing to improve and of the peak below which nothing is gained.
    """
    use_jit = (
        spending.compiled > 0 and compiled.available() and (deadline.moment is None or deadline.left() > TIME_FOR_NUMBA)
    )
    middling = max((size for size in sizes if size <= MANY), default=0)
    work = spending.compiled if use_jit else spending.work
    most = MOST_LONG_ALLOWANCES if use_jit and work > LONG else MOST_ALLOWANCES
    allowance = Allowance(int(work * min(max(middling / BUFFERS_PER_ALLOWANCE, 1.0), most)), deadline)

    def improve_part(best: Incumbent, floor: int) -> None:
        if use_jit and len(best.part) <= MANY:
            # What the plain kernel finds at once is not worth the half second that loading numba costs.
            pack_part(best, floor, spending=spending, allowance=Allowance(FIRST_WORK, deadline), jit=False)
        if best.peak > enough_for(best.part, floor, spending):
            pack_part(best, floor, spending=spending, allowance=allowance, jit=use_jit)

    return improve_part


def pack_part(best: Incumbent, floor: int, *, spending: Spending, allowance: Allowance, jit: bool) -> None:
    """Improve ``best``: greedy packings, then searches: of glued pieces, of the largest buffers, of all.

    Nothing more is tried once the peak is close enough to ``floor``.
    """
    part = best.part
    small = len(part) <= MANY
    enough = enough_for(part, floor, spending)
    deadline = allowance.deadline
    if small:
        # Where nearly everything can be set aside, greedy packings of the rest are enough.
        peel_first(best, floor, spending=spending, allowance=allowance, jit=jit, at_most=len(part) // 4)
        best.offer(greedy.portfolio(part, floor, tries=spending.tries, deadline=deadline))
        peel_first(best, floor, spending=spending, allowance=allowance, jit=jit, at_most=3 * len(part) // 4)
    count = len(part)
    # Among many buffers gluing is tried only where two rounds take away a good part.
    promising = small or 5 * len(glue(part, 2, deadline).problem) < 4 * count
    for rounds in GLUE_ROUNDS if promising else ():
        if best.peak <= enough:
            return
        glued = glue(part, rounds, deadline)
        if len(glued.problem) == count:
            break
        count = len(glued.problem)
        best.offer(
            glued.expand(
                pack_pieces(glued.problem, floor, spending=spending, allowance=allowance, original=len(part), jit=jit)
            )
        )
    if best.peak > enough and not small:
        best.offer(large.portfolio(part, floor, tries=spending.tries, deadline=deadline))
        peel_first(best, floor, spending=spending, allowance=allowance, jit=jit, at_most=large.CORED)
    if best.peak > enough and len(part) > large.CORED:
        best.offer(large.improve_core(part, best.offsets, floor=floor, enough=enough, allowance=allowance, jit=jit))
        if not small:
            peel_first(best, floor, spending=spending, allowance=allowance, jit=jit, at_most=MANY)
    if best.peak > enough and len(part) <= spending.largest:
        best.offer(
            improve(part, best.offsets, floor=floor, allowance=allowance, jit=jit, good_enough=spending.good_enough)
        )


def peel_first(
    best: Incumbent, floor: int, *, spending: Spending, allowance: Allowance, jit: bool, at_most: int
) -> None:
    """Where peeling leaves parts of at most ``at_most`` buffers, pack these, and the others around them.

    Peeling a little is worse than nothing: it loosens what fits together exactly.
    """
    if best.peak <= enough_for(best.part, floor, spending):
        return
    peeled = peel(best.part, floor, allowance.deadline)
    leaves = list(leaf_parts(best.part.take(peeled.core)))
    if max((len(part) for _, part in leaves), default=0) > at_most:
        return
    core_offsets = np.zeros(len(peeled.core), np.int64)
    row = dict(zip(best.part.index[peeled.core].tolist(), range(len(peeled.core)), strict=True))
    for base, part in leaves:
        inner = Incumbent(part)
        if not inner.swept(floor - base, spending, allowance.deadline):
            pack_part(inner, floor - base, spending=spending, allowance=allowance, jit=jit)
        core_offsets[[row[k] for k in part.index.tolist()]] = inner.offsets + base
    best.offer(peeled.restore(best.part, core_offsets, allowance.deadline))


def pack_pieces(
    pieces: Problem, floor: int, *, spending: Spending, allowance: Allowance, original: int, jit: bool
) -> Int64:
    """Pack glued pieces with a share of the allowance, the larger the more ``original`` buffers were glued."""
    start: Int64 = (greedy if len(pieces) <= MANY else large).portfolio(
        pieces, floor, tries=spending.tries, deadline=allowance.deadline
    )
    if len(pieces) > spending.largest:
        return start
    share = Allowance(allowance.work // (3 if 2 * len(pieces) < original else 10), allowance.deadline)
    allowance.work -= share.work
    start = improve(pieces, start, floor=floor, allowance=share, jit=jit, good_enough=spending.good_enough)
    allowance.work += share.work
    return start
