"""The methods for a part that sweeps leave above its bound: greedy packings, then a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.planner.packing.hard import greedy
from weftplan.planner.packing.hard.search import Allowance, improve
from weftplan.planner.packing.incumbent import Incumbent, Spending
from weftplan.planner.packing.problem import MANY, Deadline

# The allowance grows with the largest part up to this many times: a descent costs more where there are more buffers.
BUFFERS_PER_ALLOWANCE, MOST_ALLOWANCES = 450, 3.0


def improver(spending: Spending, deadline: Deadline, *, sizes: Sequence[int]) -> Callable[[Incumbent], None]:
    """Return a function that improves the packings of all parts, one after the other, within one allowance.

    ``sizes`` holds the number of buffers of each part of the problem.
    """
    middling = max((size for size in sizes if size <= MANY), default=0)
    scale = min(max(middling / BUFFERS_PER_ALLOWANCE, 1.0), MOST_ALLOWANCES)
    allowance = Allowance(int(spending.work * scale), deadline)

    def improve_part(best: Incumbent) -> None:
        part, floor = best.part, best.floor
        tries = spending.tries if best.is_small else 1  # the time of one grows with the square of the buffers
        best.offer(greedy.portfolio(part, floor, tries=tries, deadline=deadline))
        if best.peak > best.enough and len(part) <= spending.largest:
            best.offer(improve(part, best.offsets, floor=floor, allowance=allowance, good_enough=spending.good_enough))

    return improve_part
