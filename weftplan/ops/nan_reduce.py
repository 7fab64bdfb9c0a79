"""nansum and nanprod: reductions that pass over NaN; what is all NaN has the sum 0 and the product 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.ops.floats import is_float
from weftplan.ops.forms import workspace_kernel
from weftplan.ops.kernels import BOOL, accumulator
from weftplan.ops.reduce import AXES, kept_shape, reduced_axes, reduced_shape, rowwise, rowwise_workspace
from weftplan.ops.registry import register
from weftplan.ops.rules import backward, grad, same_dtype, take_bytes
from weftplan.ops.schema import InplacePair, Kernel, Op, Params, TensorSpec, Workspace


def _forward(function: str, neutral: int) -> Kernel:
    @workspace_kernel
    def compute(ctx: Workspace, p: Params, x: Any, out: Any) -> None:
        xp = ctx.xp
        axes = reduced_axes(p, x.ndim, "a reduction")
        view = out.reshape(kept_shape(x.shape, axes))
        if is_float(x.dtype):
            mask = ctx.take(x.shape, BOOL)
            kept = ctx.take(x.shape, x.dtype)
            xp.isnan(x, out=mask)
            xp.copyto(kept, x)
            xp.copyto(kept, neutral, where=mask)
            x = kept
        if axes:
            getattr(xp, function)(x, axis=axes, dtype=accumulator(out.dtype), out=view, keepdims=True)
        else:
            xp.copyto(view, x)

    return compute


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[0]
    return take_bytes((shape, BOOL), (shape, dtype)) if is_float(dtype) else 0


def _sum_gradient(xp: Any, g: Any, x: Any, y: Any, out: Any, mask: Any) -> None:
    xp.isnan(x, out=mask)
    xp.copyto(out, g)
    xp.copyto(out, 0, where=mask)


def _prod_gradient(xp: Any, g: Any, x: Any, y: Any, out: Any, mask: Any) -> None:
    xp.isnan(x, out=mask)
    xp.divide(y, x, out=out)
    xp.multiply(out, g, out=out)
    xp.copyto(out, 0, where=mask)


for _name, _function, _neutral, _gradient in (
    ("nansum", "sum", 0, _sum_gradient),
    ("nanprod", "prod", 1, _prod_gradient),
):
    register(
        Op(
            name=_name,
            forward=_forward(_function, _neutral),
            infer_shape=reduced_shape,
            infer_dtype=same_dtype,
            params=AXES,
            gradient=grad(f"_backward_{_name}", "g0", "x0", "y0"),
            workspace=_workspace,
            doc=f"The {_function} over axes of all elements that are not NaN.",
        )
    )
    backward(
        _name,
        rowwise(_gradient, True),
        ("ograd", "data", "output"),
        params=AXES,
        inplace=(InplacePair(1, 0),),
        workspace=rowwise_workspace,
    )
