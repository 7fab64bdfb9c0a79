"""RROIAlign: averages of interpolated values over grid cells of rotated regions of interest.

A region is (image, x, y, width, height, angle): its centre and sides, which ``spatial_scale`` converts to pixels, and
an angle in degrees, counter-clockwise. Sides are at least one pixel long. Points more than one pixel outside the image
count as 0. Ma et al., "Arbitrary-Oriented Scene Text Detection via Rotation Proposals" (2018). Unlike in MXNet 1.9.1,
the data has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ops.contrib.detection.psroi_pooling import region_dtypes
from weftplan.ops.contrib.detection.region_points import Cells, cells_bytes
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_float, p_int, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape
from weftplan.ops.core.schema import Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.support.array_types import Floating, RawArray

_PARAMS = (
    Param("pooled_size", p_shape, doc="Height and width of the output: the numbers of cells."),
    Param("spatial_scale", p_float, doc="Pixels of data for one unit of the regions."),
    Param("sampling_ratio", p_int, -1, "Points along each side of a cell; -1: one for each pixel, rounded up."),
)


def _size(params: Params) -> tuple[int, int]:
    size: Shape = params["pooled_size"]
    if len(size) != 2 or min(size) < 1:
        raise ParameterError(f"RROIAlign: pooled_size={size}: expected a positive height and width")
    return size[0], size[1]


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape((0, 0, 0, 0), ins[0], "RROIAlign: data of 4 axes")
    out = merge_shape((0, 0, *_size(params)), outs[0], "RROIAlign: output for pooled_size, and given")
    assert data is not None
    assert out is not None
    rois = merge_shape((out[0], 6), ins[1], "RROIAlign: rois (regions, 6)")
    assert rois is not None
    out = merge_shape((rois[0], data[1], 0, 0), out, "RROIAlign: channels of data and output")
    assert out is not None
    return [(data[0], out[1], *data[2:]), rois], [out]


Points = tuple[RawArray, RawArray, RawArray]
"""The x and y of points, and whether each lies within the image."""


def _samples(params: Params, rois: RawArray, data: Shape) -> Iterator[tuple[int, int, int, Iterator[Points]]]:
    """Yield (region, image, number of samples of a cell, iterator over the samples) of each valid region."""
    kind = accumulator(rois.dtype).type
    scale, size = kind(params["spatial_scale"]), _size(params)
    for region, (image, *numbers) in enumerate(rois.tolist()):
        x, y, width, height = (kind(number) * scale for number in numbers[:4])
        if not 0 <= image < data[0] or not all(map(math.isfinite, (x, y, width, height, numbers[4]))):
            continue
        sides = (max(height, kind(1.0)), max(width, kind(1.0)))
        ratio = params["sampling_ratio"]
        steps = [ratio if ratio > 0 else math.ceil(side / count) for side, count in zip(sides, size, strict=True)]
        turn = kind(numbers[4]) * kind(math.pi) / kind(180.0)
        yield region, int(image), math.prod(steps), _points((y, x), sides, steps, size, turn, data[2:])


def _points(
    centre: tuple[Floating, Floating],
    sides: tuple[Floating, Floating],
    steps: Sequence[int],
    size: tuple[int, int],
    turn: Floating,
    image: Shape,
) -> Iterator[Points]:
    """Yield (x, y, inside the image) of one sample in every cell at a time.

    The points are computed in the accumulator's dtype of the regions, as in MXNet 1.9.1: rounding decides whether a
    point on the border is inside.
    """
    kind = type(turn)
    cos, sin = np.cos(turn), np.sin(turn)

    def along(axis: int, step: int) -> RawArray:
        cell = sides[axis] / kind(size[axis])
        at = np.arange(size[axis]).astype(kind) * cell + (kind(step) + kind(0.5)) * cell / kind(steps[axis])
        return at - sides[axis] / kind(2.0)

    for i in range(steps[0]):
        v = along(0, i)[:, None]
        for j in range(steps[1]):
            u = along(1, j)[None, :]
            x, y = u * cos + v * sin + centre[1], v * cos - u * sin + centre[0]
            inside = (y >= -1) & (y <= image[0]) & (x >= -1) & (x <= image[1])
            x, y = np.clip(x, 0, image[1] - 1), np.clip(y, 0, image[0] - 1)
            yield x.reshape(-1), y.reshape(-1), inside.reshape(-1)


@workspace_kernel
def _forward(ctx: Workspace, p: Params, data: RawArray, rois: RawArray, out: RawArray) -> None:
    out.fill(0)
    cells = Cells(ctx, data.shape[1], math.prod(_size(p)), data.shape[1:], data.dtype)
    for region, image, count, samples in _samples(p, rois, data.shape):
        pixels = cells.image(data[image])
        cells.total.fill(0)
        for sample in samples:
            cells.set_points(*sample)
            cells.sampler.forward(pixels, cells.points, cells.total, add=True)
        ctx.xp.divide(cells.total, count, out=cells.total)
        ctx.xp.copyto(out[region].reshape(cells.total.shape), cells.total, casting="same_kind")


@workspace_kernel
def _backward(
    ctx: Workspace, p: Params, ograd: RawArray, rois: RawArray, of_data: RawArray | None, of_rois: RawArray | None
) -> None:
    """Add each sample's gradient to its pixels, in the order of regions and samples; regions get no gradient."""
    if of_rois is not None:
        of_rois.fill(0)
    if of_data is None:
        return
    cells = Cells(ctx, of_data.shape[1], math.prod(_size(p)), of_data.shape, of_data.dtype)
    target = cells.image(of_data)
    target.fill(0)
    for region, image, count, samples in _samples(p, rois, of_data.shape):
        ctx.xp.copyto(cells.total, ograd[region].reshape(cells.total.shape))
        ctx.xp.divide(cells.total, count, out=cells.total)
        for sample in samples:
            cells.set_points(*sample)
            cells.sampler.backward(cells.total, target[image], cells.points, target[image], None, add=True)
    if target is not of_data:
        ctx.xp.copyto(of_data, target, casting="same_kind")


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = inputs[0]
    return cells_bytes(shape[1], math.prod(_size(params)), shape[1:], dtype)


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = outputs[0]
    return cells_bytes(shape[1], math.prod(_size(params)), shape, dtype)


register(
    Op(
        name="_contrib_RROIAlign",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("RROIAlign", region_dtypes("RROIAlign")),
        params=_PARAMS,
        inputs=("data", "rois"),
        gradient=grad("_backward_contrib_RROIAlign", "g0", "x1"),
        workspace=_workspace,
        doc="Averages over the cells of rotated regions (image, x, y, width, height, degrees).",
    )
)
backward(
    "_contrib_RROIAlign",
    _backward,
    ("ograd", "rois"),
    grad_inputs=(0, 1),
    params=_PARAMS,
    workspace=_backward_workspace,
)
