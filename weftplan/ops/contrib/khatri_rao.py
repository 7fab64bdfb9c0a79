"""khatri_rao: columnwise Kronecker products of matrices.

Each matrix is viewed with its rows along a separate axis; the output is the broadcast product of these views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, merge_dim, merge_shape, same_dtype
from weftplan.ops.core.schema import Arrays, EntryRef, GradientBuilder, Op, Params
from weftplan.ops.elementwise.add_n import NUM_ARGS, numbered_inputs
from weftplan.support.array_types import ArrayModule, RawArray


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    columns, rows = 0, 1
    for k, shape in enumerate(ins):
        if shape is not None and len(shape) != 2:
            raise ShapeError(f"khatri_rao: input {k} has shape {shape}, expected a matrix")
        columns = merge_dim(columns, 0 if shape is None else shape[1], "columns of the inputs of khatri_rao")
        rows *= 0 if shape is None else shape[0]
    out = merge_shape(outs[0], (rows, columns), "output of khatri_rao")
    assert out is not None
    return [merge_shape(shape, (0, out[1]), "input of khatri_rao") for shape in ins], [out]


def _factor(matrix: RawArray, axis: int, rank: int) -> RawArray:
    """Return a matrix with its rows along ``axis`` of ``rank`` axes, and its columns along one more axis."""
    return matrix.reshape(*(matrix.shape[0] if a == axis else 1 for a in range(rank)), matrix.shape[1])


def _by_matrix(array: RawArray, matrices: Arrays) -> RawArray:
    """Return the output, or its gradient, with an axis for the rows of each matrix."""
    return array.reshape(*(matrix.shape[0] for matrix in matrices), array.shape[1])


@kernel
def _khatri_rao(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    product, rank = _by_matrix(out, inputs), len(inputs)
    xp.copyto(product, _factor(inputs[-1], rank - 1, rank))
    for axis, matrix in enumerate(inputs[:-1]):
        xp.multiply(product, _factor(matrix, axis, rank), out=product)


@kernel(scratch=lambda p, g, *arrays: [(g.shape, g.dtype)])
def _backward(xp: ArrayModule, p: Params, g: RawArray, *arrays: Any) -> None:
    """Compute the gradient of each matrix: g times all other matrices, summed over the rows of the others."""
    rank = len(arrays) // 2
    matrices, outputs = arrays[:rank], arrays[rank:-1]
    g, product = (_by_matrix(array, matrices) for array in (g, arrays[-1]))
    for axis, out in enumerate(outputs):
        if out is None:
            continue
        axes = [a for a in range(rank) if a != axis]
        xp.copyto(product, g)
        for a in axes:
            xp.multiply(product, _factor(matrices[a], a, rank), out=product)
        xp.sum(product, axis=tuple(axes), dtype=accumulator(out.dtype), out=out)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    matrices = [builder.input(k) for k in range(builder.num_inputs)]
    return builder.node("_backward_khatri_rao", [builder.ograd(), *matrices])


register(
    Op(
        name="khatri_rao",
        forward=_khatri_rao,
        infer_shape=_shape,
        infer_dtype=same_dtype,
        params=(NUM_ARGS,),
        inputs=numbered_inputs,
        variadic="num_args",
        gradient=_gradient,
        doc="Column by column the Kronecker product of matrices with as many columns.",
    )
)
backward(
    "khatri_rao",
    _backward,
    lambda params: ("ograd", *numbered_inputs(params)),
    grad_inputs=lambda params: tuple(range(params["num_args"])),
    params=(NUM_ARGS,),
)
