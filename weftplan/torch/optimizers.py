"""Bytes of an optimizer: its states after the first step, and the scratch of a step."""

from __future__ import annotations

from typing import Any

import torch

from weftplan.errors import BudgetError
from weftplan.torch.choice import Resident
from weftplan.torch.private import FakeTensorMode, tensors_in, without_modes
from weftplan.torch.trace import Recorder


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of an optimizer's states after its first step; 0 for None."""
    return 0 if optimizer is None else update_of(optimizer)[0]


def update_of(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of an optimizer's states, and the peak of an update's scratch.

    Two updates of a copy run on fake tensors, parameter by parameter. For ``foreach``, which updates all parameters
    together, the scratch is scaled from the largest parameter to all.
    """
    with without_modes(), FakeTensorMode():
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            alone = {name: False for name in ("foreach", "fused") if name in group}
            alike = [torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device) for p in group["params"]]
            groups.append({**group, **alone, "params": list(map(torch.nn.Parameter, alike))})
        for group in groups:
            for p in group["params"]:
                p.grad = torch.empty_like(p)
        copied = type(optimizer)(groups)
        copied.step()
        states = tensors_in([list(values.values()) for values in copied.state.values()])
        recorder = Recorder()
        for t in [t for group in groups for p in group["params"] for t in (p, p.grad)] + states:
            recorder.storage(t, -1)
        with recorder:
            copied.step()
    inside = recorder.trace.peak - recorder.trace.before
    sizes = [p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"]]
    if any(_is_foreach(group) for group in optimizer.param_groups):
        inside = inside * sum(sizes) // max(sizes)
    return sum(t.untyped_storage().nbytes() for t in states), inside


def _is_foreach(group: dict[str, Any]) -> bool:
    """Return whether a group's parameters are updated together (``foreach``), as is the default on a GPU."""
    asked = group.get("foreach")
    by_default = asked is None and "foreach" in group and not group.get("fused")
    return bool(asked) or (by_default and any(p.device.type == "cuda" for p in group["params"]))


def check_update(
    optimizer: torch.optim.Optimizer | None, *, budget: int | None, resident: Resident, gradients: int
) -> None:
    """Raise BudgetError if the optimizer's step alone exceeds the budget, with ``gradients`` bytes of new gradients."""
    if optimizer is None or budget is None:
        return
    fresh = 0 if resident.gradients else gradients
    needed = resident.total + fresh + update_of(optimizer)[1]
    if needed > budget:
        raise BudgetError(
            f"the step of {type(optimizer).__name__} alone needs {needed:,} bytes (parameters, inputs, gradients, "
            f"states and scratch), more than the budget of {budget:,}; the smallest budget that works is "
            f"at least {needed}: raise the budget, or use an optimizer with fewer states (foreach=False needs less)",
            smallest=needed,
        )
