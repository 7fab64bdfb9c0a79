"""Reductions over axes: sum, mean, max, min, prod, norm, argmax, argmin; and add_n, the sum of many tensors.

A reduction of all axes gives shape (1,), as in MXNet. Every sum has one fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from weftplan.errors import ShapeError
from weftplan.ops.kernels import BOOL, INDEX, Workspace, accumulator, collapse, reduce_to, rows_per_block
from weftplan.ops.params import p_bool, p_dtype, p_int, p_optional, p_shape
from weftplan.ops.registry import register
from weftplan.ops.rules import (
    DTypes,
    Shapes,
    backward,
    grad,
    merge_dtype,
    merge_shape,
    normalize_axis,
    same_dtype,
    same_shape,
    take_bytes,
    zero_gradient,
)
from weftplan.ops.schema import (
    EntryRef,
    GradientBuilder,
    InplacePair,
    Kernel,
    Op,
    OpContext,
    Param,
    Params,
    Shape,
    TensorSpec,
)

_AXES = (
    Param("axis", p_optional(p_shape), None, "axes to reduce; None or (): all"),
    Param("keepdims", p_bool, False, "keep the reduced axes with size 1"),
    Param("exclude", p_bool, False, "reduce all axes but those of axis"),
)


def reduced_axes(params: Params, rank: int, what: str) -> tuple[int, ...]:
    """The axes that a reduction removes, in order, under parameters axis and exclude."""
    given = params["axis"]
    axes = set(range(rank)) if not given else {normalize_axis(axis, rank, f"axis of {what}") for axis in given}
    if given and len(axes) != len(given):
        raise ShapeError(f"{what}: axis {given} names an axis twice")
    if params.get("exclude") and given:
        axes = set(range(rank)) - axes
    return tuple(sorted(axes))


def _kept_shape(source: Shape, axes: tuple[int, ...]) -> Shape:
    """``source`` with 1 in place of the reduced axes."""
    return tuple(1 if axis in axes else dim for axis, dim in enumerate(source))


def _reduced_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    axes = reduced_axes(params, len(source), "a reduction")
    if params["keepdims"]:
        out: Shape = _kept_shape(source, axes)
    else:
        out = tuple(dim for axis, dim in enumerate(source) if axis not in axes) or (1,)
    return ins, [merge_shape(outs[0], out, f"output of reducing axes {axes} of {source}")]


def _views(params: Params, source: Any, small: Any) -> tuple[tuple[int, ...], Any]:
    """The reduced axes of ``source``, and ``small`` (an output or its gradient) viewed with those axes kept."""
    axes = reduced_axes(params, source.ndim, "a reduction")
    return axes, small.reshape(_kept_shape(source.shape, axes))


def _reduction(function: str) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        out = outputs[0]
        if out is None:
            return
        x = inputs[0]
        axes, view = _views(params, x, out)
        if not axes:
            ctx.xp.copyto(view, x)
        elif function in ("sum", "prod"):
            getattr(ctx.xp, function)(x, axis=axes, dtype=accumulator(out.dtype), out=view, keepdims=True)
        else:
            getattr(ctx.xp, function)(x, axis=axes, out=view, keepdims=True)

    return kernel


_sum = _reduction("sum")


def _mean(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    total = out
    if accumulator(out.dtype) != out.dtype:  # the sum of a mean that fits may not fit
        total = ctx.take(out.shape, accumulator(out.dtype))
    _sum(ctx, params, inputs, [total])
    ctx.xp.divide(total, inputs[0].size // max(1, out.size), out=out, casting="unsafe")


def _mean_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = outputs[0]
    work = accumulator(dtype)
    return 0 if work == dtype else take_bytes((shape, work))


def _spread(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Gradient of a sum: the incoming one repeated along the reduced axes."""
    out = outputs[0]
    if out is not None:
        ctx.xp.copyto(out, _views(params, out, inputs[0])[1])


def _spread_mean(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is not None:
        view = _views(params, out, inputs[0])[1]
        ctx.xp.divide(view, out.size // max(1, view.size), out=out, casting="unsafe")


Formula = Callable[[Any, Any, Any, Any, Any, Any], None]
"""``formula(xp, ograd, x, y, out, mask)``, ograd and y broadcasting to x and out."""


def _rowwise(formula: Formula, scratch: bool) -> Kernel:
    """A backward kernel of (ograd, data, output) that works through rows of data."""

    def kernel(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        out = outputs[0]
        if out is None:
            return
        g, x, y = inputs
        g = _views(params, x, g)[1]
        shape, small = collapse(x.shape, g.shape)
        rows = rows_per_block(shape)
        g, y = g.reshape(small), y.reshape(small)
        x, out = x.reshape(shape), out.reshape(shape)
        mask = ctx.take((rows, *shape[1:]), BOOL) if scratch else None
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            bg, by = (v if small[0] == 1 else v[start:stop] for v in (g, y))
            temporary = None if mask is None else mask[: stop - start]
            formula(ctx.xp, bg, x[start:stop], by, out[start:stop], temporary)

    return kernel


def _rowwise_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    source = inputs[1].shape
    axes = reduced_axes(params, len(source), "a reduction")
    shape, _ = collapse(source, _kept_shape(source, axes))
    return take_bytes(((rows_per_block(shape), *shape[1:]), BOOL))


def _extremum_gradient(xp: Any, g: Any, x: Any, y: Any, out: Any, mask: Any) -> None:
    xp.equal(x, y, out=mask)
    xp.multiply(mask, g, out=out)


def _prod_gradient(xp: Any, g: Any, x: Any, y: Any, out: Any, mask: Any) -> None:
    xp.divide(y, x, out=out)
    xp.multiply(out, g, out=out)


def _reducer(
    name: str,
    forward: Kernel,
    backward_kernel: Kernel,
    doc: str,
    *,
    uses: tuple[str, ...] = (),
    masked: bool = False,
    workspace: Workspace | None = None,
    aliases: tuple[str, ...] = (),
) -> None:
    register(
        Op(
            name=name,
            forward=forward,
            infer_shape=_reduced_shape,
            infer_dtype=same_dtype,
            params=_AXES,
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
        params=_AXES,
        inplace=(InplacePair(1, 0),) if uses else (),
        workspace=_rowwise_workspace if masked else None,
    )


_XY = ("x0", "y0")
_reducer("sum", _sum, _spread, "Sum over axes.", aliases=("sum_axis",))
_reducer("mean", _mean, _spread_mean, "Mean over axes.", workspace=_mean_workspace)
_reducer("prod", _reduction("prod"), _rowwise(_prod_gradient, False), "Product over axes.", uses=_XY)
for _name in ("max", "min"):
    _reducer(
        _name,
        _reduction(_name),
        _rowwise(_extremum_gradient, True),
        f"The {_name}imum over axes; every element that equals it gets the whole gradient.",
        uses=_XY,
        masked=True,
        aliases=(f"{_name}_axis",),
    )


# ----------------------------------------------------------------------------------------------------------------- norm


def _norm_ord(value: Any) -> int:
    order = p_int(value)
    if order not in (1, 2):
        raise ValueError("expected 1 or 2")
    return order


_NORM = (
    Param("ord", _norm_ord, 2, "1: sum of absolute values; 2: root of the sum of squares"),
    Param("axis", p_optional(p_shape), None, "axes to reduce; None: all"),
    Param("out_dtype", p_optional(p_dtype), None, "accepted when it is the dtype of data"),
    Param("keepdims", p_bool, False, "keep the reduced axes with size 1"),
)


def _norm_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    merged, out = same_dtype(params, ins, outs)
    if params["out_dtype"] is not None:
        out = [merge_dtype(out[0], params["out_dtype"], "data and out_dtype of norm")]
    return merged, out


def _norm_plan(source: Shape, params: Params) -> tuple[Shape, Shape, int]:
    """(collapsed data shape, collapsed output shape, rows per block)."""
    axes = reduced_axes(params, len(source), "norm")
    shape, small = collapse(source, _kept_shape(source, axes))
    return shape, small, rows_per_block(shape)


def _norm(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    xp = ctx.xp
    shape, small, rows = _norm_plan(inputs[0].shape, params)
    x, y = inputs[0].reshape(shape), out.reshape(small)
    work = accumulator(out.dtype)
    powers = ctx.take((rows, *shape[1:]), work)
    total = ctx.take(small, work)
    part = ctx.take(small if rows < shape[0] and small[0] == 1 else (0,), work)
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        term = powers[: stop - start]
        if params["ord"] == 1:
            xp.absolute(x[start:stop], out=term)
        else:
            xp.multiply(x[start:stop], x[start:stop], out=term, dtype=work)
        if small[0] != 1:
            reduce_to(xp, term, total[start:stop])
        elif start == 0:
            reduce_to(xp, term, total)
        else:
            reduce_to(xp, term, part)
            xp.add(total, part, out=total)
    if params["ord"] == 2:
        xp.sqrt(total, out=total, casting="unsafe")
    xp.copyto(y, total, casting="unsafe")


def _norm_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, small, rows = _norm_plan(inputs[0].shape, params)
    work = accumulator(outputs[0].dtype)
    part: Shape = small if rows < shape[0] and small[0] == 1 else (0,)
    return take_bytes(((rows, *shape[1:]), work), (small, work), (part, work))


def _norm1_gradient(xp: Any, g: Any, x: Any, y: Any, out: Any, mask: Any) -> None:
    xp.sign(x, out=out)
    xp.multiply(out, g, out=out)


def _norm2_gradient(xp: Any, g: Any, x: Any, y: Any, out: Any, mask: Any) -> None:
    xp.divide(x, y, out=out)
    xp.multiply(out, g, out=out)


_NORM_BACKWARD = {1: _rowwise(_norm1_gradient, False), 2: _rowwise(_norm2_gradient, False)}


def _backward_norm(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    _NORM_BACKWARD[params["ord"]](ctx, params, inputs, outputs)


register(
    Op(
        name="norm",
        forward=_norm,
        infer_shape=_reduced_shape,
        infer_dtype=_norm_dtype,
        params=_NORM,
        gradient=grad("_backward_norm", "g0", "x0", "y0"),
        workspace=_norm_workspace,
        doc="The 1-norm or 2-norm over axes.",
    )
)
backward("norm", _backward_norm, ("ograd", "data", "output"), params=_NORM, inplace=(InplacePair(1, 0),))


# ------------------------------------------------------------------------------------------------------- argmax, argmin

_ARG = (
    Param("axis", p_optional(p_int), None, "axis; None: the position in the flattened tensor"),
    Param("keepdims", p_bool, False, "keep the reduced axis with size 1"),
)


def _arg_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    axis = params["axis"]
    axes = tuple(range(len(source))) if axis is None else (normalize_axis(axis, len(source), "axis of argmax"),)
    kept = _kept_shape(source, axes)
    out = kept if params["keepdims"] else tuple(dim for k, dim in enumerate(source) if k not in axes) or (1,)
    return ins, [merge_shape(outs[0], out, "output of argmax or argmin")]


def _arg(function: str) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        out = outputs[0]
        if out is None:
            return
        xp = ctx.xp
        outer, size, inner = _arg_plan(inputs[0].shape, params["axis"])
        x = inputs[0].reshape(outer, size, inner)
        found = ctx.take((outer * inner,), INDEX).reshape(outer, inner)
        if inner == 1:
            getattr(xp, function)(x.reshape(outer, size), axis=1, out=found.reshape(outer))
        else:  # NumPy would copy all of x to bring the axis to the end: one outer slice at a time instead
            slab = ctx.take((inner, size), x.dtype)
            for k in range(outer):
                xp.copyto(slab, x[k].T)
                getattr(xp, function)(slab, axis=1, out=found[k])
        xp.copyto(out.reshape(outer, inner), found, casting="unsafe")

    return kernel


def _arg_plan(source: Shape, axis: int | None) -> tuple[int, int, int]:
    if axis is None:
        return 1, math.prod(source), 1
    axis %= len(source)
    return math.prod(source[:axis]), source[axis], math.prod(source[axis + 1 :])


def _arg_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[0]
    outer, size, inner = _arg_plan(shape, params["axis"])
    slab = (inner, size) if inner != 1 else (0,)
    return take_bytes(((outer * inner,), INDEX), (slab, dtype))


for _name in ("argmax", "argmin"):
    register(
        Op(
            name=_name,
            forward=_arg(_name),
            infer_shape=_arg_shape,
            infer_dtype=same_dtype,
            params=_ARG,
            gradient=zero_gradient,
            workspace=_arg_workspace,
            doc=f"Position of the first {_name[3:]}imum along axis, in the dtype of data.",
        )
    )


# ---------------------------------------------------------------------------------------------------------------- add_n


def numbered_inputs(params: Params) -> tuple[str, ...]:
    """arg0, arg1, … of operators with num_args inputs."""
    return tuple(f"arg{k}" for k in range(params["num_args"]))


def p_count(value: Any) -> int:
    """A number of inputs: an integer of at least 1.

    >>> p_count("3")
    3
    """
    count = p_int(value)
    if count < 1:
        raise ValueError("expected at least 1")
    return count


NUM_ARGS = Param("num_args", p_count, doc="number of inputs (filled in when composing)")


def _add_n(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    xp = ctx.xp
    if len(inputs) == 1:
        xp.copyto(out, inputs[0])
        return
    xp.add(inputs[0], inputs[1], out=out)
    for term in inputs[2:]:
        xp.add(out, term, out=out)


def _add_n_gradient(builder: GradientBuilder) -> list[EntryRef | None]:
    return [
        builder.node(
            "_copy", [builder.ograd()], {}, suffix=f"in{k}_backward" if builder.num_inputs > 1 else "backward"
        )[0]
        for k in range(builder.num_inputs)
    ]


register(
    Op(
        name="add_n",
        forward=_add_n,
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        params=(NUM_ARGS,),
        inputs=numbered_inputs,
        variadic="num_args",
        gradient=_add_n_gradient,
        inplace=(InplacePair(0, 0),),
        aliases=("ElementWiseSum",),
        doc="The sum of all inputs, from the first to the last.",
    )
)
