"""ROIAlign: averages of interpolated values over grid cells of regions of interest (He et al., 2017).

A region is (image, x1, y1, x2, y2); ``spatial_scale`` converts its units to pixels. A cell averages a regular grid of
points, whose values are interpolated bilinearly; points more than one pixel outside the image count as 0. The weights
are separable: the cells of a region are R · image · Cᵀ, with a matrix R for rows and C for columns. The gradient is the
transposed product, added in the order of the regions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_bool, p_float, p_int, p_shape
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, floats_only, grad, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import DType, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    Param("pooled_size", p_shape, doc="height and width of the output: the numbers of cells"),
    Param("spatial_scale", p_float, doc="pixels of data for one unit of the regions"),
    Param("sample_ratio", p_int, -1, "points along each side of a cell; -1: one for each pixel, rounded up"),
    Param("position_sensitive", p_bool, False, "each cell has channels of its own"),
    Param("aligned", p_bool, False, "shift regions by half a pixel, and let them be smaller than one"),
)


def _size(params: Params) -> tuple[int, int]:
    size: Shape = params["pooled_size"]
    if len(size) != 2 or min(size) < 1:
        raise ParameterError(f"ROIAlign: pooled_size={size}: expected a positive height and width")
    return size[0], size[1]


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    size = _size(params)
    cells = size[0] * size[1] if params["position_sensitive"] else 1
    data = merge_shape((0, 0, 0, 0), ins[0], "ROIAlign: data of 4 axes")
    rois = merge_shape((0, 5), ins[1], "ROIAlign: rois (regions, 5)")
    out = merge_shape((0, 0, *size), outs[0], "ROIAlign: output for pooled_size, and given")
    assert data is not None
    assert rois is not None
    assert out is not None
    if data[1] % cells:
        raise ShapeError(f"ROIAlign: position_sensitive needs a multiple of {cells} channels, got data {data}")
    lead = merge_shape((rois[0], data[1] // cells), out[:2], "ROIAlign: regions and channels of the output, and given")
    assert lead is not None
    return [(data[0], lead[1] * cells, *data[2:]), (lead[0], 5)], [(*lead, *size)]


def _dtypes(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(merge_dtype(ins[0], ins[1], "ROIAlign: data and rois"), outs[0], "ROIAlign: data and output")
    return [data, data], [data]


def _weights(start: float, length: float, cells: int, points: int, extent: int) -> tuple[RawArray, int]:
    """Return the weights (cells, pixels used) of one axis, float64 on the host, and the first pixel used."""
    cell = length / cells
    samples = start + cell * (np.arange(cells)[:, None] + (np.arange(points) + 0.5) / points)
    valid = (samples >= -1.0) & (samples <= extent)
    samples = np.maximum(samples, 0.0)
    low = np.minimum(samples.astype(np.int64), extent - 1)
    high = np.minimum(low + 1, extent - 1)
    share = np.where(low >= extent - 1, 0.0, samples - low)
    begin, stop = int(low.min()), int(high.max()) + 1
    matrix = np.zeros((cells, stop - begin))
    rows = np.repeat(np.arange(cells), points)
    scale = valid / points
    np.add.at(matrix, (rows, low.reshape(-1) - begin), ((1.0 - share) * scale).reshape(-1))
    np.add.at(matrix, (rows, high.reshape(-1) - begin), (share * scale).reshape(-1))
    return matrix, begin


def _regions(
    ctx: Workspace, params: Params, rois: RawArray, data: Shape, dtype: DType
) -> Iterator[tuple[int, int, RawArray, slice, RawArray, slice]]:
    """Yield (region, image, row weights, row range, column weights, column range) of each valid region.

    A region is skipped if its image number is out of range, its corners are not finite or its cells have no points.
    """
    shift = 0.5 if params["aligned"] else 0.0
    kind = rois.dtype.type
    scale, cells = kind(params["spatial_scale"]), _size(params)
    for region, (image, *corners) in enumerate(rois.tolist()):
        scaled = [float(kind(corner) * scale) - shift for corner in corners]
        if not 0 <= image < data[0] or not all(map(math.isfinite, scaled)):
            continue
        x1, y1, x2, y2 = scaled
        matrices = []
        for begin, end, count, extent in ((y1, y2, cells[0], data[2]), (x1, x2, cells[1], data[3])):
            length = end - begin if params["aligned"] else max(end - begin, 1.0)
            points = params["sample_ratio"] if params["sample_ratio"] > 0 else math.ceil(length / count)
            if points < 1:
                break
            matrix, begin_pixel = _weights(begin, length, count, points, extent)
            matrices += [ctx.xp.asarray(matrix, dtype=dtype), slice(begin_pixel, begin_pixel + matrix.shape[1])]
        if len(matrices) == 4:
            yield region, int(image), *matrices


def _scratch(data: Shape, size: tuple[int, int], dtype: DType) -> list[tuple[Shape, DType]]:
    """Return the forward pass's scratch: the product with the row weights, a widened image, and a region's cells."""
    wide = accumulator(dtype)
    channels = data[1]
    image: Shape = (channels, *data[2:]) if wide != dtype else (0,)
    return [((channels, size[0], data[3]), wide), (image, wide), ((channels, *size), wide)]


def _cut(space: RawArray, shape: Shape) -> RawArray:
    return space.reshape(-1)[: math.prod(shape)].reshape(shape)


def _copy_channels(xp: ArrayModule, cells: RawArray, size: tuple[int, int], out: RawArray, *, reverse: bool) -> None:
    """Copy each cell's own channel from ``cells`` (channels · cells, height, width) to ``out``, or back.

    ``out`` is (channels, height, width), with ``size`` as height and width; ``reverse`` copies from ``out``.
    """
    height, width = size
    by_cell = cells.reshape(-1, height, width, height, width)
    for row in range(height):
        for column in range(width):
            if reverse:
                by_cell[:, row, column, row, column] = out[:, row, column]
            else:
                out[:, row, column] = by_cell[:, row, column, row, column]


@workspace_kernel
def _forward(ctx: Workspace, p: Params, data: RawArray, rois: RawArray, out: RawArray) -> None:
    xp, size = ctx.xp, _size(p)
    wide = accumulator(data.dtype)
    between, copy, cells = (ctx.take(*spec) for spec in _scratch(data.shape, size, data.dtype))
    out.fill(0)
    for region, image, row_matrix, rows, column_matrix, columns in _regions(ctx, p, rois, data.shape, wide):
        window = data[image, :, rows, columns]
        if wide != data.dtype:
            held = _cut(copy, window.shape)
            xp.copyto(held, window)
            window = held
        middle = _cut(between, (data.shape[1], size[0], window.shape[2]))
        multiply(xp, row_matrix, window, middle)
        multiply(xp, middle, column_matrix.T, cells)
        if p["position_sensitive"]:
            _copy_channels(xp, cells, size, out[region], reverse=False)
        else:
            xp.copyto(out[region], cells, casting="same_kind")


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes(*_scratch(inputs[0].shape, _size(params), inputs[0].dtype))


def _backward_scratch(data: Shape, size: tuple[int, int], dtype: DType) -> list[tuple[Shape, DType]]:
    wide = accumulator(dtype)
    channels = data[1]
    return [((channels, *size), wide), ((channels, data[2], size[1]), wide), ((channels, *data[2:]), wide)]


@workspace_kernel
def _backward(
    ctx: Workspace, p: Params, ograd: RawArray, rois: RawArray, of_data: RawArray | None, of_rois: RawArray | None
) -> None:
    if of_rois is not None:
        of_rois.fill(0)
    if of_data is None:
        return
    xp, size = ctx.xp, _size(p)
    shape = of_data.shape
    wide = accumulator(of_data.dtype)
    cells, between, sums = (ctx.take(*spec) for spec in _backward_scratch(shape, size, of_data.dtype))
    of_data.fill(0)
    cells.fill(0)
    for region, image, row_matrix, rows, column_matrix, columns in _regions(ctx, p, rois, shape, wide):
        if p["position_sensitive"]:
            _copy_channels(xp, cells, size, ograd[region], reverse=True)
        else:
            xp.copyto(cells, ograd[region])
        middle = _cut(between, (shape[1], row_matrix.shape[1], size[1]))
        multiply(xp, row_matrix.T, cells, middle)
        share = _cut(sums, (shape[1], row_matrix.shape[1], column_matrix.shape[1]))
        multiply(xp, middle, column_matrix, share)
        target = of_data[image, :, rows, columns]
        xp.add(target, share, out=target, casting="same_kind")


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes(*_backward_scratch(outputs[0].shape, _size(params), outputs[0].dtype))


register(
    Op(
        name="_contrib_ROIAlign",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("ROIAlign", _dtypes),
        params=_PARAMS,
        inputs=("data", "rois"),
        gradient=grad("_backward_contrib_ROIAlign", "g0", "x1"),
        workspace=_workspace,
        doc="Averages over the cells of regions (image, x1, y1, x2, y2): (regions, channels, *pooled_size).",
    )
)
backward(
    "_contrib_ROIAlign",
    _backward,
    ("ograd", "rois"),
    grad_inputs=(0, 1),
    params=_PARAMS,
    workspace=_backward_workspace,
)
