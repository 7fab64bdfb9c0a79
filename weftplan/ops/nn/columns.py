"""im2col and col2im: image windows as columns of a matrix, and the sum of columns back into an image.

Each operator is the gradient of the other. The elements of a column are ordered by channel, then by position within
the window. The kernels do one strided copy or sum for each position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_dim, merge_shape, take_bytes
from weftplan.ops.core.schema import DType, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.support.array_types import RawArray

_WINDOW = (
    Param("kernel", p_shape, doc="extents of the window, along one, two or three axes"),
    Param("stride", p_shape, (), "steps between windows (default 1)"),
    Param("dilate", p_shape, (), "steps between elements of a window (default 1)"),
    Param("pad", p_shape, (), "zeros on either side of each axis (default 0)"),
)
_COL2IM = (Param("output_size", p_shape, doc="extents of the image"), *_WINDOW)


def window(params: Params, name: str) -> tuple[Shape, Shape, Shape, Shape]:
    """Return the checked (kernel, stride, dilate, pad), defaults filled in, with one number per image axis.

    ``name`` is the operator in error messages.
    """
    kernel: Shape = params["kernel"]
    rank = len(kernel)
    if not 1 <= rank <= 3 or min(kernel) < 1:
        raise ParameterError(f"{name}: kernel={kernel}: expected one, two or three positive sizes")
    extents = [kernel]
    for key, default in (("stride", 1), ("dilate", 1), ("pad", 0)):
        values: Shape = params[key] or (default,) * rank
        if len(values) != rank or min(values) < default:
            raise ParameterError(
                f"{name}: {key}={values} does not fit kernel={kernel}: expected {default} or more for each"
            )
        extents.append(values)
    return extents[0], extents[1], extents[2], extents[3]


def window_counts(params: Params, image: Shape, name: str) -> Shape:
    """Return the number of windows along each axis of ``image`` (its extents); 0 if the extent is unknown (0)."""
    counts = []
    for size, k, s, d, p in zip(image, *window(params, name), strict=True):
        span = size + 2 * p - (d * (k - 1) + 1)
        if size and span < 0:
            raise ShapeError(f"{name}: a window of {d * (k - 1) + 1} does not fit an image of {image} with pad {p}")
        counts.append(span // s + 1 if size else 0)
    return tuple(counts)


def _taps(
    params: Params, image: RawArray, columns: RawArray, counts: Shape, name: str
) -> Iterator[tuple[RawArray, RawArray]]:
    """Yield (view of the image, view of the columns) of the same elements, for each position within the window."""
    kernel, stride, dilate, pad = window(params, name)
    batch, channels, *sizes = image.shape
    grid = columns.reshape(batch, channels, *kernel, *counts)
    every = slice(None)
    for position in product(*(range(k) for k in kernel)):
        of_image, of_grid = [], []
        for at, size, count, s, d, p in zip(position, sizes, counts, stride, dilate, pad, strict=True):
            begin = at * d - p
            first_window = max(0, -(begin // s))
            end_window = min(count, (size - 1 - begin) // s + 1)
            start = begin + first_window * s
            of_image.append(slice(start, max(start, begin + (end_window - 1) * s + 1), s))
            of_grid.append(slice(first_window, max(first_window, end_window)))
        index: tuple[slice | int, ...] = (every, every, *position, *of_grid)
        yield image[(every, every, *of_image)], grid[index]


def _gather(ctx: Workspace, params: Params, image: RawArray, columns: RawArray, counts: Shape, name: str) -> None:
    columns.fill(0)
    for source, target in _taps(params, image, columns, counts, name):
        ctx.xp.copyto(target, source)


def _sum_back(ctx: Workspace, params: Params, image: RawArray, columns: RawArray, counts: Shape, name: str) -> None:
    wide = image
    if accumulator(image.dtype) != image.dtype:
        wide = ctx.take(image.shape, accumulator(image.dtype))
    wide.fill(0)
    for target, source in _taps(params, wide, columns, counts, name):
        ctx.xp.add(target, source, out=target)
    if wide is not image:
        ctx.xp.copyto(image, wide, casting="same_kind")


def _sum_bytes(spec: TensorSpec) -> int:
    wide: DType = accumulator(spec.dtype)
    return 0 if wide == spec.dtype else take_bytes((spec.shape, wide))


# -------------------------------------------------------------------------------------------------------------- im2col


def _im2col_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    kernel = window(params, "im2col")[0]
    image = merge_shape((0,) * (len(kernel) + 2), ins[0], "im2col: data (batch, channels, *image)")
    assert image is not None
    counts = window_counts(params, image[2:], "im2col")
    columns = (image[0], image[1] * math.prod(kernel), math.prod(counts))
    out = merge_shape(columns, outs[0], f"output of im2col of {image}")
    assert out is not None
    if out[1] % math.prod(kernel):
        raise ShapeError(f"im2col: output {out} has no multiple of {math.prod(kernel)} rows")
    return [(out[0], out[1] // math.prod(kernel), *image[2:])], [out]


@workspace_kernel
def _im2col(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    counts = window_counts(p, data.shape[2:], "im2col")
    _gather(ctx, p, data, out, counts, "im2col")


@workspace_kernel
def _backward_im2col(ctx: Workspace, p: Params, ograd: RawArray, out: RawArray) -> None:
    counts = window_counts(p, out.shape[2:], "im2col")
    _sum_back(ctx, p, out, ograd, counts, "im2col")


register(
    Op(
        name="im2col",
        forward=_im2col,
        infer_shape=_im2col_shape,
        infer_dtype=floats_only("im2col"),
        params=_WINDOW,
        gradient=grad("_backward_im2col", "g0"),
        doc="The windows of images (batch, channels, *image) as columns: (batch, channels · window elements, windows).",
    )
)
backward(
    "im2col",
    _backward_im2col,
    ("ograd",),
    params=_WINDOW,
    workspace=lambda params, inputs, outputs: _sum_bytes(outputs[0]),
)

# -------------------------------------------------------------------------------------------------------------- col2im


def _col2im_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    kernel, size = window(params, "col2im")[0], params["output_size"]
    if len(size) != len(kernel) or min(size) < 1:
        raise ParameterError(f"col2im: output_size={size} does not fit kernel={kernel}: expected positive sizes")
    elements, windows = math.prod(kernel), math.prod(window_counts(params, size, "col2im"))
    columns = merge_shape((0, 0, windows), ins[0], "col2im: columns for output_size, and data")
    out = merge_shape((0, 0, *size), outs[0], "col2im: image of output_size, and output")
    assert columns is not None
    assert out is not None
    if columns[1] % elements:
        raise ShapeError(f"col2im: data {columns} has no multiple of {elements} rows")
    batch = merge_dim(columns[0], out[0], "col2im: batch of data and output")
    channels = merge_dim(columns[1] // elements, out[1], "col2im: channels of data and output")
    return [(batch, channels * elements, windows)], [(batch, channels, *size)]


@workspace_kernel
def _col2im(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    counts = window_counts(p, p["output_size"], "col2im")
    _sum_back(ctx, p, out, data, counts, "col2im")


@workspace_kernel
def _backward_col2im(ctx: Workspace, p: Params, ograd: RawArray, out: RawArray) -> None:
    counts = window_counts(p, p["output_size"], "col2im")
    _gather(ctx, p, ograd, out, counts, "col2im")


register(
    Op(
        name="col2im",
        forward=_col2im,
        infer_shape=_col2im_shape,
        infer_dtype=floats_only("col2im"),
        params=_COL2IM,
        gradient=grad("_backward_col2im", "g0"),
        workspace=lambda params, inputs, outputs: _sum_bytes(outputs[0]),
        doc="Images (batch, channels, *output_size) from columns (batch, channels · window elements, windows): "
        "overlapping windows are added.",
    )
)
backward("col2im", _backward_col2im, ("ograd",), params=_COL2IM)
