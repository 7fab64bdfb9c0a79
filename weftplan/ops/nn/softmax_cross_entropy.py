"""softmax_cross_entropy: the sum over all rows of -log(softmax(row)[label]).

As in MXNet 1.9.1, probabilities below 1e-8 count as 1e-8, but the gradient ignores that limit. Labels outside the
classes are clipped to the first or last class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import INDEX, accumulator, gather, row_blocks, rows_per_block, to_index
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_shape, same_dtype, take_bytes
from weftplan.ops.core.schema import InplacePair, Op, Params, Shape, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, DType, RawArray

_LEAST = 1e-8
_DOUBLE = np.dtype(np.float64)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, label = ins
    out = merge_shape((1,), outs[0], "softmax_cross_entropy: output, one number")
    if data is None:
        return [None, label], [out]
    if len(data) != 2:
        raise ShapeError(f"softmax_cross_entropy: data has shape {data}, expected (rows, classes)")
    label = merge_shape(data[:1], label, f"softmax_cross_entropy: label for data {data}, and given")
    assert label is not None
    return [(label[0], data[1]), label], [out]


def _powers(xp: ArrayModule, x: RawArray, row_sums: RawArray, z: RawArray) -> None:
    """Compute ``z`` = exp(x - the maximum of the row), and ``row_sums`` (rows, 1) = the sums of the rows of ``z``."""
    xp.max(x, axis=1, out=row_sums, keepdims=True)
    xp.subtract(x, row_sums, out=z, dtype=z.dtype)
    xp.exp(z, out=z)
    xp.sum(z, axis=1, out=row_sums, keepdims=True)


def _label_positions(xp: ArrayModule, label: RawArray, classes: int, index: RawArray, rows: RawArray) -> RawArray:
    """Return ``index``, filled with the flat index of each label's class in a block (rows, classes).

    ``rows`` is 0, 1, 2, …
    """
    to_index(xp, label, classes, "clip", index)
    xp.add(index, rows[: index.size] * classes, out=index)
    return index


def _buffers(ctx: Workspace, shape: Shape, acc: DType) -> tuple[RawArray, RawArray, RawArray, RawArray]:
    step = rows_per_block(shape)
    rows = ctx.take((step,), INDEX)
    rows.fill(1)
    ctx.xp.cumsum(rows, out=rows)
    ctx.xp.subtract(rows, 1, out=rows)
    return ctx.take((step, shape[1]), acc), ctx.take((step, 1), acc), ctx.take((step,), INDEX), rows


def _buffer_bytes(shape: Shape, acc: DType) -> int:
    step = rows_per_block(shape)
    return take_bytes(((step,), INDEX), ((step, shape[1]), acc), ((step, 1), acc), ((step,), INDEX))


@workspace_kernel
def _forward(ctx: Workspace, p: Params, data: RawArray, label: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    wide, sums, positions, rows = _buffers(ctx, data.shape, accumulator(data.dtype))
    picked = ctx.take((positions.size,), wide.dtype)
    total = ctx.take((1,), _DOUBLE)
    part = ctx.take((1,), _DOUBLE)
    total.fill(0)
    for block in row_blocks(data.shape):
        x = data[block]
        count = x.shape[0]
        z, row_sums, chosen = wide[:count], sums[:count], picked[:count]
        _powers(xp, x, row_sums, z)
        gather(xp, z.reshape(-1), _label_positions(xp, label[block], x.shape[1], positions[:count], rows), 0, chosen)
        xp.divide(chosen, row_sums[:, 0], out=chosen)
        xp.maximum(chosen, _LEAST, out=chosen)
        xp.log(chosen, out=chosen)
        xp.sum(chosen, dtype=_DOUBLE, out=part, keepdims=True)
        xp.subtract(total, part, out=total)
    xp.copyto(out, total, casting="unsafe")


def _forward_bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, acc = inputs[0].shape, accumulator(inputs[0].dtype)
    number = ((1,), _DOUBLE)
    return _buffer_bytes(shape, acc) + take_bytes(((rows_per_block(shape),), acc), number, number)


@workspace_kernel
def _backward(ctx: Workspace, p: Params, ograd: RawArray, data: RawArray, label: RawArray, out: RawArray) -> None:
    """Compute the gradient of data: (softmax, minus 1 at the label) · ``ograd``, which is one number."""
    xp = ctx.xp
    wide, sums, positions, rows = _buffers(ctx, data.shape, accumulator(data.dtype))
    for block in row_blocks(data.shape):
        x = data[block]
        count = x.shape[0]
        z, row_sums = wide[:count], sums[:count]
        _powers(xp, x, row_sums, z)
        xp.divide(z, row_sums, out=z)
        z.reshape(-1)[_label_positions(xp, label[block], x.shape[1], positions[:count], rows)] -= 1
        xp.multiply(z, ograd, out=out[block], casting="same_kind")


def _backward_bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return _buffer_bytes(inputs[1].shape, accumulator(inputs[1].dtype))


register(
    Op(
        name="softmax_cross_entropy",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        inputs=("data", "label"),
        gradient=grad("_backward_softmax_cross_entropy", "g0", "x0", "x1"),
        workspace=_forward_bytes,
        doc="Sum (1,) of the cross entropies of softmax(data) and the classes label (rows,); data is (rows, classes).",
    )
)
backward(
    "softmax_cross_entropy",
    _backward,
    ("ograd", "data", "label"),
    inplace=(InplacePair(1, 0),),
    workspace=_backward_bytes,
)
