"""Gradients of elementwise operators for integer arrays, by the rule of MXNet 1.9.1.

The slope is computed in float64 by the formula for floats, with an output gradient of 1. It is truncated to the integer
dtype and multiplied there by the real output gradient, wrapping around on overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from weftplan.ops.core.floats import is_float
from weftplan.ops.core.kernels import Kind, scratch_dtype
from weftplan.ops.core.schema import DType
from weftplan.support.array_types import ArrayModule, RawArray

_WIDE = np.dtype(np.float64)

Integers = Literal["slope", "whole", "zero"]
"""How a formula treats integers. ``slope``: it computes a slope in float64, which is truncated; ``whole``: it runs on
the integers, because its results are integers anyway; ``zero``: it is not called, and the gradient is 0."""


def slope_scratch(scratch: Sequence[Kind], dtype: DType, operands: int, integers: Integers = "slope") -> list[DType]:
    """Return the dtypes of the scratch blocks that a formula needs for arrays of ``dtype``."""
    if is_float(dtype) or integers == "whole":
        return [scratch_dtype(kind, dtype) for kind in scratch]
    if integers == "zero":
        return []
    return [_WIDE] * (2 + operands) + [scratch_dtype(kind, _WIDE) for kind in scratch]


def apply_slope(
    xp: ArrayModule,
    formula: Callable[..., None],
    g: RawArray,
    operands: Sequence[RawArray],
    out: RawArray,
    room: Sequence[RawArray],
    integers: Integers = "slope",
) -> None:
    """Compute ``formula(g, *operands, out, *scratch)``; ``integers`` selects the rule for integer arrays.

    ``room`` is the scratch of :func:`slope_scratch`. ``out`` may share memory with ``g`` or an operand if the formula
    allows it.
    """
    if is_float(out.dtype) or integers == "whole":
        formula(g, *operands, out, *room)
        return
    if integers == "zero":
        out.fill(0)
        return
    ones, slope, *rest = room
    wide = rest[: len(operands)]
    ones.fill(1)
    for target, source in zip(wide, operands, strict=True):
        xp.copyto(target, source)
    formula(ones, *wide, slope, *rest[len(operands) :])
    whole = ones.reshape(-1).view(out.dtype)[: slope.size].reshape(slope.shape)
    xp.copyto(whole, slope, casting="unsafe")
    xp.multiply(g, whole, out=out)
