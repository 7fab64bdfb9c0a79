"""SequenceMask, SequenceLast and SequenceReverse with lengths, which the device reads: one thread for each element."""

from __future__ import annotations

import math

import numpy as np

from weftplan.ops.core.cuda_source import each, floats
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import converted
from weftplan.ops.core.schema import Arrays, Kernel, OpContext, Params, Shape

_SOURCE = """
__device__ long long between(long long n, long long low, long long high) {
    return n < low ? low : (n > high ? high : n);
}

extern "C" __global__ void sequence_mask(const T* x, const L* lengths, T* y, long long steps, long long batch,
                                         long long rest, T value, int batch_first, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long row = i / rest;
    long long t = batch_first == 1 ? row % steps : row / batch;
    long long b = batch_first == 1 ? row / steps : row % batch;
    y[i] = t >= (long long)lengths[b] ? value : x[i];
}

extern "C" __global__ void sequence_last(const T* x, const L* lengths, T* y, long long steps, long long batch,
                                         long long rest, T value, int batch_first, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long b = i / rest;
    long long t = between((long long)lengths[b], 1, steps) - 1;
    y[i] = x[(batch_first == 1 ? b * steps + t : t * batch + b) * rest + i % rest];
}

extern "C" __global__ void sequence_last_back(const T* dy, const L* lengths, T* dx, long long steps, long long batch,
                                              long long rest, T value, int batch_first, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long row = i / rest;
    long long t = batch_first == 1 ? row % steps : row / batch;
    long long b = batch_first == 1 ? row / steps : row % batch;
    dx[i] = t == between((long long)lengths[b], 1, steps) - 1 ? dy[b * rest + i % rest] : value;
}

extern "C" __global__ void sequence_reverse(const T* x, const L* lengths, T* y, long long steps, long long batch,
                                            long long rest, T value, int batch_first, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long row = i / rest;
    long long t = row / batch;
    long long b = row % batch;
    long long n = between((long long)lengths[b], 0, steps);
    if (t < n) t = n - 1 - t;
    y[i] = x[(t * batch + b) * rest + i % rest];
}
"""


def _kernel(name: str, *, time_index: int, fill: bool = False) -> Kernel:
    """Return a kernel that launches the CUDA function ``name``.

    Args:
        name: the CUDA function.
        whole: 0 if the first input has the shape with the time axis, 1 if the output has it.
        fill: whether the operator's parameter ``value`` fills masked elements; otherwise 0 does.
    """

    def kernel(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        data, lengths, out = inputs[0], inputs[1], outputs[0]
        shape: Shape = (data, out)[time_index].shape
        axis = params["axis"]
        value = converted(float(params["value"]), out.dtype) if fill else 0
        args = (
            data, lengths, out, shape[axis], shape[1 - axis], math.prod(shape[2:]), out.dtype.type(value),
            np.int32(axis),
        )  # fmt: skip
        each(ctx.xp, _SOURCE, name, out.size, args, T=out.dtype, L=lengths.dtype)

    return kernel


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    if not params["use_sequence_length"]:
        return "without lengths it is a copy"
    return str(floats(0, 1)(params, inputs, outputs))


for _name, _launcher in (
    ("SequenceMask", _kernel("sequence_mask", time_index=0, fill=True)),
    ("_backward_SequenceMask", _kernel("sequence_mask", time_index=0)),
    ("SequenceLast", _kernel("sequence_last", time_index=0)),
    ("_backward_SequenceLast", _kernel("sequence_last_back", time_index=1)),
    ("SequenceReverse", _kernel("sequence_reverse", time_index=0)),
    ("_backward_SequenceReverse", _kernel("sequence_reverse", time_index=0)),
):
    provide(
        _name,
        Implementation(name="cuda", kernel=_launcher, workspace=lambda params, inputs, outputs: 0, refusal=_refusal),
        on="gpu",
    )
