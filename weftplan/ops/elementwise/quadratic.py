"""_contrib_quadratic, a quadratic polynomial, and _contrib_gradientmultiplier (scaled gradients).

The kernels have no state, so any worker thread may run them. Importing the module registers both operators.
"""

from __future__ import annotations

from functools import partial

from weftplan.ops.core.kernels import BlockKernel, block_workspace, copy_kernel, scratch_dtype
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import IDENTITY_INPLACE, UNARY_INPLACE, backward, grad, same_dtype, same_shape
from weftplan.ops.core.schema import InplacePair, Op, Param, Params
from weftplan.ops.elementwise.integer_gradients import apply_slope, slope_scratch
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = tuple(
    Param(name, p_float, 0.0, f"factor of {power}") for name, power in (("a", "data²"), ("b", "data"), ("c", "1"))
)


def _quadratic(xp: ArrayModule, p: Params, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(x, p["a"], out=t)
    xp.add(t, p["b"], out=t)
    xp.multiply(t, x, out=t)
    xp.add(t, p["c"], out=t)
    xp.copyto(out, t, casting="unsafe")


def _slope(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(x, 2 * p["a"], out=t)
    xp.add(t, p["b"], out=t)
    xp.multiply(t, g, out=out)


def _backward_step(xp: ArrayModule, p: Params, g: RawArray, x: RawArray, out: RawArray, *room: RawArray) -> None:
    apply_slope(xp, partial(_slope, xp, p), g, (x,), out, room)


register(
    Op(
        name="_contrib_quadratic",
        forward=BlockKernel(_quadratic, lambda params, dtype: [scratch_dtype("float", dtype)]),
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        gradient=grad("_backward_contrib_quadratic", "g0", "x0"),
        inplace=UNARY_INPLACE,
        workspace=block_workspace("float"),
        doc="a · data² + b · data + c.",
    )
)
_kernel = BlockKernel(_backward_step, lambda params, dtype: slope_scratch((None,), dtype, 1))
backward(
    "_contrib_quadratic",
    _kernel,
    ("ograd", "data"),
    params=_PARAMS,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    workspace=_kernel.workspace,
)


def _scalar_of(params: Params) -> Params:
    return {"scalar": params["scalar"]}


register(
    Op(
        name="_contrib_gradientmultiplier",
        forward=copy_kernel,
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        params=(
            Param("scalar", p_float, 1.0, "factor of the gradient; negative: it is reversed"),
            Param("is_int", p_bool, True, "accepted, no effect"),
        ),
        gradient=grad("_mul_scalar", "g0", params=_scalar_of),
        inplace=IDENTITY_INPLACE,
        doc="data, whose gradient is multiplied by scalar.",
    )
)
