"""Softmax and its losses, forward and backward.

Each row of classes has a block. If the classes of a row are at least ``_MIN_DISTANCE`` elements apart
(``multi_output``, or an axis that is not the last), each row has a thread instead. Neighbouring threads compute
neighbouring rows, so that a warp reads consecutive memory.

The formulas are those of :mod:`weftplan.ops.nn.softmax_core` and :mod:`weftplan.ops.nn.softmax_output`. The device
counts valid labels, so the host does not wait.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.cuda_source import LARGEST, TERMS, TOTAL, WIDE, each, floats, launch, width
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, Kernel, OpContext, Params, Shape
from weftplan.ops.nn.softmax_core import as_rows
from weftplan.support.array_types import RawArray

_ROWS = (
    TOTAL
    + LARGEST
    + """
extern "C" __global__ void softmax_rows(const T* x, T* y, long long classes, long long inner, int logarithm) {
    __shared__ A s[1024];
    unsigned int step = (unsigned int)inner;
    unsigned int end = (unsigned int)classes;
    unsigned int outer = blockIdx.x / step;
    unsigned int base = outer * end * step + (blockIdx.x - outer * step);
    A most = (A)x[base];
    for (unsigned int c = threadIdx.x; c < end; c += blockDim.x) most = fmax(most, (A)x[base + c * step]);
    most = largest(s, most);
    A sum = (A)0;
    #pragma unroll 4
    for (unsigned int c = threadIdx.x; c < end; c += blockDim.x) sum += exp((A)x[base + c * step] - most);
    sum = total(s, sum);
    A power = log(sum);
    A share = (A)1 / sum;
    #pragma unroll 4
    for (unsigned int c = threadIdx.x; c < end; c += blockDim.x) {
        A z = (A)x[base + c * step] - most;
        y[base + c * step] = (T)(logarithm == 1 ? z - power : exp(z) * share);
    }
}

extern "C" __global__ void softmax_rows_back(const T* dy, const T* y, T* dx, long long classes, long long inner,
                                             int logarithm) {
    __shared__ A s[1024];
    unsigned int step = (unsigned int)inner;
    unsigned int end = (unsigned int)classes;
    unsigned int outer = blockIdx.x / step;
    unsigned int base = outer * end * step + (blockIdx.x - outer * step);
    A sum = (A)0;
    for (unsigned int c = threadIdx.x; c < end; c += blockDim.x) {
        A g = (A)dy[base + c * step];
        sum += logarithm == 1 ? g : g * (A)y[base + c * step];
    }
    sum = total(s, sum);
    for (unsigned int c = threadIdx.x; c < end; c += blockDim.x) {
        A g = (A)dy[base + c * step];
        A out = (A)y[base + c * step];
        dx[base + c * step] = (T)(logarithm == 1 ? g - exp(out) * sum : (g - sum) * out);
    }
}

extern "C" __global__ void softmax_columns(const T* x, T* y, long long classes, long long inner, int logarithm,
                                           long long count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    unsigned int step = (unsigned int)inner;
    unsigned int outer = i / step;
    unsigned int begin = outer * (unsigned int)classes * step + (i - outer * step);
    unsigned int end = begin + (unsigned int)classes * step;
    A most = (A)x[begin];
    for (unsigned int at = begin; at < end; at += step) most = fmax(most, (A)x[at]);
    A sum = (A)0;
    for (unsigned int at = begin; at < end; at += step) sum += exp((A)x[at] - most);
    A power = log(sum);
    A share = (A)1 / sum;
    for (unsigned int at = begin; at < end; at += step) {
        A z = (A)x[at] - most;
        y[at] = (T)(logarithm == 1 ? z - power : exp(z) * share);
    }
}

extern "C" __global__ void softmax_columns_back(const T* dy, const T* y, T* dx, long long classes, long long inner,
                                                int logarithm, long long count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    unsigned int step = (unsigned int)inner;
    unsigned int outer = i / step;
    unsigned int begin = outer * (unsigned int)classes * step + (i - outer * step);
    unsigned int end = begin + (unsigned int)classes * step;
    A sum = (A)0;
    for (unsigned int at = begin; at < end; at += step) {
        A g = (A)dy[at];
        sum += logarithm == 1 ? g : g * (A)y[at];
    }
    for (unsigned int at = begin; at < end; at += step) {
        A g = (A)dy[at];
        A out = (A)y[at];
        dx[at] = (T)(logarithm == 1 ? g - exp(out) * sum : (g - sum) * out);
    }
}
"""
)
_MIN_DISTANCE = 8
"""Each thread computes a row if the distance in elements between the classes of a row is at least this number; a warp
then reads whole sectors of memory."""
_LABELS = (
    TOTAL
    + """
extern "C" __global__ void count_labels(const L* label, A* factor, double scale, long long ignore, long long size) {
    __shared__ A s[1024];
    A count = (A)0;
    for (long long i = threadIdx.x; i < size; i += blockDim.x)
        if ((long long)label[i] != ignore) count += (A)1;
    count = total(s, count);
    if (threadIdx.x == 0) factor[0] = (A)(scale / (double)(count < (A)1 ? (A)1 : count));
}

extern "C" __global__ void count_above(const T* x, A* factor, double scale, A least, long long size) {
    __shared__ A s[1024];
    A count = (A)0;
    for (long long i = threadIdx.x; i < size; i += blockDim.x)
        if ((A)x[i] > least) count += (A)1;
    count = total(s, count);
    if (threadIdx.x == 0) factor[0] = (A)(scale / (double)(count < (A)1 ? (A)1 : count));
}

extern "C" __global__ void fill_with(const A* factor, T* out, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = (T)factor[0];
}

extern "C" __global__ void subtract_labels(const T* y, const L* label, const T* dy, const A* factor, T* dx,
                                           long long classes, long long inner, long long ignore, A hit, A rest, A scale,
                                           int ignores, int counted, int weighted, long long count) {
    unsigned int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8u;
    if (first >= (unsigned int)count) return;
    unsigned int last = first + 8u < (unsigned int)count ? first + 8u : (unsigned int)count;
    unsigned int wide = (unsigned int)inner;
    unsigned int before = first / wide;
    unsigned int column = first - before * wide;
    unsigned int outer = before / (unsigned int)classes;
    unsigned int c = before - outer * (unsigned int)classes;
    A times = counted == 1 ? factor[0] : scale;
    for (unsigned int i = first; i < last; ++i) {  // neighbouring elements: no division but for the first
        long long mine = (long long)label[outer * wide + column];
        A g = (A)y[i] - rest;
        if (mine == (long long)c) g -= hit;
        if (ignores == 1 && mine == ignore) g = (A)0;
        g = g * times;
        if (weighted == 1) g = g * (A)dy[i];
        dx[i] = (T)g;
        if (++column == wide) {
            column = 0u;
            if (++c == (unsigned int)classes) {
                c = 0u;
                ++outer;
            }
        }
    }
}
"""
)


def _flag(value: object) -> np.int32:
    return np.int32(bool(value))


def _run(ctx: OpContext, name: str, arrays: tuple[RawArray, ...], rows: Shape, *, log: bool) -> None:
    outer, classes, inner = rows
    args = (*arrays, classes, inner, _flag(log))
    if inner >= _MIN_DISTANCE:
        each(ctx.xp, _ROWS, name.replace("rows", "columns"), outer * inner, args, T=arrays[0].dtype)
        return
    launch(ctx.xp, _ROWS, name, outer * inner, width(classes, terms=2 * TERMS), args, T=arrays[0].dtype)


def _softmax(log: bool) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        rows = as_rows(inputs[0].shape, params["axis"])
        _run(ctx, "softmax_rows", (inputs[0], outputs[0]), rows, log=log)

    return kernel


def _output_rows(params: Params, shape: Shape) -> Shape:
    if params["multi_output"]:
        return as_rows(shape, 1)
    return as_rows(shape, -1) if params["preserve_shape"] else (shape[0], math.prod(shape[1:]), 1)


def _output(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    _run(ctx, "softmax_rows", (inputs[0], outputs[0]), _output_rows(params, inputs[0].shape), log=False)


def _output_backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    output, label = inputs[:2]
    out = outputs[0]
    xp, acc = ctx.xp, accumulator(out.dtype)
    outer, classes, inner = _output_rows(params, output.shape)
    alpha = 0.0 if params["multi_output"] else params["smooth_alpha"]
    off_label = alpha / (classes - 1) if alpha and classes > 1 else 0.0
    ignore = int(params["ignore_label"])
    factor = ctx.take((1,), acc)
    scale = params["grad_scale"] / inner
    if params["normalization"] == "valid":
        counted = (label, factor, float(params["grad_scale"]), ignore, label.size)
        launch(xp, _LABELS, "count_labels", 1, WIDE, counted, T=out.dtype, L=label.dtype)
    elif params["normalization"] == "batch":
        scale /= outer if params["multi_output"] else label.size
    args = (
        output, label, inputs[2] if params["out_grad"] else output, factor, out, classes, inner, ignore,
        acc.type(1.0 - alpha - off_label), acc.type(off_label), acc.type(scale), _flag(params["use_ignore"]),
        _flag(params["normalization"] == "valid"), _flag(params["out_grad"]),
    )  # fmt: skip
    each(xp, _LABELS, "subtract_labels", out.size, args, lanes=8, T=out.dtype, L=label.dtype)


def _make_loss_backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data, out = inputs[0], outputs[0]
    acc = accumulator(out.dtype)
    factor = ctx.take((1,), acc)
    args = (data, factor, float(params["grad_scale"]), acc.type(params["valid_thresh"]), data.size)
    launch(ctx.xp, _LABELS, "count_above", 1, WIDE, args, T=out.dtype, L=out.dtype)
    each(ctx.xp, _LABELS, "fill_with", out.size, (factor, out), T=out.dtype, L=out.dtype)


def _plain(params: Params, inputs: Specs, outputs: Specs) -> str:
    if params["temperature"] not in (None, 1.0) or params.get("use_length") or len({s.dtype for s in inputs}) > 1:
        return "temperatures and lengths are not written"
    if outputs[0].dtype != inputs[0].dtype:
        return "written for results of the dtype of the data"
    return str(floats(0)(params, inputs, outputs))


def _labelled(params: Params, inputs: Specs, outputs: Specs) -> str:
    if inputs[1].shape == inputs[0].shape:
        return "probabilities as labels are two launches"
    if inputs[1].dtype.name not in ("float16", "float32", "float64", "int32", "int64", "uint8", "int8"):
        return f"written for labels of other dtypes than {inputs[1].dtype}"
    return str(floats(0)(params, inputs, outputs))


def _valid(params: Params, inputs: Specs, outputs: Specs) -> str:
    return str(floats(0)(params, inputs, outputs)) if inputs else "a constant is one launch"


def _nothing(params: Params, inputs: Specs, outputs: Specs) -> int:
    return 0


def _factor(params: Params, inputs: Specs, outputs: Specs) -> int:
    return take_bytes(((1,), accumulator(outputs[0].dtype)))


def _softmax_gradient(log: bool) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        rows = as_rows(inputs[0].shape, params["axis"])
        _run(ctx, "softmax_rows_back", (inputs[0], inputs[1], outputs[0]), rows, log=log)

    return kernel


for _name, _kernel, _bytes, _refusal in (
    ("softmax", _softmax(log=False), _nothing, _plain),
    ("log_softmax", _softmax(log=True), _nothing, _plain),
    ("_backward_softmax", _softmax_gradient(log=False), _nothing, _plain),
    ("_backward_log_softmax", _softmax_gradient(log=True), _nothing, _plain),
    ("SoftmaxOutput", _output, _nothing, floats(0)),
    ("_backward_SoftmaxOutput", _output_backward, _factor, _labelled),
    ("_backward_MakeLoss", _make_loss_backward, _factor, _valid),
):
    provide(_name, Implementation(name="cuda", kernel=_kernel, workspace=_bytes, refusal=_refusal), on="gpu")
