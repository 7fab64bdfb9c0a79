"""BatchNorm, forward and backward: one launch with a block per channel, or several launches with more blocks.

A few large channels would leave most of a GPU idle, so each is cut into pieces. The first launches write the sums of
the pieces to scratch, and the last launch adds them up. Sums are added by thread, then by halves of a block, then by
piece, in an order that depends only on shapes. A thread steps through its elements by adding to a 32-bit offset, so no
loop contains a division. The formulas are those of :mod:`weftplan.ops.nn.batch_norm`.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.cuda_source import TERMS, TOTAL, floats, launch, walking, width
from weftplan.ops.core.implementations import Implementation, Refusal, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, OpContext, Params, Shape, WorkspaceRule

_SOURCE = (
    TOTAL
    + """
__device__ A joined(const A* parts, unsigned int pieces) {
    A sum = (A)0;
    for (unsigned int k = 0; k < pieces; ++k) sum += parts[k];
    return sum;
}

extern "C" __global__ void piece_sums(const T* x, A* sums, long long channels, long long inner, long long count,
                                      long long pieces) {
    __shared__ A s[1024];
    PLACES
    A sum = (A)0;
    WALK
        sum += (A)x[at];
    STEP
    sum = total(s, sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

extern "C" __global__ void piece_squares(const T* x, const A* sums, A* squares, long long channels, long long inner,
                                         long long count, long long pieces) {
    __shared__ A s[1024];
    PLACES
    A mean = joined(sums + c * (unsigned int)pieces, (unsigned int)pieces) / (A)count;
    A sum = (A)0;
    WALK
        A d = (A)x[at] - mean;
        sum += d * d;
    STEP
    sum = total(s, sum);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

extern "C" __global__ void normalize(const T* x, T* y, const A* gamma, const A* beta, A* moving_mean, A* moving_var,
                                     A* mean_out, A* inverse_out, const A* sums, const A* squares, long long channels,
                                     long long inner, long long count, long long pieces, A eps, A keep, A take,
                                     int learn, int update, int scaled, int write) {
    __shared__ A s[1024];
    PLACES
    A mean = (A)0;
    A var = (A)0;
    if (learn == 0) {
        mean = moving_mean[c];
        var = moving_var[c];
    } else if (pieces > 1) {
        mean = joined(sums + c * (unsigned int)pieces, (unsigned int)pieces) / (A)count;
        var = joined(squares + c * (unsigned int)pieces, (unsigned int)pieces) / (A)count;
    } else {
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
    }
    bool tells = piece == 0 && threadIdx.x == 0;
    if (learn == 1 && update == 1 && tells) {
        moving_mean[c] = moving_mean[c] * keep + mean * take;
        moving_var[c] = moving_var[c] * keep + var * take;
    }
    A inverse = (A)1 / sqrt(var + eps);
    if (tells) {
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

extern "C" __global__ void piece_products(const T* dy, const T* x, const A* mean_in, A* sums, A* products,
                                          long long channels, long long inner, long long count, long long pieces) {
    __shared__ A s[1024];
    PLACES
    A mean = mean_in[c];
    A sum = (A)0;
    A product = (A)0;
    WALK
        A g = (A)dy[at];
        sum += g;
        product += ((A)x[at] - mean) * g;
    STEP
    sum = total(s, sum);
    product = total(s, product);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
        products[blockIdx.x] = product;
    }
}

extern "C" __global__ void normalize_back(const T* dy, const T* x, T* dx, const A* gamma, const A* mean_in,
                                          const A* inverse_in, A* dgamma, A* dbeta, const A* sums, const A* products,
                                          long long channels, long long inner, long long count, long long pieces,
                                          int given, int scaled, int write) {
    __shared__ A s[1024];
    PLACES
    A mean = mean_in[c];
    A inverse = inverse_in[c];
    A sum = (A)0;
    A product = (A)0;
    if (pieces > 1) {
        sum = joined(sums + c * (unsigned int)pieces, (unsigned int)pieces);
        product = joined(products + c * (unsigned int)pieces, (unsigned int)pieces);
    } else {
        WALK
            A g = (A)dy[at];
            sum += g;
            product += ((A)x[at] - mean) * g;
        STEP
        sum = total(s, sum);
        product = total(s, product);
    }
    A slope = product * inverse;
    if (piece == 0 && threadIdx.x == 0) {
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
    """Return the number of channels, the elements after the channel axis, and the elements of a channel."""
    axis = params["axis"] % len(shape)
    inner = math.prod(shape[axis + 1 :])
    return shape[axis], inner, math.prod(shape[:axis]) * inner


_PIECE, _BLOCKS, _MAX_PIECES = 4096, 512, 64
"""Minimum elements of a piece, blocks that fill a GPU (132 multiprocessors with four each), maximum pieces."""


def _pieces(channels: int, count: int) -> int:
    """Return the number of pieces of each channel. It depends only on shapes, because it determines the order of sums.

    >>> _pieces(64, 32 * 112 * 112), _pieces(512, 10**6), _pieces(3, 5000)
    (8, 1, 1)
    """
    return max(1, min(_MAX_PIECES, count // _PIECE, _BLOCKS // channels)) if channels else 1


def _flag(value: object) -> np.int32:
    return np.int32(bool(value))


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data, gamma, beta, moving_mean, moving_var = inputs
    channels, inner, count = _extents(params, data.shape)
    acc = moving_mean.dtype
    mean, inverse = (ctx.take((channels,), acc) if out is None else out for out in outputs[1:])
    spare = ctx.take((1,), data.dtype) if outputs[0] is None else outputs[0]
    learn = ctx.is_train and not params["use_global_stats"]
    pieces = _pieces(channels, count)
    walk, threads = (channels, inner, count, pieces), width(-(-count // pieces), terms=TERMS)
    sums = squares = beta
    if learn and pieces > 1:
        sums, squares = (ctx.take((channels * pieces,), acc) for _ in range(2))
        launch(ctx.xp, _SOURCE, "piece_sums", channels * pieces, threads, (data, sums, *walk), T=data.dtype)
        more = (data, sums, squares, *walk)
        launch(ctx.xp, _SOURCE, "piece_squares", channels * pieces, threads, more, T=data.dtype)
    args = (
        data, spare, beta if params["fix_gamma"] else gamma, beta, moving_mean, moving_var, mean, inverse, sums,
        squares, *walk, acc.type(params["eps"]), acc.type(params["momentum"]), acc.type(1.0 - params["momentum"]),
        _flag(learn), _flag(not ctx.recompute), _flag(not params["fix_gamma"]), _flag(outputs[0] is not None),
    )  # fmt: skip
    launch(ctx.xp, _SOURCE, "normalize", channels * pieces, threads, args, T=data.dtype)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, data, gamma, mean, inverse = inputs
    channels, inner, count = _extents(params, data.shape)
    ggrad, bgrad = (ctx.take((channels,), mean.dtype) if out is None else out for out in outputs[1:])
    spare = ctx.take((1,), data.dtype) if outputs[0] is None else outputs[0]
    pieces = _pieces(channels, count)
    walk, threads = (channels, inner, count, pieces), width(-(-count // pieces), terms=TERMS)
    sums = products = mean
    if pieces > 1:
        sums, products = (ctx.take((channels * pieces,), mean.dtype) for _ in range(2))
        more = (ograd, data, mean, sums, products, *walk)
        launch(ctx.xp, _SOURCE, "piece_products", channels * pieces, threads, more, T=data.dtype)
    args = (
        ograd, data, spare, mean if params["fix_gamma"] else gamma, mean, inverse, ggrad, bgrad, sums, products, *walk,
        _flag(params["use_global_stats"]), _flag(not params["fix_gamma"]), _flag(outputs[0] is not None),
    )  # fmt: skip
    launch(ctx.xp, _SOURCE, "normalize_back", channels * pieces, threads, args, T=data.dtype)


def _refusal(vector: int) -> Refusal:
    def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
        data, acc = inputs[0].dtype, inputs[vector].dtype
        if acc != accumulator(data):
            return f"written for statistics of {accumulator(data)}, not {acc}"
        return str(floats(0)(params, inputs, outputs))

    return refusal


def _bytes(position: int) -> WorkspaceRule:
    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        data = inputs[position]
        channels, _, count = _extents(params, data.shape)
        acc, pieces = accumulator(data.dtype), _pieces(channels, count)
        sums = [((channels * pieces,), acc)] * 2 if pieces > 1 else []
        return take_bytes(((channels,), acc), ((channels,), acc), ((1,), data.dtype), *sums)

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
