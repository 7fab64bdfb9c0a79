"""BatchNorm, forward and backward: one block for each channel, one launch.

A block reads its channel two or three times; sums run by thread, then by halves, in one fixed order. A thread walks
through its elements by adding to a place of 32 bits: nothing is divided in a loop. The formulas are those of
:mod:`weftplan.ops.nn.batch_norm`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weftplan.ops.core.cuda_source import TOTAL, floats, launch, walking, width
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, OpContext, Params, Shape

_SOURCE = (
    TOTAL
    + """
extern "C" __global__ void normalize(const T* x, T* y, const A* gamma, const A* beta, A* moving_mean, A* moving_var,
                                     A* mean_out, A* inverse_out, long long channels, long long inner, long long count,
                                     A eps, A keep, A take, int learn, int update, int scaled, int write) {
    __shared__ A s[1024];
    PLACES
    A mean = (A)0;
    A var = (A)0;
    if (learn == 1) {
        A sum = (A)0;
        WALK
            sum += (A)x[at];
        STEP
        mean = total(s, sum) / (A)count;
        sum = (A)0;
        WALK
            A d = (A)x[at] - mean;
            sum += d * d;
        STEP
        var = total(s, sum) / (A)count;
        if (update == 1 && threadIdx.x == 0) {
            moving_mean[c] = moving_mean[c] * keep + mean * take;
            moving_var[c] = moving_var[c] * keep + var * take;
        }
    } else {
        mean = moving_mean[c];
        var = moving_var[c];
    }
    A inverse = (A)1 / sqrt(var + eps);
    if (threadIdx.x == 0) {
        mean_out[c] = mean;
        inverse_out[c] = inverse;
    }
    if (write == 0) return;
    A scale = scaled == 1 ? inverse * gamma[c] : inverse;
    A shift = beta[c] - mean * scale;
    WALK
        y[at] = (T)((A)x[at] * scale + shift);
    STEP
}

extern "C" __global__ void normalize_back(const T* dy, const T* x, T* dx, const A* gamma, const A* mean_in,
                                          const A* inverse_in, A* dgamma, A* dbeta, long long channels,
                                          long long inner, long long count, int given, int scaled, int write) {
    __shared__ A s[1024];
    PLACES
    A mean = mean_in[c];
    A inverse = inverse_in[c];
    A sum = (A)0;
    A product = (A)0;
    WALK
        A g = (A)dy[at];
        sum += g;
        product += ((A)x[at] - mean) * g;
    STEP
    sum = total(s, sum);
    A slope = total(s, product) * inverse;
    if (threadIdx.x == 0) {
        dgamma[c] = scaled == 1 ? slope : (A)0;
        dbeta[c] = sum;
    }
    if (write == 0) return;
    A scale = scaled == 1 ? inverse * gamma[c] : inverse;
    A share = scale * ((A)-1 / (A)count);
    A steep = slope * inverse * share;
    A offset = sum * share - steep * mean;
    WALK
        A g = (A)dy[at] * scale;
        if (given == 0) g = g + ((A)x[at] * steep + offset);
        dx[at] = (T)g;
    STEP
}
"""
)
_SOURCE = walking(_SOURCE)


def _extents(params: Params, shape: Shape) -> tuple[int, int, int]:
    """(channels, inner, elements of a channel)."""
    axis = params["axis"] % len(shape)
    inner = math.prod(shape[axis + 1 :])
    return shape[axis], inner, math.prod(shape[:axis]) * inner


def _flag(value: Any) -> Any:
    return np.int32(bool(value))


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data, gamma, beta, moving_mean, moving_var = inputs
    channels, inner, count = _extents(params, data.shape)
    acc = moving_mean.dtype
    mean, inverse = (ctx.take((channels,), acc) if out is None else out for out in outputs[1:])
    spare = ctx.take((1,), data.dtype) if outputs[0] is None else outputs[0]
    learn = ctx.is_train and not params["use_global_stats"]
    args = (
        data, spare, beta if params["fix_gamma"] else gamma, beta, moving_mean, moving_var, mean, inverse,
        channels, inner, count, acc.type(params["eps"]), acc.type(params["momentum"]),
        acc.type(1.0 - params["momentum"]), _flag(learn), _flag(not ctx.recompute), _flag(not params["fix_gamma"]),
        _flag(outputs[0] is not None),
    )  # fmt: skip
    launch(ctx.xp, _SOURCE, "normalize", channels, width(count), args, T=data.dtype)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, data, gamma, mean, inverse = inputs
    channels, inner, count = _extents(params, data.shape)
    ggrad, bgrad = (ctx.take((channels,), mean.dtype) if out is None else out for out in outputs[1:])
    spare = ctx.take((1,), data.dtype) if outputs[0] is None else outputs[0]
    args = (
        ograd, data, spare, mean if params["fix_gamma"] else gamma, mean, inverse, ggrad, bgrad, channels, inner, count,
        _flag(params["use_global_stats"]), _flag(not params["fix_gamma"]), _flag(outputs[0] is not None),
    )  # fmt: skip
    launch(ctx.xp, _SOURCE, "normalize_back", channels, width(count), args, T=data.dtype)


def _refusal(vector: int) -> Any:
    def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
        data, acc = inputs[0].dtype, inputs[vector].dtype
        if acc != accumulator(data):
            return f"written for statistics of {accumulator(data)}, not {acc}"
        return str(floats(0)(params, inputs, outputs))

    return refusal


def _bytes(position: int) -> Any:
    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        data = inputs[position]
        vector = ((_extents(params, data.shape)[0],), accumulator(data.dtype))
        return take_bytes(vector, vector, ((1,), data.dtype))

    return workspace


provide(
    "BatchNorm",
    Implementation(name="cuda", kernel=_forward, workspace=_bytes(0), refusal=_refusal(3)),
    on="gpu",
)
provide(
    "_backward_BatchNorm",
    Implementation(name="cuda", kernel=_backward, workspace=_bytes(1), refusal=_refusal(3)),
    on="gpu",
)
