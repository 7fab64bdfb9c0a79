"""CTCLoss, forward and backward: one launch for all time steps, with a block for each sample.

The recursions are those of :mod:`weftplan.ops.contrib.ctc_loss`. The device reads the lengths, so the host does not
wait. The gradient of a channel is summed over its positions in the label in a fixed order, without atomic additions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.ops.contrib.ctc_loss import inputs_of
from weftplan.ops.core.cuda_source import LARGEST, TOTAL, floats, launch, width
from weftplan.ops.core.implementations import Implementation, Refusal, Specs, provide
from weftplan.ops.core.kernels import INDEX, accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params, Shape, WorkspaceRule
from weftplan.support.array_types import RawArray

_SOURCE = (
    TOTAL
    + LARGEST
    + """
__device__ A add_logs(A a, A b) {
    A more = a > b ? a : b;
    A less = a > b ? b : a;
    return more + log1p(exp(less - more));
}

__device__ long long channel_of(const long long* label, long long first, long long place, long long blank,
                                long long channels) {
    if (place % 2 == 0) return blank;
    long long c = label[first + place / 2];
    return c < 0ll ? 0ll : (c >= channels ? channels - 1 : c);
}

__device__ bool skips(const long long* label, long long first, long long place, long long blank, long long channels) {
    if (place % 2 == 0 || place < 3) return false;
    long long here = channel_of(label, first, place, blank, channels);
    return here != channel_of(label, first, place - 2, blank, channels);
}

__device__ long long count_of(const long long* label, const long long* counts, long long item, long long labels,
                              long long padding, int counted) {
    long long n = 0;
    if (counted == 1) {
        n = counts[item];
        return n < 0ll ? 0ll : (n > labels ? labels : n);
    }
    while (n < labels && label[item * labels + n] != padding) n += 1;
    return n;
}

__device__ bool misfits(const long long* label, long long first, long long n, long long steps, long long blank,
                        long long channels) {
    long long needed = n;
    for (long long k = 1; k < n; ++k)
        if (!skips(label, first, 2 * k + 1, blank, channels)) needed += 1;
    return needed > steps;
}

extern "C" __global__ void ctc_forward(const T* data, const long long* label, const long long* lengths,
                                       const long long* counts, A* rows, A* alpha, T* out, long long steps,
                                       long long batch, long long channels, long long labels, long long blank,
                                       long long padding, int timed, int counted, int keep, int write) {
    __shared__ A s[1024];
    long long item = blockIdx.x;
    long long places = 2 * labels + 1;
    long long first = item * labels;
    long long mine = timed == 1 ? lengths[item] : steps;
    A never = (A)-1e30;
    for (long long t = 0; t < steps; ++t) {
        long long base = (t * batch + item) * channels;
        A most = (A)data[base];
        for (long long c = threadIdx.x; c < channels; c += blockDim.x) most = fmax(most, (A)data[base + c]);
        most = largest(s, most);
        A sum = (A)0;
        for (long long c = threadIdx.x; c < channels; c += blockDim.x) sum += exp((A)data[base + c] - most);
        A power = log(total(s, sum));
        long long now = (t % 2 * batch + item) * places;
        long long before = ((t + 1) % 2 * batch + item) * places;
        for (long long p = threadIdx.x; p < places; p += blockDim.x) {
            A emitted = (A)data[base + channel_of(label, first, p, blank, channels)] - most - power;
            A found = never;
            if (t == 0) {
                if (p < 2) found = emitted;
            } else {
                found = rows[before + p];
                if (mine > t) {
                    if (p > 0) found = add_logs(found, rows[before + p - 1]);
                    if (skips(label, first, p, blank, channels)) found = add_logs(found, rows[before + p - 2]);
                    found = found + emitted;
                }
            }
            rows[now + p] = found;
            if (keep == 1) alpha[(t * batch + item) * places + p] = found;
        }
        __syncthreads();
    }
    if (write == 1 && threadIdx.x == 0) {
        long long n = count_of(label, counts, item, labels, padding, counted);
        long long last = ((steps - 1) % 2 * batch + item) * places + 2 * n;
        A found = rows[last];
        if (n > 0) found = add_logs(found, rows[last - 1]);
        out[item] = (T)(misfits(label, first, n, mine, blank, channels) ? (A)0 : -found);
    }
}

extern "C" __global__ void ctc_back(const T* ograd, const A* alpha, const T* data, const long long* label,
                                    const long long* lengths, const long long* counts, A* rows, A* chances, T* out,
                                    long long steps, long long batch, long long channels, long long labels,
                                    long long blank, long long padding, int timed, int counted) {
    __shared__ A s[1024];
    long long item = blockIdx.x;
    long long places = 2 * labels + 1;
    long long first = item * labels;
    long long mine = timed == 1 ? lengths[item] : steps;
    long long n = count_of(label, counts, item, labels, padding, counted);
    bool lost = misfits(label, first, n, mine, blank, channels);
    A never = (A)-1e30;
    long long last = ((steps - 1) * batch + item) * places + 2 * n;
    A whole = alpha[last];
    if (n > 0) whole = add_logs(whole, alpha[last - 1]);
    A most = (A)0;
    A power = (A)0;
    for (long long t = steps - 1; t >= 0; --t) {
        long long base = (t * batch + item) * channels;
        long long after = base + batch * channels;
        long long now = (t % 2 * batch + item) * places;
        long long before = ((t + 1) % 2 * batch + item) * places;
        for (long long p = threadIdx.x; p < places; p += blockDim.x) {
            A found = p == 2 * n || p == 2 * n - 1 ? (A)0 : never;
            if (t + 1 < steps) {
                found = rows[before + p];
                if (mine > t + 1) {
                    A shift = most + power;
                    found = found + ((A)data[after + channel_of(label, first, p, blank, channels)] - shift);
                    for (int k = 1; k < 3; ++k) {
                        if (p + k < places && (k == 1 || skips(label, first, p + 2, blank, channels))) {
                            A other = (A)data[after + channel_of(label, first, p + k, blank, channels)] - shift;
                            found = add_logs(found, rows[before + p + k] + other);
                        }
                    }
                }
            }
            rows[now + p] = found;
            chances[item * places + p] = exp(alpha[(t * batch + item) * places + p] + found - whole);
        }
        most = (A)data[base];
        for (long long c = threadIdx.x; c < channels; c += blockDim.x) most = fmax(most, (A)data[base + c]);
        most = largest(s, most);
        A sum = (A)0;
        for (long long c = threadIdx.x; c < channels; c += blockDim.x) sum += exp((A)data[base + c] - most);
        sum = total(s, sum);
        power = log(sum);
        for (long long c = threadIdx.x; c < channels; c += blockDim.x) {
            A slope = exp((A)data[base + c] - most) / sum;
            for (long long p = 0; p < places; ++p)
                if (channel_of(label, first, p, blank, channels) == c) slope = slope - chances[item * places + p];
            out[base + c] = (T)(lost || mine <= t ? (A)0 : slope * (A)ograd[item]);
        }
        __syncthreads();
    }
}
"""
)


def _scratch(batch: int, labels: int, acc: DType) -> list[tuple[Shape, DType]]:
    """Return the shapes and dtypes of scratch: labels, data lengths and label lengths as int64, then rows of positions.

    There are two rows per sample for the recursion and one row for probabilities.
    """
    positions = 2 * labels + 1
    return [((batch, labels), INDEX), ((batch,), INDEX), ((batch,), INDEX), ((2, batch, positions), acc),
            ((batch, positions), acc)]  # fmt: skip


def _inputs_in_scratch(
    ctx: OpContext, params: Params, data: RawArray, label: RawArray, lengths: Sequence[RawArray]
) -> tuple[list[RawArray], list[object]]:
    """Cast labels and lengths into scratch; return all scratch arrays, and the numbers that both kernels take."""
    steps, batch, channels = data.shape
    scratch = [ctx.take(*spec) for spec in _scratch(batch, label.shape[1], accumulator(data.dtype))]
    named = dict(zip(inputs_of(params)[2:], lengths, strict=True))
    ctx.xp.copyto(scratch[0], label, casting="unsafe")
    for target, name in ((scratch[1], "data_lengths"), (scratch[2], "label_lengths")):
        if name in named:
            ctx.xp.copyto(target, named[name], casting="unsafe")
    blank_is_first = params["blank_label"] == "first"
    numbers = [
        steps,
        batch,
        channels,
        label.shape[1],
        0 if blank_is_first else channels - 1,
        0 if blank_is_first else -1,
    ]
    flags = [np.int32("data_lengths" in named), np.int32("label_lengths" in named)]
    return scratch, [*numbers, *flags]


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data = inputs[0]
    out, alpha = outputs
    scratch, numbers = _inputs_in_scratch(ctx, params, data, inputs[1], inputs[2:])
    rows = scratch[3]
    target = ctx.take((data.shape[1],), data.dtype) if out is None else out
    probabilities = scratch[4] if alpha is None else alpha
    flags = [np.int32(alpha is not None), np.int32(out is not None)]
    args = [data, *scratch[:3], rows, probabilities, target, *numbers, *flags]
    launch(ctx.xp, _SOURCE, "ctc_forward", data.shape[1], width(data.shape[2], 256), args, T=data.dtype)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, alpha, data, label, *lengths = inputs
    scratch, numbers = _inputs_in_scratch(ctx, params, data, label, lengths)
    args = [ograd, alpha, data, *scratch, outputs[0], *numbers]
    launch(ctx.xp, _SOURCE, "ctc_back", data.shape[1], width(data.shape[2], 256), args, T=data.dtype)


def _bytes(at: int) -> WorkspaceRule:
    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        (_, batch, _), dtype = inputs[at]
        return take_bytes(*_scratch(batch, inputs[at + 1].shape[1], accumulator(dtype)), ((batch,), dtype))

    return workspace


def _refusal(at: int) -> Refusal:
    def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
        return "no labels" if not inputs[at + 1].shape[1] else str(floats(at)(params, inputs, outputs))

    return refusal


for _name, _kernel, _at in (("CTCLoss", _forward, 0), ("_backward_CTCLoss", _backward, 2)):
    provide(
        _name,
        Implementation(name="cuda", kernel=_kernel, workspace=_bytes(_at), refusal=_refusal(_at)),
        on="gpu",
    )
