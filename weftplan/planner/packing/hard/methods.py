"""Which method is tried after which on a part that sweeps leave above its bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weftplan.planner.packing.hard import compiled, greedy, large
from weftplan.planner.packing.hard.merging import glue
from weftplan.planner.packing.hard.peel import peel
from weftplan.planner.packing.hard.search import Allowance, improve
from weftplan.planner.packing.incumbent import Incumbent, Spending
from weftplan.planner.packing.problem import MANY, Deadline, Int64, Problem, leaf_parts

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


def improver(spending: Spending, deadline: Deadline, *, sizes: Sequence[int]) -> Callable[[Incumbent], None]:
    """What improves the packing of one part after the other, within one allowance; ``sizes`` are the numbers of buffers
    of all parts of the problem."""
    use_jit = (
        spending.compiled > 0 and compiled.available() and (deadline.moment is None or deadline.left() > TIME_FOR_NUMBA)
    )
    middling = max((size for size in sizes if size <= MANY), default=0)
    work = spending.compiled if use_jit else spending.work
    most = MOST_LONG_ALLOWANCES if use_jit and work > LONG else MOST_ALLOWANCES
    allowance = Allowance(int(work * min(max(middling / BUFFERS_PER_ALLOWANCE, 1.0), most)), deadline)

    def improve_part(best: Incumbent) -> None:
        if use_jit and best.is_small:
            # What the plain kernel finds at once is not worth the half second that loading numba costs.
            pack_part(best, Allowance(FIRST_WORK, deadline), jit=False)
        if best.peak > best.enough:
            pack_part(best, allowance, jit=use_jit)

    return improve_part


def pack_part(best: Incumbent, allowance: Allowance, *, jit: bool) -> None:
    """Improve ``best``: greedy packings, then searches: of glued pieces, of the largest buffers, of all.

    Nothing more is tried once the peak is close enough to its floor.
    """
    part, floor, spending, deadline = best.part, best.floor, best.spending, best.deadline
    if best.is_small:
        # Where nearly everything can be set aside, greedy packings of the rest are enough.
        peel_first(best, allowance, jit=jit, at_most=len(part) // 4)
        best.offer(greedy.portfolio(part, floor, tries=spending.tries, deadline=deadline))
        peel_first(best, allowance, jit=jit, at_most=3 * len(part) // 4)
    count = len(part)
    # Among many buffers gluing is tried only where two rounds take away a good part.
    promising = best.is_small or 5 * len(glue(part, 2, deadline=deadline).problem) < 4 * count
    for rounds in GLUE_ROUNDS if promising else ():
        if best.peak <= best.enough:
            return
        glued = glue(part, rounds, deadline=deadline)
        if len(glued.problem) == count:
            break
        count = len(glued.problem)
        best.offer(glued.expand(pack_pieces(glued.problem, best, allowance=allowance, jit=jit)))
    if best.peak > best.enough and not best.is_small:
        best.offer(large.portfolio(part, floor, tries=spending.tries, deadline=deadline))
        peel_first(best, allowance, jit=jit, at_most=large.CORED)
    if best.peak > best.enough and len(part) > large.CORED:
        best.offer(
            large.improve_core(part, best.offsets, floor=floor, enough=best.enough, allowance=allowance, jit=jit)
        )
        if not best.is_small:
            peel_first(best, allowance, jit=jit, at_most=MANY)
    if best.peak > best.enough and len(part) <= spending.largest:
        best.offer(
            improve(part, best.offsets, floor=floor, allowance=allowance, jit=jit, good_enough=spending.good_enough)
        )


def peel_first(best: Incumbent, allowance: Allowance, *, jit: bool, at_most: int) -> None:
    """Where peeling leaves parts of at most ``at_most`` buffers, pack these, and the others around them.

    Peeling a little is worse than nothing: it loosens what fits together exactly.
    """
    if best.peak <= best.enough:
        return
    part, spending, deadline = best.part, best.spending, best.deadline
    peeled = peel(part, best.floor, deadline=deadline)
    leaves = leaf_parts(part.take(peeled.core))
    if max((len(leaf) for _, leaf in leaves), default=0) > at_most:
        return
    offsets = np.zeros(len(part), np.int64)
    for base, leaf in leaves:
        inner = Incumbent(leaf, best.floor - base, spending=spending, deadline=deadline)
        if not inner.swept():
            pack_part(inner, allowance, jit=jit)
        offsets[np.searchsorted(part.index, leaf.index)] = inner.offsets + base
    best.offer(peeled.restore(part, offsets[peeled.core], deadline=deadline))


def pack_pieces(pieces: Problem, best: Incumbent, *, allowance: Allowance, jit: bool) -> Int64:
    """Pack glued pieces with a share of the allowance, the larger the more of the buffers were glued."""
    spending = best.spending
    start: Int64 = (greedy if len(pieces) <= MANY else large).portfolio(
        pieces, best.floor, tries=spending.tries, deadline=best.deadline
    )
    if len(pieces) > spending.largest:
        return start
    share = Allowance(allowance.work // (3 if 2 * len(pieces) < len(best.part) else 10), allowance.deadline)
    allowance.work -= share.work
    start = improve(pieces, start, floor=best.floor, allowance=share, jit=jit, good_enough=spending.good_enough)
    allowance.work += share.work
    return start
