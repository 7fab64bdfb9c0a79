"""diag: the diagonal of matrices, or a matrix from its diagonal.

Both directions index the same diagonal, so each is the gradient of the other.
"""

from __future__ import annotations

from types import EllipsisType

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import kernel, workspace_kernel
from weftplan.ops.core.params import p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_shape, normalize_axis, same_dtype
from weftplan.ops.core.schema import Op, Param, Params, Shape, Workspace
from weftplan.support.array_types import ArrayModule, RawArray

_DIAG = (
    Param("k", p_int, 0, "which diagonal: above the main one when positive"),
    Param("axis1", p_int, 0, "axis of the rows, of tensors of two or more dimensions"),
    Param("axis2", p_int, 1, "axis of the columns"),
)


def _axes(params: Params, rank: int) -> tuple[int, int]:
    rows = normalize_axis(params["axis1"], rank, "axis1 of diag")
    columns = normalize_axis(params["axis2"], rank, "axis2 of diag")
    if rows == columns:
        raise ShapeError(f"diag: axis1 and axis2 are both {rows}: expected two axes")
    return rows, columns


def _diag_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    k = params["k"]
    if not source:
        raise ShapeError("diag expects at least 1 dimension, got shape ()")
    if len(source) == 1:
        size = source[0] and source[0] + abs(k)
        out: Shape = (size, size)
    else:
        axes = _axes(params, len(source))
        rows, columns = (source[axis] for axis in axes)
        length = 0
        if rows and columns:
            length = min(rows, columns - k) if k >= 0 else min(rows + k, columns)
            if length < 1:
                raise ShapeError(f"diag: {rows} rows and {columns} columns of {source} have no diagonal {k}")
        out = (*(dim for axis, dim in enumerate(source) if axis not in axes), length)
    return ins, [merge_shape(outs[0], out, f"output of diag of {source}")]


def _line(
    xp: ArrayModule, params: Params, matrices: RawArray, rows: int, columns: int
) -> tuple[RawArray, tuple[EllipsisType, RawArray, RawArray]]:
    """Return a view of ``matrices`` with axes ``rows`` and ``columns`` last, and the index of its diagonal k."""
    k = params["k"]
    trailing = xp.moveaxis(matrices, (rows, columns), (-2, -1))
    size = min(trailing.shape[-2] + min(k, 0), trailing.shape[-1] - max(k, 0))
    steps = xp.arange(size)
    return trailing, (..., steps - min(k, 0), steps + max(k, 0))


def _build(ctx: Workspace, params: Params, vector: RawArray, matrix: RawArray) -> None:
    view, line = _line(ctx.xp, params, matrix, 0, 1)
    matrix.fill(0)
    view[line] = vector


@workspace_kernel
def _diag(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    if data.ndim == 1:
        _build(ctx, p, data, out)
    else:
        view, line = _line(ctx.xp, p, data, *_axes(p, data.ndim))
        ctx.xp.copyto(out, view[line])


@kernel
def _backward_diag(xp: ArrayModule, p: Params, g: RawArray, out: RawArray) -> None:
    if out.ndim == 1:
        view, line = _line(xp, p, g, 0, 1)
        xp.copyto(out, view[line])
    else:
        out.fill(0)
        view, line = _line(xp, p, out, *_axes(p, out.ndim))
        view[line] = g


register(
    Op(
        name="diag",
        forward=_diag,
        infer_shape=_diag_shape,
        infer_dtype=same_dtype,
        params=_DIAG,
        gradient=grad("_backward_diag", "g0"),
        doc="A matrix with the vector as diagonal k; of more dimensions, the diagonals k, as a new last axis.",
    )
)
backward("diag", _backward_diag, ("ograd",), params=_DIAG)
