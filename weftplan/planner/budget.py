"""Plans whose total, planned memory and the caller's arrays, fits a number of bytes.

``PlanOptions.budget`` limits the planned peak alone, because recomputation cannot change the rest. A user has a device
with a number of bytes, which arguments, gradients and states share. This file converts between the two.
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
    """Return the plan of least modelled time whose total, without offloaded bytes, is at most ``budget``.

    Args:
        make: plans the graph under the options that it is called with.
        options: the options; this function overrides ``recompute`` and ``budget``.
        budget: bytes for all devices together: planned peak without offloaded bytes, arguments, gradients, states.
        besides: further bytes that the budget has to cover.

    Raises:
        BudgetError: no plan fits; the message and ``smallest`` give the smallest budget that works.
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
        peak = tight.memory.peak - tight.memory.offloaded  # 0: no memory is planned, or all of it is offloaded
    raise BudgetError(
        f"the budget is {budget:,} bytes, but {outside:,} bytes of arguments, gradients and states and a planned peak "
        f"of {peak:,} bytes (of {plain.memory.peak:,} without recomputation) are needed; the smallest budget found "
        f"that works is {pasteable(outside + peak)}: raise it to that, or use a smaller batch",
        smallest=outside + peak,
    ) from None
