"""Reductions over axes: sum, mean, max, min, prod.

A reduction of all axes gives shape (1,), as in MXNet. Every sum has one fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ArrayKernel, ScratchSpecs, kernel, workspace_kernel
from weftplan.ops.core.kernels import (
    BOOL,
    accumulator,
    block_bytes,
    blocks,
    collapse,
    divide_integers,
    rows_per_block,
)
from weftplan.ops.core.params import p_bool, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_shape, normalize_axis, same_dtype, take_bytes
from weftplan.ops.core.schema import (
    InplacePair,
    Kernel,
    Op,
    Param,
    Params,
    Shape,
    SpecLike,
    TensorSpec,
    Workspace,
    WorkspaceRule,
)
from weftplan.support.array_types import ArrayModule, RawArray

AXES = (
    Param("axis", p_optional(p_shape), None, "axes to reduce; None or (): all"),
    Param("keepdims", p_bool, False, "keep the reduced axes with size 1"),
    Param("exclude", p_bool, False, "reduce all axes but those of axis"),
)


def reduced_axes(params: Params, rank: int, what: str) -> tuple[int, ...]:
    """Return the axes that a reduction removes, ascending, for the parameters axis and exclude."""
    listed = params["axis"]
    axes = set(range(rank)) if not listed else {normalize_axis(axis, rank, f"axis of {what}") for axis in listed}
    if listed and len(axes) != len(listed):
        raise ShapeError(f"{what}: axis {listed} names an axis twice")
    if params.get("exclude") and listed:
        axes = set(range(rank)) - axes
    return tuple(sorted(axes))


def keepdims_shape(source: Shape, axes: tuple[int, ...]) -> Shape:
    """Return ``source`` with 1 in place of the reduced axes."""
    return tuple(1 if axis in axes else dim for axis, dim in enumerate(source))


def reduced_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    axes = reduced_axes(params, len(source), "a reduction")
    if params["keepdims"]:
        out: Shape = keepdims_shape(source, axes)
    else:
        out = tuple(dim for axis, dim in enumerate(source) if axis not in axes) or (1,)
    return ins, [merge_shape(outs[0], out, f"output of reducing axes {axes} of {source}")]


def _views(params: Params, source: RawArray, small: RawArray) -> tuple[tuple[int, ...], RawArray]:
    """Return the reduced axes, and ``small`` (an output or its gradient) reshaped with size 1 in these axes."""
    axes = reduced_axes(params, source.ndim, "a reduction")
    return axes, small.reshape(keepdims_shape(source.shape, axes))


def _reduction(function: str) -> ArrayKernel:
    def bare_form(
        params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> Callable[..., object] | None:
        source, (_, dtype) = inputs[0].shape, outputs[0]
        axes = reduced_axes(params, len(source), "a reduction")
        reduced = keepdims_shape(source, axes)
        wide = accumulator(dtype) if function in ("sum", "prod") else None
        reduce = getattr(np, _UFUNCS[function]).reduce
        return (lambda x, out: reduce(x, axes, wide, out.reshape(reduced), True)) if axes else None

    @kernel(bare_form=bare_form)
    def compute(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
        axes, view = _views(p, x, out)
        if not axes:
            xp.copyto(view, x)
        elif function in ("sum", "prod"):
            getattr(xp, function)(x, axis=axes, dtype=accumulator(out.dtype), out=view, keepdims=True)
        else:
            getattr(xp, function)(x, axis=axes, out=view, keepdims=True)

    return compute


_UFUNCS = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}
"""The ufunc of each reduction in NumPy."""


_sum = _reduction("sum")


@workspace_kernel
def _mean(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    total = out
    if accumulator(out.dtype) != out.dtype:  # the sum may overflow although the mean does not
        total = ctx.take(out.shape, accumulator(out.dtype))
    _sum(ctx, p, (data,), [total])
    count = data.size // max(1, out.size)
    if out.dtype.kind not in "iu":
        ctx.xp.divide(total, count, out=out, casting="unsafe")
    elif count > np.iinfo(out.dtype).max:  # greater than any sum of this dtype, so the mean is 0
        out.fill(0)
    else:
        for y, scratch in blocks(ctx, (out,), (out.dtype,)):
            divide_integers(ctx.xp, y, count, y, scratch)


def _mean_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = outputs[0]
    if dtype.kind in "iu":
        return block_bytes(math.prod(shape), [dtype])
    work = accumulator(dtype)
    return 0 if work == dtype else take_bytes((shape, work))


@kernel
def _spread(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    """Compute the gradient of a sum: the output gradient repeated along the reduced axes."""
    xp.copyto(out, _views(p, out, ograd)[1])


@kernel
def _spread_mean(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    view = _views(p, out, ograd)[1]
    xp.divide(view, out.size // max(1, view.size), out=out, casting="unsafe")


Formula = Callable[[Any, Any, Any, Any, Any, Any], None]
"""``formula(xp, ograd, x, y, out, mask)`` computes a gradient; ograd and y broadcast to x and out."""


def _mask(params: Params, g: SpecLike, x: SpecLike, y: SpecLike, out: SpecLike) -> ScratchSpecs:
    """Return the scratch of :func:`rowwise`: a mask for one block of rows."""
    shape, _ = collapse(x.shape, keepdims_shape(x.shape, reduced_axes(params, len(x.shape), "a reduction")))
    return [((rows_per_block(shape), *shape[1:]), BOOL)]


def rowwise(formula: Formula, masked: bool) -> ArrayKernel:
    """Return a backward kernel (ograd, data, output) -> gradient that applies ``formula`` to blocks of rows.

    ``masked``: the formula needs a mask as scratch; else it gets None.
    """

    def compute(
        xp: ArrayModule, p: Params, g: RawArray, x: RawArray, y: RawArray, out: RawArray, mask: RawArray | None = None
    ) -> None:
        g = _views(p, x, g)[1]
        shape, small = collapse(x.shape, g.shape)
        rows = rows_per_block(shape)
        g, y = g.reshape(small), y.reshape(small)
        x, out = x.reshape(shape), out.reshape(shape)
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            bg, by = (v if small[0] == 1 else v[start:stop] for v in (g, y))
            temporary = None if mask is None else mask[: stop - start]
            formula(xp, bg, x[start:stop], by, out[start:stop], temporary)

    return ArrayKernel(compute, _mask if masked else None)


def _extremum_gradient(xp: ArrayModule, g: RawArray, x: RawArray, y: RawArray, out: RawArray, mask: RawArray) -> None:
    xp.equal(x, y, out=mask)
    xp.multiply(mask, g, out=out)


def _prod_gradient(
    xp: ArrayModule, g: RawArray, x: RawArray, y: RawArray, out: RawArray, mask: RawArray | None
) -> None:
    xp.divide(y, x, out=out, casting="unsafe")
    xp.multiply(out, g, out=out)


def _reducer(
    name: str,
    forward: Kernel,
    backward_kernel: Kernel,
    doc: str,
    *,
    uses: tuple[str, ...] = (),
    workspace: WorkspaceRule | None = None,
    aliases: tuple[str, ...] = (),
) -> None:
    register(
        Op(
            name=name,
            forward=forward,
            infer_shape=reduced_shape,
            infer_dtype=same_dtype,
            params=AXES,
            gradient=grad(f"_backward_{name}", "g0", *uses),
            workspace=workspace,
            aliases=aliases,
            doc=doc,
        )
    )
    backward(
        name,
        backward_kernel,
        ("ograd", "data", "output") if uses else ("ograd",),
        params=AXES,
        inplace=(InplacePair(1, 0),) if uses else (),
    )


_XY = ("x0", "y0")
_reducer("sum", _sum, _spread, "Sum over axes.", aliases=("sum_axis",))
_reducer("mean", _mean, _spread_mean, "Mean over axes.", workspace=_mean_workspace)
_reducer("prod", _reduction("prod"), rowwise(_prod_gradient, False), "Product over axes.", uses=_XY)
for _name in ("max", "min"):
    _reducer(
        _name,
        _reduction(_name),
        rowwise(_extremum_gradient, True),
        f"The {_name}imum over axes; every element that equals it gets the whole gradient.",
        uses=_XY,
        aliases=(f"{_name}_axis",),
    )
