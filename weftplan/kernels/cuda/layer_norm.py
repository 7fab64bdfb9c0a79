"""LayerNorm and InstanceNorm: forward in one launch, backward in at most two.

Forward and the data's gradient use a block for each normalised row. The gradients of gamma and beta use a block for
each element of gamma, or for ``_SIDE`` elements if these are contiguous in the data. They sum over all rows in a fixed
order. The formulas and the four dimensions of the data are those of :mod:`weftplan.ops.nn.layer_norm`.
"""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.cuda_source import TERMS, TOTAL, WIDE, floats, launch, width
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, Kernel, OpContext, Params, Shape, WorkspaceRule
from weftplan.ops.nn.layer_norm import View, instance_view, layer_view

_SIDE = 32
"""Elements of gamma per block of ``sum_over_rows`` if they are contiguous in the data; otherwise a block has one."""
_SOURCE = (
    TOTAL
    + """
extern "C" __global__ void normalize_rows(const T* x, const T* gamma, const T* beta, T* y, A* mean_out, A* std_out,
                                          long long rows, long long size, long long inner, A eps, int by_row,
                                          int write) {
    __shared__ A s[1024];
    unsigned int wide = (unsigned int)inner;
    unsigned int end = (unsigned int)size;
    unsigned int row = blockIdx.x / wide;
    unsigned int base = row * end * wide + (blockIdx.x - row * wide);
    unsigned int own = row % (unsigned int)rows;
    A sum = (A)0;
    for (unsigned int f = threadIdx.x; f < end; f += blockDim.x) sum += (A)x[base + f * wide];
    A mean = total(s, sum) / (A)size;
    sum = (A)0;
    for (unsigned int f = threadIdx.x; f < end; f += blockDim.x) {
        A d = (A)x[base + f * wide] - mean;
        sum += d * d;
    }
    A deviation = sqrt(total(s, sum) / (A)size + eps);
    if (threadIdx.x == 0) {
        mean_out[blockIdx.x] = mean;
        std_out[blockIdx.x] = deviation;
    }
    if (write == 0) return;
    A inverse = (A)1 / deviation;
    for (unsigned int f = threadIdx.x; f < end; f += blockDim.x) {
        unsigned int v = by_row == 1 ? own : f;
        y[base + f * wide] = (T)(((A)x[base + f * wide] - mean) * inverse * (A)gamma[v] + (A)beta[v]);
    }
}

extern "C" __global__ void normalize_rows_back(const T* dy, const T* x, const T* gamma, const A* mean_in,
                                               const A* std_in, T* dx, long long rows, long long size,
                                               long long inner, int by_row) {
    __shared__ A s[1024];
    unsigned int wide = (unsigned int)inner;
    unsigned int end = (unsigned int)size;
    unsigned int row = blockIdx.x / wide;
    unsigned int base = row * end * wide + (blockIdx.x - row * wide);
    unsigned int own = row % (unsigned int)rows;
    A mean = mean_in[blockIdx.x];
    A inverse = (A)1 / std_in[blockIdx.x];
    A sum = (A)0;
    A slope = (A)0;
    for (unsigned int f = threadIdx.x; f < end; f += blockDim.x) {
        A h = (A)dy[base + f * wide] * (A)gamma[by_row == 1 ? own : f];
        sum += h;
        slope += h * (((A)x[base + f * wide] - mean) * inverse);
    }
    sum = total(s, sum) / (A)size;
    slope = total(s, slope) / (A)size;
    for (unsigned int f = threadIdx.x; f < end; f += blockDim.x) {
        A h = (A)dy[base + f * wide] * (A)gamma[by_row == 1 ? own : f];
        A normal = ((A)x[base + f * wide] - mean) * inverse;
        dx[base + f * wide] = (T)((h - sum - normal * slope) * inverse);
    }
}

extern "C" __global__ void sum_over_rows(const T* dy, const T* x, const A* mean, const A* deviation, T* dgamma,
                                         T* dbeta, long long size, long long inner, long long count, int side,
                                         int by_row) {
    __shared__ A s[1024];
    __shared__ A z[1024];
    int t = threadIdx.x;
    int line = t / side;
    int lines = blockDim.x / side;
    unsigned int v = blockIdx.x * side + t % side;
    unsigned int wide = (unsigned int)inner;
    unsigned int pitch = (unsigned int)size;
    unsigned int outer = line / wide;  // of term o, which is walked through without a division
    unsigned int column = line - outer * wide;
    unsigned int outer_step = lines / wide;
    unsigned int column_step = lines - outer_step * wide;
    A slope = (A)0;
    A sum = (A)0;
    if (v < pitch) {
        for (unsigned int o = line; o < (unsigned int)count; o += lines) {
            unsigned int place = outer * pitch + v;
            unsigned int at = place * wide + column;
            unsigned int row = by_row == 1 ? place : o;
            A g = (A)dy[at];
            sum += g;
            slope += g * (((A)x[at] - mean[row]) / deviation[row]);
            outer += outer_step;
            column += column_step;
            if (column >= wide) {
                column -= wide;
                ++outer;
            }
        }
    }
    s[t] = slope;
    z[t] = sum;
    __syncthreads();
    for (int k = lines / 2; k > 0; k /= 2) {
        if (line < k) {
            s[t] = s[t] + s[t + k * side];
            z[t] = z[t] + z[t + k * side];
        }
        __syncthreads();
    }
    if (line == 0 && v < size) {
        dgamma[v] = (T)s[t];
        dbeta[v] = (T)z[t];
    }
}
"""
)


def _flag(value: object) -> np.int32:
    return np.int32(bool(value))


def _forward(view: View, *, by_row: bool) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        data, gamma, beta = inputs
        (batch, rows, size, inner), _ = view(params, data.shape)
        acc = accumulator(data.dtype)
        mean, deviation = (ctx.take((batch * rows * inner,), acc) if out is None else out for out in outputs[1:])
        spare = ctx.take((1,), data.dtype) if outputs[0] is None else outputs[0]
        args = (
            data, gamma, beta, spare, mean, deviation, rows, size, inner, acc.type(params["eps"]),
            _flag(by_row), _flag(outputs[0] is not None),
        )  # fmt: skip
        launch(ctx.xp, _SOURCE, "normalize_rows", batch * rows * inner, width(size, terms=TERMS), args, T=data.dtype)

    return kernel


def _backward(view: View, *, by_row: bool) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        ograd, data, gamma, mean, deviation = inputs
        (batch, rows, size, inner), _ = view(params, data.shape)
        if outputs[1] is not None or outputs[2] is not None:
            dgamma, dbeta = (ctx.take(gamma.shape, gamma.dtype) if out is None else out for out in outputs[1:])
            within = size if by_row else inner
            count, side = batch * within, 1 if within > 1 else _SIDE
            lines = width(count, WIDE // side)
            args = (ograd, data, mean, deviation, dgamma, dbeta, gamma.size, within, count, np.int32(side),
                    _flag(by_row))  # fmt: skip
            blocks = -(-gamma.size // side)
            launch(ctx.xp, _SOURCE, "sum_over_rows", blocks, lines * side, args, T=data.dtype)
        if outputs[0] is not None:  # last, because it may share memory with an input
            name, blocks = "normalize_rows_back", batch * rows * inner
            data_args = (ograd, data, gamma, mean, deviation, outputs[0], rows, size, inner, _flag(by_row))
            launch(ctx.xp, _SOURCE, name, blocks, width(size, terms=TERMS), data_args, T=data.dtype)

    return kernel


def _bytes(view: View, *, backward: bool) -> WorkspaceRule:
    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        data = inputs[1] if backward else inputs[0]
        if backward:
            vector = (inputs[2].shape, data.dtype)
            return take_bytes(vector, vector)
        shape: Shape = view(params, data.shape)[0]
        row = ((math.prod(shape) // shape[2],), accumulator(data.dtype))
        return take_bytes(row, row, ((1,), data.dtype))

    return workspace


for _name, _view, _by_row in (("LayerNorm", layer_view, False), ("InstanceNorm", instance_view, True)):
    provide(
        _name,
        Implementation(
            name="cuda",
            kernel=_forward(_view, by_row=_by_row),
            workspace=_bytes(_view, backward=False),
            refusal=floats(0),
        ),
        on="gpu",
    )
    provide(
        f"_backward_{_name}",
        Implementation(
            name="cuda",
            kernel=_backward(_view, by_row=_by_row),
            workspace=_bytes(_view, backward=True),
            refusal=floats(1),
        ),
        on="gpu",
    )
