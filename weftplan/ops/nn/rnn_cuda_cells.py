"""Fused elementwise CUDA kernels of LSTM and GRU cells, forward and backward, with one launch per step.

The formulas are those of :mod:`weftplan.ops.nn.rnn_cells`, which calls these functions on a GPU.
"""

from __future__ import annotations

import numpy as np

from weftplan.ops.core.cuda_source import each
from weftplan.support.array_types import ArrayModule, RawArray

_SOURCE = """
__device__ A sigmoid(A x) {
    return (A)1 / (exp(-x) + (A)1);
}

extern "C" __global__ void lstm_step(T* gates, const T* product, const T* cell, T* next_cell, T* next_state,
                                     long long size, long long count) {
    long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    long long at = k / size * 4 * size + k % size;
    A i = sigmoid((A)gates[at] + (A)product[at]);
    A f = sigmoid((A)gates[at + size] + (A)product[at + size]);
    A g = tanh((A)gates[at + 2 * size] + (A)product[at + 2 * size]);
    A o = sigmoid((A)gates[at + 3 * size] + (A)product[at + 3 * size]);
    gates[at] = (T)i;
    gates[at + size] = (T)f;
    gates[at + 2 * size] = (T)g;
    gates[at + 3 * size] = (T)o;
    A c = f * (A)cell[k] + i * g;
    next_cell[k] = (T)c;
    next_state[k] = (T)(tanh(c) * o);
}

extern "C" __global__ void lstm_back(const T* gates, const T* after, const T* cell, const T* d_state, const T* d_cell,
                                     T* d_gates, T* next_d_cell, long long size, long long count) {
    long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    long long at = k / size * 4 * size + k % size;
    A i = (A)gates[at];
    A f = (A)gates[at + size];
    A g = (A)gates[at + 2 * size];
    A o = (A)gates[at + 3 * size];
    A d = (A)d_state[k];
    A curve = tanh((A)after[k]);
    A whole = (A)d_cell[k] + ((A)1 - curve * curve) * o * d;
    d_gates[at + 3 * size] = (T)(d * curve * o * ((A)1 - o));
    d_gates[at] = (T)(whole * g * i * ((A)1 - i));
    d_gates[at + 2 * size] = (T)(whole * i * ((A)1 - g * g));
    d_gates[at + size] = (T)(whole * (A)cell[k] * f * ((A)1 - f));
    next_d_cell[k] = (T)(whole * f);
}

extern "C" __global__ void gru_step(T* gates, const T* product, const T* bias, const T* state, T* next_state,
                                    T* share, long long size, int keep, long long count) {
    long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    long long j = k % size;
    long long at = k / size * 3 * size + j;
    A r = sigmoid((A)gates[at] + ((A)product[at] + (A)bias[j]));
    A z = sigmoid((A)gates[at + size] + ((A)product[at + size] + (A)bias[j + size]));
    A own = (A)product[at + 2 * size] + (A)bias[j + 2 * size];
    A n = tanh((A)gates[at + 2 * size] + own * r);
    gates[at] = (T)r;
    gates[at + size] = (T)z;
    gates[at + 2 * size] = (T)n;
    if (keep == 1) share[k] = (T)own;
    next_state[k] = (T)(((A)state[k] - n) * z + n);
}

extern "C" __global__ void gru_back(const T* gates, const T* share, const T* state, const T* d_state, T* d_gates,
                                    T* product, T* kept, long long size, long long count) {
    long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    long long at = k / size * 3 * size + k % size;
    A r = (A)gates[at];
    A z = (A)gates[at + size];
    A n = (A)gates[at + 2 * size];
    A d = (A)d_state[k];
    A d_z = ((A)state[k] - n) * d * z * ((A)1 - z);
    A d_n = (d - d * z) * ((A)1 - n * n);
    A d_r = d_n * (A)share[k] * r * ((A)1 - r);
    d_gates[at] = (T)d_r;
    d_gates[at + size] = (T)d_z;
    d_gates[at + 2 * size] = (T)d_n;
    product[at] = (T)d_r;
    product[at + size] = (T)d_z;
    product[at + 2 * size] = (T)(d_n * r);
    kept[k] = (T)(d * z);
}
"""


def fused(xp: ArrayModule, *arrays: RawArray) -> bool:
    """Return whether the kernels can take these arrays: on a GPU, C-contiguous, and of one dtype."""
    return xp is not np and all(a.flags.c_contiguous and a.dtype == arrays[0].dtype for a in arrays)


def lstm_step(
    xp: ArrayModule, gates: RawArray, product: RawArray, cell: RawArray, next_cell: RawArray, next_state: RawArray
) -> None:
    """Add ``product`` to ``gates`` (batch, 4 · size), activate them in place, and compute the next cell and state."""
    args = (gates, product, cell, next_cell, next_state, cell.shape[1])
    each(xp, _SOURCE, "lstm_step", cell.size, args, T=gates.dtype)


def lstm_back(
    xp: ArrayModule,
    gates: RawArray,
    new_cell: RawArray,
    cell: RawArray,
    d_state: RawArray,
    d_cell: RawArray,
    d_gates: RawArray,
    next_d_cell: RawArray,
) -> None:
    """Compute ``d_gates``, and the gradient ``next_d_cell`` of ``cell``; ``new_cell`` is the cell after the step."""
    args = (gates, new_cell, cell, d_state, d_cell, d_gates, next_d_cell, cell.shape[1])
    each(xp, _SOURCE, "lstm_back", cell.size, args, T=gates.dtype)


def gru_step(
    xp: ArrayModule,
    gates: RawArray,
    product: RawArray,
    bias: RawArray,
    state: RawArray,
    next_state: RawArray,
    share: RawArray | None,
) -> None:
    """Add ``product`` and ``bias`` to ``gates`` (batch, 3 · size), activate them in place, and compute the next state.

    ``product`` is the state times its weights. For gate n, r multiplies product + bias; ``share`` (batch, size), unless
    None, gets that sum before the multiplication. ``next_state`` may be ``state``.
    """
    keep = np.int32(share is not None)
    args = (gates, product, bias, state, next_state, next_state if share is None else share, state.shape[1], keep)
    each(xp, _SOURCE, "gru_step", state.size, args, T=gates.dtype)


def gru_back(
    xp: ArrayModule,
    gates: RawArray,
    share: RawArray,
    state: RawArray,
    d_state: RawArray,
    d_gates: RawArray,
    product: RawArray,
    d_old: RawArray,
) -> None:
    """Compute ``d_gates``, and write the gradient of the state's products to ``product``.

    ``d_old``, which may be ``d_state``, gets z · d_state, a part of the gradient of ``state``. The caller adds the
    other part, which follows from ``product``.
    """
    args = (gates, share, state, d_state, d_gates, product, d_old, state.shape[1])
    each(xp, _SOURCE, "gru_back", state.size, args, T=gates.dtype)
