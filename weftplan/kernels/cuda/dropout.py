"""Dropout on a GPU: one launch draws random numbers and computes mask and result. The mask equals that of a host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weftplan.kernels.cuda.philox import ROUNDS
from weftplan.ops.core.cuda_source import THREADS, each, floats, launch
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, OpContext, Params
from weftplan.support.array_types import DType

_SOURCE = (
    """
extern "C" __global__ void drop(const T* x, T* y, unsigned char* mask, unsigned long long key0,
                                unsigned long long key1, unsigned int limit, A scale, int write, long long count) {
    __shared__ unsigned char kept[2048];
    unsigned int t = threadIdx.x;
    unsigned long long x0 = (unsigned long long)blockIdx.x * 256ull + (unsigned long long)t + 1ull;
    unsigned long long x1 = 0ull;
    unsigned long long x2 = 0ull;
    unsigned long long x3 = 0ull;
    ROUNDS
    for (unsigned int k = 0; k < 8; ++k) {
        unsigned long long word = k < 2 ? x0 : (k < 4 ? x1 : (k < 6 ? x2 : x3));
        unsigned int number = (unsigned int)(word >> (k % 2 == 0 ? 8 : 40)) & 0xffffffu;
        kept[t * 8 + k] = (unsigned char)(number >= limit ? 1 : 0);
    }
    __syncthreads();
    for (unsigned int k = t; k < 2048; k += 256) {
        unsigned int i = blockIdx.x * 2048 + k;
        if (i < (unsigned int)count) {
            mask[i] = kept[k];
            if (write == 1) y[i] = (T)((A)x[i] * (A)kept[k] * scale);
        }
    }
}

extern "C" __global__ void drop_back(const T* dy, const unsigned char* mask, T* dx, A scale, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) dx[i] = (T)((A)dy[i] * (A)mask[i] * scale);
}
"""
).replace("ROUNDS", ROUNDS)
_DRAWN = 8 * THREADS
"""Elements of a block: each thread calls Philox once, which gives eight numbers of 32 bits for the block."""
_MASK = np.dtype(np.uint8)


def _active(ctx: OpContext, params: Params) -> bool:
    return params["p"] > 0 and (ctx.is_train or params["mode"] == "always")


def _scale(params: Params, dtype: DType) -> np.generic:
    scale: np.generic = accumulator(dtype).type(1.0 / (1.0 - params["p"]) if params["p"] < 1 else 0.0)
    return scale


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data = inputs[0]
    out, mask = outputs
    if not _active(ctx, params):
        if mask is not None:
            mask.fill(1)
        if out is not None:
            ctx.xp.copyto(out, data)
        return
    keep_mask = ctx.take(data.shape, _MASK) if mask is None else mask
    target = ctx.take((1,), data.dtype) if out is None else out
    generator: Any = ctx.generator()  # a PhiloxGenerator: it has a key
    # Keep an element if its 24-bit number / 2^24 >= p. Comparing the number with ceil(p * 2^24) is equivalent: both
    # products are exact.
    limit = np.uint32(math.ceil(float(np.float32(params["p"])) * (1 << 24)))
    args = (data, target, keep_mask, *generator.key, limit, _scale(params, data.dtype), np.int32(out is not None))
    launch(ctx.xp, _SOURCE, "drop", -(-data.size // _DRAWN), THREADS, (*args, data.size), T=data.dtype)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, mask = inputs
    out = outputs[0]
    if not _active(ctx, params):
        ctx.xp.copyto(out, ograd)
        return
    each(ctx.xp, _SOURCE, "drop_back", out.size, (ograd, mask, out, _scale(params, out.dtype)), T=out.dtype)


def _bytes(params: Params, inputs: Specs, outputs: Specs) -> int:
    return take_bytes((inputs[0].shape, _MASK), ((1,), inputs[0].dtype))


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    return "one draw for several elements is not written" if params["axes"] else str(floats(0)(params, inputs, outputs))


provide("Dropout", Implementation(name="cuda", kernel=_forward, workspace=_bytes, refusal=_refusal), on="gpu")
provide(
    "_backward_Dropout",
    Implementation(name="cuda", kernel=_backward, workspace=lambda params, inputs, outputs: 0, refusal=_refusal),
    on="gpu",
)
