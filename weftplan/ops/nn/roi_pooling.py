"""ROIPooling: the maxima over a grid of cells of each region of interest.

A region is (image, x1, y1, x2, y2), corners included; ``spatial_scale`` converts its coordinates to pixels. A region is
rounded to whole pixels, at least one along each axis, and cut into cells that may overlap by a pixel. Cells outside of
the image, and regions whose image does not exist, give 0. Of equal maxima the first in row-major order gets the
gradient. Girshick, "Fast R-CNN" (2015).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_float, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, floats_only, grad, merge_dtype, merge_shape
from weftplan.ops.core.schema import Op, Param, Params, Shape
from weftplan.support.array_types import ArrayModule, FloatType, RawArray

_PARAMS = (
    Param("pooled_size", p_shape, doc="Number of cells along height and width."),
    Param("spatial_scale", p_float, doc="Pixels of data per unit of the regions' coordinates."),
)


def _size(params: Params) -> tuple[int, int]:
    size: Shape = params["pooled_size"]
    if len(size) != 2 or min(size) < 1:
        raise ParameterError(f"ROIPooling: pooled_size={size}: expected a positive height and width")
    return size[0], size[1]


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = None if ins[0] is None else merge_shape((0, 0, 0, 0), ins[0], "ROIPooling: data of 4 axes")
    out = merge_shape((0, 0, *_size(params)), outs[0], "ROIPooling: output for pooled_size, and given")
    out = merge_shape(out, outs[1], "ROIPooling: output and places of the maxima")
    rois = merge_shape((0, 5), ins[1], "ROIPooling: rois (regions, 5)")
    assert out is not None
    assert rois is not None
    rois = merge_shape((out[0], 5), rois, "ROIPooling: regions in output and rois")
    assert rois is not None
    if data is not None:
        out = merge_shape((0, data[1], 0, 0), out, "ROIPooling: channels of data and output")
        assert out is not None
        data = (data[0], out[1], *data[2:])
    out = (rois[0], *out[1:])
    return [data, rois], [out, out]


def _dtypes(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(merge_dtype(ins[0], ins[1], "ROIPooling: data and rois"), outs[0], "ROIPooling: data and output")
    return [data, data], [data, merge_dtype(INDEX, outs[1], "ROIPooling: places of the maxima")]


def round_half_away(value: Any) -> int:
    """Return ``value`` rounded to the nearest integer, halves away from 0."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def _cells(start: int, end: int, cells: int, extent: int, kind: FloatType) -> list[tuple[int, int]]:
    """Return (first pixel, end) of each of ``cells`` cells of a region, clipped to ``extent``.

    The region is the pixels ``start`` to ``end``, both included. As in MXNet 1.9.1, the arithmetic uses ``kind``, the
    float type of the data, because its rounding decides the borders.
    """
    size = kind(max(end - start + 1, 1)) / kind(cells)
    ranges = []
    for cell in range(cells):
        begin = math.floor(kind(cell) * size) + start
        stop = math.ceil(kind(cell + 1) * size) + start
        ranges.append((min(max(begin, 0), extent), min(max(stop, 0), extent)))
    return ranges


def _regions(
    params: Params, rois: RawArray, data: Shape, kind: FloatType
) -> Iterator[tuple[int, int, int, int, slice, slice]]:
    """Yield (region, image, cell row, cell column, rows, columns) of every cell that is not empty."""
    height, width = _size(params)
    scale = kind(params["spatial_scale"])
    for region, (image, *corners) in enumerate(rois.tolist()):
        scaled = [kind(corner) * scale for corner in corners]
        if not 0 <= image < data[0] or not all(map(math.isfinite, scaled)):
            continue
        x1, y1, x2, y2 = map(round_half_away, scaled)
        rows = _cells(y1, y2, height, data[2], kind)
        columns = _cells(x1, x2, width, data[3], kind)
        for i, (top, bottom) in enumerate(rows):
            for j, (begin, stop) in enumerate(columns):
                if top < bottom and begin < stop:
                    yield region, int(image), i, j, slice(top, bottom), slice(begin, stop)


@kernel
def _forward(
    xp: ArrayModule, p: Params, data: RawArray, rois: RawArray, out: RawArray | None, positions: RawArray | None
) -> None:
    """Pool the regions; output 1 is the position (row · width + column) of each maximum, -1 for an empty cell."""
    if out is not None:
        out.fill(0)
    if positions is not None:
        positions.fill(-1)
    channels = xp.arange(data.shape[1])
    for region, image, i, j, rows, columns in _regions(p, rois, data.shape, data.dtype.type):
        window = data[image, :, rows, columns]
        if out is not None:
            xp.max(window, axis=(1, 2), out=out[region, :, i, j])
        if positions is not None:
            # Find the first row with the maximum, then its first column: temporaries have a row or column per channel.
            row = window.max(axis=2).argmax(axis=1)
            column = window[channels, row].argmax(axis=1)
            positions[region, :, i, j] = (row + rows.start) * data.shape[3] + column + columns.start


@kernel
def _backward(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    rois: RawArray,
    positions: RawArray,
    of_data: RawArray | None,
    of_rois: RawArray | None,
) -> None:
    """Add each output's gradient to the element of its maximum, in the order of the regions; the regions get 0."""
    if of_rois is not None:
        of_rois.fill(0)
    if of_data is None:
        return
    of_data.fill(0)
    channels = of_data.shape[1]
    flat = of_data.reshape(of_data.shape[0], channels, -1)
    for region, image in enumerate(rois[:, 0].tolist()):
        if not 0 <= image < of_data.shape[0]:
            continue
        for channel in range(channels):
            index, g = positions[region, channel].reshape(-1), ograd[region, channel].reshape(-1)
            valid = index >= 0
            xp.add.at(flat[int(image), channel], index[valid], g[valid])


register(
    Op(
        name="ROIPooling",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("ROIPooling", _dtypes),
        params=_PARAMS,
        inputs=("data", "rois"),
        outputs=("output", "maxidx"),
        visible_outputs=1,
        gradient=grad("_backward_ROIPooling", "g0", "x1", "y1"),
        doc="Maxima of data (batch, channels, height, width) over the cells of each region (image, x1, y1, x2, y2) in "
        "rois (regions, 5): (regions, channels, *pooled_size).",
    )
)
backward("ROIPooling", _backward, ("ograd", "rois", "maxidx"), grad_inputs=(0, 1), params=_PARAMS)
