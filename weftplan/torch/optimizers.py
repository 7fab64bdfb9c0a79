"""Bytes of an optimizer: its states after the first step, and the scratch of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weftplan.errors import BudgetError, PlanError
from weftplan.torch.prediction import record
from weftplan.torch.private import without_modes

if TYPE_CHECKING:
    from weftplan.torch.choice import Resident


def update_of(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of an optimizer's states, and the peak of an update's scratch.

    Raises:
        PlanError: the optimizer's step fails on fake tensors, or needs arguments as that of LBFGS.
    """

    def update(updated: torch.optim.Optimizer) -> None:
        for p in (p for group in updated.param_groups for p in group["params"]):
            p.grad = torch.empty_like(p) if p.grad is None else p.grad
        updated.step()

    with without_modes():
        try:
            trace = record(update, (optimizer,), kernels=None, functions=torch.enable_grad())
        except PlanError as error:
            raise PlanError(
                f"the step of {type(optimizer).__name__} cannot be traced alone ({error}): leave out optimizer=, and "
                f"pass the bytes of its states and scratch as other="
            ) from error
    end, spans = len(trace.calls), trace.spans()
    states = [r for r, purpose in enumerate(trace.purposes) if purpose == "optimizer" and spans[r][1] == end]
    return sum(trace.nbytes[r] for r in states), trace.peak - trace.before


def check_update(
    optimizer: torch.optim.Optimizer | None,
    scratch: int,
    *,
    budget: int | None,
    resident: Resident,
    gradients: int,
    smallest: int,
) -> None:
    """Raise BudgetError if the optimizer's step, with ``gradients`` bytes of new gradients, exceeds the budget.

    ``smallest`` is the smallest budget of the forward and the backward pass.
    """
    if optimizer is None or budget is None:
        return
    fresh = 0 if resident.gradients else gradients
    needed = resident.total + fresh + scratch
    if needed > budget:
        works = max(needed, smallest)
        raise BudgetError(
            f"the step of {type(optimizer).__name__} alone needs {needed:,} bytes (parameters, inputs, gradients, "
            f"states and scratch), more than the budget of {budget:,}; the smallest budget that works is {works}: "
            f"raise the budget, or use an optimizer with fewer states (foreach=False needs less)",
            smallest=works,
        )
