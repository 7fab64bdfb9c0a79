"""_contrib_index_array: the coordinates of each element of a tensor.

The kernel writes ranges to views of its output and has no state. Importing the module registers the operator.
"""

from __future__ import annotations

from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape, normalize_axis, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params
from weftplan.support.array_types import ArrayModule, RawArray


def _axes(params: Params, ndim: int) -> list[int]:
    """Return the axes whose positions are listed, as numbers of at least 0."""
    axes = range(ndim) if params["axes"] is None else params["axes"]
    return [normalize_axis(axis, ndim, "axes of index_array") for axis in axes]


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, out = ins[0], outs[0]
    if data is None and out is not None and out:
        data = out[:-1]
    if not data:
        return ins, outs
    out = merge_shape((*data, len(_axes(params, len(data)))), out, f"output of index_array of {data}")
    assert out is not None
    return [out[:-1]], [out]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return ins, [merge_dtype(INDEX, outs[0], "output of index_array")]


@kernel
def _index_array(xp: ArrayModule, p: Params, data: RawArray | None, out: RawArray) -> None:
    shape = out.shape[:-1]
    for column, axis in enumerate(_axes(p, len(shape))):
        positions = xp.arange(shape[axis], dtype=INDEX)  # small: one number for each position along the axis
        out[..., column] = positions.reshape(-1, *[1] * (len(shape) - 1 - axis))


register(
    Op(
        name="_contrib_index_array",
        forward=_index_array,
        infer_shape=_shape,
        infer_dtype=_dtype,
        params=(Param("axes", p_optional(p_shape), None, "axes whose positions are listed, in this order; None: all"),),
        gradient=zero_gradient,
        ignored_inputs=(0,),
        doc="For each element of data its index: one number for each of axes, in int64.",
    )
)
