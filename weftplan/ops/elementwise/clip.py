"""clip: values limited to an interval.

For integer dtypes, the limits are first clamped to the dtype's range. The gradient of a NaN is the output's gradient.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.floats import is_float, is_half
from weftplan.ops.core.kernels import BOOL, BlockKernel
from weftplan.ops.core.params import p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, backward, grad, same_dtype, same_shape
from weftplan.ops.core.schema import DType, InplacePair, Op, Param, Params
from weftplan.support.array_types import ArrayModule, RawArray


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
    least, most = int(limits.min), int(limits.max)
    number: np.generic = dtype.type(least if value < least else most if value > most else int(value))
    return number


def _clip_step(xp: ArrayModule, params: Params, x: RawArray, out: RawArray) -> None:
    low, high = (
        saturated(params["a_min"], out.dtype, -math.inf),
        saturated(params["a_max"], out.dtype, math.inf),
    )
    xp.clip(x, low, high, out=out)


def _slope_step(
    xp: ArrayModule, params: Params, g: RawArray, x: RawArray, out: RawArray, inside: RawArray, outside: RawArray
) -> None:
    # Half-precision values are compared with float32 limits, as in MXNet. A limit rounded to half precision can equal
    # a value outside of the interval, which would then count as inside.
    number = np.float32 if is_half(x.dtype) else float
    xp.less(x, number(params["a_min"]), out=inside)
    xp.greater(x, number(params["a_max"]), out=outside)
    xp.logical_or(inside, outside, out=outside)
    xp.logical_not(outside, out=inside)  # NaN counts as inside, so that its gradient is not lost
    xp.multiply(g, inside, out=out)


_backward_clip = BlockKernel(_slope_step, lambda params, dtype: [BOOL, BOOL])

_CLIP = (Param("a_min", p_float, doc="least value"), Param("a_max", p_float, doc="greatest value"))
register(
    Op(
        name="clip",
        forward=BlockKernel(_clip_step),
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        params=_CLIP,
        gradient=grad("_backward_clip", "g0", "x0"),
        inplace=UNARY_INPLACE,
        doc="Values limited to [a_min, a_max]; the gradient passes where they lie inside.",
    )
)
backward(
    "clip",
    _backward_clip,
    ("ograd", "data"),
    params=_CLIP,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    workspace=_backward_clip.workspace,
)
