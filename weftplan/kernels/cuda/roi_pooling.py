"""ROIPooling: forward with a thread for each cell, backward with a thread for each pixel.

A pixel's thread adds up the gradients of the cells whose maximum is the pixel. The device reads the regions, so
the host does not wait. Formulas are those of :mod:`weftplan.ops.nn.roi_pooling`. There is no kernel for float16,
because the borders of cells are computed in the data's dtype.
"""

from __future__ import annotations

import numpy as np

from weftplan.ops.core.cuda_source import each, floats
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, OpContext, Params

_SOURCE = """
__device__ long long away(T value) {  // the nearest integer, halves away from 0
    T whole = floor(fabs(value) + (T)0.5);
    return (long long)(value < (T)0 ? -whole : whole);
}

__device__ long long border(T size, long long cell, long long start, long long extent, int upper) {
    T edge = (T)cell * size;
    long long found = (long long)(upper == 1 ? ceil(edge) : floor(edge)) + start;
    return found < 0ll ? 0ll : (found > extent ? extent : found);
}

extern "C" __global__ void pool_regions(const T* data, const T* rois, T* out, long long* places, long long images,
                                        long long channels, long long height, long long width, long long rows,
                                        long long columns, T scale, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long column = i % columns;
    long long row = i / columns % rows;
    long long channel = i / (columns * rows) % channels;
    const T* roi = rois + i / (columns * rows * channels) * 5;
    T most = (T)0;
    long long where = -1;
    bool there = roi[0] >= (T)0 && roi[0] < (T)images;
    for (int k = 1; k < 5; ++k) there = there && isfinite(roi[k]);
    if (there) {
        long long x1 = away(roi[1] * scale);
        long long y1 = away(roi[2] * scale);
        long long wide = away(roi[3] * scale) - x1 + 1;
        long long high = away(roi[4] * scale) - y1 + 1;
        T cell_width = (T)(wide < 1 ? 1ll : wide) / (T)columns;
        T cell_height = (T)(high < 1 ? 1ll : high) / (T)rows;
        long long left = border(cell_width, column, x1, width, 0);
        long long right = border(cell_width, column + 1, x1, width, 1);
        long long top = border(cell_height, row, y1, height, 0);
        long long bottom = border(cell_height, row + 1, y1, height, 1);
        const T* plane = data + ((long long)roi[0] * channels + channel) * height * width;
        for (long long y = top; y < bottom; ++y) {
            for (long long x = left; x < right; ++x) {
                T value = plane[y * width + x];
                if (where < 0 || value > most || (isnan(value) && !isnan(most))) {
                    most = value;
                    where = y * width + x;
                }
            }
        }
    }
    out[i] = most;
    places[i] = where;
}

extern "C" __global__ void spread_regions(const T* ograd, const T* rois, const long long* places, T* out,
                                          long long channels, long long pixels, long long regions, long long cells,
                                          long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long pixel = i % pixels;
    long long channel = i / pixels % channels;
    long long image = i / (pixels * channels);
    T sum = (T)0;
    for (long long region = 0; region < regions; ++region) {
        T whose = rois[region * 5];
        if (!(whose >= (T)0) || (long long)whose != image) continue;
        long long first = (region * channels + channel) * cells;
        for (long long cell = 0; cell < cells; ++cell)
            if (places[first + cell] == pixel) sum += ograd[first + cell];
    }
    out[i] = sum;
}
"""


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data, rois = inputs
    rows, columns = params["pooled_size"]
    shape = (rois.shape[0], data.shape[1], rows, columns)
    out = ctx.take(shape, data.dtype) if outputs[0] is None else outputs[0]
    maxima = ctx.take(shape, np.dtype(np.int64)) if outputs[1] is None else outputs[1]
    args = (data, rois, out, maxima, *data.shape, rows, columns, data.dtype.type(params["spatial_scale"]))
    each(ctx.xp, _SOURCE, "pool_regions", out.size, args, T=data.dtype)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, rois, maxima = inputs
    if outputs[1] is not None:
        outputs[1].fill(0)
    if outputs[0] is None:
        return
    out = outputs[0]
    _, channels, height, width = out.shape
    args = (ograd, rois, maxima, out, channels, height * width, rois.shape[0], ograd.shape[2] * ograd.shape[3])
    each(ctx.xp, _SOURCE, "spread_regions", out.size, args, T=out.dtype)


def _bytes(params: Params, inputs: Specs, outputs: Specs) -> int:
    shape = (inputs[1].shape[0], inputs[0].shape[1], *params["pooled_size"])
    return take_bytes((shape, inputs[0].dtype), (shape, np.dtype(np.int64)))


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    if inputs[0].dtype.itemsize < 4:
        return "written for float32 and float64"
    return str(floats(0)(params, inputs, outputs))


provide("ROIPooling", Implementation(name="cuda", kernel=_forward, workspace=_bytes, refusal=_refusal), on="gpu")
provide(
    "_backward_ROIPooling",
    Implementation(name="cuda", kernel=_backward, workspace=lambda params, inputs, outputs: 0, refusal=_refusal),
    on="gpu",
)
