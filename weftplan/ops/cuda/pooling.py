"""Pooling, forward and backward: one thread for each output, and for each element of the gradient.

An element adds up the gradients of its windows in their order, so nothing is added by atomics. Formulas and ties are
those of :mod:`weftplan.ops.nn.pooling`; p-norms are left to it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weftplan.ops.core.cuda_source import TOTAL, each, floats, launch, width
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params, Shape

_WINDOW = """
__device__ long long first_of(long long o, long long stride, long long pad) {
    long long begin = o * stride - pad;
    return begin < 0ll ? 0ll : begin;
}

__device__ long long end_of(long long o, long long stride, long long pad, long long kernel, long long extent) {
    long long end = o * stride - pad + kernel;
    return end < extent ? end : extent;
}

__device__ long long span_of(long long o, long long stride, long long pad, long long kernel, long long extent,
                             int padded) {
    long long begin = o * stride - pad;
    long long end = begin + kernel;
    if (padded == 1) {
        end = end < extent + pad ? end : extent + pad;
    } else {
        begin = begin < 0ll ? 0ll : begin;
        end = end < extent ? end : extent;
    }
    return end - begin < 1ll ? 1ll : end - begin;
}

__device__ long long low_of(long long i, long long stride, long long pad, long long kernel) {
    long long low = i + pad - kernel + 1;  // the first window that reaches element i
    return low <= 0ll ? 0ll : (low + stride - 1) / stride;
}

__device__ long long high_of(long long i, long long stride, long long pad, long long windows) {
    long long high = (i + pad) / stride;
    return high < windows - 1 ? high : windows - 1;
}
"""
_EXTENTS = """long long d, long long h, long long w, long long od, long long oh, long long ow, long long kd,
    long long kh, long long kw, long long sd, long long sh, long long sw, long long pd, long long ph, long long pw,
    int kind, int padded, T least, long long count"""
_SOURCE = (
    _WINDOW
    + """
extern "C" __global__ void pool(const T* x, T* y, EXTENTS) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long c = i % ow;
    long long b = i / ow % oh;
    long long a = i / (ow * oh) % od;
    const T* plane = x + i / (ow * oh * od) * (d * h * w);
    A sum = (A)0;
    T most = least;
    long long right = end_of(c, sw, pw, kw, w);
    long long bottom = end_of(b, sh, ph, kh, h);
    long long back = end_of(a, sd, pd, kd, d);
    for (long long z = first_of(a, sd, pd); z < back; ++z) {
        for (long long r = first_of(b, sh, ph); r < bottom; ++r) {
            for (long long q = first_of(c, sw, pw); q < right; ++q) {
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
            long long n = span_of(a, sd, pd, kd, d, padded) * span_of(b, sh, ph, kh, h, padded);
            sum = sum * (A)(1.0 / (double)(n * span_of(c, sw, pw, kw, w, padded)));
        }
        y[i] = (T)sum;
    }
}

__device__ bool is_first(const T* plane, T most, long long a, long long b, long long c, long long z, long long r,
                         long long q, long long h, long long w, long long kh, long long kw, long long sd,
                         long long sh, long long sw, long long pd, long long ph, long long pw) {
    long long right = end_of(c, sw, pw, kw, w);
    long long bottom = end_of(b, sh, ph, kh, h);
    for (long long u = first_of(a, sd, pd); u <= z; ++u) {
        for (long long v = first_of(b, sh, ph); v < bottom; ++v) {
            for (long long t = first_of(c, sw, pw); t < right; ++t) {
                if (u == z && v == r && t == q) return true;
                if ((A)plane[(u * h + v) * w + t] == (A)most) return false;
            }
        }
    }
    return true;
}

extern "C" __global__ void pool_back(const T* dy, const T* x, const T* y, T* dx, EXTENTS) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long q = i % w;
    long long r = i / w % h;
    long long z = i / (w * h) % d;
    long long n = i / (w * h * d);
    const T* plane = x + n * (d * h * w);
    A mine = kind == 0 ? (A)x[i] : (A)0;
    A sum = (A)0;
    long long last_a = high_of(z, sd, pd, od);
    long long last_b = high_of(r, sh, ph, oh);
    long long last_c = high_of(q, sw, pw, ow);
    for (long long a = low_of(z, sd, pd, kd); a <= last_a; ++a) {
        for (long long b = low_of(r, sh, ph, kh); b <= last_b; ++b) {
            for (long long c = low_of(q, sw, pw, kw); c <= last_c; ++c) {
                long long o = ((n * od + a) * oh + b) * ow + c;
                A g = (A)dy[o];
                if (kind == 0) {
                    if (mine != (A)y[o]) continue;
                    if (is_first(plane, y[o], a, b, c, z, r, q, h, w, kh, kw, sd, sh, sw, pd, ph, pw)) sum += g;
                } else if (kind == 1) {
                    long long m = span_of(a, sd, pd, kd, d, padded) * span_of(b, sh, ph, kh, h, padded);
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
).replace("EXTENTS", _EXTENTS)
_WHOLE = (
    TOTAL
    + """
extern "C" __global__ void pool_whole(const T* x, T* y, long long size, A share) {
    __shared__ A s[1024];
    const T* plane = x + blockIdx.x * size;
    A sum = (A)0;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) sum += (A)plane[i];
    sum = total(s, sum);
    if (threadIdx.x == 0) y[blockIdx.x] = (T)(sum * share);
}
"""
)
_KINDS = {"max": 0, "avg": 1, "sum": 2}


def _words(params: Params, image: Shape, grid: Shape, dtype: DType) -> tuple[Any, ...]:
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
