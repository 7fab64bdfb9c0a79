"""_split_v2: a tensor split along an axis into equal sections, or at indices.

The forward pass copies views of the input to the outputs; the backward pass copies their gradients to the same views.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.params import MAX_OUTPUTS, p_bool, p_int, p_range, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, merge_shape, normalize_axis, same_dtype
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, Param, Params
from weftplan.ops.elementwise.add_n import numbered
from weftplan.support.array_types import ArrayModule, RawArray

_SPLIT = (
    Param("indices", p_shape, doc="where each piece begins, the first at 0; unused when sections is given"),
    Param("axis", p_int, 1, "axis to cut"),
    Param("squeeze_axis", p_bool, False, "drop the axis, of which every piece must have size 1"),
    Param("sections", p_range(0, MAX_OUTPUTS), 0, "number of equal pieces; 0: as indices says"),
)


def _count(params: Params) -> int:
    count: int = params["sections"] if params["sections"] > 0 else len(params["indices"])
    if count < 1:
        raise ParameterError("_split_v2: expected sections of at least 1, or indices of which the first is 0")
    return count


def _bounds(params: Params, size: int) -> list[slice]:
    """Return a slice for each piece of an axis of ``size`` elements."""
    count = _count(params)
    if params["sections"] > 0:
        if size % count:
            raise ShapeError(f"_split_v2: {size} elements cannot be cut into {count} equal pieces")
        edges = [size // count * k for k in range(count + 1)]
    else:
        edges = [*params["indices"], size]
        if edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
            raise ShapeError(
                f"_split_v2: pieces of {size} elements that begin at {params['indices']} are empty, or leave some out: "
                f"expected 0 and then growing numbers below {size}"
            )
    return [slice(a, b) for a, b in pairwise(edges)]


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    axis = normalize_axis(params["axis"], len(source), "axis of _split_v2")
    if source[axis] == 0:
        return ins, outs
    pieces = []
    for shape, part in zip(outs, _bounds(params, source[axis]), strict=True):
        size = part.stop - part.start
        if params["squeeze_axis"] and size != 1:
            raise ShapeError(f"_split_v2: squeeze_axis needs pieces of size 1 of {source}, axis {axis}, got {size}")
        middle = () if params["squeeze_axis"] else (size,)
        remaining = (*source[:axis], *middle, *source[axis + 1 :])
        pieces.append(merge_shape(shape, remaining, f"output of _split_v2 of {source}"))
    return ins, pieces


def _pieces(
    params: Params, tensor: RawArray, parts: Sequence[RawArray | None]
) -> list[tuple[RawArray, RawArray | None]]:
    """Return (view of ``tensor``, part reshaped to the view's shape) of each piece; None remains None."""
    axis = params["axis"] % tensor.ndim
    views = [tensor[(*(slice(None),) * axis, part)] for part in _bounds(params, tensor.shape[axis])]
    return [(view, None if part is None else part.reshape(view.shape)) for view, part in zip(views, parts, strict=True)]


@kernel
def _forward(xp: ArrayModule, p: Params, data: RawArray, *outputs: RawArray | None) -> None:
    for view, out in _pieces(p, data, outputs):
        if out is not None:
            xp.copyto(out, view)


@kernel
def _backward(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    for view, g in _pieces(p, out, inputs):
        xp.copyto(view, g)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    return builder.node("_backward_split_v2", [builder.ograd(k) for k in range(_count(builder.params))])


register(
    Op(
        name="_split_v2",
        forward=_forward,
        infer_shape=_shape,
        infer_dtype=same_dtype,
        params=_SPLIT,
        outputs=lambda params: ("output",) if _count(params) == 1 else numbered("output", _count(params)),
        gradient=_gradient,
        doc="The pieces of data along axis: sections equal ones, or those that begin at indices.",
    )
)
backward("_split_v2", _backward, lambda params: numbered("ograd", _count(params)), params=_SPLIT)
