"""Fit everything into a number of bytes: the caller's arrays and planned memory.

``PlanOptions.budget`` limits the planned peak alone, because recomputation can change nothing else. A user has a device
with a number of bytes, which arguments, gradients and states share; the difference is worked out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weftplan.device.amounts import pasteable
from weftplan.errors import BudgetError
from weftplan.planner.drafts import PlannedSteps
from weftplan.planner.options import PlanOptions

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
        budget: most bytes of all devices together: planned peak (less what waits in offload targets),
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
        tight = make(options.replace(recompute="off", budget=max(budget - outside, 0)))
    except BudgetError as error:
        peak = plain.memory.peak if error.smallest is None else error.smallest
    else:
        if budget >= outside:
            return tight
        peak = tight.memory.peak - tight.memory.offloaded  # nothing is planned at all, or all of it is elsewhere
    raise BudgetError(
        f"the budget is {budget:,} bytes, but {outside:,} bytes of arguments, gradients and states and a planned peak "
        f"of {peak:,} bytes (of {plain.memory.peak:,} without recomputation) are needed; the smallest budget found "
        f"that works is {pasteable(outside + peak)}: raise it to that, or use a smaller batch",
        smallest=outside + peak,
    ) from None
