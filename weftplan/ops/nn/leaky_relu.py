"""LeakyReLU: leaky, prelu, elu, selu, gelu or rrelu of each element.

The backward pass reads the incoming gradient. It also reads the output for selu, the data for gelu, data and gamma for
prelu, and the drawn slopes (``mask``) for rrelu. For leaky and elu it reads the output, whose sign is that of the data,
unless ``slope`` is negative; then it reads the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ops.core import tiling
from weftplan.ops.core.forms import ChosenKernel, context_kernel, workspace_kernel
from weftplan.ops.core.kernels import BOOL, BlockKernel, accumulator, block_bytes, blocks
from weftplan.ops.core.params import p_enum, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, Shapes, backward, floats_only, merge_shape, take_bytes
from weftplan.ops.core.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    InplacePair,
    Kernel,
    Op,
    OpContext,
    Param,
    Params,
    TensorSpec,
    Workspace,
)
from weftplan.ops.elementwise.erf import erf
from weftplan.ops.nn.prelu import (
    prelu_backward,
    prelu_block,
    prelu_forward,
    prelu_forward_block,
    prelu_gamma_shape,
    prelu_part,
    prelu_rows,
)
from weftplan.support.array_types import ArrayModule, RawArray

_LAMBDA = 1.0507009873554804934193349852946
_ALPHA = 1.6732632423543772848170429916717

_PARAMS = (
    Param("act_type", p_enum("elu", "gelu", "leaky", "prelu", "rrelu", "selu"), "leaky", "The function."),
    Param("slope", p_float, 0.25, "Slope below 0 of leaky and elu."),
    Param("lower_bound", p_float, 0.125, "rrelu: least slope."),
    Param("upper_bound", p_float, 0.334, "rrelu: greatest slope."),
)


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "gamma") if params["act_type"] == "prelu" else ("data",)


def _outputs(params: Params) -> tuple[str, ...]:
    return ("output", "mask") if params["act_type"] == "rrelu" else ("output",)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = ins[0]
    for position, shape in enumerate(outs):
        data = merge_shape(data, shape, f"LeakyReLU: data and output {position}")
    if params["act_type"] == "rrelu" and params["lower_bound"] > params["upper_bound"]:
        raise ParameterError(
            f"LeakyReLU: lower_bound={params['lower_bound']} is above upper_bound={params['upper_bound']}"
        )
    if len(ins) == 1:
        return [data], [data] * len(outs)
    return [data, ins[1] if data is None else prelu_gamma_shape(data, ins[1])], [data]


def _leaky(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.minimum(x, 0, out=t)
    xp.multiply(t, p["slope"], out=t)
    xp.maximum(x, 0, out=out)
    xp.add(out, t, out=out, casting="same_kind")


def _elu(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.minimum(x, 0, out=t)
    xp.expm1(t, out=t)
    xp.multiply(t, p["slope"], out=t)
    xp.maximum(x, 0, out=out)
    xp.add(out, t, out=out, casting="same_kind")


def _selu(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.minimum(x, 0, out=t)
    xp.expm1(t, out=t)
    xp.multiply(t, _LAMBDA * _ALPHA, out=t)
    xp.maximum(x, 0, out=out)
    xp.multiply(out, _LAMBDA, out=out)
    xp.add(out, t, out=out, casting="same_kind")


def _normal_cdf(xp: ArrayModule, x: RawArray, out: RawArray, scratch: Sequence[RawArray]) -> None:
    """Compute ``out`` = the standard normal distribution function of ``x``.

    ``scratch`` is six arrays like ``out`` and a bool array.
    """
    scaled, t, u, a, b, c, near = scratch
    xp.multiply(x, math.sqrt(0.5), out=scaled)
    erf(xp, scaled, out, t, u, a, b, c, near)
    xp.add(out, 1.0, out=out)
    xp.multiply(out, 0.5, out=out)


def _gelu(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, cdf: RawArray, *scratch: RawArray) -> None:
    _normal_cdf(xp, x, cdf, scratch)
    xp.multiply(x, cdf, out=out, casting="same_kind")


_FORWARD: dict[str, Callable[..., None]] = {"leaky": _leaky, "elu": _elu, "selu": _selu, "gelu": _gelu}


def _scratch(params: Params, dtype: DType, *, backward: bool = False) -> list[DType]:
    """Return the dtypes of the scratch blocks of one pass of any function but prelu and rrelu."""
    wide = accumulator(dtype)
    if params["act_type"] == "gelu":
        return [wide] * (8 if backward else 7) + [BOOL]
    return [wide, BOOL] if backward else [wide]


def _forward_step(xp: ArrayModule, params: Params, x: RawArray, out: RawArray, *scratch: RawArray) -> None:
    _FORWARD[params["act_type"]](xp, params, x, out, *scratch)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (shape, dtype) = inputs[0]
    if params["act_type"] == "prelu":
        return take_bytes((prelu_forward_block(prelu_rows(shape, inputs[1].shape)[0]), dtype))
    size = math.prod(shape)
    if params["act_type"] == "rrelu":
        return block_bytes(size, [np.dtype(np.float32), BOOL, dtype])
    return block_bytes(size, _scratch(params, dtype))


def _leaky_slope(xp: ArrayModule, p: Params, kept: RawArray, t: RawArray, mask: RawArray) -> None:
    xp.copyto(t, p["slope"])
    xp.copyto(t, 1, where=mask)


def _elu_slope(xp: ArrayModule, p: Params, kept: RawArray, t: RawArray, mask: RawArray) -> None:
    if p["slope"] >= 0:  # kept is the output, slope·(exp(x) - 1) below 0
        xp.add(kept, p["slope"], out=t)
    else:
        xp.minimum(kept, 0, out=t)
        xp.exp(t, out=t)
        xp.multiply(t, p["slope"], out=t)
    xp.copyto(t, 1, where=mask)


def _selu_slope(xp: ArrayModule, p: Params, kept: RawArray, t: RawArray, mask: RawArray) -> None:
    xp.add(kept, _LAMBDA * _ALPHA, out=t)
    xp.copyto(t, _LAMBDA, where=mask)


_SLOPE = {"leaky": _leaky_slope, "elu": _elu_slope, "selu": _selu_slope}


def _gelu_backward(
    xp: ArrayModule, g: RawArray, x: RawArray, out: RawArray, slope: RawArray, density: RawArray, *scratch: RawArray
) -> None:
    """Compute the gradient ``out`` = g · (cdf(x) + x · density(x)) of gelu, for the standard normal distribution."""
    _normal_cdf(xp, x, slope, scratch)
    xp.multiply(x, x, out=density, casting="same_kind")
    xp.multiply(density, -0.5, out=density)
    xp.exp(density, out=density)
    xp.multiply(density, 1.0 / math.sqrt(2.0 * math.pi), out=density)
    xp.multiply(density, x, out=density)
    xp.add(slope, density, out=slope)
    xp.multiply(g, slope, out=out, casting="same_kind")


def _backward_step(
    xp: ArrayModule, params: Params, g: RawArray, kept: RawArray, out: RawArray, *scratch: RawArray
) -> None:
    kind = params["act_type"]
    if kind == "gelu":
        _gelu_backward(xp, g, kept, out, *scratch)
        return
    slope, mask = scratch
    xp.less_equal(kept, 0, out=mask)
    xp.logical_not(mask, out=mask)  # NaN counts as above 0: the incoming gradient must not vanish there
    _SLOPE[kind](xp, params, kept, slope, mask)
    xp.multiply(g, slope, out=out, casting="same_kind")


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (shape, dtype) = outputs[0]
    if params["act_type"] == "prelu":
        rows, slopes = prelu_rows(shape, inputs[2].shape)
        block, wide = prelu_block(rows), accumulator(dtype)
        return take_bytes((block, wide), (block, BOOL), (prelu_part(rows, slopes), wide), (slopes, wide))
    if params["act_type"] == "rrelu":
        return 0
    return block_bytes(math.prod(shape), _scratch(params, dtype, backward=True))


# ---------------------------------------------------------------------------------------------------------- rrelu


@context_kernel
def _random_forward(ctx: OpContext, p: Params, data: RawArray, out: RawArray | None, mask: RawArray | None) -> None:
    """Compute rrelu with random slopes in training, else with their mean; ``mask`` gets the slope, or 1 above 0."""
    xp = ctx.xp
    low, high = p["lower_bound"], p["upper_bound"]
    generator = ctx.generator() if ctx.is_train else None
    flat = data.reshape(-1)
    size = min(flat.size, tiling.block())
    draws = ctx.take((size,), np.dtype(np.float32))
    above = ctx.take((size,), BOOL)
    slopes = ctx.take((size,), data.dtype)
    for first in range(0, flat.size, tiling.block()):
        here = slice(first, min(first + tiling.block(), flat.size))
        x = flat[here]
        draw, positive, slope = draws[: x.size], above[: x.size], slopes[: x.size]
        if generator is None:
            draw.fill((low + high) / 2)
        else:
            generator.random(draw.shape, dtype=np.float32, out=draw)
            xp.multiply(draw, high - low, out=draw)
            xp.add(draw, low, out=draw)
        xp.greater(x, 0, out=positive)
        xp.copyto(slope, draw, casting="same_kind")
        xp.copyto(slope, 1, where=positive)
        if mask is not None:
            mask.reshape(-1)[here] = slope
        if out is not None:
            xp.multiply(x, slope, out=out.reshape(-1)[here])


@workspace_kernel
def _prelu(ctx: Workspace, p: Params, data: RawArray, gamma: RawArray, out: RawArray) -> None:
    prelu_forward(ctx, data, gamma, out)


@workspace_kernel
def _backward_prelu(ctx: Workspace, p: Params, *arrays: Any) -> None:
    prelu_backward(ctx, *arrays)


@workspace_kernel
def _backward_random(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    for g, slope, target in blocks(ctx, arrays):
        ctx.xp.multiply(g, slope, out=target)


_FORWARD_KERNELS: dict[str, Kernel] = {"rrelu": _random_forward, "prelu": _prelu}
_BACKWARD_KERNELS: dict[str, Kernel] = {"rrelu": _backward_random, "prelu": _backward_prelu}
_forward_blocks = BlockKernel(_forward_step, _scratch)
_backward_blocks = BlockKernel(_backward_step, partial(_scratch, backward=True))


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    kind = builder.params["act_type"]
    if kind == "prelu":
        uses = [builder.input(0), builder.input(1)]
    elif kind == "rrelu":
        uses = [builder.output(1)]
    elif kind == "gelu" or (kind != "selu" and builder.params["slope"] < 0):
        uses = [builder.input(0)]
    else:
        uses = [builder.output(0)]
    return builder.node("_backward_LeakyReLU", [builder.ograd(), *uses])


register(
    Op(
        name="LeakyReLU",
        forward=ChosenKernel(lambda params: (_FORWARD_KERNELS.get(params["act_type"], _forward_blocks), params)),
        infer_shape=_infer_shape,
        infer_dtype=floats_only("LeakyReLU"),
        params=_PARAMS,
        inputs=_inputs,
        outputs=_outputs,
        gradient=_gradient,
        inplace=UNARY_INPLACE,
        workspace=_workspace,
        input_init={1: '["Constant", {"value": 0.25}]'},
        random=True,
        doc="leaky, prelu, elu, selu, gelu or rrelu of each element, in the shape of data; gamma, for prelu, is "
        "(channels,), (1,) or broadcasts to data.",
    )
)
backward(
    "LeakyReLU",
    ChosenKernel(
        lambda params: (_BACKWARD_KERNELS.get(params["act_type"], _backward_blocks), params), elementwise=True
    ),
    lambda params: ("ograd", "data", "gamma") if params["act_type"] == "prelu" else ("ograd", "kept"),
    grad_inputs=lambda params: (0, 1) if params["act_type"] == "prelu" else (0,),
    params=_PARAMS,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    workspace=_backward_workspace,
)
