"""DeformablePSROIPooling: sampled PSROIPooling with cells moved by learned offsets.

``trans`` (regions, classes · 2, parts, parts) contains the x and y offsets of each part of a region, whose cells move
together. An offset times ``trans_std`` is a share of the region's width or height. The channels of the output are split
among the classes. Each cell averages ``sample_per_part``² samples; samples more than half a pixel outside the image are
ignored. Dai et al., "Deformable Convolutional Networks" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.contrib.detection.psroi_pooling import (
    CELLS,
    CHANNELS,
    SCALE,
    group_of_cell,
    groups_of,
    pooled_shape,
    region_dtypes,
)
from weftplan.ops.contrib.detection.region_points import Cells, cells_bytes
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_bool, p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, merge_shape, take_bytes
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.nn.roi_pooling import round_half_away
from weftplan.support.array_types import DType, RawArray

_NAME = "DeformablePSROIPooling"
_PARAMS = (
    SCALE,
    CHANNELS,
    Param("group_size", p_int, doc="Groups of cells each way."),
    CELLS,
    Param("part_size", p_int, 0, "Parts of a region each way that move on their own; 0: each cell."),
    Param("sample_per_part", p_int, 1, "Points along each side of a cell."),
    Param("trans_std", p_float, 0.0, "What offsets are multiplied by."),
    Param("no_trans", p_bool, False, "True: no input trans, and nothing moves."),
)


def _parts(params: Params) -> int:
    for key, least in (("group_size", 1), ("part_size", 0), ("sample_per_part", 1)):
        if params[key] < least:
            raise ParameterError(f"{_NAME}: {key}={params[key]}: expected at least {least}")
    return int(params["part_size"] or params["pooled_size"])


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "rois") if params["no_trans"] else ("data", "rois", "trans")


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    parts = _parts(params)
    data, rois, out = pooled_shape(_NAME, params, ins, outs)
    if params["no_trans"]:
        return [data, rois], [out]
    trans = merge_shape((rois[0], 0, parts, parts), ins[2], f"{_NAME}: trans (regions, classes * 2, parts, parts)")
    assert trans is not None
    if trans[1] % 2 or (trans[1] and params["output_dim"] % (trans[1] // 2)):
        raise ShapeError(
            f"{_NAME}: trans {trans}: expected two planes for each class, and classes that divide "
            f"output_dim={params['output_dim']}"
        )
    return [data, (trans[0], *rois[1:]), trans], [(trans[0], *out[1:])]


class _Region(NamedTuple):
    """A region of interest and the left and top edges of its cells, in row-major order, before offsets are added."""

    number: int
    image: int
    left: Any
    top: Any
    width: float
    height: float


def _regions(params: Params, rois: RawArray, data: Shape) -> Iterator[_Region]:
    cells = params["pooled_size"]
    kind = rois.dtype.type
    scale, half, least = kind(params["spatial_scale"]), kind(0.5), kind(0.1)
    for number, (image, *corners) in enumerate(rois.tolist()):
        if not 0 <= image < data[0] or not all(map(math.isfinite, corners)):
            continue
        scaled = [
            kind(round_half_away(corner)) * scale - half for corner in (*corners[:2], corners[2] + 1, corners[3] + 1)
        ]
        if not all(map(math.isfinite, scaled)):
            continue
        x1, y1, x2, y2 = scaled
        width, height = max(x2 - x1, least), max(y2 - y1, least)
        steps = np.arange(cells).astype(rois.dtype)
        left = np.tile(steps * (width / kind(cells)) + x1, cells)
        top = np.repeat(steps * (height / kind(cells)) + y1, cells)
        yield _Region(number, int(image), left, top, width, height)


class _Geometry:
    """Geometry shared by all regions: the group and the part of each cell, in row-major order."""

    def __init__(self, params: Params, data: Shape, trans: RawArray | None) -> None:
        self.cells, self.parts = params["pooled_size"], _parts(params)
        groups = groups_of(_NAME, params)
        group = [group_of_cell(cell, groups, self.cells) for cell in range(self.cells)]
        part = [min(cell * self.parts // self.cells, self.parts - 1) for cell in range(self.cells)]
        self.group = np.array([i * groups + j for i in group for j in group])
        self.part = np.array([i * self.parts + j for i in part for j in part])
        self.classes = 1 if trans is None else trans.shape[1] // 2
        self.class_channels = params["output_dim"] // self.classes
        self.extents = data[2:]
        self.samples = params["sample_per_part"]
        self.std = params["trans_std"]

    def moves(self, trans: RawArray | None, region: int, category: int) -> tuple[RawArray | float, RawArray | float]:
        """Return the offsets (x, y) of a region's cells for class ``category``, as shares of the region's size."""
        if trans is None:
            return 0.0, 0.0
        shares = trans[region, 2 * category : 2 * category + 2].reshape(2, -1)[:, self.part]
        return shares[0] * self.std, shares[1] * self.std

    def points(
        self, region: _Region, trans: RawArray | None, category: int
    ) -> list[tuple[RawArray, RawArray, RawArray]]:
        """Return (x, y, inside the image) of each sample for class ``category``: host arrays, one element per cell."""
        move_x, move_y = self.moves(trans, region.number, category)
        points = []
        kind = region.left.dtype.type
        height, width = self.extents
        steps = kind(self.cells), kind(self.samples)
        for i in range(self.samples):
            y = region.top + move_y * region.height + kind(i) * (region.height / steps[0] / steps[1])
            for j in range(self.samples):
                x = region.left + move_x * region.width + kind(j) * (region.width / steps[0] / steps[1])
                inside = (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)
                points.append((np.clip(x, 0, width - 1), np.clip(y, 0, height - 1), inside))
        return points

    def planes(self, image: RawArray, category: int) -> RawArray:
        """Return the channels of an image for class ``category``: (channels of the output, groups, height, width)."""
        by_channel = image.reshape(self.classes * self.class_channels, -1, *self.extents)
        return by_channel[category * self.class_channels : (category + 1) * self.class_channels]


def _begin(
    ctx: Workspace, params: Params, data: Shape, dtype: DType, trans: RawArray | None, image: Shape
) -> tuple[_Geometry, Cells]:
    geometry = _Geometry(params, data, trans)
    cells = Cells(ctx, geometry.class_channels, geometry.cells**2, image, dtype)
    cells.planes[...] = ctx.xp.asarray(geometry.group * math.prod(data[2:]))
    return geometry, cells


def _on_host(trans: RawArray | None) -> RawArray | None:
    """Return the offsets as an array on the host, or None without offsets."""
    return None if trans is None else np.array(trans.tolist(), trans.dtype)


@workspace_kernel
def _forward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    xp = ctx.xp
    data, rois = inputs[:2]
    trans = _on_host(None if p["no_trans"] else inputs[2])
    out.fill(0)
    geometry, cells = _begin(ctx, p, data.shape, data.dtype, trans, data.shape[1:])
    for region in _regions(p, rois, data.shape):
        image = cells.image(data[region.image])
        for category in range(geometry.classes):
            points = geometry.points(region, trans, category)
            cells.total.fill(0)
            for sample in points:
                cells.set_points(*sample)
                cells.sampler.forward(
                    geometry.planes(image, category), cells.points, cells.total, planes=cells.planes, add=True
                )
            count = np.maximum(sum(inside.astype(np.int64) for *_, inside in points), 1)
            xp.divide(cells.total, xp.asarray(count), out=cells.total, casting="same_kind")
            target = out[region.number, category * geometry.class_channels : (category + 1) * geometry.class_channels]
            xp.copyto(target.reshape(cells.total.shape), cells.total, casting="same_kind")


def _moved_back(
    geometry: _Geometry,
    region: _Region,
    category: int,
    gradient: RawArray,
    sample: tuple[RawArray, ...],
    target: RawArray,
) -> None:
    """Add the gradients of a sample's points to ``target``, the gradient of the offsets of their parts.

    An integral coordinate, such as one clipped to the border, contributes 0: MXNet 1.9.1 then interpolates between a
    pixel and itself.
    """
    for axis, (coordinate, size) in enumerate(((sample[0], region.width), (sample[1], region.height))):
        slope = np.where(coordinate == np.floor(coordinate), 0.0, gradient[axis]) * (geometry.std * size)
        np.add.at(target[2 * category + axis].reshape(-1), geometry.part, slope)


@workspace_kernel
def _backward(ctx: Workspace, p: Params, ograd: RawArray, data: RawArray, rois: RawArray, *arrays: Any) -> None:
    xp = ctx.xp
    trans: Any = _on_host(None if p["no_trans"] else arrays[0])
    of_data, of_rois, *of_trans = arrays if p["no_trans"] else arrays[1:]
    if of_rois is not None:
        of_rois.fill(0)
    moved = bool(of_trans) and of_trans[0] is not None
    if of_data is None and not moved:
        return
    geometry, cells = _begin(ctx, p, data.shape, data.dtype, trans, data.shape)
    wide = cells.image(data)
    target = of_data
    if of_data is not None:
        if wide is not data:
            target = ctx.take(of_data.shape, wide.dtype)
        target.fill(0)
    moves = np.zeros(trans.shape) if moved else None
    for region in _regions(p, rois, data.shape):
        for category in range(geometry.classes):
            points = geometry.points(region, trans, category)
            count = np.maximum(sum(inside.astype(np.int64) for *_, inside in points), 1)
            source = ograd[region.number, category * geometry.class_channels : (category + 1) * geometry.class_channels]
            xp.copyto(cells.total, source.reshape(cells.total.shape))
            xp.divide(cells.total, xp.asarray(count), out=cells.total, casting="same_kind")
            for sample in points:
                cells.set_points(*sample)
                cells.sampler.backward(
                    cells.total,
                    geometry.planes(wide[region.image], category),
                    cells.points,
                    None if target is None else geometry.planes(target[region.image], category),
                    cells.gradient if moved else None,
                    planes=cells.planes,
                    add=True,
                )
                if moves is not None:
                    slopes = np.array(cells.gradient.tolist())
                    _moved_back(geometry, region, category, slopes, sample, moves[region.number])
    if of_data is not None and target is not of_data:
        xp.copyto(of_data, target, casting="same_kind")
    if moves is not None:
        of_trans[0][...] = xp.asarray(moves, dtype=of_trans[0].dtype)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[0]
    return cells_bytes(_class_channels(params, inputs[2:]), params["pooled_size"] ** 2, shape[1:], dtype)


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[1]
    wide = accumulator(dtype)
    widened = take_bytes((shape, wide)) if wide != dtype else 0
    return widened + cells_bytes(_class_channels(params, inputs[3:]), params["pooled_size"] ** 2, shape, dtype)


def _class_channels(params: Params, trans: Sequence[TensorSpec]) -> int:
    """Return the number of channels of the output for one class."""
    return int(params["output_dim"]) // (trans[0].shape[1] // 2 if trans else 1)


def _gradient(g: GradientBuilder) -> Sequence[EntryRef | None]:
    return g.node(f"_backward_contrib_{_NAME}", [g.ograd(), *(g.input(k) for k in range(g.num_inputs))])


register(
    Op(
        name=f"_contrib_{_NAME}",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only(_NAME, region_dtypes(_NAME)),
        params=_PARAMS,
        inputs=_inputs,
        gradient=_gradient,
        workspace=_workspace,
        doc="Averages of samples in the cells of regions, which trans moves; each group of cells has its own channels.",
    )
)
backward(
    f"_contrib_{_NAME}",
    _backward,
    lambda params: ("ograd", *_inputs(params)),
    grad_inputs=lambda params: tuple(range(len(_inputs(params)))),
    params=_PARAMS,
    workspace=_backward_workspace,
)
