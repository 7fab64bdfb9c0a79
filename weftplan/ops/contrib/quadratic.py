"""_contrib_quadratic, a quadratic polynomial, and _contrib_gradientmultiplier (scaled gradients).

The kernels have no state, so any worker thread may run them. Importing the module registers both operators.
"""

from __future__ import annotations

from weftplan.ops.core.kernels import copy_kernel
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import IDENTITY_INPLACE, grad, same_dtype, same_shape
from weftplan.ops.core.schema import Op, Param, Params
from weftplan.ops.elementwise.rows import row

_PARAMS = tuple(
    Param(name, p_float, 0.0, f"factor of {power}") for name, power in (("a", "data²"), ("b", "data"), ("c", "1"))
)

row(
    "_contrib_quadratic",
    lambda p, x: (x * p.a + p.b) * x + p.c,
    lambda p, g, x, y: (x * (2 * p.a) + p.b) * g,
    params=_PARAMS,
    compute="float",
    doc="a · data² + b · data + c.",
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
