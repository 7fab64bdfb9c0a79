"""Operators of a tensor and a number: ``x + 2``, ``1 / x``, ``x > 0``, …

The number is converted to the tensor's dtype first, so integers stay integers: ``int32 array + 1.5`` adds 1, as in
MXNet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import numpy as np

from weftplan.ops.core.expression import BOOL, Expr, Parameters, Scalar, apply, f, quotient, where
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.formula_kernel import Choices, FormulaKernel, Integers
from weftplan.ops.core.kernels import COMPARISONS
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, backward, grad, same_dtype, same_shape, zero_gradient
from weftplan.ops.core.schema import DType, DTypeRule, GradientRule, InplacePair, Op, Param
from weftplan.ops.elementwise.rows import ONNX_SCALAR
from weftplan.support.array_types import ArrayModule, RawArray

SCALAR = (
    Param("scalar", p_float, 1.0, "the number"),
    Param("is_int", p_bool, True, "accepted for MXNet's sake; the tensor's dtype alone decides"),
)


def converted(value: float, dtype: DType) -> float:
    """Return ``value`` as a number of ``dtype``: unchanged for floats, else truncated and wrapped like a C cast.

    >>> int(converted(2.9, np.dtype("int32"))), int(converted(-1.0, np.dtype("uint8")))
    (2, 255)
    """
    if is_float(dtype):
        return value
    number = np.array(int(value) if math.isfinite(value) else 0, np.int64).astype(dtype)[()]
    return cast("float", number)


def _slope_number(value: float, dtype: DType) -> float:
    """Return ``value`` as a float, rounded as :func:`converted` does."""
    return value if is_float(dtype) else float(converted(value, dtype))


def _scalar_op(
    name: str,
    alias: str,
    formula: Callable[..., object],
    doc: str,
    *,
    derivative: Callable[..., object] | None = None,
    uses: str = "x0",
    integer: Callable[..., object] | None = None,
    integers: Integers = "slope",
    choices: Choices | None = None,
    gradient: GradientRule = zero_gradient,
    infer_dtype: DTypeRule = same_dtype,
    params: tuple[Param, ...] = SCALAR,
    onnx: str = "",
) -> None:
    """Register an operator of an array and a number, and its backward operator if it has a derivative.

    Args:
        formula: the result, a function of (x, number), with ``choices`` of (x, number, p).
        derivative: the gradient, a function of (g, x or y, number), with ``choices`` of (g, x or y, number, p).
        uses: the array that the derivative reads: the input ``"x0"`` or the output ``"y0"``.
        integer: the formula for integers, if it is another.
        integers: how the derivative treats integers.
        onnx: ONNX's name of the operator of two arrays; the number is its left operand in names that begin with _r.
    """
    if onnx:
        ONNX_SCALAR[name] = onnx, name.startswith("_r")

    def with_number(function: Callable[..., object], convert: Callable[..., object]) -> Callable[..., object]:
        def traced(p: Parameters, *arrays: Expr) -> object:
            return function(*arrays, Scalar.call(convert, p.scalar, p.array_dtype), *([p] if choices else []))

        return traced

    if derivative is not None:
        gradient = grad(f"_backward_{name.lstrip('_')}", "g0", uses)
        backward(
            name,
            FormulaKernel(with_number(derivative, _slope_number), 2, integers=integers, choices=choices),
            ("ograd", "data" if uses == "x0" else "output"),
            params=params,
            inplace=(InplacePair(0, 0), InplacePair(1, 0)),
        )
    register(
        Op(
            name=name,
            forward=FormulaKernel(
                with_number(formula, converted),
                integer=None if integer is None else with_number(integer, converted),
                choices=choices,
            ),
            infer_shape=same_shape,
            infer_dtype=infer_dtype,
            params=params,
            gradient=gradient,
            inplace=UNARY_INPLACE,
            aliases=(alias,) if alias else (),
            doc=doc,
        )
    )


def _remainder(xp: ArrayModule, x: RawArray, number: float, out: RawArray) -> None:
    """Compute the remainder of x / number; 0 for a number of 0."""
    if number == 0:
        out.fill(0)
    else:
        xp.remainder(x, number, out=out)


def _log(number: float) -> float:
    return math.log(number) if number > 0 else (-math.inf if number == 0 else math.nan)


def _smooth_l1(x: Expr, s: Scalar) -> Expr:
    size = abs(x)
    near = size * s**2
    is_near = f.less(near, 1.0)
    near = near * size * 0.5
    far = size - 0.5 / Scalar.call(float, s**2)  # infinite, without a warning, if an integer dtype makes s 0
    return where(f.logical_not(is_near), far, near)


_COPY = grad("_copy", "g0", params={})
_SQUARES: Choices = {"squares": lambda p: p["scalar"] == 2.0}
"""The most common exponent, for which a product is twenty times cheaper than a power."""

_scalar_op("_plus_scalar", "_PlusScalar", lambda x, s: x + s, "data + scalar.", gradient=_COPY,
           onnx="Add")  # fmt: skip
_scalar_op("_minus_scalar", "_MinusScalar", lambda x, s: x - s, "data - scalar.", gradient=_COPY,
           onnx="Sub")  # fmt: skip
_scalar_op("_rminus_scalar", "_RMinusScalar", lambda x, s: s - x, "scalar - data.",
           gradient=grad("negative", "g0", params={}), onnx="Sub")  # fmt: skip
_scalar_op("_mul_scalar", "_MulScalar", lambda x, s: x * s, "data * scalar.", gradient=grad("_mul_scalar", "g0"),
           onnx="Mul")  # fmt: skip
_scalar_op(
    "_div_scalar",
    "_DivScalar",
    lambda x, s: x / s,
    "data / scalar; integers drop the fraction.",
    integer=quotient,
    gradient=grad("_div_scalar", "g0"),
    onnx="Div",
)
_scalar_op(
    "_rdiv_scalar",
    "_RDivScalar",
    lambda x, s: s / x,
    "scalar / data; integers drop the fraction.",
    integer=lambda x, s: quotient(s, x),
    derivative=lambda g, x, s: -s / (x * x) * g,
    onnx="Div",
)
_scalar_op(
    "_mod_scalar",
    "_ModScalar",
    lambda x, s: apply(_remainder, x, s),
    "Remainder of data / scalar with the scalar's sign.",
    gradient=grad("_backward_mod_scalar", "g0"),
)
backward("_mod_scalar", FormulaKernel(lambda p, g: g, integers="zero"), ("ograd",), params=SCALAR,
         inplace=UNARY_INPLACE)  # fmt: skip
_scalar_op(
    "_rmod_scalar",
    "_RModScalar",
    lambda x, s: where(f.equal(x, 0), 0, f.remainder(s, x)),
    "Remainder of scalar / data with the sign of data, 0 where data is 0.",
    derivative=lambda g, x, s: -f.floor(s / x) * g,
    integers="zero",
)
_scalar_op(
    "_power_scalar",
    "_PowerScalar",
    lambda x, s, p: x * x if p.squares else f.power(x, s, as_float=True),
    "data to the power of scalar.",
    # True, the exponent of bools, is 1.
    derivative=lambda g, x, s, p: (x * s if p.squares and p.array_dtype != BOOL else f.power(x, s - 1.0) * s) * g,
    choices=_SQUARES,
    onnx="Pow",
)
_scalar_op(
    "_rpower_scalar",
    "_RPowerScalar",
    lambda x, s: f.power(s, x, as_float=True),
    "scalar to the power of data.",
    derivative=lambda g, y, s: g * y * Scalar.call(_log, s),
    uses="y0",
    onnx="Pow",
)
_scalar_op(
    "_maximum_scalar",
    "_MaximumScalar",
    f.maximum,
    "The greater of data and scalar.",
    onnx="Max",
    derivative=lambda g, x, s: g * f.greater_equal(x, s),
    integers="formula",
)
_scalar_op(
    "_minimum_scalar",
    "_MinimumScalar",
    f.minimum,
    "The smaller of data and scalar.",
    onnx="Min",
    derivative=lambda g, x, s: g * f.less_equal(x, s),
    integers="formula",
)
_scalar_op(
    "_hypot_scalar",
    "_HypotScalar",
    f.hypot,
    "sqrt(data² + scalar²).",
    derivative=lambda g, x, s: x / f.hypot(x, s) * g,
)
_scalar_op(
    "smooth_l1",
    "",
    _smooth_l1,
    "0.5 (scalar·x)² where |x| < 1/scalar², else |x| - 0.5/scalar².",
    derivative=lambda g, x, s: (x * (s * s)).clip(-1.0, 1.0) * g,
    params=SCALAR[:1],
)
for _short, _ufunc, _what in COMPARISONS:
    _scalar_op(
        f"_{_short}_scalar",
        f"_{_short.title().replace('_', '')}Scalar",
        getattr(f, _ufunc),
        f"1 where {_what.format('data', 'scalar')}, else 0, in the dtype of data.",
    )
