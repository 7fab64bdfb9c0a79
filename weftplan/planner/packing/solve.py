"""How a checked problem is packed: cut into parts, swept outwards, and searched where that leaves too much.

The sweeps reach the lower bound on the graphs of ordinary networks. What they leave goes through one door to
:mod:`weftplan.planner.packing.hard`.
"""

from __future__ import annotations

import numpy as np

from weftplan.planner.packing.deadline import Deadline, OutOfTime
from weftplan.planner.packing.edges import reuse_edges
from weftplan.planner.packing.from_the_peak import VARIANTS, pack_outwards
from weftplan.planner.packing.hard import improver
from weftplan.planner.packing.incumbent import Incumbent, Spending
from weftplan.planner.packing.precedence import Precedence
from weftplan.planner.packing.problem import Int64, Problem, leaf_parts

# Where memory may be spent on waiting less, so many times more places are looked at.
PATIENCE = 8


def solve(
    problem: Problem, bound: int, *, spending: Spending, deadline: Deadline, order: Precedence | None = None
) -> Int64:
    """Offsets in units for a checked problem; ``bound`` is its lower bound.

    Every independent part is packed on its own. Only a part that rises above what the others need anyway is searched.
    ``order`` is that of the buffers of the problem that the user gave.
    """
    offsets = np.zeros(len(problem), np.int64)
    leaves = leaf_parts(problem)
    improve = improver(spending, deadline, [len(part) for _, part in leaves])
    for base, part in leaves:
        floor = bound - base
        best = Incumbent(part, order)
        try:
            if not best.swept(floor, spending, deadline):
                improve(best, floor)
            best.wait_less(floor, deadline)
        except OutOfTime:
            best.hurry(floor)
        offsets[part.index] = best.offsets + base
    return offsets


def spread(problem: Problem, offsets: Int64, *, room: int, order: Precedence, deadline: Deadline) -> Int64:
    """The packing of at most ``room`` units with the fewest waits that sweeps find, or ``offsets``."""
    best = order.waits(*reuse_edges(problem.lo, problem.hi, problem.size, offsets))
    for variant in VARIANTS:
        if not best:
            break
        try:
            found = pack_outwards(
                problem, floor=room, limit=room, variant=variant, order=order, deadline=deadline, patience=PATIENCE
            )
        except OutOfTime:
            break
        if found is not None and found[1] < best:
            offsets, best = found
    return offsets
