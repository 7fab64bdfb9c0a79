"""Dropout: zero a random part of the data in training and scale the rest.

The hidden output ``mask`` has one byte per draw: 1 if the element is kept. MXNet 1.9.1 stores a scaled mask in the
data's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import DTypeError
from weftplan.ops.core import tiling
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import context_kernel
from weftplan.ops.core.kernels import blocks
from weftplan.ops.core.params import p_bool, p_enum, p_float, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    grad,
    merge_dtype,
    merge_shape,
    normalize_axis,
    take_bytes,
)
from weftplan.ops.core.schema import InplacePair, Op, OpContext, Param, Params, Shape, TensorSpec
from weftplan.support.array_types import ArrayModule, Generator, RawArray

_MASK = np.dtype(np.uint8)
_DRAW = np.dtype(np.float32)


def _p_fraction(value: object) -> float:
    p = p_float(value)
    if not 0 <= p <= 1:
        raise ValueError("expected a number from 0 to 1")
    return p


_PARAMS = (
    Param("p", _p_fraction, 0.5, "Probability that an element is dropped."),
    Param("mode", p_enum("always", "training"), "training", "always: drop outside training too."),
    Param("axes", p_shape, (), "Axes along which all elements share one draw."),
    Param("cudnn_off", p_bool, False, "Accepted, no effect."),
)


def _mask_shape(params: Params, shape: Shape) -> Shape:
    axes = {normalize_axis(axis, len(shape), "Dropout: axes") for axis in params["axes"]}
    return tuple(1 if axis in axes else dim for axis, dim in enumerate(shape))


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "Dropout: data and output")
    if data is None:
        return ins, outs
    return [data], [data, merge_shape(_mask_shape(params, data), outs[1], "Dropout: mask needed, and given")]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "Dropout: data and output")
    if data is not None and not is_float(data):
        raise DTypeError(f"Dropout expects floats, got {data}: cast the data first (Cast, astype)")
    return [data], [data, merge_dtype(_MASK, outs[1], "Dropout: mask")]


def _active(ctx: OpContext, params: Params) -> bool:
    return params["p"] > 0 and (ctx.is_train or params["mode"] == "always")


def _scale(params: Params) -> float:
    return 1.0 / (1.0 - params["p"]) if params["p"] < 1 else 0.0


@context_kernel
def _forward(ctx: OpContext, p: Params, data: RawArray, out: RawArray | None, mask: RawArray | None) -> None:
    shape = _mask_shape(p, data.shape)
    is_elementwise = shape == data.shape
    size = min(math.prod(shape), tiling.block())
    draws = ctx.take((size,), _DRAW)
    # If output 1 is not wanted, this is the mask: one block at a time, or the whole small mask of `axes`.
    buffer = ctx.take((size,) if is_elementwise else shape, _MASK)
    if not _active(ctx, p):
        if mask is not None:
            mask.fill(1)
        if out is not None:
            ctx.xp.copyto(out, data)
        return
    generator = ctx.generator()
    if not is_elementwise:
        keep = buffer if mask is None else mask
        for (part,) in blocks(ctx, (keep,)):
            _draw(ctx.xp, generator, p, draws, part)
        if out is not None:
            ctx.xp.multiply(data, keep, out=out)
            ctx.xp.multiply(out, _scale(p), out=out)
        return
    flat = data.reshape(-1)
    for start in range(0, flat.size, tiling.block()):
        elements = slice(start, min(start + tiling.block(), flat.size))
        part = buffer[: elements.stop - start] if mask is None else mask.reshape(-1)[elements]
        _draw(ctx.xp, generator, p, draws, part)
        if out is not None:
            target = out.reshape(-1)[elements]
            ctx.xp.multiply(flat[elements], part, out=target)
            ctx.xp.multiply(target, _scale(p), out=target)


def _draw(xp: ArrayModule, generator: Generator, params: Params, draws: RawArray, part: RawArray) -> None:
    numbers = draws[: part.size]
    generator.random(numbers.shape, dtype=_DRAW, out=numbers)
    xp.greater_equal(numbers, params["p"], out=part)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    data = inputs[0].shape
    shape = _mask_shape(params, data)
    size = min(math.prod(shape), tiling.block())
    return take_bytes(((size,), _DRAW), ((size,) if shape == data else shape, _MASK))


@context_kernel
def _backward(ctx: OpContext, p: Params, ograd: RawArray, mask: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    if not _active(ctx, p):
        xp.copyto(out, ograd)
    elif mask.shape == ograd.shape:
        for g, keep, target in blocks(ctx, (ograd, mask, out)):
            xp.multiply(g, keep, out=target)
            xp.multiply(target, _scale(p), out=target)
    else:
        xp.multiply(ograd, mask, out=out)
        xp.multiply(out, _scale(p), out=out)


register(
    Op(
        name="Dropout",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=_infer_dtype,
        params=_PARAMS,
        outputs=("output", "mask"),
        visible_outputs=1,
        gradient=grad("_backward_Dropout", "g0", "y1"),
        inplace=UNARY_INPLACE,
        workspace=_workspace,
        random=True,
        needs_training=lambda params: params["p"] > 0 and params["mode"] != "always",
        doc="Zero each element with probability p and scale the others by 1 / (1 - p), in training; the output has the "
        "shape of data.",
    )
)
backward("Dropout", _backward, ("ograd", "mask"), params=_PARAMS, inplace=(InplacePair(0, 0),))
