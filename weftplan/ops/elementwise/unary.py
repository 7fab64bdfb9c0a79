"""Unary elementwise operators: exp, sqrt, tanh, relu, rounding, … with their gradients, one row each.

A gradient reads the forward output if its formula allows that (``sqrt``, ``tanh``, …), and the input otherwise.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.expression import apply, cast, f
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.params import p_float
from weftplan.ops.core.rules import floats_only, grad
from weftplan.ops.core.schema import Param
from weftplan.ops.elementwise.erf import erf
from weftplan.ops.elementwise.rows import row
from weftplan.support.array_types import ArrayModule, RawArray


def relu_into(xp: ArrayModule, x: RawArray, out: RawArray) -> None:
    """Compute ``out`` = max(x, 0): NaN stays NaN, and -0 becomes 0; ``out`` may be ``x``."""
    if xp is np and x.size > 4096 and is_float(out.dtype):
        xp.clip(x, 0.0, math.inf, out=out)  # NumPy vectorises clip, but not maximum with a scalar
        xp.add(out, 0.0, out=out)  # clip leaves -0 unchanged
    else:
        xp.maximum(x, 0, out=out, casting="unsafe")  # 0 is no bool


_DEGREE = math.pi / 180.0

row(
    "exp",
    "exp",
    gradient=grad("elemwise_mul", "g0", "y0", into=(0,), params={}),
    onnx="Exp",
    doc="e to the power of x.",
)
row("expm1", "expm1", lambda g, x, y: f.exp(x) * g, doc="exp(x) - 1, exact near 0.")
row("log", "log", lambda g, x, y: g / x, onnx="Log", doc="Natural logarithm.")
row("log10", "log10", lambda g, x, y: g / x * (1.0 / math.log(10.0)), doc="Logarithm to base 10.")
row("log2", "log2", lambda g, x, y: g / x * (1.0 / math.log(2.0)), doc="Logarithm to base 2.")
row("log1p", "log1p", lambda g, x, y: g / (x + 1.0), doc="log(1 + x), exact near 0.")
row("sqrt", "sqrt", lambda g, x, y: g / y * 0.5, onnx="Sqrt", doc="Square root.")
row("rsqrt", lambda x: 1.0 / f.sqrt(x), lambda g, x, y: y * y * y * -0.5 * g, compute="float", doc="1 / sqrt(x).")
row("cbrt", "cbrt", lambda g, x, y: g / (y * y * 3.0), doc="Cube root.")
row("rcbrt", lambda x: 1.0 / f.cbrt(x), lambda g, x, y: (y * y).square() * (-1.0 / 3.0) * g, compute="float",
    doc="1 / cbrt(x).")  # fmt: skip
row("square", "square", lambda g, x, y: g * x * 2.0, doc="x times x.")
row("abs", "absolute", lambda g, x, y: f.sign(x) * g, onnx="Abs", doc="Absolute value; its gradient at 0 is 0.")
row("sign", "sign", onnx="Sign", doc="-1, 0 or 1.")
row("negative", "negative", gradient=grad("negative", "g0", params={}), onnx="Neg", doc="-x.")
row("reciprocal", lambda x: 1.0 / x, lambda g, x, y: g / -(x * x), onnx="Reciprocal", doc="1 / x.")
row("sin", "sin", lambda g, x, y: f.cos(x) * g, onnx="Sin", doc="Sine of radians.")
row("cos", "cos", lambda g, x, y: -f.sin(x) * g, onnx="Cos", doc="Cosine of radians.")
row("tan", "tan", lambda g, x, y: (y * y + 1.0) * g, onnx="Tan", doc="Tangent of radians.")
row("arcsin", "arcsin", lambda g, x, y: g / f.sqrt(1.0 - x * x), onnx="Asin", doc="Inverse sine, in radians.")
row("arccos", "arccos", lambda g, x, y: -(g / f.sqrt(1.0 - x * x)), onnx="Acos", doc="Inverse cosine, in radians.")
row("arctan", "arctan", lambda g, x, y: g / (x * x + 1.0), onnx="Atan", doc="Inverse tangent, in radians.")
row("sinh", "sinh", lambda g, x, y: f.cosh(x) * g, onnx="Sinh", doc="Hyperbolic sine.")
row("cosh", "cosh", lambda g, x, y: f.sinh(x) * g, onnx="Cosh", doc="Hyperbolic cosine.")
row("tanh", "tanh", lambda g, x, y: (1.0 - y * y) * g, onnx="Tanh", doc="Hyperbolic tangent.")
row("arcsinh", "arcsinh", lambda g, x, y: g / f.sqrt(x * x + 1.0), onnx="Asinh", doc="Inverse hyperbolic sine.")
row("arccosh", "arccosh", lambda g, x, y: g / f.sqrt(x * x + -1.0), onnx="Acosh", doc="Inverse hyperbolic cosine.")
row("arctanh", "arctanh", lambda g, x, y: g / (1.0 - x * x), onnx="Atanh", doc="Inverse hyperbolic tangent.")
row("degrees", lambda x: x * (1.0 / _DEGREE), lambda g, x, y: g * (1.0 / _DEGREE), doc="Radians to degrees.")
row("radians", lambda x: x * _DEGREE, lambda g, x, y: g * _DEGREE, doc="Degrees to radians.")
row(
    "sigmoid",
    lambda x: f.reciprocal(f.exp(-cast(x, "real")) + 1.0),  # exp may be infinite; its reciprocal is 0, as it should be
    lambda g, x, y: (1.0 - y) * y * g,
    compute="real",
    onnx="Sigmoid",
    doc="1 / (1 + exp(-x)).",
)
row("relu", lambda x: apply(relu_into, x, same=f.maximum(x, 0)), lambda g, x, y: g * f.sign(y), onnx="Relu",
    doc="max(x, 0).")  # fmt: skip
row(
    "softsign",
    lambda x: x / (abs(x) + 1),
    lambda g, x, y: g / (abs(x) + 1).square(),
    compute="float",
    onnx="Softsign",
    doc="x / (1 + |x|).",
)
row(
    "hard_sigmoid",
    lambda p, x: (x * p.alpha + p.beta).clip(0, 1),
    lambda p, g, x, y: f.less(abs(x * p.alpha + (p.beta - 0.5)), 0.5) * p.alpha * g,
    params=(
        Param("alpha", p_float, 0.2, "slope of the middle part"),
        Param("beta", p_float, 0.5, "value at 0"),
    ),
    infer_dtype=floats_only("hard_sigmoid"),
    doc="alpha * x + beta, limited to [0, 1].",
)
row(
    "erf",
    erf,
    lambda g, x, y: f.exp(-(x * x)) * (2.0 / math.sqrt(math.pi)) * g,
    compute="float",
    onnx="Erf",
    doc="Gauss error function.",
)
row(
    "round", lambda x: f.copysign(f.floor(abs(x) + 0.5), x), compute="float", doc="Nearest integer, halves away from 0."
)
row("rint", lambda x: f.ceil(x - 0.5), compute="float", doc="Nearest integer, halves downwards.")
row("floor", "floor", onnx="Floor", doc="Greatest integer <= x.")
row("ceil", "ceil", onnx="Ceil", doc="Smallest integer >= x.")
row("trunc", "trunc", doc="Integer part, towards 0.")
row("fix", "trunc", doc="Integer part, towards 0 (the same as trunc).")
row("logical_not", lambda x: f.equal(x, 0), doc="1 where x is 0, else 0.")
row("_contrib_isnan", "isnan", doc="1 where x is not a number, else 0.")
row("_contrib_isinf", "isinf", doc="1 where x is infinite, else 0.")
row("_contrib_isfinite", "isfinite", doc="1 where x is a number and not infinite, else 0.")
