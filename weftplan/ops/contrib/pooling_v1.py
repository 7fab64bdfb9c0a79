"""Pooling by the rules of MXNet's first releases, over two spatial axes; symbol files name it ``Pooling_v1``.

Padding is zeros in every reduction: a maximum next to the border is at least 0, and an average divides by the whole
kernel. A window of ``pooling_convention="full"`` that reaches beyond the padding has fewer elements; one without
elements has the maximum -inf and the sum 0. Each element that equals the maximum of a window gets the window's whole
gradient. The kernels pool a block of planes at a time, as those of :mod:`weftplan.ops.nn.pooling`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core import tiling
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL, accumulator
from weftplan.ops.core.params import p_bool, p_enum, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape
from weftplan.ops.core.schema import Op, Param, Params, Shape, SpecLike
from weftplan.ops.nn.pooling_windows import Grid, make_grid
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    Param("kernel", p_shape, (), "Height and width of a window; needed unless global_pool."),
    Param("pool_type", p_enum("max", "avg", "sum"), "max", "Reduction of a window."),
    Param("global_pool", p_bool, False, "True: one window, the whole image; kernel, stride and pad are ignored."),
    Param(
        "pooling_convention", p_enum("valid", "full"), "valid", "Number of windows, rounded down (valid) or up (full)."
    ),
    Param("stride", p_shape, (), "Steps between windows (default 1)."),
    Param("pad", p_shape, (), "Zeros on either side of each axis (default 0)."),
)


def _window(params: Params, image: Shape) -> tuple[Shape, Shape, Shape]:
    """Return the checked kernel, stride and pad, each a pair of numbers."""
    if params["global_pool"]:
        return image, (1, 1), (0, 0)
    kernel, stride, pad = params["kernel"], params["stride"] or (1, 1), params["pad"] or (0, 0)
    for name, pair, least in (("kernel", kernel, 1), ("stride", stride, 1), ("pad", pad, 0)):
        if len(pair) != 2 or min(pair) < least:
            raise ParameterError(
                f"Pooling_v1: {name}={pair}: expected two numbers of at least {least}, (height, width)"
            )
    return kernel, stride, pad


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape((0, 0, 0, 0), ins[0], "Pooling_v1: data (batch, channels, height, width)")
    out = merge_shape((0, 0, 0, 0), outs[0], "Pooling_v1: output")
    assert data is not None
    assert out is not None
    kernel, stride, pad = _window(params, data[2:])
    sizes = []
    for extent, k, s, p in zip(data[2:], kernel, stride, pad, strict=True):
        span = extent + 2 * p - k
        if extent and span < 0:
            raise ShapeError(f"Pooling_v1: kernel {kernel} is larger than data {data} with padding {pad}")
        rounded = span // s if params["pooling_convention"] == "valid" else -(-span // s)
        sizes.append(1 if params["global_pool"] else 1 + rounded if extent else 0)
    out = merge_shape((*data[:2], *sizes), out, f"Pooling_v1: output for data {data}, and given")
    assert out is not None
    return [(*out[:2], *data[2:])], [out]


def _grid(params: Params, image: Shape, sizes: Shape) -> tuple[Grid, tuple[slice, ...]]:
    """Return the windows over padded planes, and the index of the image in padded planes."""
    kernel, stride, pad = _window(params, image)
    padded = tuple(extent + 2 * p for extent, p in zip(image, pad, strict=True))
    inner = (slice(None), *(slice(p, p + extent) for extent, p in zip(image, pad, strict=True)))
    return make_grid(padded, sizes, kernel, stride, (0, 0), True), inner


def _blocks(shape: Shape) -> tuple[int, Iterator[slice]]:
    """Return the number of planes in a block, and the blocks of an array (batch, channels, height, width)."""
    total = shape[0] * shape[1]
    step = min(total, max(1, tiling.block() // max(1, math.prod(shape[2:]))))
    return step, (slice(start, min(start + step, total)) for start in range(0, total, step or 1))


def _flat(array: RawArray) -> RawArray:
    return array.reshape(-1, *array.shape[2:])


def _share(params: Params, image: Shape) -> float:
    """Return the factor of a window's sum."""
    return 1.0 / math.prod(_window(params, image)[0]) if params["pool_type"] == "avg" else 1.0


def _scratch(params: Params, data: SpecLike, out: SpecLike) -> ScratchSpecs:
    step, image = _blocks(data.shape)[0], _grid(params, data.shape[2:], out.shape[2:])[0].image
    return [((step, *image), data.dtype), ((step, *out.shape[2:]), accumulator(data.dtype))]


@kernel(scratch=_scratch)
def _forward(xp: ArrayModule, params: Params, data: RawArray, out: RawArray, padded: RawArray, wide: RawArray) -> None:
    image, is_max = data.shape[2:], params["pool_type"] == "max"
    grid, inner = _grid(params, image, out.shape[2:])
    padded.fill(0)
    for block in _blocks(data.shape)[1]:
        planes, target = padded[: block.stop - block.start], wide[: block.stop - block.start]
        planes[inner] = _flat(data)[block]
        target.fill(-math.inf if is_max else 0)
        for windows, elements in grid.taps:
            (xp.maximum if is_max else xp.add)(target[windows], planes[elements], out=target[windows])
        xp.multiply(target, _share(params, image), out=target)
        _flat(out)[block] = target


def _backward_scratch(
    params: Params, ograd: SpecLike, data: SpecLike, output: SpecLike, dgrad: SpecLike
) -> ScratchSpecs:
    planes, _ = _scratch(params, data, output)
    acc, sizes = accumulator(data.dtype), (planes[0][0], *output.shape[2:])
    return [planes, (planes[0], acc), (sizes, acc), (sizes, BOOL)]


@kernel(scratch=_backward_scratch)
def _backward(
    xp: ArrayModule,
    params: Params,
    ograd: RawArray,
    data: RawArray,
    output: RawArray,
    dgrad: RawArray,
    *scratch: RawArray,
) -> None:
    image, is_max = dgrad.shape[2:], params["pool_type"] == "max"
    grid, inner = _grid(params, image, ograd.shape[2:])
    scratch[0].fill(0)
    for block in _blocks(dgrad.shape)[1]:
        planes, target, term, mask = (buffer[: block.stop - block.start] for buffer in scratch)
        planes[inner] = _flat(data)[block]
        target.fill(0)
        for windows, elements in grid.taps:
            share, hit = term[windows], mask[windows]
            xp.multiply(_flat(ograd)[block][windows], _share(params, image), out=share)
            if is_max:
                xp.equal(planes[elements], _flat(output)[block][windows], out=hit)
                xp.multiply(share, hit, out=share)
            xp.add(target[elements], share, out=target[elements])
        _flat(dgrad)[block] = target[inner]


register(
    Op(
        name="Pooling_v1",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("Pooling_v1"),
        params=_PARAMS,
        gradient=grad("_backward_Pooling_v1", "g0", "x0", "y0"),
        doc="Maximum, average or sum of each window of data (batch, channels, height, width), padded with zeros: "
        "(batch, channels, *windows). Pooling has more uses; this operator is for networks that name it.",
    )
)
backward("Pooling_v1", _backward, ("ograd", "data", "output"), params=_PARAMS)
