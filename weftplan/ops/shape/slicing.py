"""Slicing operators: slice, slice_axis, slice_like, reverse. Gradients are zero outside the region.

A function for each of the first three returns the region that it selects; kernels and gradients are built from it.
``_slice_assign`` and ``_slice_assign_scalar`` return their input with a region replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import converted
from weftplan.ops.core.params import p_float, p_int, p_optional, p_shape, p_tuple
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_shape, normalize_axis, same_dtype, same_shape
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, Shape, ShapeRule
from weftplan.ops.shape.broadcast import like_dtype
from weftplan.support.array_types import ArrayModule, RawArray

Region = Callable[[Params, Shape, Shape], tuple[slice, ...]]
"""A function from the parameters, a tensor's shape and the output's shape to the selected region."""


def _register(
    name: str,
    region: Region,
    infer_shape: ShapeRule,
    params: tuple[Param, ...],
    doc: str,
    inputs: tuple[str, ...] = ("data",),
    aliases: tuple[str, ...] = (),
) -> None:
    @kernel
    def forward(xp: ArrayModule, p: Params, data: RawArray, *arrays: Any) -> None:
        out = arrays[-1]
        xp.copyto(out, data[region(p, data.shape, out.shape)])

    @kernel
    def reverse(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
        out.fill(0)
        xp.copyto(_part(out, region(p, out.shape, ograd.shape)), ograd)

    register(
        Op(
            name=name,
            forward=forward,
            infer_shape=infer_shape,
            infer_dtype=like_dtype,
            params=params,
            inputs=inputs,
            gradient=grad(f"_backward_{name}", "g0"),
            ignored_inputs=tuple(range(1, len(inputs))),
            aliases=aliases,
            doc=doc,
        )
    )
    backward(name, reverse, ("ograd",), params=params)


def _part(array: RawArray, region: tuple[slice, ...]) -> RawArray:
    """Return a view of a region, also of an array without dimensions, of which an empty index copies the number."""
    index: Any = (*region, ...)
    part: RawArray = array[index]
    return part


def _region_shape(name: str, region: Region) -> ShapeRule:
    """Return the shape rule of an operator whose region does not depend on the output's shape."""

    def infer(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        source = ins[0]
        if source is None:
            return ins, outs
        dims = []
        for axis, (dim, part) in enumerate(zip(source, region(params, source, ()), strict=True)):
            size = len(range(*part.indices(dim)))
            if dim and not size:
                raise ShapeError(f"{name} of {source} selects nothing of axis {axis} ({part.start}:{part.stop})")
            dims.append(size if dim else 0)
        return ins, [merge_shape(outs[0], tuple(dims), f"output of {name} of {source}")]

    return infer


def _slice_region(params: Params, shape: Shape, part: Shape) -> tuple[slice, ...]:
    begin, end, step = params["begin"], params["end"], params["step"]
    if len(begin) != len(end) or len(begin) > len(shape) or (step and len(step) != len(begin)):
        raise ShapeError(f"slice of {shape}: begin {begin}, end {end} and step {step} do not fit")
    steps = step or (None,) * len(begin)
    if 0 in steps:
        raise ShapeError(f"slice of {shape}: step {step} must not hold 0")
    slices = tuple(slice(*bounds) for bounds in zip(begin, end, steps, strict=True))
    return slices + (slice(None),) * (len(shape) - len(slices))


def _axis_region(params: Params, shape: Shape, part: Shape) -> tuple[slice, ...]:
    axis = normalize_axis(params["axis"], len(shape), "axis of slice_axis")
    dim = shape[axis]
    begin, end = params["begin"], params["end"]
    for bound in (begin, end):
        if dim and bound is not None and not -dim <= bound <= dim:
            raise ShapeError(f"slice_axis: begin {begin}, end {end} exceed dimension {axis} of {shape}")
    every = slice(None)
    return tuple(slice(begin, end) if k == axis else every for k in range(len(shape)))


def _like_region(params: Params, shape: Shape, part: Shape) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in part)


def _like_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, like = ins
    if source is None or like is None:
        return ins, outs
    axes = params["axes"]
    if not axes and len(like) != len(source):
        raise ShapeError(f"slice_like: {source} and {like} differ in rank; name the axes to slice")
    dims = list(source)
    for position in axes or range(len(source)):
        axis = normalize_axis(position, len(source), "axes of slice_like")
        size = like[normalize_axis(position, len(like), "axes of slice_like")]
        if dims[axis] and size > dims[axis]:
            raise ShapeError(f"slice_like: dimension {axis} of {source} is smaller than that of {like}")
        dims[axis] = size
    return ins, [merge_shape(outs[0], tuple(dims), "output of slice_like")]


_BOUNDS = p_tuple(p_optional(p_int))
_REGION = (
    Param("begin", _BOUNDS, doc="first index of each axis; None: from the start"),
    Param("end", _BOUNDS, doc="end of each axis, not included; None: to the end"),
    Param("step", _BOUNDS, (), "steps, also negative"),
)
_slice_shape = _region_shape("slice", _slice_region)
_register(
    "slice",
    _slice_region,
    _slice_shape,
    _REGION,
    "The region begin:end:step of the first axes.",
    aliases=("crop",),
)
_register(
    "slice_axis",
    _axis_region,
    _region_shape("slice_axis", _axis_region),
    (
        Param("axis", p_int, doc="axis"),
        Param("begin", p_int, doc="first index"),
        Param("end", p_optional(p_int), doc="end, not included; None: to the end"),
    ),
    "The region begin:end of one axis.",
)
_register(
    "slice_like",
    _like_region,
    _like_shape,
    (Param("axes", p_shape, (), "axes to slice; (): all"),),
    "The first elements of each axis, as many as shape_like has.",
    inputs=("data", "shape_like"),
)


# -------------------------------------------------------------------------------------------------- regions replaced


def _assign_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer that the output has the first input's shape, and a second input the region's shape."""
    shape = merge_shape(ins[0], outs[0], "input and output of _slice_assign")
    _, region = _slice_shape(params, [shape], ins[1:] or [None])
    return [shape, *region[: len(ins) - 1]], [shape]


@kernel
def _assign(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    if out is not inputs[0]:
        xp.copyto(out, inputs[0])
    region = _part(out, _slice_region(p, out.shape, ()))
    if len(inputs) == 2:
        xp.copyto(region, inputs[1])
    else:
        region[...] = converted(p["scalar"], out.dtype)


@kernel
def _assign_backward(xp: ArrayModule, p: Params, g: RawArray, *outputs: RawArray | None) -> None:
    """Route the region's gradient to the assigned value, and the remainder to the input."""
    region = _slice_region(p, g.shape, ())
    if len(outputs) == 2 and outputs[1] is not None:
        xp.copyto(outputs[1], g[region])
    if outputs[0] is not None:
        if outputs[0] is not g:
            xp.copyto(outputs[0], g)
        outputs[0][region] = 0


_SCALAR = Param("scalar", p_float, 0.0, "what the region becomes")
for _name, _inputs, _params, _aliases, _doc in (
    ("_slice_assign", ("lhs", "rhs"), _REGION, ("_crop_assign",), "lhs, its region begin:end:step replaced by rhs."),
    ("_slice_assign_scalar", ("data",), (_SCALAR, *_REGION), ("_crop_assign_scalar",),
     "data, with the region begin:end:step replaced by a number."),
):  # fmt: skip
    register(
        Op(
            name=_name,
            forward=_assign,
            infer_shape=_assign_shape,
            infer_dtype=same_dtype,
            params=_params,
            inputs=_inputs,
            gradient=grad(f"_backward{_name}", "g0"),
            inplace=(InplacePair(0, 0),),
            aliases=_aliases,
            doc=_doc,
        )
    )
    backward(
        _name,
        _assign_backward,
        ("ograd",),
        grad_inputs=tuple(range(len(_inputs))),
        params=_params,
        inplace=(InplacePair(0, 0),),
    )


@kernel
def _reverse(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    axes = {normalize_axis(axis, out.ndim, "axis of reverse") for axis in p["axis"]}
    flipped = tuple(slice(None, None, -1 if axis in axes else None) for axis in range(out.ndim))
    xp.copyto(out, data[flipped])


def _reverse_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    new = same_shape(params, ins, outs)
    if new[0][0] is not None:
        for axis in params["axis"]:
            normalize_axis(axis, len(new[0][0]), "axis of reverse")
    return new


_REVERSE = (Param("axis", p_shape, doc="axes to turn round"),)
register(
    Op(
        name="reverse",
        forward=_reverse,
        infer_shape=_reverse_shape,
        infer_dtype=same_dtype,
        params=_REVERSE,
        gradient=grad("_backward_reverse", "g0"),
        aliases=("flip",),
        doc="The elements in opposite order along axis.",
    )
)
backward("reverse", _reverse, ("ograd",), params=_REVERSE)
