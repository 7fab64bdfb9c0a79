"""Fit everything into a number of bytes: what the caller brings and what the planner places.

``PlanOptions.budget`` limits the planned peak alone, because that is what recomputation can change. A user has a device
of so many bytes, which arguments, gradients and states share; the difference is worked out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weftplan.device.amounts import pasteable
from weftplan.errors import BudgetError
from weftplan.planner.options import PlanOptions
from weftplan.planner.planned_steps import PlannedSteps

Planned = TypeVar("Planned", bound=PlannedSteps)


def plan_within(
    make: Callable[[PlanOptions], Planned],
    options: PlanOptions,
    *,
    budget: int,
    besides: Callable[[Planned], int] = lambda planned: 0,
) -> Planned:
    """The plan of least modelled time whose total, less what waits elsewhere, is at most ``budget`` bytes.

    Args:
        make: plans the graph under given options.
        options: the options; their ``recompute`` and ``budget`` are set here.
        budget: most bytes of all devices together: planned peak (less what waits in homes),
            arguments, gradients, states.
        besides: further bytes that the budget has to cover.

    Raises:
        BudgetError: nothing fits; names the smallest budget that works, also as its attribute ``smallest``.
    """
    plain = make(options.replace(recompute="off", budget=None))
    outside = sum(plain.memory.external_bytes.values()) + besides(plain)
    if plain.memory.peak + outside <= budget:
        return plain
    try:
        found = make(options.replace(recompute="off", budget=max(budget - outside, 0)))
    except BudgetError as error:
        peak = plain.memory.peak if error.smallest is None else error.smallest
    else:
        if budget >= outside:
            return found
        peak = found.memory.peak - found.memory.in_homes  # nothing is planned at all, or all of it is elsewhere
    raise BudgetError(
        f"the budget is {budget:,} bytes, but {outside:,} bytes of arguments, gradients and states and a planned peak "
        f"of {peak:,} bytes (of {plain.memory.peak:,} without recomputation) are needed; the smallest budget found "
        f"that works is {pasteable(outside + peak)}: raise it to that, or use a smaller batch",
        smallest=outside + peak,
    ) from None
