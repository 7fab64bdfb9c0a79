"""``mx.sym.image``: images as tensors, normalized, cropped, flipped.

Images before ``to_tensor`` are (height, width, channels), after it (channels, height, width); both may have a leading
batch axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import ArrayKernel, kernel, workspace_kernel
from weftplan.ops.core.params import p_float, p_int, p_tuple
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    floats_only,
    grad,
    merge_dtype,
    merge_shape,
    same_dtype,
    same_shape,
    zero_gradient,
)
from weftplan.ops.core.schema import Op, Param, Params, Shape, Workspace
from weftplan.support.array_types import ArrayModule, RawArray

_floats = p_tuple(p_float)
FLOAT = np.dtype(np.float32)


def _image(name: str, shape: Shape) -> Shape:
    """Return ``shape``; raise ShapeError unless it has 3 axes (an image) or 4 (a batch of images)."""
    if len(shape) not in (3, 4):
        raise ShapeError(f"{name}: expected an image of 3 axes or a batch of 4, got {shape}")
    return shape


# ----------------------------------------------------------------------------------------------------------- normalize

_NORMALIZE = (
    Param("mean", _floats, (0.0, 0.0, 0.0, 0.0), "Means of the channels; one number: of all."),
    Param("std", _floats, (1.0, 1.0, 1.0, 1.0), "Standard deviations of the channels; one number: of all."),
)


def _normalize_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    new_ins, new_outs = same_shape(params, ins, outs)
    if new_outs[0] is not None:
        channels = _image("normalize", new_outs[0])[-3]
        if channels not in (0, 1, 3):
            raise ShapeError(f"normalize: data {new_outs[0]}: expected 1 or 3 channels before height and width")
        for key in ("mean", "std"):
            if len(params[key]) != 1 and len(params[key]) < channels:
                raise ParameterError(f"normalize: {key}={params[key]}: expected one number, or {channels}")
    return list(new_ins), list(new_outs)


def _of_channels(ctx: Workspace, values: tuple[float, ...], like: RawArray) -> RawArray:
    """Return ``values``, one for each channel, as an array that broadcasts against images."""
    channels = like.shape[-3]
    chosen = values * channels if len(values) == 1 else values[:channels]
    channel_values: RawArray = ctx.xp.asarray(np.array(chosen).reshape(-1, 1, 1), dtype=like.dtype)
    return channel_values


@workspace_kernel
def _normalize(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    ctx.xp.subtract(data, _of_channels(ctx, p["mean"], out), out=out)
    ctx.xp.divide(out, _of_channels(ctx, p["std"], out), out=out)


@workspace_kernel
def _normalize_backward(ctx: Workspace, p: Params, ograd: RawArray, out: RawArray) -> None:
    ctx.xp.divide(ograd, _of_channels(ctx, p["std"], out), out=out)


register(
    Op(
        name="_image_normalize",
        forward=_normalize,
        infer_shape=_normalize_shape,
        infer_dtype=floats_only("normalize"),
        params=_NORMALIZE,
        gradient=grad("_backward_image_normalize", "g0"),
        inplace=UNARY_INPLACE,
        doc="(data - mean) / std of each channel of tensors (channels, height, width), or of a batch.",
    )
)
backward("_image_normalize", _normalize_backward, ("ograd",), params=_NORMALIZE, inplace=UNARY_INPLACE)


# ----------------------------------------------------------------------------------------------------------- to_tensor


def _tensor_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, out = ins[0], outs[0]
    if out is not None:
        *lead, channels, height, width = _image("to_tensor", out)
        data = merge_shape((*lead, height, width, channels), data, "to_tensor: data for the output, and given")
    if data is not None:
        *lead, height, width, channels = _image("to_tensor", data)
        out = (*lead, channels, height, width)
    return [data], [out]


def _tensor_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return ins, [merge_dtype(FLOAT, outs[0], "to_tensor: output")]


@kernel
def _to_tensor(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    xp.copyto(xp.moveaxis(out, -3, -1), data, casting="unsafe")
    xp.divide(out, 255.0, out=out)


register(
    Op(
        name="_image_to_tensor",
        forward=_to_tensor,
        infer_shape=_tensor_shape,
        infer_dtype=_tensor_dtype,
        gradient=zero_gradient,
        doc="Images (height, width, channels) of 0 to 255 as float32 tensors (channels, height, width) of 0 to 1.",
    )
)


# ---------------------------------------------------------------------------------------------------------------- crop

_CROP = (
    Param("x", p_int, doc="First column."),
    Param("y", p_int, doc="First row."),
    Param("width", p_int, doc="Columns of the output."),
    Param("height", p_int, doc="Rows of the output."),
)


def _crop_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    size = (params["height"], params["width"])
    if min(*size, params["x"] + 1, params["y"] + 1) < 1:
        raise ParameterError(f"crop: {dict(params)}: expected x and y of at least 0, and a positive width and height")
    data, out = ins[0], outs[0]
    if data is None and out is None:
        return ins, outs
    if data is None:
        assert out is not None
        data = (*_image("crop", out)[:-3], 0, 0, out[-1])
    *lead, rows, columns, channels = _image("crop", data)
    out = merge_shape((*lead, *size, channels), out, "crop: output for its size, and given")
    assert out is not None
    for extent, begin, count in ((rows, params["y"], size[0]), (columns, params["x"], size[1])):
        if extent and begin + count > extent:
            raise ShapeError(f"crop: {dict(params)} reaches beyond images of {data}")
    return [(*out[:-3], rows, columns, out[-1])], [out]


def _window(params: Params, image: RawArray) -> RawArray:
    rows = slice(params["y"], params["y"] + params["height"])
    return image[..., rows, params["x"] : params["x"] + params["width"], :]


@kernel
def _crop(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    xp.copyto(out, _window(p, data))


@kernel
def _crop_backward(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    out.fill(0)
    xp.copyto(_window(p, out), ograd)


register(
    Op(
        name="_image_crop",
        forward=_crop,
        infer_shape=_crop_shape,
        infer_dtype=same_dtype,
        params=_CROP,
        gradient=grad("_backward_image_crop", "g0"),
        doc="A window of images (height, width, channels), or of a batch.",
    )
)
backward("_image_crop", _crop_backward, ("ograd",), params=_CROP)


# --------------------------------------------------------------------------------------------------------------- flips


def _flip_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    new_ins, new_outs = same_shape(params, ins, outs)
    if new_outs[0] is not None:
        _image("flip", new_outs[0])
    return list(new_ins), list(new_outs)


def _flip(axis: int) -> ArrayKernel:
    @kernel
    def compute(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
        turned: list[Any] = [slice(None)] * data.ndim
        turned[axis] = slice(None, None, -1)
        xp.copyto(out, data[tuple(turned)])

    return compute


for _name, _axis, _doc in (
    ("_image_flip_left_right", -2, "Images (height, width, channels), the last column first."),
    ("_image_flip_top_bottom", -3, "Images (height, width, channels), the last row first."),
):
    register(
        Op(
            name=_name,
            forward=_flip(_axis),
            infer_shape=_flip_shape,
            infer_dtype=same_dtype,
            gradient=grad(_name, "g0"),
            doc=_doc,
        )
    )
