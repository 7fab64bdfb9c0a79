"""Fused optimizer steps: the updates of many weights pushed as a single operation.

Each update is an operator call on its own weight. The operation reads all gradients and writes all weights and states.
Its variables therefore order it exactly like the single calls, and its results are bit-identical to theirs. It runs in
parts on idle cores. The functions are stateless; one thread at a time uses an optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from weftplan import config, engine
from weftplan import ndarray as nd
from weftplan.ndarray import NDArray, pushing
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.memory.chunk import take
from weftplan.ops.optimizer import fused_update
from weftplan.support.slots import MAKE_ROOM


class Step(NamedTuple):
    """``nd.<op>(weight, gradient, *states, out=weight, **params)``."""

    op: str
    arrays: tuple[NDArray, ...]
    params: dict[str, Any]

    def push(self) -> None:
        """Push the step as a separate operation."""
        getattr(nd, self.op)(*self.arrays, out=self.arrays[0], **self.params)


def push_together(steps: Sequence[Step]) -> None:
    """Push independent steps, fused if possible."""
    groups: dict[Any, list[Step]] = {}
    for step in steps:
        weight = step.arrays[0]
        groups.setdefault((step.op, weight.dtype, weight.context), []).append(step)
    for (name, dtype, context), group in groups.items():
        if len(group) == 1 or not _can_be_one(group):
            for step in group:
                step.push()
            continue
        compiled = config.get("WEFTPLAN_KERNELS") != "numpy"
        sizes = [step.arrays[0].size for step in group]
        settings = [step.params for step in group]
        run, scratch = fused_update.work(name, settings, len(group[0].arrays), sizes, dtype, compiled=compiled)
        pushing.push_kernel(
            partial(_run, run, context, scratch, name),
            [array for step in group for array in step.arrays],
            [step.arrays[1].var for step in group],
            [array.var for step in group for k, array in enumerate(step.arrays) if k != 1],
            context,
            name=name,
        )


def _can_be_one(group: Sequence[Step]) -> bool:
    """Return whether these steps can be fused: uniform arrays in host memory, none written twice, no offloading."""
    if MAKE_ROOM.value is not None or engine.debug_enabled():
        return False
    written = [array.var for step in group for k, array in enumerate(step.arrays) if k != 1]
    read = {step.arrays[1].var for step in group}
    if len({*written}) < len(written) or not read.isdisjoint(written):
        return False
    for step in group:
        weight = step.arrays[0]
        for array in step.arrays:
            if array.shape != weight.shape or array.dtype != weight.dtype or array.context != weight.context:
                return False
    return group[0].arrays[0].context.device_type == "cpu"


def _run(run: fused_update.Steps, context: Any, scratch: int, name: str, *raws: Any) -> None:
    if not scratch:
        quietly(run, raws, None)
        return
    resource, borrowed = take(context, scratch, f"{name} workspace")
    try:
        quietly(run, raws, borrowed.raw)
    finally:
        resource.free(borrowed)
