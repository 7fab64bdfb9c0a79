"""Unary elementwise operators: exp, sqrt, tanh, relu, rounding, … with their gradients.

A gradient reads the forward output if its formula allows that (``sqrt``, ``tanh``, …), and the input otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from weftplan.ops.core.floats import is_float
from weftplan.ops.core.kernels import BOOL, BlockKernel, Kind, UfuncKernel, block_workspace, scratch_dtype
from weftplan.ops.core.params import p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, backward, floats_only, grad, same_dtype, same_shape, zero_gradient
from weftplan.ops.core.schema import DTypeRule, GradientRule, InplacePair, Op, Param, Params
from weftplan.ops.elementwise.erf import erf
from weftplan.ops.elementwise.integer_gradients import apply_slope, slope_scratch
from weftplan.support.array_types import ArrayModule, RawArray

Step = Callable[..., None]
"""``step(xp, params, x, out, *scratch)`` computes one block; ``out`` may be ``x``."""


def _stepwise(step: Step, scratch: tuple[Kind, ...]) -> BlockKernel:
    """Return a kernel that runs ``step`` on blocks of its input."""
    return BlockKernel(step, lambda params, dtype: [scratch_dtype(kind, dtype) for kind in scratch])


def _derivative(step: Step, scratch: tuple[Kind, ...]) -> BlockKernel:
    """Return the kernel (output gradient, data or output) -> data's gradient that runs ``step`` on blocks."""

    def on_slopes(xp: ArrayModule, params: Params, g: RawArray, x: RawArray, out: RawArray, *room: RawArray) -> None:
        apply_slope(xp, partial(step, xp, params), g, (x,), out, room)

    return BlockKernel(on_slopes, lambda params, dtype: slope_scratch(scratch, dtype, 1))


def unary(
    name: str,
    forward: str | Step,
    derivative: Step | None = None,
    uses: str = "x0",
    *,
    scratch: tuple[Kind, ...] = (),
    forward_scratch: tuple[Kind, ...] = (),
    gradient: GradientRule | None = None,
    params: tuple[Param, ...] = (),
    infer_dtype: DTypeRule = same_dtype,
    inplace: tuple[InplacePair, ...] = UNARY_INPLACE,
    aliases: tuple[str, ...] = (),
    in_mxnet: bool = True,
    doc: str,
) -> None:
    """Register an elementwise operator and, with ``derivative``, its backward operator.

    Args:
        forward: name of a ufunc, or a :data:`Step`.
        derivative: ``derivative(xp, params, ograd, x_or_y, out, *scratch)``; ``out`` may be either of the two inputs.
            It is written for floats; :mod:`weftplan.ops.elementwise.integer_gradients` applies it to integers.
        uses: the array that the derivative reads: the input ``"x0"`` or the output ``"y0"``.
        scratch: dtypes of the derivative's scratch blocks (None: the array's).
        forward_scratch: dtypes of the scratch blocks of ``forward``.
        gradient: the gradient rule, if there is no ``derivative``.
    """
    if derivative is not None:
        gradient = grad(f"_backward_{name}", "g0", uses)
    register(
        Op(
            name=name,
            forward=UfuncKernel(forward, 1) if isinstance(forward, str) else _stepwise(forward, forward_scratch),
            infer_shape=same_shape,
            infer_dtype=infer_dtype,
            params=params,
            gradient=gradient,
            inplace=inplace,
            workspace=block_workspace(*forward_scratch) if forward_scratch else None,
            aliases=aliases,
            in_mxnet=in_mxnet,
            doc=doc,
        )
    )
    if derivative is not None:
        kernel = _derivative(derivative, scratch)
        backward(
            name,
            kernel,
            ("ograd", "data" if uses == "x0" else "output"),
            params=params,
            inplace=(InplacePair(0, 0), InplacePair(1, 0)),
            workspace=kernel.workspace,
        )


# --------------------------------------------------------------------- formulas: (xp, params, ograd, x or y, out, t…)


def _sqrt(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray) -> None:
    xp.divide(g, y, out=out)
    xp.multiply(out, 0.5, out=out)


def _rsqrt(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(y, y, out=t)
    xp.multiply(t, y, out=t)
    xp.multiply(t, -0.5, out=t)
    xp.multiply(t, g, out=out)


def _cbrt(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(y, y, out=t)
    xp.multiply(t, 3.0, out=t)
    xp.divide(g, t, out=out)


def _rcbrt(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(y, y, out=t)
    xp.multiply(t, t, out=t)
    xp.multiply(t, -1.0 / 3.0, out=t)
    xp.multiply(t, g, out=out)


def _expm1(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.exp(x, out=t)
    xp.multiply(t, g, out=out)


def _divided_by(factor: float) -> Step:
    def step(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray) -> None:
        xp.divide(g, x, out=out)
        if factor != 1.0:
            xp.multiply(out, factor, out=out)

    return step


def _log1p(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.add(x, 1.0, out=t)
    xp.divide(g, t, out=out)


def _square(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray) -> None:
    xp.multiply(g, x, out=out)
    xp.multiply(out, 2.0, out=out)


def _abs(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.sign(x, out=t)
    xp.multiply(t, g, out=out)


def _sin(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.cos(x, out=t)
    xp.multiply(t, g, out=out)


def _cos(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.sin(x, out=t)
    xp.negative(t, out=t)
    xp.multiply(t, g, out=out)


def _tan(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(y, y, out=t)
    xp.add(t, 1.0, out=t)
    xp.multiply(t, g, out=out)


def _tanh(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(y, y, out=t)
    xp.subtract(1.0, t, out=t)
    xp.multiply(t, g, out=out)


def _sinh(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.cosh(x, out=t)
    xp.multiply(t, g, out=out)


def _cosh(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.sinh(x, out=t)
    xp.multiply(t, g, out=out)


def _inverse(sign: int, shift: float, root: bool, negate: bool = False) -> Step:
    """Return the derivative of an inverse trigonometric or hyperbolic function.

    It computes g / (sign·x² + shift), or g / sqrt(sign·x² + shift) if ``root``, with the opposite sign if ``negate``.
    """

    def step(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
        xp.multiply(x, x, out=t)
        if sign < 0:
            xp.subtract(shift, t, out=t)
        else:
            xp.add(t, shift, out=t)
        if root:
            xp.sqrt(t, out=t)
        xp.divide(g, t, out=out)
        if negate:
            xp.negative(out, out=out)

    return step


def _scaled_by(factor: float) -> Step:
    def step(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray) -> None:
        xp.multiply(g, factor, out=out)

    return step


def _reciprocal_forward(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
    xp.divide(1.0, x, out=out, casting="unsafe")


def _sign_forward(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
    xp.sign(x, out=out)


def _reciprocal(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(x, x, out=t)
    xp.negative(t, out=t)
    xp.divide(g, t, out=out)


def _sigmoid_forward(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
    if not is_float(out.dtype):
        xp.copyto(out, 1.0 / (1.0 + xp.exp(-x.astype(float))), casting="unsafe")
        return
    xp.negative(x, out=out)
    xp.exp(out, out=out)  # may overflow to infinity, whose reciprocal is 0, as it should be
    xp.add(out, 1.0, out=out)
    xp.reciprocal(out, out=out)


def _sigmoid(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.subtract(1.0, y, out=t)
    xp.multiply(t, y, out=t)
    xp.multiply(t, g, out=out)


def relu_step(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
    """Compute ``out`` = max(x, 0) of one block: NaN stays NaN, and -0 becomes 0. ``Activation`` uses it, too."""
    if xp is np and x.size > 4096 and is_float(out.dtype):
        xp.clip(x, 0.0, math.inf, out=out)  # NumPy vectorises clip, but not maximum with a scalar
        xp.add(out, 0.0, out=out)  # clip leaves -0 unchanged
    else:
        xp.maximum(x, 0, out=out)


def _relu(xp: ArrayModule, p: Params, g: RawArray, y: RawArray, out: RawArray, t: RawArray) -> None:
    xp.sign(y, out=t)  # NaN stays NaN
    xp.multiply(g, t, out=out)


def _softsign_forward(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.absolute(x, out=t)
    xp.add(t, 1, out=t)
    xp.divide(x, t, out=out, casting="unsafe")


def _softsign(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.absolute(x, out=t)
    xp.add(t, 1, out=t)
    xp.multiply(t, t, out=t)
    xp.divide(g, t, out=out)


def _hard_sigmoid_forward(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
    xp.multiply(x, p["alpha"], out=out)
    xp.add(out, p["beta"], out=out)
    xp.clip(out, 0, 1, out=out)


def _hard_sigmoid(
    xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray, inside: RawArray
) -> None:
    xp.multiply(x, p["alpha"], out=t)
    xp.add(t, p["beta"] - 0.5, out=t)
    xp.absolute(t, out=t)
    xp.less(t, 0.5, out=inside)
    xp.multiply(inside, p["alpha"], out=t)
    xp.multiply(t, g, out=out)


def _erf(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(x, x, out=t)
    xp.negative(t, out=t)
    xp.exp(t, out=t)
    xp.multiply(t, 2.0 / math.sqrt(math.pi), out=t)
    xp.multiply(t, g, out=out)


def _erf_forward(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, *scratch: RawArray) -> None:
    erf(xp, x, out, *scratch)


def _away_from_zero(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
    """Round half away from zero, as MXNet's ``round`` does (NumPy rounds half to even)."""
    xp.absolute(x, out=t)
    xp.add(t, 0.5, out=t)
    xp.floor(t, out=t)
    xp.copysign(t, x, out=out, casting="unsafe")


def _half_down(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
    """Round half down, ``ceil(x - 0.5)``, as MXNet's ``rint`` does."""
    xp.subtract(x, 0.5, out=t)
    xp.ceil(t, out=out, casting="unsafe")


def _logical_not(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
    xp.equal(x, 0, out=out)


def _one_over(root: str) -> Step:
    def step(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
        getattr(xp, root)(x, out=t)
        xp.divide(1.0, t, out=out, casting="unsafe")

    return step


def _angle(factor: float) -> Step:
    def step(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
        xp.multiply(x, factor, out=out, casting="unsafe")

    return step


# -------------------------------------------------------------------------------------------------- the operators

_V: tuple[Kind, ...] = (None,)
_F: tuple[Kind, ...] = ("float",)
_DEGREE = math.pi / 180.0

unary("exp", "exp", gradient=grad("elemwise_mul", "g0", "y0", into=(0,), params={}), doc="e to the power of x.")
unary("expm1", "expm1", _expm1, scratch=_V, doc="exp(x) - 1, exact near 0.")
unary("log", "log", _divided_by(1.0), doc="Natural logarithm.")
unary("log10", "log10", _divided_by(1.0 / math.log(10.0)), doc="Logarithm to base 10.")
unary("log2", "log2", _divided_by(1.0 / math.log(2.0)), doc="Logarithm to base 2.")
unary("log1p", "log1p", _log1p, scratch=_V, doc="log(1 + x), exact near 0.")
unary("sqrt", "sqrt", _sqrt, "y0", doc="Square root.")
unary("rsqrt", _one_over("sqrt"), _rsqrt, "y0", scratch=_V, forward_scratch=_F, doc="1 / sqrt(x).")
unary("cbrt", "cbrt", _cbrt, "y0", scratch=_V, doc="Cube root.")
unary("rcbrt", _one_over("cbrt"), _rcbrt, "y0", scratch=_V, forward_scratch=_F, doc="1 / cbrt(x).")
unary("square", "square", _square, doc="x times x.")
unary("abs", "absolute", _abs, scratch=_V, doc="Absolute value; its gradient at 0 is 0.")
unary("sign", _sign_forward, gradient=zero_gradient, doc="-1, 0 or 1.")
unary("negative", "negative", gradient=grad("negative", "g0", params={}), doc="-x.")
unary("reciprocal", _reciprocal_forward, _reciprocal, scratch=_V, doc="1 / x.")
unary("sin", "sin", _sin, scratch=_V, doc="Sine of radians.")
unary("cos", "cos", _cos, scratch=_V, doc="Cosine of radians.")
unary("tan", "tan", _tan, "y0", scratch=_V, doc="Tangent of radians.")
unary("arcsin", "arcsin", _inverse(-1, 1.0, True), scratch=_V, doc="Inverse sine, in radians.")
unary("arccos", "arccos", _inverse(-1, 1.0, True, True), scratch=_V, doc="Inverse cosine, in radians.")
unary("arctan", "arctan", _inverse(1, 1.0, False), scratch=_V, doc="Inverse tangent, in radians.")
unary("sinh", "sinh", _sinh, scratch=_V, doc="Hyperbolic sine.")
unary("cosh", "cosh", _cosh, scratch=_V, doc="Hyperbolic cosine.")
unary("tanh", "tanh", _tanh, "y0", scratch=_V, doc="Hyperbolic tangent.")
unary("arcsinh", "arcsinh", _inverse(1, 1.0, True), scratch=_V, doc="Inverse hyperbolic sine.")
unary("arccosh", "arccosh", _inverse(1, -1.0, True), scratch=_V, doc="Inverse hyperbolic cosine.")
unary("arctanh", "arctanh", _inverse(-1, 1.0, False), scratch=_V, doc="Inverse hyperbolic tangent.")
unary("degrees", _angle(1.0 / _DEGREE), _scaled_by(1.0 / _DEGREE), doc="Radians to degrees.")
unary("radians", _angle(_DEGREE), _scaled_by(_DEGREE), doc="Degrees to radians.")
unary("sigmoid", _sigmoid_forward, _sigmoid, "y0", scratch=_V, doc="1 / (1 + exp(-x)).")
unary("relu", relu_step, _relu, "y0", scratch=_V, doc="max(x, 0).")
unary("softsign", _softsign_forward, _softsign, scratch=_V, forward_scratch=_F, doc="x / (1 + |x|).")
unary(
    "hard_sigmoid",
    _hard_sigmoid_forward,
    _hard_sigmoid,
    scratch=(None, BOOL),
    params=(
        Param("alpha", p_float, 0.2, "slope of the middle part"),
        Param("beta", p_float, 0.5, "value at 0"),
    ),
    infer_dtype=floats_only("hard_sigmoid"),
    doc="alpha * x + beta, limited to [0, 1].",
)
unary("erf", _erf_forward, _erf, scratch=_V, forward_scratch=("float",) * 5 + (BOOL,), doc="Gauss error function.")
unary("round", _away_from_zero, gradient=zero_gradient, forward_scratch=_F, doc="Nearest integer, halves away from 0.")
unary("rint", _half_down, gradient=zero_gradient, forward_scratch=_F, doc="Nearest integer, halves downwards.")
unary("floor", "floor", gradient=zero_gradient, doc="Greatest integer <= x.")
unary("ceil", "ceil", gradient=zero_gradient, doc="Smallest integer >= x.")
unary("trunc", "trunc", gradient=zero_gradient, doc="Integer part, towards 0.")
unary("fix", "trunc", gradient=zero_gradient, doc="Integer part, towards 0 (the same as trunc).")
unary("logical_not", _logical_not, gradient=zero_gradient, doc="1 where x is 0, else 0.")
for _name, _doc in (
    ("isnan", "1 where x is not a number, else 0."),
    ("isinf", "1 where x is infinite, else 0."),
    ("isfinite", "1 where x is a number and not infinite, else 0."),
):
    unary(f"_contrib_{_name}", _name, gradient=zero_gradient, doc=_doc)
