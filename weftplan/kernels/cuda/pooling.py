"""Pooling, forward and backward: each thread computes several rows of one column, so that it divides only once.

The gradient of a maximum takes two launches. The first finds the largest element of each window. The second adds up,
for each element, the gradients of the windows in which it is the largest. It adds in the order of the windows, without
atomic additions. In a global sum or average, several threads add up each image. Formulas and ties are those of
:mod:`weftplan.ops.nn.pooling`. There are no kernels for p-norms and global maxima.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np

from weftplan.ops.core.cuda_source import TERMS, THREADS, each, floats, launch, width
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params, Shape

_WINDOW = """
__device__ __noinline__ A share_of(int m) {
    return (A)(1.0 / (double)m);
}

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
    return stride == 1 ? low : (int)((unsigned int)(low + stride - 1) / (unsigned int)stride);
}

__device__ int high_of(int i, int stride, int pad, int windows) {
    int high = stride == 1 ? i + pad : (int)((unsigned int)(i + pad) / (unsigned int)stride);
    return high < windows - 1 ? high : windows - 1;
}
"""
_NAMES = ["d", "h", "w", "od", "oh", "ow", "kd", "kh", "kw", "sd", "sh", "sw", "pd", "ph", "pw"]
_EXTENTS = f"{', '.join(f'long long {name}_' for name in _NAMES)}, T least, long long count"
_NARROW = " ".join(f"int {name} = (int){name}_;" for name in _NAMES)
"""CUDA C that casts the arguments to 32 bits. CuPy passes Python's numbers as 64 bits; arrays have fewer than 2^31
elements."""
_ROWS, _STRIP = 4, 8
"""Neighbouring rows of one column that a thread computes: forward, and backward."""
_THREAD_POSITION = """
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    NARROW
    unsigned int strips = (unsigned int)(TALL + SIZE - 1) / SIZEu;
    unsigned int line = i / (unsigned int)WIDE;
    int column = (int)(i - line * (unsigned int)WIDE);
    unsigned int slice = line / strips;
    int row = (int)(line - slice * strips) * SIZE;
    unsigned int image = slice / (unsigned int)DEEP;
    int layer = (int)(slice - image * (unsigned int)DEEP);
    int end = row + SIZE < TALL ? row + SIZE : TALL;"""
"""CUDA C for the place of a thread: ``SIZE`` rows of one column in a layer of an image."""


def _thread_position(deep: str, tall: str, wide: str, size: int) -> str:
    """Return ``_THREAD_POSITION`` for ``size`` rows per thread and the names of the extents."""
    text = _THREAD_POSITION.replace("DEEP", deep).replace("TALL", tall).replace("WIDE", wide).replace("SIZE", str(size))
    return text.lstrip("\n")


_WINDOWS = """
    int left = first_of(column, sw, pw);
    int right = end_of(column, sw, pw, kw, w);
    int front = first_of(layer, sd, pd);
    int back = end_of(layer, sd, pd, kd, d);
    const T* pixels = x + image * (unsigned int)(d * h * w);"""
_MAX_UNROLLED = 25
"""Maximum number of elements of a window whose loops are unrolled."""
_TAPS = f"""if (kd == 1 && kh * kw <= {_MAX_UNROLLED} && bottom - top == kh && right - left == kw) {{
            int corner = (front * h + top) * w + left;
            #pragma unroll
            for (int r = 0; r < kh; ++r) {{
                #pragma unroll
                for (int q = 0; q < kw; ++q) {{
                    int at = corner + r * w + q;
                    TAP
                }}
            }}
        }} else {{
            for (int z = front; z < back; ++z) {{
                for (int r = top; r < bottom; ++r) {{
                    for (int q = left; q < right; ++q) {{
                        int at = (z * h + r) * w + q;
                        TAP
                    }}
                }}
            }}
        }}"""
"""CUDA C that runs ``TAP`` for each element of a window in order: unrolled within the image, in loops at its border."""


def _with_taps(code: str) -> str:
    """Return ``code`` with each ``TAPS(statements)`` replaced by ``_TAPS`` with these statements."""
    return re.sub(
        r"TAPS\((.*?)\)\n(?=        \w)", lambda match: _TAPS.replace("TAP", match[1]) + "\n", code, flags=re.DOTALL
    )


_INSIDE = """    // Rows begin at multiples of STRIP, so within the image each window has the same rows of every strip.
    int offset = (ph - kh + sh + 64 * sh) / sh - 64;
    int from_b = row / sh + offset;
    int windows = (STRIP - 1 + ph) / sh - offset + 1;
    bool inside = STRIP % sh == 0 && windows <= STRIP + 2 && row + STRIP <= h && from_b >= 0 && from_b + windows <= oh;
"""
"""CUDA C for ``inside``: whether a strip has all its windows, so that the compiler knows the rows of each window."""
_SOURCE = (
    _with_taps(
        _WINDOW
        + """
extern "C" __global__ void pool_largest(const T* x, T* y, EXTENTS) {
OUTPUTS
WINDOWS
    for (; row < end; ++row) {
        int top = first_of(row, sh, ph);
        int bottom = end_of(row, sh, ph, kh, h);
        T most = least;
        TAPS(T value = pixels[at]; if ((A)value > (A)most || isnan((A)value)) most = value;)
        y[(slice * (unsigned int)oh + (unsigned int)row) * (unsigned int)ow + (unsigned int)column] = most;
    }
}

extern "C" __global__ void pool_sum(const T* x, T* y, EXTENTS) {
OUTPUTS
WINDOWS
    int area = span_of(layer, sd, pd, kd, d, PADDED) * span_of(column, sw, pw, kw, w, PADDED);
    int known = 0;
    A share = (A)1;
    for (; row < end; ++row) {
        int top = first_of(row, sh, ph);
        int bottom = end_of(row, sh, ph, kh, h);
        A sum = (A)0;
        TAPS(sum += (A)pixels[at];)
        int m = KIND == 1 ? area * span_of(row, sh, ph, kh, h, PADDED) : 0;
        if (m != known) {  // the same for all windows within the image
            known = m;
            share = share_of(m);
        }
        y[(slice * (unsigned int)oh + (unsigned int)row) * (unsigned int)ow + (unsigned int)column] = (T)(sum * share);
    }
}

extern "C" __global__ void find_largest(const T* x, int* places, EXTENTS) {
OUTPUTS
WINDOWS
    for (; row < end; ++row) {
        int top = first_of(row, sh, ph);
        int bottom = end_of(row, sh, ph, kh, h);
        int place = -1;
        bool odd = false;
        A most = (A)least;
        TAPS(A value = (A)pixels[at]; odd = odd || isnan(value);
             if (value > most || place < 0) { most = value; place = at; })
        places[(slice * (unsigned int)oh + (unsigned int)row) * (unsigned int)ow + (unsigned int)column] =
            odd ? -1 : place;  // no element is equal to a NaN
    }
}

extern "C" __global__ void pool_back(const T* dy, const int* places, T* dx, EXTENTS) {
INPUTS
    A sums[STRIP];
    #pragma unroll
    for (int k = 0; k < STRIP; ++k) sums[k] = (A)0;
    int begin = (layer * h + row) * w + column;
    int last_a = high_of(layer, sd, pd, od);
    int last_b = high_of(end - 1, sh, ph, oh);
    int low_b = low_of(row, sh, ph, kh);
    int last_c = high_of(column, sw, pw, ow);
    int low_c = low_of(column, sw, pw, kw);
INSIDE
    for (int a = low_of(layer, sd, pd, kd); a <= last_a; ++a) {
        unsigned int lines = (image * (unsigned int)od + (unsigned int)a) * (unsigned int)oh;
        if (inside) {
            #pragma unroll
            for (int j = 0; j < windows; ++j) {
                #pragma unroll 1
                for (int c = low_c; c <= last_c; ++c) {
                    unsigned int at = (lines + (unsigned int)(from_b + j)) * (unsigned int)ow + (unsigned int)c;
                    A g = (A)dy[at];
                    int far = places[at] - begin;
                    #pragma unroll
                    for (int t = 0; t < kh; ++t) {
                        int k = (offset + j) * sh - ph + t;
                        if (k >= 0 && k < STRIP && far == k * w) sums[k < 0 || k >= STRIP ? 0 : k] += g;
                    }
                }
            }
            continue;
        }
        for (int b = low_b; b <= last_b; ++b) {
            unsigned int line_of = (lines + (unsigned int)b) * (unsigned int)ow;
            #pragma unroll 1
            for (int c = low_c; c <= last_c; ++c) {
                A g = (A)dy[line_of + (unsigned int)c];
                int far = places[line_of + (unsigned int)c] - begin;
                #pragma unroll
                for (int k = 0; k < STRIP; ++k)
                    if (far == k * w) sums[k] += g;
            }
        }
    }
STORE
}

extern "C" __global__ void spread_back(const T* dy, T* dx, EXTENTS) {
INPUTS
    A sums[STRIP];
    #pragma unroll
    for (int k = 0; k < STRIP; ++k) sums[k] = (A)0;
    int known = 0;
    A share = (A)1;
    int low_a = low_of(layer, sd, pd, kd);
    int last_a = high_of(layer, sd, pd, od);
    int last_b = high_of(end - 1, sh, ph, oh);
    int low_b = low_of(row, sh, ph, kh);
    int last_c = high_of(column, sw, pw, ow);
    int low_c = low_of(column, sw, pw, kw);
INSIDE
    // Windows within the image all have the same share.
    inside = inside && from_b * sh >= ph && (from_b + windows - 1) * sh - ph + kh <= h;
    inside = inside && low_c * sw >= pw && last_c * sw - pw + kw <= w;
    inside = inside && low_a * sd >= pd && last_a * sd - pd + kd <= d;
    for (int a = low_a; a <= last_a; ++a) {
        unsigned int lines = (image * (unsigned int)od + (unsigned int)a) * (unsigned int)oh;
        if (inside) {
            #pragma unroll
            for (int j = 0; j < windows; ++j) {
                #pragma unroll 1
                for (int c = low_c; c <= last_c; ++c) {
                    A g = (A)dy[(lines + (unsigned int)(from_b + j)) * (unsigned int)ow + (unsigned int)c];
                    if (KIND == 1) g = g * (A)(1.0 / (double)(kd * kh * kw));
                    #pragma unroll
                    for (int t = 0; t < kh; ++t) {
                        int k = (offset + j) * sh - ph + t;
                        if (k >= 0 && k < STRIP) sums[k < 0 || k >= STRIP ? 0 : k] += g;
                    }
                }
            }
            continue;
        }
        int depth = span_of(a, sd, pd, kd, d, PADDED);
        for (int b = low_b; b <= last_b; ++b) {
            int area = KIND == 1 ? depth * span_of(b, sh, ph, kh, h, PADDED) : 0;
            int from = b * sh - ph - row;
            #pragma unroll 1
            for (int c = low_c; c <= last_c; ++c) {
                int m = area * span_of(c, sw, pw, kw, w, PADDED);
                if (m != known) {
                    known = m;
                    share = share_of(m);
                }
                A g = (A)dy[(lines + (unsigned int)b) * (unsigned int)ow + (unsigned int)c] * share;
                #pragma unroll
                for (int k = 0; k < STRIP; ++k)
                    if (k >= from && k < from + kh) sums[k] += g;
            }
        }
    }
STORE
}
"""
    )
    .replace("OUTPUTS\nWINDOWS", _thread_position("od", "oh", "ow", _ROWS) + _WINDOWS)
    .replace("INPUTS", _thread_position("d", "h", "w", _STRIP))
    .replace(
        "STORE",
        """    unsigned int to = (slice * (unsigned int)h + (unsigned int)row) * (unsigned int)w + (unsigned int)column;
    #pragma unroll
    for (int k = 0; k < STRIP; ++k)
        if (row + k < end) dx[to + (unsigned int)(k * w)] = (T)sums[k];""",
    )
    .replace("INSIDE", _INSIDE)
    .replace("STRIP", str(_STRIP))
    .replace("EXTENTS", _EXTENTS)
    .replace("NARROW", _NARROW)
)
_GLOBAL = """
extern "C" __global__ void pool_whole(const T* x, T* y, long long size, A share, int lanes, long long images) {
    __shared__ A s[256];
    unsigned int t = threadIdx.x;
    unsigned int wide = (unsigned int)lanes;
    unsigned int lane = t % wide;
    unsigned int image = blockIdx.x * (256u / wide) + t / wide;
    A sum = (A)0;
    if (image < (unsigned int)images) {
        const T* plane = x + image * (unsigned int)size;
        for (unsigned int i = lane; i < (unsigned int)size; i += wide) sum += (A)plane[i];
    }
    s[t] = sum;
    __syncthreads();
    for (unsigned int k = wide / 2u; k > 0; k /= 2) {
        if (lane < k) s[t] = s[t] + s[t + k];
        __syncthreads();
    }
    if (lane == 0 && image < (unsigned int)images) y[image] = (T)(s[t] * share);
}
"""
_FEW = 8
"""Minimum number of threads that add up one image in global pooling."""
_KINDS = {"max": 0, "avg": 1, "sum": 2}
_INDEX = np.dtype(np.int32)


def _words(params: Params, image: Shape, grid: Shape, dtype: DType) -> tuple[str, tuple[object, ...]]:
    """Return the CUDA C for a call, and its arguments after the arrays.

    Images of one or two dimensions get leading extents of 1.
    """
    rank = len(image)
    if params["global_pool"]:
        kernel, stride, pad = image, (1,) * rank, (0,) * rank
    else:
        kernel, stride, pad = params["kernel"], params["stride"] or (1,) * rank, (params["pad"] or (0,) * rank)[:rank]
    rows = [((fill,) * (3 - rank) + tuple(part)) for part, fill in
            ((image, 1), (grid, 1), (kernel, 1), (stride, 1), (pad, 0))]  # fmt: skip
    extents = [int(n) for row in rows for n in row]
    least = dtype.type(-np.inf)
    padded = int(params["count_include_pad"] is not False)
    kind = _KINDS[params["pool_type"]]
    code = source(tuple(extents[6:]), kind=kind, padded=padded, flat=rank < 3)
    return code, (*extents, least)


@lru_cache(maxsize=256)
def source(windows: tuple[int, ...], *, kind: int, padded: int, flat: bool) -> str:
    """Return the CUDA C with extents, strides, pads and kind of windows as constants, which speeds up divisions.

    Args:
        windows: kernel, stride and pad, each of three extents.
        kind: a value of ``_KINDS``.
        padded: 1 if padding counts in averages, otherwise 0.
        flat: whether images have no depth, which is then the constant 1.
    """
    constants = dict(zip(_NAMES[6:], windows, strict=True)) | ({"d": 1, "od": 1} if flat else {})
    text = re.sub(r"\bKIND\b", str(kind), _SOURCE)
    text = re.sub(r"\bPADDED\b", str(padded), text)
    for name, value in constants.items():
        text = text.replace(f"int {name} = (int){name}_;", f"int {name} = {value};")
    return text


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data, out = inputs[0], outputs[0]
    image = data.shape[2:]
    size = math.prod(image)
    if params["global_pool"] and params["pool_type"] != "max":
        share = accumulator(data.dtype).type(1.0 / size if params["pool_type"] == "avg" else 1.0)
        lanes = width(size, THREADS, terms=TERMS, least=_FEW)
        args = (data, out, size, share, np.int32(lanes), out.size)
        launch(ctx.xp, _GLOBAL, "pool_whole", -(-out.size * lanes // THREADS), THREADS, args, T=data.dtype)
        return
    name = "pool_largest" if params["pool_type"] == "max" else "pool_sum"
    code, words = _words(params, image, out.shape[2:], data.dtype)
    each(ctx.xp, code, name, _threads(out.shape, _ROWS), (data, out, *words), T=data.dtype)


def _threads(shape: Shape, rows: int) -> int:
    """Return the number of threads for an array if each thread computes ``rows`` neighbouring rows of a column."""
    *outer, tall, wide = (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape
    return math.prod(outer) * -(-tall // rows) * wide


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, out = inputs[0], outputs[0]
    code, words = _words(params, out.shape[2:], ograd.shape[2:], out.dtype)
    threads = _threads(out.shape, _STRIP)
    if params["pool_type"] != "max":
        each(ctx.xp, code, "spread_back", threads, (ograd, out, *words), T=out.dtype)
        return
    maxima = ctx.take(ograd.shape, _INDEX)
    each(ctx.xp, code, "find_largest", _threads(ograd.shape, _ROWS), (inputs[1], maxima, *words), T=out.dtype)
    each(ctx.xp, code, "pool_back", threads, (ograd, maxima, out, *words), T=out.dtype)


def _maxima_bytes(params: Params, inputs: Specs, outputs: Specs) -> int:
    return take_bytes((inputs[0].shape, _INDEX)) if params["pool_type"] == "max" else 0


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    if params["pool_type"] == "lp":
        return "p-norms are not written"
    if params["global_pool"] and params["pool_type"] == "max":
        return "the maximum of a whole image is a few launches of CuPy's own"
    return str(floats(0)(params, inputs, outputs))


for _name, _kernel, _bytes in (
    ("Pooling", _forward, lambda params, inputs, outputs: 0),
    ("_backward_Pooling", _backward, _maxima_bytes),
):
    provide(_name, Implementation(name="cuda", kernel=_kernel, workspace=_bytes, refusal=_refusal), on="gpu")
