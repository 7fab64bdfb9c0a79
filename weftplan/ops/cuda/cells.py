"""What an LSTM cell does between its products, forwards and backwards: one launch a step.

The formulas are those of :mod:`weftplan.ops.nn.rnn_cells`, which calls this on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan.ops.cuda.source import each

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
"""


def fused(xp: Any, *arrays: Any) -> bool:
    """Whether the kernels can take these arrays: on a GPU, contiguous, of a float type."""
    return xp is not np and all(a.flags.c_contiguous and a.dtype == arrays[0].dtype for a in arrays)


def lstm_step(xp: Any, gates: Any, product: Any, cell: Any, next_cell: Any, next_state: Any) -> None:
    """``gates`` (batch, 4 size) before their activation, with ``product`` to be added, are left activated."""
    args = (gates, product, cell, next_cell, next_state, cell.shape[1])
    each(xp, _SOURCE, "lstm_step", cell.size, args, T=gates.dtype)


def lstm_back(
    xp: Any, gates: Any, after: Any, cell: Any, d_state: Any, d_cell: Any, d_gates: Any, next_d_cell: Any
) -> None:
    """Gradients of the gates and of the cell before the step."""
    args = (gates, after, cell, d_state, d_cell, d_gates, next_d_cell, cell.shape[1])
    each(xp, _SOURCE, "lstm_back", cell.size, args, T=gates.dtype)
