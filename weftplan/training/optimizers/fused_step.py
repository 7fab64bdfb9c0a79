"""Fused optimizer steps: the updates of many weights as a single stage of an operation.

Each update is an operator call on its own weight, or an expression of arrays. The stage reads all gradients and writes
all weights and states, so its variables order it exactly like the single updates, and its results are bit-identical to
theirs. On the host it runs in parts on idle cores; on a GPU or a simulated device it is one launch. The functions are
stateless; one thread at a time uses an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from weftplan import config, device, engine
from weftplan import ndarray as nd
from weftplan.device.context import Context
from weftplan.kernels.cuda import updates
from weftplan.kvstore.stages import HOST, Stage, launch, on_device
from weftplan.ndarray import NDArray
from weftplan.ndarray.array import fresh
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.memory.chunk import take
from weftplan.ops.core.formulas import DTYPES
from weftplan.ops.optimizer import fused_update
from weftplan.ops.optimizer.fused_update import Rule
from weftplan.support.array_types import RawArray
from weftplan.support.slots import MAKE_ROOM

Work = Callable[[Sequence[Any], Any], None]
"""``work(raws, scratch)``: raws are the arrays of each step in turn, a narrow weight last."""


class OptimizerStep(NamedTuple):
    """The update of a weight.

    Attributes:
        rule: the name of an operator, or an expression.
        arrays: the weight, the gradient and the states. If there is a ``narrow`` weight, the first is its float32 copy.
        params: parameters of the operator or the expression.
        narrow: a weight in half precision, which becomes the rounded float32 copy; its gradient is in half precision.
    """

    rule: Rule
    arrays: tuple[NDArray, ...]
    params: dict[str, Any]
    narrow: NDArray | None = None

    def push(self) -> None:
        """Push the step as separate operations."""
        weight, gradient, *states = self.arrays
        if self.narrow is not None:
            gradient = gradient.astype(weight.np_dtype)
        if isinstance(self.rule, str):
            getattr(nd, self.rule)(weight, gradient, *states, out=weight, **self.params)
        else:
            new, *values = self.rule(weight, gradient, *states, **self.params)
            for state, value in zip(states, values, strict=True):
                state[:] = value
            weight[:] = new
        if self.narrow is not None:
            self.narrow[:] = weight

    @property
    def name(self) -> str:
        """Name of the operation that begins with this step."""
        return self.rule if isinstance(self.rule, str) else f"{self.rule.__name__}_update"


def stages_of(steps: Sequence[OptimizerStep]) -> list[Stage]:
    """Return a stage for each rule, dtype and device of these steps, which share no array."""
    groups: dict[Any, list[OptimizerStep]] = {}
    for step in steps:
        weight, narrow = step.arrays[0], step.narrow
        kind = None if narrow is None else narrow.np_dtype
        groups.setdefault((step.rule, len(step.arrays), weight.np_dtype, kind, weight.chunk.context), []).append(step)
    return [_stage(group) for group in groups.values()]


def push_together(steps: Sequence[OptimizerStep]) -> None:
    """Push independent steps: fused if possible. A single operator is called as such."""
    if (len(steps) > 1 or not isinstance(steps[0].rule, str)) and _can_fuse(steps):
        for stage in stages_of(steps):
            launch([stage])
        return
    for step in steps:
        step.push()


def can_fuse_on(context: Context) -> bool:
    """Return whether steps on a device can be fused."""
    return context.device_type in HOST or context.device_type in ("sim", "gpu")


def _can_fuse(steps: Sequence[OptimizerStep]) -> bool:
    """Return whether these steps can be fused: uniform arrays on such a device, none written twice, no offloading."""
    if MAKE_ROOM.value is not None or engine.debug_enabled() or engine.get().has_failed:
        return False
    written: list[Any] = []
    checked: Context | None = None
    for step in steps:
        weight = step.arrays[0]
        context = weight.chunk.context
        if context is not checked and not can_fuse_on(context):
            return False
        checked = context
        for index, array in enumerate(step.arrays):
            other = array.chunk.context
            # Contexts of one executor are one object; a comparison would be a call of Python for each array.
            if array.shape != weight.shape or (other is not context and other != context):
                return False
            if array.np_dtype != weight.np_dtype and (index != 1 or step.narrow is None):
                return False
        written += [array.chunk.var for array in (weight, *step.arrays[2:])]
        if step.narrow is not None:
            written.append(step.narrow.chunk.var)
    return len({*written}) == len(written) and {step.arrays[1].chunk.var for step in steps}.isdisjoint(written)


def _stage(steps: Sequence[OptimizerStep]) -> Stage:
    head = steps[0]
    context, narrow = head.arrays[0].context, head.narrow is not None
    work, scratch = _work(steps, context, narrow=narrow)
    grads = [step.arrays[1] for step in steps]
    writes: list[NDArray] = []
    for step in steps:
        writes.append(step.arrays[0])
        writes += step.arrays[2:]
        if step.narrow is not None:
            writes.append(step.narrow)
    if scratch and context.device_type == "gpu":  # in a chunk, which is freed only after the device has finished
        writes.append(fresh(context, (scratch,), np.dtype(np.uint8), "optimizer step workspace"))
        scratch = 0
    run = partial(_run, work, scratch, context, len(steps), len(head.arrays) - 1 + narrow)
    return Stage(head.name, on_device(context, run), grads, writes, context, repeatable=False)


def _work(steps: Sequence[OptimizerStep], context: Context, *, narrow: bool) -> tuple[Work, int]:
    """Return the work of steps of one kind, and its scratch bytes."""
    rule, arrays, dtype = steps[0].rule, len(steps[0].arrays), steps[0].arrays[0].np_dtype
    compiled = config.get("WEFTPLAN_KERNELS") != "numpy"
    xp = np
    if context.device_type == "gpu":
        formulas = []
        if compiled and dtype in DTYPES:
            formulas = [fused_update.formula_of(rule, step.params, arrays, dtype) for step in steps]
        xp = device.get(context).xp
        if formulas and None not in formulas:
            return partial(_on_gpu, xp, formulas, arrays, narrow), 0
    return fused_update.work(
        rule,
        tuple([tuple(step.params.items()) for step in steps]),
        arrays,
        tuple([step.arrays[0].size for step in steps]),
        dtype,
        compiled=compiled,
        narrow=narrow,
        xp=xp,
    )


def _on_gpu(xp: Any, formulas: Sequence[Any], arrays: int, narrow: bool, raws: Sequence[Any], scratch: Any) -> None:
    del scratch
    rows = []
    for index, formula in enumerate(formulas):
        begin = index * (arrays + narrow)
        operands = raws[begin : begin + arrays]
        rows.append(updates.WeightStep(formula, operands, operands[0], raws[begin + arrays] if narrow else None))
    updates.step(xp, rows)


def _run(
    work: Work, scratch: int, context: Context, steps: int, operands_per_step: int, raws: Sequence[RawArray]
) -> None:
    """Run the steps on raw arrays: all gradients, the other ``operands_per_step`` arrays of each step, any scratch."""
    ordered: list[RawArray] = []
    for step in range(steps):
        begin = steps + step * operands_per_step
        ordered += (raws[begin], raws[step], *raws[begin + 1 : begin + operands_per_step])
    shared = raws[steps + steps * operands_per_step] if len(raws) > steps + steps * operands_per_step else None
    if not scratch:
        quietly(work, ordered, shared)
        return
    context_now = (
        context if context.device_type in HOST else Context("cpu", 0)
    )  # kernels of simulated devices run later
    resource, borrowed = take(context_now, scratch, "optimizer step workspace")
    try:
        quietly(work, ordered, borrowed.raw)
    finally:
        resource.free(borrowed)
