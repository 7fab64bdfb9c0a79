"""LeakyReLU: leaky, prelu, elu, selu, gelu or rrelu of each element.

The backward pass reads the incoming gradient. It also reads the output for selu, the data for gelu, data and gamma for
prelu, and the drawn slopes (``mask``) for rrelu. For leaky and elu it reads the output, whose sign is that of the data,
unless ``slope`` is negative; then it reads the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core import tiling
from weftplan.ops.core.expression import Expr, cast, f, where
from weftplan.ops.core.forms import ChosenKernel, context_kernel
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.gradient_kernel import GradientKernel
from weftplan.ops.core.kernels import BOOL, block_bytes, blocks
from weftplan.ops.core.params import p_enum, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, Shapes, backward, floats_only, merge_shape
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
    Shape,
    TensorSpec,
)
from weftplan.ops.elementwise.erf import erf
from weftplan.support.array_types import RawArray

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


def _gamma_shape(data: Shape, gamma: Shape | None) -> Shape:
    """Return the shape of gamma for ``data``: (channels,) by default, else ``gamma`` with unknown dimensions filled in.

    ``gamma`` may be (channels,), (1,) or a shape that broadcasts to ``data``; any other shape raises ShapeError.

    >>> _gamma_shape((2, 3, 4), None), _gamma_shape((2, 3, 4), (1, 3, 0))
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
    return [data, ins[1] if data is None else _gamma_shape(data, ins[1])], [data]


def _falling(x: Expr, tail: Expr, scale: float | None = None) -> Expr:
    """Return the formula max(x, 0) · scale + tail."""
    above = f.maximum(x, 0, kind=None)
    return (above if scale is None else f.multiply(above, scale, kind=None)) + tail


def _below(x: Expr) -> Expr:
    return f.minimum(x, 0)


def _normal_cdf(x: Expr) -> Expr:
    """Return the formula of the standard normal distribution function."""
    return (erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def _align(data: Shape, gamma: Shape) -> Shape:
    """Return the shape in which gamma broadcasts to data: an array of one axis has a value for each channel."""
    return (1, *gamma, *(1,) * (len(data) - 2)) if len(gamma) == 1 < len(data) else gamma


_FORWARD: dict[str, Callable[[Any, Any], Any]] = {
    "leaky": lambda p, x: _falling(x, _below(x) * p.slope),
    "elu": lambda p, x: _falling(x, f.expm1(_below(x)) * p.slope),
    "selu": lambda p, x: _falling(x, f.expm1(_below(x)) * (_LAMBDA * _ALPHA), _LAMBDA),
    "gelu": lambda p, x: x * _normal_cdf(x),
}


def _slope(above: object, slope: Expr, value: Expr) -> Expr:
    """Return ``above`` where ``value`` is above 0 or NaN, at which the gradient must not vanish, else ``slope``."""
    return where(f.logical_not(f.less_equal(value, 0)), above, slope)


def _density(x: Expr) -> Expr:
    return f.exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))


_GRADIENTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "leaky": lambda p, g, value: g * _slope(1, cast(p.slope, "float"), value),
    # If the slope is positive, the array is the output, slope · (exp(x) - 1) below 0.
    "elu": lambda p, g, value: g * _slope(1, value + p.slope if p.rises else f.exp(_below(value)) * p.slope, value),
    "selu": lambda p, g, value: g * _slope(_LAMBDA, value + _LAMBDA * _ALPHA, value),
    "gelu": lambda p, g, x: g * (_normal_cdf(x) + _density(x) * x),
}
_CHOICES = {"act_type": lambda p: p["act_type"], "rises": lambda p: p["slope"] >= 0}


# ---------------------------------------------------------------------------------------------------------- rrelu


@context_kernel
def _random_forward(ctx: OpContext, p: Params, data: RawArray, out: RawArray | None, mask: RawArray | None) -> None:
    """Compute rrelu with random slopes in training, else with their mean; ``mask`` gets the slope, or 1 above 0."""
    xp = ctx.xp
    low, high = p["lower_bound"], p["upper_bound"]
    generator = ctx.generator() if ctx.is_train else None
    targets = [array for array in (out, mask) if array is not None]
    for x, *parts, draw, above, slope in blocks(ctx, (data, *targets), _random_scratch(data.dtype)):
        if generator is None:
            draw.fill((low + high) / 2)
        else:
            generator.random(draw.shape, dtype=np.float32, out=draw)
            xp.multiply(draw, high - low, out=draw)
            xp.add(draw, low, out=draw)
        xp.greater(x, 0, out=above)
        xp.copyto(slope, draw, casting="same_kind")
        xp.copyto(slope, 1, where=above)
        if mask is not None:
            parts[-1][...] = slope
        if out is not None:
            xp.multiply(x, slope, out=parts[0])


def _random_scratch(dtype: DType) -> tuple[DType, ...]:
    """Return the dtypes of rrelu's scratch: the draws, whether data is above 0, and the slopes."""
    return np.dtype(np.float32), BOOL, dtype


_formula = FormulaKernel(lambda p, x: _FORWARD[p.act_type](p, x), choices=_CHOICES, compute="float")
_gradient_formula = FormulaKernel(
    lambda p, g, value: _GRADIENTS[p.act_type](p, g, value), 2, choices=_CHOICES, compute="float"
)
_prelu = FormulaKernel(lambda p, x, gamma: _falling(x, _below(x) * gamma), 2, align=_align, limit=tiling.share)
# The gradient of gamma comes first, since that of data may have the memory of the output gradient or of data.
_prelu_gradients = GradientKernel(
    lambda p, g, x, gamma: (
        g * where(f.greater(x, 0), 1, cast(gamma, "float")),
        f.minimum(x, 0) * g,
    ),
    3, groups=((1,), (0,)), sums=True, overlaps=(0, 1), compute="float", align=_align,
)  # fmt: skip
_KERNELS: dict[str, Kernel] = {"rrelu": _random_forward, "prelu": _prelu}
_FORWARD_KERNEL = ChosenKernel(lambda params: (_KERNELS.get(params["act_type"], _formula), params), elementwise=True)
_BACKWARD_KERNELS: dict[str, Kernel] = {
    "rrelu": FormulaKernel(lambda p, g, slope: g * slope, 2),
    "prelu": _prelu_gradients,
}


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[0]
    if params["act_type"] == "rrelu":
        return block_bytes(math.prod(shape), _random_scratch(dtype))
    return _FORWARD_KERNEL.workspace(params, inputs, outputs)


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
        forward=_FORWARD_KERNEL,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("LeakyReLU"),
        params=_PARAMS,
        inputs=_inputs,
        positions=("data", "gamma"),
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
        lambda params: (_BACKWARD_KERNELS.get(params["act_type"], _gradient_formula), params), elementwise=True
    ),
    lambda params: ("ograd", "data", "gamma") if params["act_type"] == "prelu" else ("ograd", "kept"),
    grad_inputs=lambda params: (0, 1) if params["act_type"] == "prelu" else (0,),
    params=_PARAMS,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
)
