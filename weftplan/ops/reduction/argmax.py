"""argmax and argmin: positions of extrema, in the dtype of the data as in MXNet.

Positions that this dtype cannot hold exactly are refused when a call or a plan asks for its scratch.
"""

from __future__ import annotations

import math

from weftplan.errors import DTypeError
from weftplan.ops.core.floats import holds_positions
from weftplan.ops.core.forms import ChosenKernel, ScratchSpecs, kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_bool, p_int, p_optional
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, merge_shape, normalize_axis, same_dtype, zero_gradient
from weftplan.ops.core.schema import Kernel, Op, Param, Params, Shape, SpecLike
from weftplan.ops.reduction.reduce import keepdims_shape
from weftplan.support.array_types import ArrayModule, RawArray

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
    reduced = keepdims_shape(source, axes)
    out = reduced if params["keepdims"] else tuple(dim for k, dim in enumerate(source) if k not in axes) or (1,)
    return ins, [merge_shape(outs[0], out, "output of argmax or argmin")]


def _scratch(params: Params, data: SpecLike, out: SpecLike) -> ScratchSpecs:
    """Return the scratch: positions and, unless the axis is the last, one outer slice with the axis last."""
    outer, size, inner = _arg_plan(data.shape, params["axis"])
    if not holds_positions(out.dtype, size):
        raise DTypeError(
            f"argmax, argmin: positions up to {size - 1:,} are not exact in {out.dtype}, the dtype of data; "
            f"cast the data {data.shape} to float32 or float64"
        )
    slab = (inner, size) if inner != 1 else (0,)
    return [((outer * inner,), INDEX), (slab, data.dtype)]


def _arg(function: str) -> Kernel:
    @kernel(scratch=_scratch)
    def compute(xp: ArrayModule, p: Params, data: RawArray, out: RawArray, index: RawArray, slab: RawArray) -> None:
        outer, size, inner = _arg_plan(data.shape, p["axis"])
        x = data.reshape(outer, size, inner)
        positions = index.reshape(outer, inner)
        if inner == 1:
            getattr(xp, function)(x.reshape(outer, size), axis=1, out=positions.reshape(outer))
        else:  # NumPy would copy all of x to move the axis last; copy one outer slice at a time instead
            for k in range(outer):
                xp.copyto(slab, x[k].T)
                getattr(xp, function)(slab, axis=1, out=positions[k])
        xp.copyto(out.reshape(outer, inner), positions, casting="unsafe")

    return compute


def _arg_plan(source: Shape, axis: int | None) -> tuple[int, int, int]:
    if axis is None:
        return 1, math.prod(source), 1
    axis %= len(source)
    return math.prod(source[:axis]), source[axis], math.prod(source[axis + 1 :])


for _name in ("argmax", "argmin"):
    register(
        Op(
            name=_name,
            forward=_arg(_name),
            infer_shape=_arg_shape,
            infer_dtype=same_dtype,
            params=_ARG,
            gradient=zero_gradient,
            doc=f"Position of the first {_name[3:]}imum along axis, in the dtype of data.",
        )
    )


def _channel_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    return _arg_shape(_CHANNEL, ins, outs)


_CHANNEL: Params = {"axis": 1, "keepdims": False}
_argmax = _arg("argmax")
register(
    Op(
        name="argmax_channel",
        forward=ChosenKernel(lambda params: (_argmax, _CHANNEL)),
        infer_shape=_channel_shape,
        infer_dtype=same_dtype,
        gradient=zero_gradient,
        doc="Position of the first maximum along axis 1, in the dtype of data.",
    )
)
