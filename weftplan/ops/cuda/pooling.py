"""Pooling, forward and backward: one thread for each output, and for each element of the gradient.

An element adds up the gradients of its windows in their order, so nothing is added by atomics. Formulas and ties are
those of :mod:`weftplan.ops.nn.pooling`; p-norms are left to it.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.cuda_source import TOTAL, each, floats, launch, width
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params, Shape
from weftplan.support.array_types import RawArray

_WINDOW = """
__device__ int first_of(int o, int stride, int pad) {
    int begin = o * stride - pad;
    return begin < 0 ? 0 : begin;
}

__device__ int end_of(int o, int stride, int pad, int kernel, int extent) {
    int end = o * stride - pad + kernel;
    return end < extent ? end : extent;
}

__device__ int span_of(int o, int stride, int pad, int kernel, int extent,
                             int padded) {
    int begin = o * stride - pad;
    int end = begin + kernel;
    if (padded == 1) {
        end = end < extent + pad ? end : extent + pad;
    } else {
        begin = begin < 0 ? 0 : begin;
        end = end < extent ? end : extent;
    }
    return end - begin < 1 ? 1 : end - begin;
}

__device__ int low_of(int i, int stride, int pad, int kernel) {
    int low = i + pad - kernel + 1;  // the first window that reaches element i
    if (low <= 0) return 0;
    return stride == 1 ? low : (low + stride - 1) / stride;
}

__device__ int high_of(int i, int stride, int pad, int windows) {
    int high = stride == 1 ? i + pad : (i + pad) / stride;
    return high < windows - 1 ? high : windows - 1;
}
"""
_NAMES = ["d", "h", "w", "od", "oh", "ow", "kd", "kh", "kw", "sd", "sh", "sw", "pd", "ph", "pw"]
_EXTENTS = f"{', '.join(f'long long {name}_' for name in _NAMES)}, int kind, int padded, T least, long long count"
_NARROW = " ".join(f"int {name} = (int){name}_;" for name in _NAMES)
"""Python's numbers are passed as 64 bits; arrays have fewer than 2^31 elements, so 32 do."""
_SOURCE = (
    (
        _WINDOW
        + """
extern "C" __global__ void pool(const T* x, T* y, EXTENTS) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    NARROW
    int rows = (int)i / ow;
    int planes = rows / oh;
    int n = planes / od;
    int c = (int)i - rows * ow;
    int b = rows - planes * oh;
    int a = planes - n * od;
    const T* plane = x + n * (d * h * w);
    A sum = (A)0;
    T most = least;
    int right = end_of(c, sw, pw, kw, w);
    int bottom = end_of(b, sh, ph, kh, h);
    int back = end_of(a, sd, pd, kd, d);
    for (int z = first_of(a, sd, pd); z < back; ++z) {
        for (int r = first_of(b, sh, ph); r < bottom; ++r) {
            for (int q = first_of(c, sw, pw); q < right; ++q) {
                T value = plane[(z * h + r) * w + q];
                if (kind == 0) {
                    if ((A)value > (A)most || isnan((A)value)) most = value;
                } else {
                    sum += (A)value;
                }
            }
        }
    }
    if (kind == 0) {
        y[i] = most;
    } else {
        if (kind == 1) {
            int m = span_of(a, sd, pd, kd, d, padded) * span_of(b, sh, ph, kh, h, padded);
            sum = sum * (A)(1.0 / (double)(m * span_of(c, sw, pw, kw, w, padded)));
        }
        y[i] = (T)sum;
    }
}

__device__ bool is_first(const T* plane, T most, int a, int b, int c, int z, int r,
                         int q, int h, int w, int kh, int kw, int sd,
                         int sh, int sw, int pd, int ph, int pw) {
    int right = end_of(c, sw, pw, kw, w);
    int bottom = end_of(b, sh, ph, kh, h);
    for (int u = first_of(a, sd, pd); u <= z; ++u) {
        for (int v = first_of(b, sh, ph); v < bottom; ++v) {
            for (int t = first_of(c, sw, pw); t < right; ++t) {
                if (u == z && v == r && t == q) return true;
                if ((A)plane[(u * h + v) * w + t] == (A)most) return false;
            }
        }
    }
    return true;
}

extern "C" __global__ void pool_back(const T* dy, const T* x, const T* y, T* dx, EXTENTS) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    NARROW
    int rows = (int)i / w;
    int planes = rows / h;
    int n = planes / d;
    int q = (int)i - rows * w;
    int r = rows - planes * h;
    int z = planes - n * d;
    const T* plane = x + n * (d * h * w);
    A mine = kind == 0 ? (A)x[i] : (A)0;
    A sum = (A)0;
    int last_a = high_of(z, sd, pd, od);
    int last_b = high_of(r, sh, ph, oh);
    int last_c = high_of(q, sw, pw, ow);
    for (int a = low_of(z, sd, pd, kd); a <= last_a; ++a) {
        for (int b = low_of(r, sh, ph, kh); b <= last_b; ++b) {
            for (int c = low_of(q, sw, pw, kw); c <= last_c; ++c) {
                int o = ((n * od + a) * oh + b) * ow + c;
                A g = (A)dy[o];
                if (kind == 0) {
                    if (mine != (A)y[o]) continue;
                    if (is_first(plane, y[o], a, b, c, z, r, q, h, w, kh, kw, sd, sh, sw, pd, ph, pw)) sum += g;
                } else if (kind == 1) {
                    int m = span_of(a, sd, pd, kd, d, padded) * span_of(b, sh, ph, kh, h, padded);
                    sum += g * (A)(1.0 / (double)(m * span_of(c, sw, pw, kw, w, padded)));
                } else {
                    sum += g;
                }
            }
        }
    }
    dx[i] = (T)sum;
}
"""
    )
    .replace("EXTENTS", _EXTENTS)
    .replace("NARROW", _NARROW)
)
_WHOLE = (
    TOTAL
    + """
extern "C" __global__ void pool_whole(const T* x, T* y, long long size, A share) {
    __shared__ A s[1024];
    const T* plane = x + (long long)blockIdx.x * size;
    A sum = (A)0;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) sum += (A)plane[i];
    sum = total(s, sum);
    if (threadIdx.x == 0) y[blockIdx.x] = (T)(sum * share);
}
"""
)
_KINDS = {"max": 0, "avg": 1, "sum": 2}


def _words(params: Params, image: Shape, grid: Shape, dtype: DType) -> tuple[RawArray, ...]:
    """The arguments behind the arrays: two- and one-dimensional images have leading extents of 1."""
    rank = len(image)
    if params["global_pool"]:
        kernel, stride, pad = image, (1,) * rank, (0,) * rank
    else:
        kernel, stride, pad = params["kernel"], params["stride"] or (1,) * rank, (params["pad"] or (0,) * rank)[:rank]
    rows = [((fill,) * (3 - rank) + tuple(part)) for part, fill in
            ((image, 1), (grid, 1), (kernel, 1), (stride, 1), (pad, 0))]  # fmt: skip
    least = dtype.type(-np.inf)
    padded = np.int32(params["count_include_pad"] is not False)
    return (*(int(n) for row in rows for n in row), np.int32(_KINDS[params["pool_type"]]), padded, least)


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data, out = inputs[0], outputs[0]
    image = data.shape[2:]
    size = math.prod(image)
    if params["global_pool"] and params["pool_type"] != "max":
        share = accumulator(data.dtype).type(1.0 / size if params["pool_type"] == "avg" else 1.0)
        launch(ctx.xp, _WHOLE, "pool_whole", out.size, width(size), (data, out, size, share), T=data.dtype)
        return
    args = (data, out, *_words(params, image, out.shape[2:], data.dtype))
    each(ctx.xp, _SOURCE, "pool", out.size, args, T=data.dtype)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, out = inputs[0], outputs[0]
    data, output = (inputs[1], inputs[2]) if params["pool_type"] == "max" else (ograd, ograd)
    args = (ograd, data, output, out, *_words(params, out.shape[2:], ograd.shape[2:], out.dtype))
    each(ctx.xp, _SOURCE, "pool_back", out.size, args, T=out.dtype)


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    if params["pool_type"] == "lp":
        return "p-norms are not written"
    if params["global_pool"] and params["pool_type"] == "max":
        return "the maximum of a whole image is a few launches of CuPy's own"
    return str(floats(0)(params, inputs, outputs))


for _name, _kernel in (("Pooling", _forward), ("_backward_Pooling", _backward)):
    provide(
        _name,
        Implementation(name="cuda", kernel=_kernel, workspace=lambda params, inputs, outputs: 0, refusal=_refusal),
        on="gpu",
    )
