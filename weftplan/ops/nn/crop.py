"""Crop: a window of the two spatial axes of an image batch, at an offset or in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.params import p_bool, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, merge_shape, same_dtype
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, Param, Params, Shape
from weftplan.ops.elementwise.add_n import NUM_ARGS, numbered_inputs
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    NUM_ARGS,
    Param("offset", p_shape, (0, 0), "Row and column at which the window begins."),
    Param("h_w", p_shape, (0, 0), "Height and width of the window; ignored with a second input, whose extents it has."),
    Param("center_crop", p_bool, False, "True: the window is in the middle, and offset is ignored."),
)


def _inputs(params: Params) -> tuple[str, ...]:
    if params["num_args"] > 2:
        raise ParameterError(f"Crop: num_args={params['num_args']}: expected 1, or 2 (data, and what to crop like)")
    return numbered_inputs(params)


def _window(params: Params, data: Shape, size: Shape) -> tuple[slice, slice]:
    """Return the row slice and the column slice of a window of ``size`` (height, width) in ``data``, a shape."""
    extents = data[2:]
    offset = params["offset"]
    if len(offset) != 2:
        raise ParameterError(f"Crop: offset={offset}: expected a row and a column")
    if params["center_crop"]:
        offset = tuple((extent - length) // 2 for extent, length in zip(extents, size, strict=True))
    ends = [start + length for start, length in zip(offset, size, strict=True)]
    if any(start < 0 for start in offset) or any(end > extent for end, extent in zip(ends, extents, strict=True)):
        raise ShapeError(f"Crop: a window of {size} at offset {offset} does not lie in data {data}")
    return slice(offset[0], ends[0]), slice(offset[1], ends[1])


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, out = ins[0], outs[0]
    size: Shape | None = None
    if params["num_args"] == 2:
        like = ins[1]
        if like is not None:
            if len(like) != 4:
                raise ShapeError(f"Crop: the second input has shape {like}, expected (batch, channels, height, width)")
            size = like[2:]
    else:
        size = params["h_w"]
        if len(size) != 2 or min(size) < 1:
            raise ParameterError(f"Crop: h_w={size}: expected a positive height and width, or a second input")
    if out is not None:
        out = merge_shape((0, 0, 0, 0), out, "Crop: output of 4 axes")
        assert out is not None
    if size is not None:
        out = merge_shape((0, 0, *size), out, f"Crop: output for a window of {size}, and given")
    if data is not None:
        data = merge_shape((0, 0, 0, 0), data, "Crop: data (batch, channels, height, width)")
    if out is not None and data is not None:
        data = merge_shape(data, (*out[:2], 0, 0), "Crop: data, and batch and channels of the output")
        assert data is not None
        out = (*data[:2], *out[2:])
        if 0 not in data and 0 not in out:
            _window(params, data, out[2:])
    return [data, *ins[1:]], [out]


@kernel
def _forward(xp: ArrayModule, p: Params, *arrays: Any) -> None:
    *inputs, out = arrays
    rows, columns = _window(p, inputs[0].shape, out.shape[2:])
    xp.copyto(out, inputs[0][:, :, rows, columns])


@kernel
def _backward(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    rows, columns = _window(p, out.shape, ograd.shape[2:])
    out.fill(0)
    xp.copyto(out[:, :, rows, columns], ograd)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    return [*builder.node("_backward_Crop", [builder.ograd()]), *[None] * (builder.num_inputs - 1)]


register(
    Op(
        name="Crop",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        inputs=_inputs,
        variadic="num_args",
        gradient=_gradient,
        ignored_inputs=lambda params: (1,) if params["num_args"] == 2 else (),
        doc="A window (batch, channels, *h_w) of data (batch, channels, height, width); a second input, if there is "
        "one, gives the height and width of the window.",
    )
)
backward("Crop", _backward, ("ograd",), params=_PARAMS)
