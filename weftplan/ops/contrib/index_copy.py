"""_contrib_index_copy: a tensor with some rows replaced by those of another tensor.

Indices may have any dtype; their fraction is dropped. If an index occurs several times, the last new row wins, but all
of these rows get the gradient, as in MXNet 1.9.1. An index out of range is an error; MXNet writes beyond the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import gather
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, grad, merge_dtype, merge_shape
from weftplan.ops.core.schema import InplacePair, Op, Params, TensorSpec, Workspace
from weftplan.ops.indexing.gather_nd import flat_bytes, flat_positions
from weftplan.support.array_types import RawArray

_NAME = "index_copy"


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    old, index, new = ins
    old = merge_shape(old, outs[0], f"{_NAME}: old_tensor and output")
    if index is not None and len(index) != 1:
        raise ShapeError(f"{_NAME}: index_vector has shape {index}, expected a vector")
    if old is None:
        return [old, index, new], [old]
    if not old:
        raise ShapeError(f"{_NAME}: old_tensor has no axes, expected rows")
    rows = index[0] if index is not None else new[0] if new else 0
    new = merge_shape(
        (rows, *old[1:]), new, f"{_NAME} into {old} of {rows or '?'} rows: expected new_tensor, and given"
    )
    assert new is not None
    if new[0] > old[0] > 0:
        raise ShapeError(f"{_NAME}: {new[0]} rows for an old_tensor of shape {old}: it has only {old[0]}")
    return [old, (new[0],), new], [old]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    dtype = merge_dtype(ins[0], outs[0], f"{_NAME}: old_tensor and output")
    dtype = merge_dtype(dtype, ins[2], f"{_NAME}: old_tensor and new_tensor")
    return [dtype, ins[1], dtype], [dtype]


def _positions(ctx: Workspace, index: RawArray, tensor: RawArray) -> RawArray:
    return flat_positions(ctx, _NAME, index.reshape(1, -1), tensor.shape[:1], wrap=False)


@workspace_kernel
def _forward(ctx: Workspace, p: Params, old: RawArray, index: RawArray, new: RawArray, out: RawArray) -> None:
    positions = _positions(ctx, index, old)
    if out is not old:
        ctx.xp.copyto(out, old)
    out[positions] = new


@workspace_kernel
def _backward(
    ctx: Workspace, p: Params, g: RawArray, index: RawArray, old: RawArray | None, new: RawArray | None
) -> None:
    """Copy the gradient of the replaced rows to ``new``, and of the other rows to ``old``, with zeros elsewhere."""
    positions = _positions(ctx, index, g)
    if new is not None:
        gather(ctx.xp, g, positions, 0, new)
    if old is not None:
        ctx.xp.copyto(old, g)
        old[positions] = 0


def _bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return flat_bytes((1, *inputs[1].shape))


register(
    Op(
        name="_contrib_index_copy",
        forward=_forward,
        infer_shape=_shape,
        infer_dtype=_dtype,
        inputs=("old_tensor", "index_vector", "new_tensor"),
        gradient=grad("_backward_contrib_index_copy", "g0", "x1", into=(0, 2)),
        inplace=(InplacePair(0, 0),),
        workspace=_bytes,
        doc="old_tensor with row k of new_tensor in the place of row index_vector[k].",
    )
)
backward(
    "_contrib_index_copy", _backward, ("ograd", "index_vector"), grad_inputs=(0, 2), workspace=_bytes,
    name="_backward_contrib_index_copy",
)  # fmt: skip
