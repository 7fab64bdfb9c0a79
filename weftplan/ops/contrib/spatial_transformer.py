"""GridGenerator, BilinearSampler, SpatialTransformer: sampling grids, and images sampled at them.

A grid is (batch, 2, height, width), x before y, in coordinates from -1 to 1 (:mod:`weftplan.ops.nn.sampling`). As in
MXNet 1.9.1, pixel coordinates along an axis of one pixel are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.params import p_bool, p_enum, p_optional, p_shape
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape, take_bytes
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, Shape, TensorSpec, Workspace, WorkspaceRule
from weftplan.ops.nn.sampling import Sampler, base_bytes, base_grid, sampler_bytes
from weftplan.support.array_types import RawArray

_CUDNN = Param("cudnn_off", p_optional(p_bool), None, "Accepted, no effect.")
_TARGET = Param("target_shape", p_shape, (0, 0), "Height and width of the output.")


def _target(name: str, params: Params) -> Shape:
    shape: Shape = params["target_shape"]
    if len(shape) != 2 or min(shape) < 1:
        raise ParameterError(f"{name}: target_shape={shape}: expected a positive height and width")
    return shape


def _four(name: str, shape: Shape | None, what: str) -> Shape | None:
    return None if shape is None else merge_shape((0, 0, 0, 0), shape, f"{name}: {what} of 4 axes")


def _points(grid: RawArray) -> RawArray:
    """Return a view (batch, 2, points) of ``grid``."""
    return grid.reshape(grid.shape[0], 2, -1)


def _rows(images: RawArray) -> RawArray:
    """Return a view (batch, channels, points) of ``images``."""
    return images.reshape(*images.shape[:2], -1)


# -------------------------------------------------------------------------------------------------------- GridGenerator

_GRID = (
    Param("transform_type", p_enum("affine", "warp"), doc="Type of data: affine maps, or a flow in pixels."),
    _TARGET,
)


def _affine(params: Params) -> bool:
    return bool(params["transform_type"] == "affine")


def _grid_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if not _affine(params):
        flow = merge_shape((0, 2, 0, 0), ins[0], "GridGenerator: flow (batch, 2, height, width), and data")
        flow = merge_shape(flow, outs[0], "GridGenerator: flow and output")
        return [flow], [flow]
    out = merge_shape((0, 2, *_target("GridGenerator", params)), outs[0], "GridGenerator: output for target_shape")
    assert out is not None
    maps = merge_shape((out[0], 6), ins[0], "GridGenerator: affine maps (batch, 6), and data")
    assert maps is not None
    return [maps], [(maps[0], *out[1:])]


@workspace_kernel
def _grid(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    height, width = out.shape[2:]
    base = base_grid(ctx, height, width, out.dtype)
    if _affine(p):
        multiply(xp, data.reshape(-1, 3), base, out.reshape(-1, height * width))
        return
    for axis, extent in ((0, width), (1, height)):
        coordinate = out[:, axis]
        xp.multiply(data[:, axis], 2.0 / (extent - 1) if extent > 1 else math.inf, out=coordinate)
        xp.add(coordinate, base[axis].reshape(height, width), out=coordinate)


@workspace_kernel
def _grid_backward(ctx: Workspace, p: Params, ograd: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    height, width = ograd.shape[2:]
    if _affine(p):
        base = base_grid(ctx, height, width, out.dtype)
        multiply(xp, ograd.reshape(-1, height * width), base.T, out.reshape(-1, 3))
        return
    for axis, extent in ((0, width), (1, height)):
        xp.multiply(ograd[:, axis], 2.0 / (extent - 1) if extent > 1 else math.inf, out=out[:, axis])


def _grid_bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return base_bytes(outputs[0].shape[2], outputs[0].shape[3], outputs[0].dtype)


def _grid_backward_bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return base_bytes(inputs[0].shape[2], inputs[0].shape[3], inputs[0].dtype) if _affine(params) else 0


def _warp_inplace(params: Params) -> tuple[InplacePair, ...]:
    return () if _affine(params) else (InplacePair(0, 0),)


register(
    Op(
        name="GridGenerator",
        forward=_grid,
        infer_shape=_grid_shape,
        infer_dtype=floats_only("GridGenerator"),
        params=_GRID,
        gradient=grad("_backward_GridGenerator", "g0"),
        inplace=_warp_inplace,
        workspace=_grid_bytes,
        doc="Sampling grid (batch, 2, height, width) of affine maps (batch, 6) and target_shape, or of a flow "
        "(batch, 2, height, width).",
    )
)
backward(
    "GridGenerator", _grid_backward, ("ograd",), params=_GRID, inplace=_warp_inplace, workspace=_grid_backward_bytes
)


# ------------------------------------------------------------------------------------------------------ BilinearSampler


def _sample_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, out = _four("BilinearSampler", ins[0], "data"), _four("BilinearSampler", outs[0], "output")
    grid = merge_shape((0, 2, 0, 0), ins[1], "BilinearSampler: grid (batch, 2, height, width)")
    assert grid is not None
    batch = [shape[0] for shape in (data, grid, out) if shape is not None and shape[0]]
    for size in batch[1:]:
        if size != batch[0]:
            raise ShapeError(f"BilinearSampler: data {data} and grid {grid} differ in batch")
    count = batch[0] if batch else 0
    grid = (count, *grid[1:])
    if out is not None:
        grid = merge_shape(grid, (0, 0, *out[2:]), "BilinearSampler: grid and output")
        assert grid is not None
    if data is not None:
        data = (count, *data[1:])
        out = merge_shape((count, data[1], *grid[2:]), out, "BilinearSampler: output for data and grid, and given")
    return [data, grid], [out]


@workspace_kernel
def _sample(ctx: Workspace, p: Params, data: RawArray, grid: RawArray, out: RawArray) -> None:
    _sample_all(ctx, data, _points(grid), out)


def _sample_all(ctx: Workspace, data: RawArray, points: RawArray, out: RawArray) -> None:
    sampler = Sampler(ctx, data.shape[1], points.shape[2], data.dtype)
    for image, grid, target in zip(data, points, _rows(out), strict=True):
        sampler.forward(image, grid, target)


@workspace_kernel
def _sample_backward(
    ctx: Workspace,
    p: Params,
    ograd: RawArray,
    data: RawArray,
    grid: RawArray,
    d_data: RawArray | None,
    d_grid: RawArray | None,
) -> None:
    _backward_all(ctx, ograd, data, _points(grid), d_data, None if d_grid is None else _points(d_grid))


def _backward_all(
    ctx: Workspace,
    ograd: RawArray,
    data: RawArray,
    points: RawArray,
    of_data: RawArray | None,
    of_points: RawArray | None,
) -> None:
    sampler = Sampler(ctx, data.shape[1], points.shape[2], data.dtype)
    if of_data is None and of_points is None:
        return
    for n, (g, image, grid) in enumerate(zip(_rows(ograd), data, points, strict=True)):
        targets = (None if array is None else array[n] for array in (of_data, of_points))
        sampler.backward(g, image, grid, *targets)


def _sample_bytes(position: int) -> WorkspaceRule:
    """Return the rule for the scratch bytes of sampling.

    Input ``position`` has the sampled extents: the grid (1) forward, the incoming gradient (0) backward.
    """

    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        data = inputs[1 - position]
        return sampler_bytes(data.shape[1], math.prod(inputs[position].shape[2:]), data.dtype)

    return workspace


register(
    Op(
        name="BilinearSampler",
        forward=_sample,
        infer_shape=_sample_shape,
        infer_dtype=floats_only("BilinearSampler"),
        params=(_CUDNN,),
        inputs=("data", "grid"),
        gradient=grad("_backward_BilinearSampler", "g0", "x0", "x1"),
        workspace=_sample_bytes(1),
        doc="Images (batch, channels, height, width) sampled at grid (batch, 2, rows, columns) by bilinear "
        "interpolation: (batch, channels, rows, columns).",
    )
)
backward(
    "BilinearSampler",
    _sample_backward,
    ("ograd", "data", "grid"),
    grad_inputs=(0, 1),
    params=(_CUDNN,),
    workspace=_sample_bytes(0),
)


# --------------------------------------------------------------------------------------------------- SpatialTransformer

_SPATIAL = (
    _TARGET,
    Param("transform_type", p_enum("affine"), doc="Type of loc: affine maps."),
    Param("sampler_type", p_enum("bilinear"), doc="How pixels are interpolated."),
    _CUDNN,
)


def _spatial_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    target = _target("SpatialTransformer", params)
    data = _four("SpatialTransformer", ins[0], "data")
    out = merge_shape((0, 0, *target), outs[0], f"SpatialTransformer: output for target_shape={target}")
    maps = merge_shape((0, 6), ins[1], "SpatialTransformer: loc, affine maps (batch, 6)")
    assert out is not None
    assert maps is not None
    if data is not None:
        out = merge_shape((*data[:2], 0, 0), out, "SpatialTransformer: data and output")
        assert out is not None
    maps = merge_shape((out[0], 0), maps, "SpatialTransformer: batch of data, and loc")
    assert maps is not None
    out = (maps[0], *out[1:])
    return [None if data is None else (*out[:2], *data[2:]), maps], [out]


def _map_points(ctx: Workspace, loc: RawArray, base: RawArray) -> RawArray:
    points = ctx.take((loc.shape[0], 2, base.shape[1]), loc.dtype)
    multiply(ctx.xp, loc.reshape(-1, 3), base, points.reshape(-1, base.shape[1]))
    return points


@workspace_kernel
def _spatial(ctx: Workspace, p: Params, data: RawArray, loc: RawArray, out: RawArray) -> None:
    height, width = p["target_shape"]
    base = base_grid(ctx, height, width, loc.dtype)
    _sample_all(ctx, data, _map_points(ctx, loc, base), out)


@workspace_kernel
def _spatial_backward(
    ctx: Workspace,
    p: Params,
    ograd: RawArray,
    data: RawArray,
    loc: RawArray,
    d_data: RawArray | None,
    d_loc: RawArray | None,
) -> None:
    height, width = p["target_shape"]
    base = base_grid(ctx, height, width, loc.dtype)
    points = _map_points(ctx, loc, base)
    of_points = ctx.take(points.shape, loc.dtype)
    _backward_all(ctx, ograd, data, points, d_data, None if d_loc is None else of_points)
    if d_loc is not None:
        multiply(ctx.xp, of_points.reshape(-1, base.shape[1]), base.T, d_loc.reshape(-1, 3))


def _spatial_bytes(params: Params, data: TensorSpec, grids: int) -> int:
    height, width = params["target_shape"]
    batch, channels = data.shape[:2]
    grid = ((batch, 2, height * width), data.dtype)
    return (
        base_bytes(height, width, data.dtype)
        + take_bytes(*[grid] * grids)
        + sampler_bytes(channels, height * width, data.dtype)
    )


register(
    Op(
        name="SpatialTransformer",
        forward=_spatial,
        infer_shape=_spatial_shape,
        infer_dtype=floats_only("SpatialTransformer"),
        params=_SPATIAL,
        inputs=("data", "loc"),
        gradient=grad("_backward_SpatialTransformer", "g0", "x0", "x1"),
        workspace=lambda params, inputs, outputs: _spatial_bytes(params, inputs[0], 1),
        doc="Images (batch, channels, height, width) under affine maps loc (batch, 6), sampled by bilinear "
        "interpolation: (batch, channels, *target_shape).",
    )
)
backward(
    "SpatialTransformer",
    _spatial_backward,
    ("ograd", "data", "loc"),
    grad_inputs=(0, 1),
    params=_SPATIAL,
    workspace=lambda params, inputs, outputs: _spatial_bytes(params, inputs[1], 2),
)
