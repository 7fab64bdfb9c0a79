"""PSROIPooling: averages over grid cells of regions of interest, with separate channels per cell.

A region is (image, x1, y1, x2, y2), with inclusive corners that are rounded; ``spatial_scale`` converts them to pixels.
Channel (d · groups + i) · groups + j of the data belongs to channel d of the output and to the cells of group (i, j).
Cells without pixels give 0, and so do regions whose image number is out of range or whose corners are not finite.
Dai et al., "R-FCN" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, floats_only, grad, merge_dtype, merge_shape
from weftplan.ops.core.schema import DTypeRule, Op, Param, Params, Shape
from weftplan.ops.nn.roi_pooling import round_half_away
from weftplan.support.array_types import ArrayModule, Floating, FloatType, RawArray

SCALE = Param("spatial_scale", p_float, doc="Pixels of data for one unit of the regions.")
CHANNELS = Param("output_dim", p_int, doc="Channels of the output.")
CELLS = Param("pooled_size", p_int, doc="Height and width of the output: cells of a region each way.")

_PARAMS = (SCALE, CHANNELS, CELLS, Param("group_size", p_int, 0, "Groups of cells each way; 0: each cell is one."))


def groups_of(name: str, params: Params) -> int:
    """Return the number of groups of cells along each axis.

    Raises:
        ParameterError: ``output_dim`` or ``pooled_size`` is not positive, or ``group_size`` is negative.
    """
    for key, least in (("output_dim", 1), ("pooled_size", 1), ("group_size", 0)):
        if params[key] < least:
            raise ParameterError(f"{name}: {key}={params[key]}: expected at least {least}")
    return int(params["group_size"] or params["pooled_size"])


def pooled_shape(name: str, params: Params, ins: Shapes, outs: Shapes) -> tuple[Shape, Shape, Shape]:
    """Return the shapes (data, regions, output) of a pooling whose groups of cells have channels of their own."""
    groups, cells = groups_of(name, params), params["pooled_size"]
    planes = params["output_dim"] * groups * groups
    data = merge_shape((0, planes, 0, 0), ins[0], f"{name}: data with output_dim * group_size**2 channels, and given")
    out = merge_shape((0, params["output_dim"], cells, cells), outs[0], f"{name}: output for its sizes, and given")
    assert out is not None
    rois = merge_shape((out[0], 5), ins[1], f"{name}: rois (regions, 5)")
    assert data is not None
    assert rois is not None
    return data, rois, (rois[0], *out[1:])


def group_of_cell(cell: int, groups: int, cells: int) -> int:
    """Return the group, along one axis, to which a cell belongs.

    >>> [group_of_cell(cell, 2, 5) for cell in range(5)]
    [0, 0, 0, 1, 1]
    """
    return min(cell * groups // cells, groups - 1)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, rois, out = pooled_shape("PSROIPooling", params, ins, outs)
    return [data, rois], [out]


def region_dtypes(name: str) -> DTypeRule:
    """Return a rule by which all inputs and the output of operator ``name`` have one dtype."""

    def infer(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        merged = outs[0]
        for dtype in ins:
            merged = merge_dtype(merged, dtype, f"{name}: inputs and output")
        return [merged] * len(ins), [merged]

    return infer


def _spans(start: Floating, end: Floating, cells: int, extent: int, kind: FloatType) -> list[tuple[int, int]]:
    """Return the range (first, end) of pixels, within ``extent``, of each cell between ``start`` and ``end``.

    The ranges are computed in the data's float dtype, as in MXNet 1.9.1, because rounding decides which pixels belong
    to a cell.
    """
    size = max(end - start, kind(0.1)) / kind(cells)
    bounds = [(math.floor(kind(k) * size + start), math.ceil(kind(k + 1) * size + start)) for k in range(cells)]
    return [(min(max(begin, 0), extent), min(max(stop, 0), extent)) for begin, stop in bounds]


def _cells(params: Params, rois: RawArray, data: Shape) -> Iterator[tuple[int, int, int, int, slice, slice, int]]:
    """Yield (region, image, cell row, cell column, rows, columns, group) of every cell that has pixels."""
    cells, groups = params["pooled_size"], groups_of("PSROIPooling", params)
    kind = rois.dtype.type
    scale = kind(params["spatial_scale"])
    for region, (image, *corners) in enumerate(rois.tolist()):
        if not 0 <= image < data[0] or not all(map(math.isfinite, corners)):
            continue
        scaled = [kind(round_half_away(corner)) * scale for corner in (*corners[:2], corners[2] + 1, corners[3] + 1)]
        if not all(map(math.isfinite, scaled)):
            continue
        x1, y1, x2, y2 = scaled
        columns = _spans(x1, x2, cells, data[3], kind)
        for i, (top, bottom) in enumerate(_spans(y1, y2, cells, data[2], kind)):
            for j, (begin, stop) in enumerate(columns):
                if top < bottom and begin < stop:
                    group = group_of_cell(i, groups, cells) * groups + group_of_cell(j, groups, cells)
                    yield region, int(image), i, j, slice(top, bottom), slice(begin, stop), group


def _by_group(params: Params, image: RawArray) -> RawArray:
    """Return an image reshaped to (channels of the output, groups, height, width)."""
    return image.reshape(params["output_dim"], -1, *image.shape[1:])


@kernel
def _forward(xp: ArrayModule, p: Params, data: RawArray, rois: RawArray, out: RawArray) -> None:
    out.fill(0)
    wide = accumulator(data.dtype)
    for region, image, i, j, rows, columns, group in _cells(p, rois, data.shape):
        window = _by_group(p, data[image])[:, group, rows, columns]
        xp.mean(window, axis=(1, 2), dtype=wide, out=out[region, :, i, j])


@kernel
def _backward(
    xp: ArrayModule, p: Params, ograd: RawArray, rois: RawArray, of_data: RawArray | None, of_rois: RawArray | None
) -> None:
    """Add each cell's gradient to its pixels, in the order of the regions; regions get no gradient."""
    if of_rois is not None:
        of_rois.fill(0)
    if of_data is None:
        return
    of_data.fill(0)
    for region, image, i, j, rows, columns, group in _cells(p, rois, of_data.shape):
        target = _by_group(p, of_data[image])[:, group, rows, columns]
        share = ograd[region, :, i, j] / ((rows.stop - rows.start) * (columns.stop - columns.start))
        xp.add(target, share[:, None, None], out=target)


register(
    Op(
        name="_contrib_PSROIPooling",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("PSROIPooling", region_dtypes("PSROIPooling")),
        params=_PARAMS,
        inputs=("data", "rois"),
        gradient=grad("_backward_contrib_PSROIPooling", "g0", "x1"),
        doc="Averages over the cells of regions, each group of cells with channels of its own.",
    )
)
backward("_contrib_PSROIPooling", _backward, ("ograd", "rois"), grad_inputs=(0, 1), params=_PARAMS)
