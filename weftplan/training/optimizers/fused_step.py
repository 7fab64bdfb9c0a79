"""Fused optimizer steps: the updates of many weights as a single stage of an operation.

Each update is an operator call on its own weight. The stage reads all gradients and writes all weights and states, so
its variables order it exactly like the single calls, and its results are bit-identical to theirs. On the host it runs
in parts on idle cores; on a simulated device it is one launch. The functions are stateless; one thread at a time uses
an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from weftplan import config, engine
from weftplan import ndarray as nd
from weftplan.device.context import Context
from weftplan.kvstore.stages import HOST, Stage, launch, on_device
from weftplan.ndarray import NDArray
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.memory.chunk import take
from weftplan.ops.optimizer import fused_update
from weftplan.support.array_types import RawArray
from weftplan.support.slots import MAKE_ROOM


class Step(NamedTuple):
    """``nd.<op>(weight, gradient, *states, out=weight, **params)``.

    Attributes:
        arrays: the weight, the gradient and the states. If there is a ``narrow`` weight, the first is its float32 copy.
        narrow: a weight in half precision, which becomes the rounded float32 copy; its gradient is in half precision.
    """

    op: str
    arrays: tuple[NDArray, ...]
    params: dict[str, Any]
    narrow: NDArray | None = None

    def push(self) -> None:
        """Push the step as separate operations."""
        weight, gradient, *states = self.arrays
        if self.narrow is not None:
            gradient = gradient.astype(weight.dtype)
        getattr(nd, self.op)(weight, gradient, *states, out=weight, **self.params)
        if self.narrow is not None:
            self.narrow[:] = weight


def stages_of(steps: Sequence[Step]) -> list[Stage]:
    """Return a stage for each operator, dtype and device of these steps, which share no array."""
    groups: dict[Any, list[Step]] = {}
    for step in steps:
        weight, narrow = step.arrays[0], step.narrow
        kind = None if narrow is None else narrow.dtype
        groups.setdefault((step.op, len(step.arrays), weight.dtype, kind, weight.context), []).append(step)
    return [_stage(group) for group in groups.values()]


def push_together(steps: Sequence[Step]) -> None:
    """Push independent steps: fused if possible."""
    if len(steps) > 1 and _can_fuse(steps):
        for stage in stages_of(steps):
            launch([stage])
        return
    for step in steps:
        step.push()


def can_fuse_on(context: Context) -> bool:
    """Return whether steps on a device can be fused."""
    return context.device_type in HOST or context.device_type == "sim"


def _can_fuse(steps: Sequence[Step]) -> bool:
    """Return whether these steps can be fused: uniform arrays on such a device, none written twice, no offloading."""
    if MAKE_ROOM.value is not None or engine.debug_enabled() or engine.get().has_failed:
        return False
    written: list[Any] = []
    for step in steps:
        weight = step.arrays[0]
        if not can_fuse_on(weight.context):
            return False
        for place, array in enumerate(step.arrays):
            if array.shape != weight.shape or array.context != weight.context:
                return False
            if array.dtype != weight.dtype and (place != 1 or step.narrow is None):
                return False
        written += [array.var for array in (weight, *step.arrays[2:])]
        if step.narrow is not None:
            written.append(step.narrow.var)
    return len({*written}) == len(written) and {step.arrays[1].var for step in steps}.isdisjoint(written)


def _stage(steps: Sequence[Step]) -> Stage:
    first = steps[0]
    count, context, dtype = len(first.arrays), first.arrays[0].context, first.arrays[0].dtype
    narrow = None if first.narrow is None else first.narrow.dtype
    work = fused_update.work(
        first.op,
        tuple([tuple(step.params.items()) for step in steps]),
        count,
        tuple([step.arrays[0].size for step in steps]),
        dtype,
        compiled=config.get("WEFTPLAN_KERNELS") != "numpy",
        narrow=narrow is not None,
    )
    grads = [step.arrays[1] for step in steps]
    writes: list[NDArray] = []
    for step in steps:
        writes.append(step.arrays[0])
        writes += step.arrays[2:]
        if step.narrow is not None:
            writes.append(step.narrow)
    run = partial(_run, work, context, len(steps), count - 1 + (narrow is not None))
    return Stage(first.op, on_device(context, run), grads, writes, context, repeatable=False)


def _run(
    work: tuple[Callable[[Sequence[Any], Any], None], int],
    context: Context,
    steps: int,
    each: int,
    raws: Sequence[RawArray],
) -> None:
    """Run the steps on raw arrays: all gradients, then ``each`` other array of each step."""
    run, scratch = work
    ordered: list[RawArray] = []
    for step in range(steps):
        begin = steps + step * each
        ordered += (raws[begin], raws[step], *raws[begin + 1 : begin + each])
    if not scratch:
        quietly(run, ordered, None)
        return
    where = context if context.device_type in HOST else Context("cpu", 0)  # kernels of simulated devices run later
    resource, borrowed = take(where, scratch, "optimizer step workspace")
    try:
        quietly(run, ordered, borrowed.raw)
    finally:
        resource.free(borrowed)
