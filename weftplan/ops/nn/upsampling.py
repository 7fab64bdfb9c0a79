"""UpSampling: enlargement by an integer factor, by repetition or a learnt (bilinear) filter.

``nearest`` takes any number of inputs, enlarges each to ``scale`` times the extents of the first input, and
concatenates their channels or adds them. ``bilinear`` is a Deconvolution with one filter per channel; its weight is
initialised to bilinear interpolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core import registry
from weftplan.ops.core.forms import context_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_enum, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, merge_shape, same_dtype
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, OpContext, Param, Params, TensorSpec
from weftplan.ops.elementwise.add_n import NUM_ARGS, numbered_inputs
from weftplan.support.array_types import RawArray

_PARAMS = (
    Param("scale", p_int, doc="Factor of height and width."),
    Param("num_filter", p_int, 0, "bilinear: number of channels."),
    Param("sample_type", p_enum("nearest", "bilinear"), doc="Repeat pixels, or filter with a weight."),
    Param("multi_input_mode", p_enum("concat", "sum"), "concat", "nearest: how several inputs are combined."),
    NUM_ARGS,
    Param("workspace", p_int, 512, "Accepted, no effect."),
)


def _bilinear(params: Params) -> bool:
    return bool(params["sample_type"] == "bilinear")


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "weight") if _bilinear(params) else numbered_inputs(params)


def _check(params: Params) -> int:
    scale: int = params["scale"]
    if scale < 1:
        raise ParameterError(f"UpSampling: scale={scale}: expected at least 1")
    return scale


# ------------------------------------------------------------------------------------------------------------- bilinear


def _deconvolution(params: Params, channels: int) -> Params:
    """Return the parameters of the Deconvolution that enlarges images of ``channels`` channels ``scale`` times."""
    scale = _check(params)
    kernel, pad = 2 * scale - scale % 2, scale // 2
    return registry.parse_params(
        registry.get("Deconvolution"),
        {
            "kernel": (kernel, kernel),
            "stride": (scale, scale),
            "pad": (pad, pad),
            "num_filter": channels,
            "num_group": channels,
            "no_bias": True,
        },
    )


def _bilinear_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    channels = params["num_filter"]
    if channels < 1:
        raise ParameterError(f"UpSampling: num_filter={channels}: expected the number of channels, for bilinear")
    data = merge_shape((0, channels, 0, 0), ins[0], f"UpSampling: data with num_filter={channels} channels, and given")
    shapes = registry.get("Deconvolution").infer_shape(_deconvolution(params, channels), [data, ins[1]], outs)
    return list(shapes[0]), list(shapes[1])


# -------------------------------------------------------------------------------------------------------------- nearest


def _nearest_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    scale, shape0 = _check(params), ins[0]
    shapes = [shape for shape in (*ins, *outs) if shape is not None]
    if any(len(shape) != 4 for shape in shapes):
        raise ShapeError(f"UpSampling: shapes {shapes}: expected (batch, channels, height, width)")
    out = outs[0]
    if shape0 is None:
        return ins, outs
    out = merge_shape((shape0[0], 0, shape0[2] * scale, shape0[3] * scale), out, "UpSampling: output, and given")
    assert out is not None
    batch, height, width = out[0], out[2], out[3]
    new: Shapes = []
    for position, shape in enumerate(ins):
        if shape is not None:
            shape = merge_shape((batch, 0, 0, 0), shape, f"UpSampling: input {position} and batch of the output")
            assert shape is not None
            for extent, size in ((shape[2], height), (shape[3], width)):
                if extent and size and size % extent:
                    raise ShapeError(f"UpSampling: input {position} of shape {shape} does not divide {height}x{width}")
        new.append(shape)
    channels = [0 if shape is None else shape[1] for shape in new]
    if params["multi_input_mode"] == "sum" and len(ins) > 1:
        for count in channels:
            out = merge_shape((0, count, 0, 0), out, "UpSampling: channels of inputs that are summed")
            assert out is not None
        new = [None if shape is None else (shape[0], out[1], *shape[2:]) for shape in new]
    elif 0 not in channels:
        out = merge_shape((0, sum(channels), 0, 0), out, "UpSampling: channels of all inputs, and of the output")
    return new, [out]


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    return (_bilinear_shape if _bilinear(params) else _nearest_shape)(params, ins, outs)


def _parts(params: Params, out: RawArray, inputs: Sequence[RawArray]) -> list[tuple[RawArray, RawArray]]:
    """Return (its part of ``out``, the input) for each input, as views with separate axes for repeated pixels.

    The views are (batch, channels, height, row repeats, width, column repeats); the input has 1 repeat of each.
    """
    parts = []
    start = 0
    for array in inputs:
        if params["multi_input_mode"] == "sum":
            start = 0
        batch, channels, height, width = array.shape
        factors = out.shape[2] // height, out.shape[3] // width
        part = out[:, start : start + channels].reshape(batch, channels, height, factors[0], width, factors[1])
        parts.append((part, array.reshape(batch, channels, height, 1, width, 1)))
        start += channels
    return parts


# -------------------------------------------------------------------------------------------------------------- kernels


@context_kernel
def _forward(ctx: OpContext, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    if _bilinear(p):
        channels = inputs[0].shape[1]
        registry.get("Deconvolution").forward(ctx, _deconvolution(p, channels), inputs, (out,))
    elif out is not None:
        for position, (part, x) in enumerate(_parts(p, out, inputs)):
            if position and p["multi_input_mode"] == "sum":
                ctx.xp.add(part, x, out=part)
            else:
                ctx.xp.copyto(part, x)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    if not _bilinear(params):
        return 0
    inner = _deconvolution(params, inputs[0].shape[1])
    return registry.get("Deconvolution").workspace_bytes(inner, inputs, outputs)


@context_kernel
def _backward(ctx: OpContext, p: Params, ograd: RawArray, *arrays: Any) -> None:
    if _bilinear(p):
        inner = _deconvolution(p, arrays[0].shape[1])
        registry.get("_backward_Deconvolution").forward(ctx, inner, (ograd, *arrays[:2]), arrays[2:])
        return
    shapes = ctx.output_shapes or [out.shape for out in arrays]
    start = 0
    for out, shape in zip(arrays, shapes, strict=True):
        if out is not None:
            (part, target) = _parts({"multi_input_mode": "sum"}, ograd[:, start:], [out])[0]
            ctx.xp.sum(part, axis=(3, 5), dtype=accumulator(out.dtype), out=target, keepdims=True)
        if p["multi_input_mode"] == "concat":
            start += shape[1]


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    if not _bilinear(params):
        return 0
    inner = _deconvolution(params, inputs[1].shape[1])
    return registry.get("_backward_Deconvolution").workspace_bytes(inner, inputs, outputs)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    reads = [builder.input(0), builder.input(1)] if _bilinear(builder.params) else []
    return builder.node("_backward_UpSampling", [builder.ograd(), *reads])


register(
    Op(
        name="UpSampling",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        inputs=_inputs,
        variadic="num_args",
        gradient=_gradient,
        workspace=_workspace,
        input_init={1: '["bilinear", {}]'},
        doc="Images (batch, channels, height, width) enlarged to (batch, channels, scale · height, scale · width): "
        "pixels repeated, or filtered with a weight.",
    )
)
backward(
    "UpSampling",
    _backward,
    lambda params: ("ograd", *(("data", "weight") if _bilinear(params) else ())),
    grad_inputs=lambda params: tuple(range(len(_inputs(params)))),
    params=_PARAMS,
    workspace=_backward_workspace,
)
