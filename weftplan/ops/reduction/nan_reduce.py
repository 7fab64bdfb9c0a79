"""nansum and nanprod: reductions that ignore NaN; an all-NaN input has the sum 0 and the product 1."""

from __future__ import annotations

from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL, accumulator
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import backward, grad, same_dtype
from weftplan.ops.core.schema import InplacePair, Kernel, Op, Params, SpecLike
from weftplan.ops.reduction.reduce import AXES, keepdims_shape, reduced_axes, reduced_shape, rowwise
from weftplan.support.array_types import ArrayModule, RawArray


def _scratch(params: Params, x: SpecLike, out: SpecLike) -> ScratchSpecs:
    """Return the scratch of float data: a mask of its NaN, and a copy without them. Other dtypes need none."""
    return [(x.shape, BOOL), (x.shape, x.dtype)] if is_float(x.dtype) else []


def _forward(function: str, neutral: int) -> Kernel:
    @kernel(scratch=_scratch)
    def compute(
        xp: ArrayModule,
        p: Params,
        x: RawArray,
        out: RawArray,
        mask: RawArray | None = None,
        cleaned: RawArray | None = None,
    ) -> None:
        axes = reduced_axes(p, x.ndim, "a reduction")
        view = out.reshape(keepdims_shape(x.shape, axes))
        if cleaned is not None:
            xp.isnan(x, out=mask)
            xp.copyto(cleaned, x)
            xp.copyto(cleaned, neutral, where=mask)
            x = cleaned
        if axes:
            getattr(xp, function)(x, axis=axes, dtype=accumulator(out.dtype), out=view, keepdims=True)
        else:
            xp.copyto(view, x)

    return compute


def _sum_gradient(xp: ArrayModule, g: RawArray, x: RawArray, y: RawArray, out: RawArray, mask: RawArray) -> None:
    xp.isnan(x, out=mask)
    xp.copyto(out, g)
    xp.copyto(out, 0, where=mask)


def _prod_gradient(xp: ArrayModule, g: RawArray, x: RawArray, y: RawArray, out: RawArray, mask: RawArray) -> None:
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
            doc=f"The {_function} over axes of all elements that are not NaN.",
        )
    )
    backward(
        _name,
        rowwise(_gradient, True),
        ("ograd", "data", "output"),
        params=AXES,
        inplace=(InplacePair(1, 0),),
    )
