"""The kernels of LeakyReLU's prelu: a learned slope below 0, per channel or one for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weftplan.ops.kernels import BOOL, accumulator, row_blocks, rows_per_block
from weftplan.ops.schema import OpContext


def prelu_rows(shape: Sequence[int], slopes: int) -> tuple[int, int, int]:
    """(outer, slopes, inner): one slope for each channel, or one for all."""
    if slopes == 1:
        return shape[0], 1, math.prod(shape[1:])
    if len(shape) == 1:
        return 1, shape[0], 1
    return shape[0], shape[1], math.prod(shape[2:])


def prelu_block(rows: tuple[int, int, int]) -> tuple[int, int, int]:
    """Shape of the block that is worked on together."""
    return rows_per_block(rows), rows[1], rows[2]


def prelu_forward(ctx: OpContext, data: Any, gamma: Any, out: Any) -> None:
    """``out`` = data above 0, gamma · data below; ``out`` may be ``data``."""
    xp = ctx.xp
    rows = prelu_rows(data.shape, gamma.size)
    block = prelu_block(rows)
    scratch = ctx.take(block, out.dtype)
    data, out, slope = data.reshape(rows), out.reshape(rows), gamma.reshape(1, -1, 1)
    for here in row_blocks(rows):
        x, y = data[here], out[here]
        low = scratch[: x.shape[0]]
        xp.minimum(x, 0, out=low)
        xp.multiply(low, slope, out=low)
        xp.maximum(x, 0, out=y)
        xp.add(y, low, out=y)


def prelu_backward(ctx: OpContext, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Gradients of data and gamma from (ograd, data, gamma); the first may take the memory of ograd or data."""
    xp = ctx.xp
    ograd, data, gamma = inputs
    dgrad, ggrad = outputs
    rows = prelu_rows(data.shape, gamma.size)
    block = prelu_block(rows)
    wide = accumulator(data.dtype)
    scratch, mask = ctx.take(block, wide), ctx.take(block, BOOL)
    total, part = ctx.take((rows[1],), wide), ctx.take((rows[1],), wide)
    total.fill(0)
    ograd, data, slope = ograd.reshape(rows), data.reshape(rows), gamma.reshape(1, -1, 1)
    target = None if dgrad is None else dgrad.reshape(rows)
    for here in row_blocks(rows):
        g, x = ograd[here], data[here]
        t, positive = scratch[: x.shape[0]], mask[: x.shape[0]]
        xp.greater(x, 0, out=positive)
        if ggrad is not None:
            xp.minimum(x, 0, out=t)
            xp.multiply(t, g, out=t)
            xp.sum(t, axis=(0, 2), out=part)
            xp.add(total, part, out=total)
        if target is not None:
            xp.copyto(t, slope)
            xp.copyto(t, 1, where=positive)
            xp.multiply(g, t, out=target[here], casting="same_kind")
    if ggrad is not None:
        ggrad[...] = total
