"""fill_element_0index: replacement of an element in each row, the counterpart of ``pick``.

A mask in scratch selects the elements: each column is compared with the index, so an index out of range selects none.
"""

from __future__ import annotations

from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import BOOL, INDEX
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, grad, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import InplacePair, Op, Params, TensorSpec, Workspace
from weftplan.support.array_types import RawArray


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    shape = merge_shape(merge_shape(ins[0], (0, 0), "lhs of fill_element_0index"), outs[0], "lhs and the output")
    rows = merge_shape(merge_shape(ins[1], (0,), "mhs of fill_element_0index"), ins[2], "mhs and rhs")
    assert shape is not None
    rows = merge_shape(rows, shape[:1], f"mhs, one element for each row of {shape}")
    assert rows is not None
    shape = (rows[0], shape[1])
    return [shape, rows, rows], [shape]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    dtype = merge_dtype(merge_dtype(ins[0], ins[1], "lhs and mhs"), outs[0], "lhs and the output")
    return [dtype, dtype, ins[2]], [dtype]


def _marked(ctx: Workspace, columns: int, index: RawArray) -> RawArray:
    """Return a mask (rows, columns) of the element that ``index`` selects in each row; none if out of range."""
    xp = ctx.xp
    positions = ctx.take(index.shape, INDEX)
    xp.copyto(positions, index, casting="unsafe")
    marks = ctx.take((columns, index.size), BOOL)
    for column in range(columns):
        xp.equal(positions, column, out=marks[column])
    return marks.T


def _mask_bytes(columns: int, index: TensorSpec) -> int:
    return take_bytes((index.shape, INDEX), ((columns, index.shape[0]), BOOL))


@workspace_kernel
def _fill(ctx: Workspace, p: Params, lhs: RawArray, mhs: RawArray, rhs: RawArray, out: RawArray | None) -> None:
    if out is not None:
        tensor, values, index = (lhs, mhs, rhs)
        if out is not tensor:
            ctx.xp.copyto(out, tensor)
        ctx.xp.copyto(out, values[:, None], where=_marked(ctx, tensor.shape[1], index))


@workspace_kernel
def _backward_fill(
    ctx: Workspace, p: Params, g: RawArray, index: RawArray, d_lhs: RawArray | None, d_mhs: RawArray | None
) -> None:
    marks = _marked(ctx, g.shape[1], index)
    if d_mhs is not None:
        d_mhs.fill(0)
        for column in range(g.shape[1]):
            ctx.xp.copyto(d_mhs, g[:, column], where=marks[:, column])
    if d_lhs is not None:
        ctx.xp.copyto(d_lhs, g)
        ctx.xp.copyto(d_lhs, 0, where=marks)


register(
    Op(
        name="fill_element_0index",
        forward=_fill,
        infer_shape=_shape,
        infer_dtype=_dtype,
        inputs=("lhs", "mhs", "rhs"),
        gradient=grad("_backward_fill_element_0index", "g0", "x2", into=(0, 1)),
        inplace=(InplacePair(0, 0),),
        workspace=lambda params, inputs, outputs: _mask_bytes(inputs[0].shape[1], inputs[2]),
        doc="lhs, with element rhs[i] of row i replaced by mhs[i]; an index that names no column replaces nothing.",
    )
)
backward(
    "fill_element_0index",
    _backward_fill,
    ("ograd", "rhs"),
    grad_inputs=(0, 1),
    workspace=lambda params, inputs, outputs: _mask_bytes(inputs[0].shape[1], inputs[1]),
)
