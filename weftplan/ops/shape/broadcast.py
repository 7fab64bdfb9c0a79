"""Operators that repeat elements: broadcast_to, broadcast_axis, broadcast_like, repeat, tile, Pad.

The kernels copy the input to views of the output; the gradient of an element is the sum over its copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import accumulator, reduce_to
from weftplan.ops.core.params import p_enum, p_float, p_int, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    backward,
    grad,
    is_known,
    merge_dtype,
    merge_shape,
    normalize_axis,
    same_dtype,
)
from weftplan.ops.core.schema import Op, Param, Params, Shape
from weftplan.support.array_types import ArrayModule, RawArray

# ------------------------------------------------------------------------------------------------------------ broadcast


@kernel
def _broadcast(xp: ArrayModule, p: Params, *arrays: RawArray | None) -> None:
    *inputs, out = arrays
    xp.copyto(out, inputs[0])


@kernel
def _backward_broadcast(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    reduce_to(xp, ograd, out)


def _stretched(source: Shape, target: Shape, what: str) -> Shape:
    """Return ``source`` broadcast to the shape ``target`` of equal rank; 0 in ``target`` keeps the size."""
    if len(source) != len(target):
        raise ShapeError(f"{what}: {source} and {target} differ in rank")
    for dim, size in zip(source, target, strict=True):
        if dim not in (0, 1) and size not in (0, dim):
            raise ShapeError(f"{what}: {source} cannot be broadcast to {target}")
    return tuple(size or dim for dim, size in zip(source, target, strict=True))


def _to_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, target = ins[0], params["shape"]
    if source is None:
        return ins, outs
    return ins, [merge_shape(outs[0], _stretched(source, target, "broadcast_to"), "output of broadcast_to")]


def _axis_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    axes, sizes = params["axis"], params["size"]
    if len(axes) != len(sizes):
        raise ShapeError(f"broadcast_axis: axis {axes} and size {sizes} differ in length")
    dims = list(source)
    for position, size in zip(axes, sizes, strict=True):
        axis = normalize_axis(position, len(source), "axis of broadcast_axis")
        if source[axis] not in (0, 1):
            raise ShapeError(f"broadcast_axis: dimension {axis} of {source} is not 1")
        dims[axis] = size
    return ins, [merge_shape(outs[0], tuple(dims), "output of broadcast_axis")]


def _like_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, like = ins
    if source is None or like is None:
        return ins, outs
    left, right = params["lhs_axes"], params["rhs_axes"]
    if left is None and right is None:
        target = like
    elif not left or not right or len(left) != len(right):
        raise ShapeError(
            f"broadcast_like: lhs_axes {left} and rhs_axes {right} must come together, equally long and not empty; "
            f"leave both out to repeat all axes"
        )
    else:
        dims = list(source)
        for a, b in zip(left, right, strict=True):
            axis = normalize_axis(a, len(source), "lhs_axes of broadcast_like")
            dims[axis] = like[normalize_axis(b, len(like), "rhs_axes of broadcast_like")]
        target = tuple(dims)
    return ins, [merge_shape(outs[0], _stretched(source, target, "broadcast_like"), "output of broadcast_like")]


def like_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer one dtype for input 0 and the output, from either of them; other inputs may have any dtype."""
    dtype = merge_dtype(ins[0], outs[0], "input 0 and the output")
    return [dtype, *ins[1:]], [dtype]


for _name, _infer, _params, _inputs, _aliases, _doc in (
    (
        "broadcast_to",
        _to_shape,
        (Param("shape", p_shape, (), "shape of the output; 0: as the input"),),
        ("data",),
        (),
        "Axes of size 1 repeated to shape.",
    ),
    (
        "broadcast_axis",
        _axis_shape,
        (
            Param("axis", p_shape, (), "axes of size 1 to repeat"),
            Param("size", p_shape, (), "their sizes in the output"),
        ),
        ("data",),
        ("broadcast_axes",),
        "Axes of size 1 repeated to size.",
    ),
    (
        "broadcast_like",
        _like_shape,
        (
            Param("lhs_axes", p_optional(p_shape), None, "axes of lhs to repeat; None: all"),
            Param("rhs_axes", p_optional(p_shape), None, "axes of rhs whose sizes they take"),
        ),
        ("lhs", "rhs"),
        (),
        "Axes of size 1 of lhs repeated to the sizes of rhs.",
    ),
):
    register(
        Op(
            name=_name,
            forward=_broadcast,
            infer_shape=_infer,
            infer_dtype=like_dtype,
            params=_params,
            inputs=_inputs,
            gradient=grad(f"_backward_{_name}", "g0", params={}),
            ignored_inputs=tuple(range(1, len(_inputs))),
            aliases=_aliases,
            doc=_doc,
        )
    )
    backward(_name, _backward_broadcast, ("ograd",))


# --------------------------------------------------------------------------------------------------------------- repeat


def _p_positive(value: object) -> int:
    number = p_int(value)
    if number < 1:
        raise ValueError("expected at least 1")
    return number


def _repeat_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, axis, count = ins[0], params["axis"], params["repeats"]
    if source is None:
        return ins, outs
    if axis is None:
        out: Shape = (math.prod(source) * count,)
    else:
        axis = normalize_axis(axis, len(source), "axis of repeat")
        out = (*source[:axis], source[axis] * count, *source[axis + 1 :])
    return ins, [merge_shape(outs[0], out, f"output of repeat of {source}")]


def _repeat_views(params: Params, small: RawArray, large: RawArray) -> tuple[RawArray, RawArray]:
    """Return ``small`` as (outer, size, 1, inner) and its repetition ``large`` as (outer, size, repeats, inner)."""
    axis = params["axis"]
    if axis is None:
        outer, size, inner = 1, small.size, 1
    else:
        axis %= small.ndim
        outer, size, inner = math.prod(small.shape[:axis]), small.shape[axis], math.prod(small.shape[axis + 1 :])
    return small.reshape(outer, size, 1, inner), large.reshape(outer, size, params["repeats"], inner)


@kernel
def _repeat(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    small, large = _repeat_views(p, data, out)
    xp.copyto(large, small)


@kernel
def _backward_repeat(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    small, large = _repeat_views(p, out, ograd)
    reduce_to(xp, large, small)


_REPEAT = (
    Param("repeats", _p_positive, doc="how often each element comes"),
    Param("axis", p_optional(p_int), None, "axis; None: of the flattened tensor"),
)
register(
    Op(
        name="repeat",
        forward=_repeat,
        infer_shape=_repeat_shape,
        infer_dtype=same_dtype,
        params=_REPEAT,
        gradient=grad("_backward_repeat", "g0"),
        doc="Each element repeats times, next to each other, along axis.",
    )
)
backward("repeat", _backward_repeat, ("ograd",), params=_REPEAT)


# ----------------------------------------------------------------------------------------------------------------- tile


def _tile_dims(source: Shape, reps: Shape) -> tuple[list[int], list[int]]:
    """Return ``source`` and ``reps``, the shorter one padded with leading 1s to the rank of the other."""
    rank = max(len(source), len(reps))
    return [1] * (rank - len(source)) + list(source), [1] * (rank - len(reps)) + list(reps)


def _p_reps(value: object) -> Shape:
    reps: Shape = p_shape(value)
    if any(rep < 1 for rep in reps):
        raise ValueError("expected numbers of at least 1")
    return reps


def _tile_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    dims, reps = _tile_dims(source, params["reps"])
    out = tuple(dim * rep for dim, rep in zip(dims, reps, strict=True))
    return ins, [merge_shape(outs[0], out, f"output of tile of {source}")]


def _tile_views(params: Params, small: RawArray, large: RawArray) -> tuple[RawArray, RawArray]:
    dims, reps = _tile_dims(small.shape, params["reps"])
    pairs = list(zip(reps, dims, strict=True))
    return (
        small.reshape([size for _, dim in pairs for size in (1, dim)]),
        large.reshape([size for pair in pairs for size in pair]),
    )


@kernel
def _tile(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    small, large = _tile_views(p, data, out)
    xp.copyto(large, small)


@kernel
def _backward_tile(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    small, large = _tile_views(p, out, ograd)
    axes = tuple(range(0, large.ndim, 2))
    xp.sum(large, axis=axes, dtype=accumulator(small.dtype), out=small, keepdims=True)


_TILE = (Param("reps", _p_reps, doc="repetitions along each axis, the last ones when there are fewer than axes"),)
register(
    Op(
        name="tile",
        forward=_tile,
        infer_shape=_tile_shape,
        infer_dtype=same_dtype,
        params=_TILE,
        gradient=grad("_backward_tile", "g0"),
        doc="The whole tensor reps times along each axis.",
    )
)
backward("tile", _backward_tile, ("ograd",), params=_TILE)


# ------------------------------------------------------------------------------------------------------------------ Pad


def _pairs(params: Params, rank: int) -> list[tuple[int, int]]:
    width = params["pad_width"]
    if len(width) != 2 * rank:
        raise ShapeError(f"Pad: pad_width {width} must hold 2 numbers for each of {rank} dimensions")
    return list(zip(width[::2], width[1::2], strict=True))


def _pad_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    pairs = _pairs(params, len(source))
    if params["mode"] == "reflect" and is_known(source):
        for dim, pair in zip(source, pairs, strict=True):
            if max(pair) >= dim > 0 and max(pair) > 0:
                raise ShapeError(f"Pad: cannot reflect {max(pair)} elements of a dimension of {dim} in {source}")
    out = tuple(dim and dim + low + high for dim, (low, high) in zip(source, pairs, strict=True))
    return ins, [merge_shape(outs[0], out, f"output of Pad of {source}")]


def _centre(params: Params, padded: RawArray) -> RawArray:
    pairs = _pairs(params, padded.ndim)
    return padded[tuple(slice(low, dim - high) for dim, (low, high) in zip(padded.shape, pairs, strict=True))]


def _layer(padded: RawArray, axis: int, index: int) -> RawArray:
    position: tuple[slice | int, ...] = (*(slice(None),) * axis, index)
    return padded[position]


def _mirrors(params: Params, padded: RawArray) -> Iterator[tuple[RawArray, RawArray]]:
    """Yield (border, source) views, axis by axis: each layer of the border and the layer that is copied to it.

    Copying in this order fills the corners from borders that are already complete. The gradient adds each border to its
    source in reverse order.
    """
    edge = params["mode"] == "edge"
    for axis, (low, high) in enumerate(_pairs(params, padded.ndim)):
        inner_first, inner_last = low, padded.shape[axis] - high - 1
        for k in range(1, low + 1):
            yield _layer(padded, axis, inner_first - k), _layer(padded, axis, inner_first if edge else inner_first + k)
        for k in range(1, high + 1):
            yield _layer(padded, axis, inner_last + k), _layer(padded, axis, inner_last if edge else inner_last - k)


@kernel
def _pad(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    if p["mode"] == "constant":
        out.fill(p["constant_value"])
    xp.copyto(_centre(p, out), data)
    if p["mode"] != "constant":
        for border, source in _mirrors(p, out):
            xp.copyto(border, source)


@kernel(scratch=lambda p, g, out: [] if p["mode"] == "constant" else [(g.shape, g.dtype)])
def _backward_pad(xp: ArrayModule, p: Params, g: RawArray, out: RawArray, folded: RawArray | None = None) -> None:
    if folded is not None:
        xp.copyto(folded, g)
        for border, source in reversed(list(_mirrors(p, folded))):
            xp.add(source, border, out=source)
        g = folded
    xp.copyto(out, _centre(p, g))


def _p_width(value: object) -> Shape:
    width: Shape = p_shape(value)
    if any(number < 0 for number in width):
        raise ValueError("expected numbers of at least 0")
    return width


_PAD = (
    Param("mode", p_enum("constant", "edge", "reflect"), doc="what the border holds"),
    Param("pad_width", _p_width, doc="elements before and after, for each dimension"),
    Param("constant_value", p_float, 0.0, "border value in mode constant"),
)
register(
    Op(
        name="Pad",
        forward=_pad,
        infer_shape=_pad_shape,
        infer_dtype=same_dtype,
        params=_PAD,
        gradient=grad("_backward_Pad", "g0"),
        aliases=("pad",),
        doc="A border around the tensor: constant, the edge repeated, or its reflection.",
    )
)
backward("Pad", _backward_pad, ("ograd",), params=_PAD)
