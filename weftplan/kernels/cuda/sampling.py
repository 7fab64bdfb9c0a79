"""BilinearSampler and SpatialTransformer: forward with a thread for each sample.

The gradient of an image is a sum over samples sorted by pixel, without atomic additions. The formulas and the order of
their operations are those of :mod:`weftplan.ops.nn.sampling`.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.kernels.cuda.segments import keys_scratch, sort
from weftplan.ops.core.cuda_source import TOTAL, each, floats, launch, width
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, Kernel, OpContext, Params, Shape, SpecLike, WorkspaceRule
from weftplan.support.array_types import RawArray

_CORNER = """
__device__ A place_of(A point, long long extent) {
    return (point + (A)1) * ((A)0.5 * (A)(extent - 1));
}

__device__ A near_of(A place, int step) {  // the weight of the neighbour on one side
    A rest = place - floor(place);
    return step == 1 ? rest : (A)1 - rest;
}

__device__ long long pixel_of(A x, A y, int column, int row, long long width, long long height) {
    A fx = floor(x) + (A)column;
    A fy = floor(y) + (A)row;
    if (!(fx >= (A)0) || !(fy >= (A)0) || fx > (A)(width - 1) || fy > (A)(height - 1)) return -1;
    return (long long)fy * width + (long long)fx;
}
"""
_FORWARD = (
    _CORNER
    + """
extern "C" __global__ void sample(const T* image, const T* grid, T* out, long long channels, long long height,
                                  long long width, long long places, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long place = i % places;
    long long plane = i / places;
    long long n = plane / channels;
    A x = place_of((A)grid[2 * n * places + place], width);
    A y = place_of((A)grid[(2 * n + 1) * places + place], height);
    A sum = (A)0;
    for (int corner = 0; corner < 4; ++corner) {
        int row = corner / 2;
        int column = corner % 2;
        long long pixel = pixel_of(x, y, column, row, width, height);
        if (pixel >= 0) {
            A weight = near_of(x, column) * near_of(y, row);
            sum += (A)image[plane * height * width + pixel] * weight;
        }
    }
    out[i] = (T)sum;
}
"""
)
_KEYS = (
    _CORNER
    + """
extern "C" __global__ void corner_keys(const T* grid, unsigned long long* keys, A* weights, long long height,
                                       long long width, long long places, long long real, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    if (i >= real) {
        keys[i] = 0xffffffffffffffffull;
        return;
    }
    long long n = i / (4 * places);
    long long inside = i % (4 * places);
    int corner = (int)(inside / places);
    long long place = inside % places;
    int row = corner / 2;
    int column = corner % 2;
    A x = place_of((A)grid[2 * n * places + place], width);
    A y = place_of((A)grid[(2 * n + 1) * places + place], height);
    long long pixel = pixel_of(x, y, column, row, width, height);
    weights[i] = near_of(x, column) * near_of(y, row);
    keys[i] = pixel < 0 ? 0xffffffffffffffffull
                        : (unsigned long long)(n * height * width + pixel) << 32 | (unsigned long long)inside;
}

extern "C" __global__ void sum_corners(const unsigned long long* keys, const A* weights, const T* ograd, T* out,
                                       long long channels, long long pixels, long long places, long long real,
                                       long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long slot = i / channels;
    long long channel = i % channels;
    unsigned long long where = keys[slot] >> 32;
    if (where == 0xffffffffull) return;
    if (slot > 0 && keys[slot - 1] >> 32 == where) return;
    long long n = (long long)where / pixels;
    long long pixel = (long long)where % pixels;
    A sum = (A)0;
    for (long long j = slot; j < real; ++j) {
        unsigned long long key = keys[j];
        if (key >> 32 != where) break;
        long long inside = (long long)(key & 0xffffffffull);
        sum += (A)ograd[(n * channels + channel) * places + inside % places] * weights[n * 4 * places + inside];
    }
    out[(n * channels + channel) * pixels + pixel] = (T)sum;
}
"""
)
_POINTS = (
    _CORNER
    + """
extern "C" __global__ void grid_gradient(const T* ograd, const T* image, const T* grid, T* out, long long channels,
                                         long long height, long long width, long long places, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long n = i / places;
    long long place = i % places;
    A x = place_of((A)grid[2 * n * places + place], width);
    A y = place_of((A)grid[(2 * n + 1) * places + place], height);
    A of_x = (A)0;
    A of_y = (A)0;
    for (int corner = 0; corner < 4; ++corner) {
        int row = corner / 2;
        int column = corner % 2;
        long long pixel = pixel_of(x, y, column, row, width, height);
        if (pixel >= 0) {
            A sum = (A)0;
            for (long long c = 0; c < channels; ++c) {
                long long plane = n * channels + c;
                sum += (A)image[plane * height * width + pixel] * (A)ograd[plane * places + place];
            }
            of_x += sum * near_of(y, row) * ((A)0.5 * (A)(width - 1) * (A)(2 * column - 1));
            of_y += sum * near_of(x, column) * ((A)0.5 * (A)(height - 1) * (A)(2 * row - 1));
        }
    }
    out[2 * n * places + place] = (T)of_x;
    out[(2 * n + 1) * places + place] = (T)of_y;
}
"""
)
_AFFINE = (
    TOTAL
    + """
__device__ A base_of(int row, long long place, long long height, long long width, A far_x, A far_y) {
    if (row == 0) return (A)(place % width) * far_x - (A)1;
    if (row == 1) return (A)(place / width) * far_y - (A)1;
    return (A)1;
}

extern "C" __global__ void map_points(const T* maps, T* grid, long long height, long long width, A far_x, A far_y,
                                      long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long place = i % (height * width);
    long long line = i / (height * width);
    A sum = (A)0;
    for (int row = 0; row < 3; ++row)
        sum += (A)maps[3 * line + row] * base_of(row, place, height, width, far_x, far_y);
    grid[i] = (T)sum;
}

extern "C" __global__ void map_gradient(const T* of_grid, T* out, long long height, long long width, A far_x, A far_y) {
    __shared__ A s[1024];
    long long line = blockIdx.x / 3;
    int row = blockIdx.x % 3;
    long long places = height * width;
    A sum = (A)0;
    for (long long p = threadIdx.x; p < places; p += blockDim.x)
        sum += (A)of_grid[line * places + p] * base_of(row, p, height, width, far_x, far_y);
    sum = total(s, sum);
    if (threadIdx.x == 0) out[blockIdx.x] = (T)sum;
}
"""
)
"""CUDA C for SpatialTransformer's grid and the gradient of its affine map. ``far_x`` and ``far_y`` are results of
:func:`_far`."""


def _far(extent: int, dtype: DType) -> np.generic:
    """Return the distance of neighbouring grid points in [-1, 1], or NaN for an extent of 1, as on a CPU."""
    step: np.generic = accumulator(dtype).type(2.0 / (extent - 1) if extent > 1 else math.nan)
    return step


def _sample(ctx: OpContext, data: RawArray, grid: RawArray, out: RawArray) -> None:
    _, channels, height, width_ = data.shape
    points = math.prod(out.shape[2:])
    each(ctx.xp, _FORWARD, "sample", out.size, (data, grid, out, channels, height, width_, points), T=data.dtype)


def _image_scratch(data: Shape, points: int, dtype: DType) -> list[tuple[Shape, DType]]:
    return [keys_scratch(4 * data[0] * points), ((4 * data[0] * points,), accumulator(dtype))]


def _of_image(ctx: OpContext, ograd: RawArray, grid: RawArray, out: RawArray) -> None:
    batch, channels, height, width_ = out.shape
    points = math.prod(ograd.shape[2:])
    keys, weights = (ctx.take(*spec) for spec in _image_scratch(out.shape, points, out.dtype))
    xp, kind = ctx.xp, out.dtype
    real = 4 * batch * points
    each(xp, _KEYS, "corner_keys", keys.size, (grid, keys, weights, height, width_, points, real), T=kind)
    sort(xp, keys)
    out.fill(0)
    args = (keys, weights, ograd, out, channels, height * width_, points, real)
    each(xp, _KEYS, "sum_corners", real * channels, args, T=kind)


def _of_grid(ctx: OpContext, ograd: RawArray, data: RawArray, grid: RawArray, out: RawArray) -> None:
    batch, channels, height, width_ = data.shape
    points = math.prod(ograd.shape[2:])
    args = (ograd, data, grid, out, channels, height, width_, points)
    each(ctx.xp, _POINTS, "grid_gradient", batch * points, args, T=data.dtype)


def _map(ctx: OpContext, loc: RawArray, target: Shape) -> RawArray:
    height, width_ = target
    grid = ctx.take((loc.shape[0], 2, height * width_), loc.dtype)
    args = (loc, grid, height, width_, _far(width_, loc.dtype), _far(height, loc.dtype))
    each(ctx.xp, _AFFINE, "map_points", grid.size, args, T=loc.dtype)
    return grid


def _sampler(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    _sample(ctx, inputs[0], inputs[1], outputs[0])


def _sampler_backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, data, grid = inputs
    if outputs[0] is not None:
        _of_image(ctx, ograd, grid, outputs[0])
    if outputs[1] is not None:
        _of_grid(ctx, ograd, data, grid, outputs[1])


def _spatial(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    _sample(ctx, inputs[0], _map(ctx, inputs[1], params["target_shape"]), outputs[0])


def _spatial_backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, data, loc = inputs
    height, width_ = params["target_shape"]
    grid = _map(ctx, loc, (height, width_))
    if outputs[0] is not None:
        _of_image(ctx, ograd, grid, outputs[0])
    if outputs[1] is not None:
        of_grid = ctx.take(grid.shape, loc.dtype)
        _of_grid(ctx, ograd, data, grid, of_grid)
        far = (_far(width_, loc.dtype), _far(height, loc.dtype))
        args = (of_grid, outputs[1], height, width_, *far)
        threads = width(height * width_)
        launch(ctx.xp, _AFFINE, "map_gradient", outputs[1].size // 3 * 3, threads, args, T=loc.dtype)


def _sampler_bytes(params: Params, inputs: Specs, outputs: Specs) -> int:
    return take_bytes(*_image_scratch(inputs[1].shape, math.prod(inputs[0].shape[2:]), inputs[1].dtype))


def _map_spec(params: Params, data: SpecLike) -> tuple[Shape, DType]:
    return (data.shape[0], 2, math.prod(params["target_shape"])), data.dtype


def _spatial_backward_bytes(params: Params, inputs: Specs, outputs: Specs) -> int:
    grid = take_bytes(*[_map_spec(params, inputs[1])] * 2)
    return grid + take_bytes(*_image_scratch(inputs[1].shape, math.prod(params["target_shape"]), inputs[1].dtype))


def _offer(name: str, kernel: Kernel, workspace: WorkspaceRule) -> None:
    def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
        if max(math.prod(spec.shape) for spec in (*inputs, *outputs)) * 4 >= 1 << 31:
            return "written for arrays of fewer than 2^29 elements"
        return str(floats(0)(params, inputs, outputs))

    provide(name, Implementation(name="cuda", kernel=kernel, workspace=workspace, refusal=refusal), on="gpu")


_offer("BilinearSampler", _sampler, lambda params, inputs, outputs: 0)
_offer("_backward_BilinearSampler", _sampler_backward, _sampler_bytes)
_offer("SpatialTransformer", _spatial, lambda params, inputs, outputs: take_bytes(_map_spec(params, inputs[0])))
_offer("_backward_SpatialTransformer", _spatial_backward, _spatial_backward_bytes)
