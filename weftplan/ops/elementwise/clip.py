"""clip: values limited to an interval.

For integer dtypes, the limits are first clamped to the dtype's range. The gradient of a NaN is the output's gradient.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.expression import Expr, Parameters, Scalar, f
from weftplan.ops.core.floats import is_float, is_half
from weftplan.ops.core.params import p_float
from weftplan.ops.core.schema import DType, Param
from weftplan.ops.elementwise.rows import row


def saturated(value: float, dtype: DType, nan: float) -> float | np.generic:
    """Return ``value`` as a number of ``dtype``; a float dtype leaves it unchanged.

    For integer dtypes it is truncated and clamped to their range, after ``nan`` has replaced NaN.

    >>> int(saturated(256.0, np.dtype("uint8"), 0.0)), int(saturated(-math.inf, np.dtype("int32"), 0.0))
    (255, -2147483648)
    """
    if is_float(dtype):
        return value
    if dtype.kind == "b":
        return bool(value)
    if math.isnan(value):
        value = nan
    limits = np.iinfo(dtype)
    least, greatest = int(limits.min), int(limits.max)
    number: np.generic = dtype.type(least if value < least else greatest if value > greatest else int(value))
    return number


def _limit(value: float, dtype: DType) -> float | np.generic:
    """Return a limit with which a gradient compares values of ``dtype``.

    Half-precision values are compared with float32 limits, as in MXNet. A limit rounded to half precision can equal a
    value outside of the interval, which would then count as inside.
    """
    return np.float32(value) if is_half(dtype) else float(value)


def _gradient(p: Parameters, g: Expr, x: Expr, y: Expr) -> Expr:
    low, high = (Scalar.call(_limit, limit, p.array_dtype) for limit in (p.a_min, p.a_max))
    outside = f.logical_or(f.less(x, low), f.greater(x, high))
    return g * f.logical_not(outside)  # NaN counts as inside, so that its gradient is not lost


row(
    "clip",
    lambda p, x: x.clip(
        Scalar.call(saturated, p.a_min, p.array_dtype, -math.inf),
        Scalar.call(saturated, p.a_max, p.array_dtype, math.inf),
    ),
    _gradient,
    params=(Param("a_min", p_float, doc="least value"), Param("a_max", p_float, doc="greatest value")),
    integers="formula",
    doc="Values limited to [a_min, a_max]; the gradient passes where they lie inside.",
)
