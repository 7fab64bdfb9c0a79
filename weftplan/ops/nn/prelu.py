"""Kernels of LeakyReLU's prelu, which multiplies negative data by gamma: one number, one per channel, or broadcast."""

from __future__ import annotations

import math

from weftplan.errors import ShapeError
from weftplan.ops.core import tiling
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL, accumulator, collapse, reduce_to, row_blocks, rows_per_block
from weftplan.ops.core.rules import merge_shape
from weftplan.ops.core.schema import Params, Shape, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray


def prelu_gamma_shape(data: Shape, gamma: Shape | None) -> Shape:
    """Return the shape of gamma for ``data``: (channels,) by default, else ``gamma`` with unknown dimensions filled in.

    ``gamma`` may be (channels,), (1,) or a shape that broadcasts to ``data``; any other shape raises ShapeError.

    >>> prelu_gamma_shape((2, 3, 4), None), prelu_gamma_shape((2, 3, 4), (1, 3, 0))
    ((3,), (1, 3, 4))
    """
    channels = data[1] if len(data) > 1 else data[-1]
    if gamma is None:
        return (channels,)
    if gamma == (1,):
        return gamma
    if len(gamma) == 1:
        merged = merge_shape((channels,), gamma, f"LeakyReLU: gamma needed for data {data}, and given")
        return merged or gamma
    if len(gamma) != len(data) or any(g not in (0, 1, d) for g, d in zip(gamma, data, strict=True) if d):
        raise ShapeError(
            f"LeakyReLU: gamma has shape {gamma}, expected ({channels},), (1,) or what broadcasts to data {data}"
        )
    return tuple(g or d for g, d in zip(gamma, data, strict=True))


def _rows(data: Shape, gamma: Shape) -> tuple[Shape, Shape]:
    """Return the shapes of data and of gamma, which broadcasts to it, with adjacent axes merged if possible."""
    if len(gamma) == 1 < len(data):
        gamma = (1, *gamma, *(1,) * (len(data) - 2))
    shape, slopes = collapse(data, gamma)
    return shape, slopes


def _scratch(params: Params, data: SpecLike, gamma: SpecLike, out: SpecLike) -> ScratchSpecs:
    """Return the scratch: a block of whole rows, of about :func:`tiling.share` elements."""
    shape, _ = _rows(data.shape, gamma.shape)
    return [((rows_per_block(shape, tiling.share(math.prod(shape))), *shape[1:]), out.dtype)]


@kernel(scratch=_scratch)
def prelu(xp: ArrayModule, p: Params, data: RawArray, gamma: RawArray, out: RawArray, scratch: RawArray) -> None:
    """Compute ``out`` = data if it is above 0, else gamma · data; ``out`` may be ``data``."""
    shape, slopes = _rows(data.shape, gamma.shape)
    data, out, slope = data.reshape(shape), out.reshape(shape), gamma.reshape(slopes)
    for chunk in row_blocks(shape, tiling.share(math.prod(shape))):
        x, y = data[chunk], out[chunk]
        low = scratch[: x.shape[0]]
        xp.minimum(x, 0, out=low)
        xp.multiply(low, slope if slopes[0] == 1 else slope[chunk], out=low)
        xp.maximum(x, 0, out=y)
        xp.add(y, low, out=y)


def _backward_scratch(
    params: Params, ograd: SpecLike, data: SpecLike, gamma: SpecLike, *outputs: SpecLike | None
) -> ScratchSpecs:
    """Return the scratch: a block, whose size determines the order of sums, its mask, its sums, and all sums."""
    (shape, slopes), wide = _rows(data.shape, gamma.shape), accumulator(data.dtype)
    block = (rows_per_block(shape), *shape[1:])
    part = slopes if slopes[0] == 1 else (block[0], *slopes[1:])
    return [(block, wide), (block, BOOL), (part, wide), (slopes, wide)]


@kernel(scratch=_backward_scratch)
def prelu_backward(
    xp: ArrayModule, p: Params, ograd: RawArray, data: RawArray, gamma: RawArray, dgrad: RawArray | None,
    ggrad: RawArray | None, scratch: RawArray, mask: RawArray, part: RawArray, total: RawArray,
) -> None:  # fmt: skip
    """Compute the gradients ``dgrad`` of data and ``ggrad`` of gamma, each unless None.

    ``dgrad`` may be ``ograd`` or ``data``.
    """
    shape, slopes = _rows(data.shape, gamma.shape)
    total.fill(0)
    ograd, data, slope = ograd.reshape(shape), data.reshape(shape), gamma.reshape(slopes)
    target = None if dgrad is None else dgrad.reshape(shape)
    for chunk in row_blocks(shape):
        g, x = ograd[chunk], data[chunk]
        t, positive = scratch[: x.shape[0]], mask[: x.shape[0]]
        rows = slice(None) if slopes[0] == 1 else chunk
        xp.greater(x, 0, out=positive)
        if ggrad is not None:
            xp.minimum(x, 0, out=t)
            xp.multiply(t, g, out=t)
            share = part if slopes[0] == 1 else part[: x.shape[0]]
            reduce_to(xp, t, share)
            xp.add(total[rows], share, out=total[rows])
        if target is not None:
            xp.copyto(t, slope[rows])
            xp.copyto(t, 1, where=positive)
            xp.multiply(g, t, out=target[chunk], casting="same_kind")
    if ggrad is not None:
        ggrad.reshape(slopes)[...] = total
