"""ravel_multi_index and unravel_index: coordinates of elements to flat indices, and back.

Coordinates are whole numbers of any dtype. No check makes sure that they lie within ``shape``, whose first dimension
has no effect and may be -1. Division rounds towards zero, as in MXNet 1.9.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import INDEX, block_bytes, blocks, divide_integers
from weftplan.ops.core.params import p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, merge_shape, same_dtype, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params, TensorSpec, Workspace, WorkspaceRule
from weftplan.support.array_types import RawArray

_PARAMS = (Param("shape", p_shape, doc="shape of the tensor that the places are in"),)


def _axes(params: Params) -> int:
    if not params["shape"]:
        raise ParameterError("ravel_multi_index, unravel_index: shape=(): expected at least one dimension")
    return len(params["shape"])


def _ravel_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    axes = _axes(params)
    out = merge_shape(outs[0], (0,), "output of ravel_multi_index, one place for each column")
    assert out is not None
    data = merge_shape(
        (axes, out[0]), ins[0], f"ravel_multi_index for shape {params['shape']}: expected data, and given"
    )
    assert data is not None
    return [data], [data[1:]]


@workspace_kernel
def _ravel(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    for y, *coordinates, total, part in blocks(ctx, (out, *data), (INDEX, INDEX)):
        total.fill(0)
        for size, x in zip(p["shape"], coordinates, strict=True):
            xp.copyto(part, x, casting="unsafe")
            xp.multiply(total, size, out=total)
            xp.add(total, part, out=total)
        xp.copyto(y, total, casting="unsafe")


def _unravel_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    axes = _axes(params)
    if ins[0] is not None and len(ins[0]) != 1:
        raise ShapeError(f"unravel_index: data has shape {ins[0]}, expected one axis of places")
    data = merge_shape(ins[0], (0,), "data of unravel_index")
    assert data is not None
    out = merge_shape((axes, data[0]), outs[0], f"unravel_index for shape {params['shape']}: output, and given")
    assert out is not None
    return [out[1:]], [out]


@workspace_kernel
def _unravel(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    shape = p["shape"]
    for x, *coordinates, remainder, part, scratch in blocks(ctx, (data, *out), (INDEX,) * 3):
        xp.copyto(remainder, x, casting="unsafe")
        for axis in range(len(shape) - 1, 0, -1):
            xp.fmod(remainder, shape[axis], out=part)
            xp.copyto(coordinates[axis], part, casting="unsafe")
            part.fill(shape[axis])
            divide_integers(xp, remainder, part, remainder, scratch)
        xp.copyto(coordinates[0], remainder, casting="unsafe")


def _bytes(count: int) -> WorkspaceRule:
    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        size = inputs[0].shape[-1]
        return block_bytes(size, [INDEX] * count)

    return workspace


register(
    Op(
        name="_ravel_multi_index",
        forward=_ravel,
        infer_shape=_ravel_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        gradient=zero_gradient,
        workspace=_bytes(2),
        aliases=("ravel_multi_index",),
        doc="The place in memory of each column of coordinates (axes, columns).",
    )
)
register(
    Op(
        name="_unravel_index",
        forward=_unravel,
        infer_shape=_unravel_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        gradient=zero_gradient,
        workspace=_bytes(3),
        aliases=("unravel_index",),
        doc="The coordinates (axes, places) of each place in memory.",
    )
)
