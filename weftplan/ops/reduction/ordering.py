"""Sorting operators: topk, sort, argsort.

Equal elements keep their order, ascending or descending. NaN counts as greater than all numbers. NumPy allocates
temporaries, which no memory plan counts. To limit them, rows are sorted in blocks of at most :data:`_SORTED` elements,
or of one row if it is longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.floats import holds_positions
from weftplan.ops.core.forms import kernel, workspace_kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_bool, p_dtype, p_enum, p_int, p_optional
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, merge_dtype, merge_shape, normalize_axis, take_bytes
from weftplan.ops.core.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    Op,
    Param,
    Params,
    Shape,
    TensorSpec,
    Workspace,
)
from weftplan.support.array_types import ArrayModule, RawArray

_INT32 = np.dtype(np.int32)
_SORTED = 1 << 12
"""Greatest number of elements that one call sorts, unless a single row has more."""


def _rows_at_once(rows: int, size: int) -> int:
    return min(rows, max(1, _SORTED // max(1, size)))


def _extents(shape: Shape, axis: int | None) -> tuple[int, int, int]:
    """Return the extents (outer, size, inner) before, of and after the sorted axis; None: the flattened tensor."""
    if axis is None:
        return 1, math.prod(shape), 1
    axis = normalize_axis(axis, len(shape), "axis to sort along")
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _as_rows(array: RawArray, extents: tuple[int, int, int]) -> RawArray:
    """Return ``array`` as (groups, rows of a group, elements of a row); rows run along the sorted axis.

    The length of that axis may differ from ``extents``, as it does in the output of topk.
    """
    outer, _, inner = extents
    if inner == 1:
        return array.reshape(1, outer, -1)
    return array.reshape(outer, -1, inner).transpose(0, 2, 1)


def _orders(
    ctx: Workspace, data: RawArray, extents: tuple[int, int, int], ascending: bool
) -> Iterator[tuple[tuple[int, slice], RawArray]]:
    """Yield ((group, rows), order of the elements in each of these rows), block by block."""
    xp = ctx.xp
    rows = _as_rows(data, extents)
    count = _rows_at_once(*rows.shape[1:])
    block = ctx.take((count, rows.shape[2]), data.dtype)
    for group in range(rows.shape[0]):
        for start in range(0, rows.shape[1], count):
            slab = group, slice(start, min(start + count, rows.shape[1]))
            part = block[: slab[1].stop - start]
            xp.copyto(part, rows[slab])
            if ascending:
                yield slab, xp.argsort(part, axis=1, kind="stable")
            else:  # reversed, so that equal elements keep their order
                yield slab, part.shape[1] - 1 - xp.argsort(part[:, ::-1], axis=1, kind="stable")[:, ::-1]


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[0]
    outer, size, inner = _extents(shape, params["axis"])
    lines = outer if inner == 1 else inner
    return take_bytes(((_rows_at_once(lines, size), size), dtype))


def _scatter(
    xp: ArrayModule, target: RawArray, slab: tuple[int, slice], order: RawArray, values: RawArray | int
) -> None:
    """Set the elements of the rows ``target[slab]`` at the positions ``order`` to ``values``."""
    rows = target[slab]
    rows[xp.arange(len(order))[:, None], order] = values


def _sized(shape: Shape, axis: int | None, size: int) -> Shape:
    if axis is None:
        return (size,)
    axis %= len(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


def _check_positions(params: Params, size: int, name: str) -> None:
    if not holds_positions(params["dtype"], size):
        raise ShapeError(
            f"{name}: dtype {params['dtype']} cannot hold positions up to {size - 1:,}; give dtype='int32' or 'int64'"
        )


# ----------------------------------------------------------------------------------------------------------------- topk


def _gives_values(params: Params) -> bool:
    return params["ret_typ"] in ("value", "both")


def _positions_dtype(params: Params) -> DType:
    """Return the dtype of the positions; int64 if only the gradient reads them."""
    return INDEX if params["ret_typ"] == "value" else params["dtype"]


def _topk_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    size = _extents(source, params["axis"])[1]
    if params["ret_typ"] == "mask":
        merged = merge_shape(source, outs[0], "topk: data and mask")
        return [merged], [merged]
    if 0 in source:
        return ins, outs
    k = params["k"] if params["k"] > 0 else size
    if k > size:
        raise ShapeError(f"topk: k={k} exceeds the {size} elements along axis {params['axis']} of {source}")
    if params["ret_typ"] != "value":
        _check_positions(params, size, "topk")
    out = _sized(source, params["axis"], k)
    return ins, [merge_shape(shape, out, f"output of topk of {source}") for shape in outs]


def _topk_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    positions = _positions_dtype(params)
    if params["ret_typ"] == "indices":
        return ins, [merge_dtype(outs[0], positions, "output of topk and its dtype")]
    data = merge_dtype(ins[0], outs[0], "topk: data and output")
    if params["ret_typ"] == "mask":
        return [data], [data]
    positions_dtypes = [merge_dtype(dtype, positions, "positions of topk and its dtype") for dtype in outs[1:]]
    return [data], [data, *positions_dtypes]


@workspace_kernel
def _topk(ctx: Workspace, p: Params, data: RawArray, *outputs: RawArray | None) -> None:
    xp = ctx.xp
    extents = _extents(data.shape, p["axis"])
    k = p["k"] if p["k"] > 0 else extents[1]
    source = _as_rows(data, extents)
    views = [None if out is None else _as_rows(out, extents) for out in outputs]
    if p["ret_typ"] == "mask" and outputs[0] is not None:
        outputs[0].fill(0)
    for slab, order in _orders(ctx, data, extents, p["is_ascend"]):
        chosen = order[:, :k]
        if p["ret_typ"] == "mask":
            if views[0] is not None:
                _scatter(xp, views[0], slab, chosen, 1)
            continue
        values, positions = views if _gives_values(p) else (None, views[0])
        if values is not None:
            values[slab] = xp.take_along_axis(source[slab], chosen, axis=1)
        if positions is not None:
            positions[slab] = chosen


@kernel
def _backward_order(xp: ArrayModule, p: Params, g: RawArray, positions: RawArray, out: RawArray) -> None:
    """Scatter the output gradient to the original positions of the values."""
    extents = _extents(out.shape, p["axis"])
    out.fill(0)
    target, g, positions = (_as_rows(array, extents) for array in (out, g, positions))
    count = _rows_at_once(*target.shape[1:])
    for group in range(target.shape[0]):
        for start in range(0, target.shape[1], count):
            slab = group, slice(start, start + count)
            _scatter(xp, target, slab, positions[slab].astype(INDEX), g[slab])


def _topk_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    if not _gives_values(builder.params):
        return [None]
    return builder.node("_backward_topk", [builder.ograd(), builder.output(1)])


_POSITIONS = Param("dtype", p_dtype, np.dtype(np.float32), "dtype of positions")
_AXIS = Param("axis", p_optional(p_int), -1, "axis; None: the flattened tensor")
_TOPK = (
    _AXIS,
    Param("k", p_int, 1, "how many; 0: all"),
    Param("ret_typ", p_enum("value", "indices", "mask", "both"), "indices", "what is returned"),
    Param("is_ascend", p_bool, False, "True: the smallest instead of the greatest"),
    _POSITIONS,
)
register(
    Op(
        name="topk",
        forward=_topk,
        infer_shape=_topk_shape,
        infer_dtype=_topk_dtype,
        params=_TOPK,
        outputs=lambda params: ("output0", "output1") if _gives_values(params) else ("output",),
        visible_outputs=lambda params: 2 if params["ret_typ"] == "both" else 1,
        gradient=_topk_gradient,
        workspace=_workspace,
        doc="The k greatest elements along axis: their positions, values, both, or a mask that is 1 where they are.",
    )
)
backward("topk", _backward_order, ("ograd", "indices"), params=_TOPK)


# -------------------------------------------------------------------------------------------------------- sort, argsort


def _sorted_shape(params: Params, source: Shape, name: str) -> Shape:
    size = _extents(source, params["axis"])[1]
    if 0 in source and params["axis"] is None:
        size = 0
    return _sized(source, params["axis"], size)


def _sort_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if ins[0] is None:
        return ins, outs
    out = _sorted_shape(params, ins[0], "sort")
    return ins, [merge_shape(shape, out, f"output of sort of {ins[0]}") for shape in outs]


def _sort_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "sort: data and output")
    return [data], [data, _INT32]


@workspace_kernel
def _sort(ctx: Workspace, p: Params, data: RawArray, output0: RawArray | None, output1: RawArray | None) -> None:
    extents = _extents(data.shape, p["axis"])
    source = _as_rows(data, extents)
    values, positions = (None if out is None else _as_rows(out, extents) for out in (output0, output1))
    for slab, order in _orders(ctx, data, extents, p["is_ascend"]):
        if values is not None:
            values[slab] = ctx.xp.take_along_axis(source[slab], order, axis=1)
        if positions is not None:
            positions[slab] = order


_UPWARDS = Param("is_ascend", p_bool, True, "False: from the greatest to the smallest")
_SORT = (_AXIS, _UPWARDS)
register(
    Op(
        name="sort",
        forward=_sort,
        infer_shape=_sort_shape,
        infer_dtype=_sort_dtype,
        params=_SORT,
        outputs=("output0", "output1"),
        visible_outputs=1,
        gradient=lambda builder: builder.node("_backward_sort", [builder.ograd(), builder.output(1)]),
        workspace=_workspace,
        doc="The elements in order along axis.",
    )
)
backward("sort", _backward_order, ("ograd", "indices"), params=_SORT)


def _argsort_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if ins[0] is None:
        return ins, outs
    _check_positions(params, _extents(ins[0], params["axis"])[1], "argsort")
    return ins, [merge_shape(outs[0], _sorted_shape(params, ins[0], "argsort"), f"output of argsort of {ins[0]}")]


def _argsort_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return ins, [merge_dtype(outs[0], params["dtype"], "output of argsort and its dtype")]


@workspace_kernel
def _argsort(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    extents = _extents(data.shape, p["axis"])
    target = _as_rows(out, extents)
    for slab, order in _orders(ctx, data, extents, p["is_ascend"]):
        target[slab] = order


register(
    Op(
        name="argsort",
        forward=_argsort,
        infer_shape=_argsort_shape,
        infer_dtype=_argsort_dtype,
        params=(*_SORT, _POSITIONS),
        gradient=lambda builder: [None],
        workspace=_workspace,
        doc="The positions of the elements in order along axis.",
    )
)
