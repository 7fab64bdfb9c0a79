"""ONNX import of layers with parameters, pooling and products, with their padding.

Each rule turns one ONNX node (a :class:`.OnnxCall`) into symbols and has no other effect. Importing the module
registers the rules; any thread may then call them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.convert.kinds import POOLS
from weftplan.convert.onnx_in.reading import OnnxCall, rule
from weftplan.symbol import Symbol


def _pads(call: OnnxCall, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[int]:
    """Return the padding before each axis, then after each axis."""
    kind = call.get("auto_pad", "NOTSET")
    axes = len(kernel)
    if kind in ("NOTSET", ""):
        return list(call.get("pads") or [0] * 2 * axes)
    if kind == "VALID":
        return [0] * 2 * axes
    begin, behind = [], []
    for size, k, stride, dilate in zip(call.shape()[2:], kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (k - 1) * dilate + 1 - size, 0)
        less, more = total // 2, total - total // 2
        begin.append(less if kind == "SAME_UPPER" else more)
        behind.append(more if kind == "SAME_UPPER" else less)
    return begin + behind


def _padded(call: OnnxCall, data: Symbol, pads: list[int], value: float) -> tuple[Symbol, tuple[int, ...]]:
    """Return the data and symmetric padding; asymmetric padding is applied to the data first."""
    axes = len(pads) // 2
    begin, behind = pads[:axes], pads[axes:]
    if begin == behind:
        return data, tuple(begin)
    if any(number < 0 for number in pads):
        raise call.refuse(f"pads={pads}: negative ones are not read")
    return pad_all(call, data, [0, 0, *begin], [0, 0, *behind], "constant", value), (0,) * axes


def pad_all(
    call: OnnxCall, data: Symbol, before: Sequence[int], behind: Sequence[int], mode: str, value: float
) -> Symbol:
    rank = len(before)
    crops = any(n < 0 for n in (*before, *behind))
    if mode not in ("constant", "edge", "reflect") or rank > 5 or (crops and mode != "constant"):
        raise call.refuse(f"padding {list(before)} and {list(behind)}, mode {mode}, is not read")
    shape = call.model.shape(data)
    if crops:  # negative padding removes elements
        for axis, (low, high) in enumerate(zip(before, behind, strict=True)):
            begin, end = max(0, -low), shape[axis] - max(0, -high)
            if begin >= end:
                raise call.refuse(f"padding {list(before)} and {list(behind)} removes all of axis {axis} of {shape}")
            if end - begin < shape[axis]:
                data = call.make("slice_axis", data, axis=axis, begin=begin, end=end)
        before, behind = [max(0, n) for n in before], [max(0, n) for n in behind]
        if not any((*before, *behind)):
            return data
        shape = call.model.shape(data)
    inner = 2 if rank >= 3 else 0
    if any((*before[:inner], *behind[:inner])):
        raise call.refuse("padding of the first two axes is not read")
    lifted = data if rank > 3 else call.make("reshape", data, shape=(*shape[:2], *(1,) * (4 - rank), *shape[2:])
                                             if rank > 2 else (1, 1, *shape))  # fmt: skip
    zeros = [0] * max(0, 4 - rank)
    pads_before = [*before[:2], *zeros, *before[2:]] if rank > 2 else [0, 0, *before]
    pads_after = [*behind[:2], *zeros, *behind[2:]] if rank > 2 else [0, 0, *behind]
    width = tuple(number for pair in zip(pads_before, pads_after, strict=True) for number in pair)
    padded = call.make("Pad", lifted, mode=mode, pad_width=width, constant_value=value)
    if rank > 3:
        return padded
    sizes = tuple(size + a + b for size, a, b in zip(shape, before, behind, strict=True))
    return call.make("reshape", padded, shape=sizes)


@rule("Conv", "ConvTranspose")
def _conv(call: OnnxCall) -> Symbol:
    weight = call.constant(1)
    axes = weight.ndim - 2
    kernel = tuple(call.get("kernel_shape") or weight.shape[2:])
    strides, dilations = tuple(call.get("strides") or (1,) * axes), tuple(call.get("dilations") or (1,) * axes)
    group, bias = call.get("group", 1), [call.as_parameter(2)] if call.has(2) else []
    shared = {"kernel": kernel, "stride": strides, "dilate": dilations, "num_group": group, "no_bias": not bias}
    if call.op == "ConvTranspose":
        if call.get("output_shape") or call.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID", ""):
            raise call.refuse("output_shape and auto_pad are not read")
        pads = list(call.get("pads") or [0] * 2 * axes)
        if pads[:axes] != pads[axes:]:
            raise call.refuse(f"pads={pads}: only the same on both sides is read")
        shared.update(pad=tuple(pads[:axes]), adj=tuple(call.get("output_padding") or (0,) * axes))
        return call.make(
            "Deconvolution", call.symbol(), call.as_parameter(1), *bias, num_filter=weight.shape[1] * group, **shared
        )
    data, pad = _padded(call, call.symbol(), _pads(call, kernel, strides, dilations), 0.0)
    return call.make("Convolution", data, call.as_parameter(1), *bias, num_filter=weight.shape[0], pad=pad, **shared)


_POOLS = {theirs: kind for kind, theirs in POOLS.items()}


@rule(*_POOLS)
def _pool(call: OnnxCall) -> Symbol:
    kernel = tuple(call.get("kernel_shape"))
    axes = len(kernel)
    strides, no_stride = tuple(call.get("strides") or (1,) * axes), (1,) * axes
    if tuple(call.get("dilations") or no_stride) != no_stride or call.outputs > 1:
        raise call.refuse("dilations and the indices of maxima are not read")
    counted = call.op != "AveragePool" or bool(call.get("count_include_pad", 0))
    pads = _pads(call, kernel, strides, no_stride)
    uneven = pads[:axes] != pads[axes:]
    if uneven and not counted:
        raise call.refuse(f"pads={pads}: an average that leaves padding out needs the same on both sides")
    data, pad = _padded(call, call.symbol(), pads, -math.inf if call.op == "MaxPool" else 0.0)
    kind = _POOLS[call.op]
    facts: dict[str, Any] = {"p_value": call.get("p", 2)} if kind == "lp" else {}
    if kind == "avg":
        facts["count_include_pad"] = counted
    convention = "full" if call.get("ceil_mode", 0) else "valid"
    return call.make(
        "Pooling", data, kernel=kernel, stride=strides, pad=pad, pool_type=kind, pooling_convention=convention, **facts
    )


@rule(*(f"Global{theirs}" for theirs in _POOLS))
def _global_pool(call: OnnxCall) -> Symbol:
    kind = _POOLS[call.op.removeprefix("Global")]
    facts = {"p_value": call.get("p", 2)} if kind == "lp" else {}
    return call.make("Pooling", call.symbol(), global_pool=True, kernel=(1,) * (len(call.shape()) - 2),
                     pool_type=kind, **facts)  # fmt: skip


@rule("BatchNormalization")
def _batch_norm(call: OnnxCall) -> Symbol:
    states = [call.as_parameter(k, state=True) for k in (3, 4)]
    result = call.make(
        "BatchNorm", call.symbol(), call.as_parameter(1), call.as_parameter(2), *states, fix_gamma=False,
        eps=call.get("epsilon", 1e-5), momentum=call.get("momentum", 0.9),
    )  # fmt: skip
    return result[0]


@rule("InstanceNormalization", "LayerNormalization")
def _norm(call: OnnxCall) -> Symbol:
    data, scale = call.symbol(), call.as_parameter(1)
    shift = (
        call.as_parameter(2)
        if call.has(2)
        else call.model.parameter(f"{call.name}_beta", np.zeros_like(call.constant(1)))
    )
    if call.op == "InstanceNormalization":
        return call.make("InstanceNorm", data, scale, shift, eps=call.get("epsilon", 1e-5))
    if call.get("axis", -1) not in (-1, len(call.shape()) - 1):
        raise call.refuse("only the last axis is read")
    return call.make("LayerNorm", data, scale, shift, eps=call.get("epsilon", 1e-5))[0]


@rule("LRN")
def _lrn(call: OnnxCall) -> Symbol:
    facts = {"alpha": call.get("alpha", 1e-4), "beta": call.get("beta", 0.75), "knorm": call.get("bias", 1.0)}
    if call.get("size") % 2 == 0:
        raise call.refuse("an even size is not read: its window is not centred")
    return call.make("LRN", call.symbol(), nsize=call.get("size"), **facts)


@rule("Gemm")
def _gemm(call: OnnxCall) -> Symbol:
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    data = call.make("transpose", call.symbol()) if call.get("transA", 0) else call.symbol()
    if isinstance(call.inputs[1], Symbol):
        product = call.make("dot", data, call.symbol(1), transpose_b=bool(call.get("transB", 0)))
        product = product * alpha if alpha != 1 else product
        return call.make("broadcast_add", product, call.symbol(2) * beta) if call.has(2) else product
    weight = call.constant(1) * np.float32(alpha) if alpha != 1 else call.constant(1)
    weight = weight if call.get("transB", 0) else weight.T
    vector = call.has(2) and not isinstance(call.inputs[2], Symbol) and np.size(call.inputs[2]) == weight.shape[0]
    bias = [call.as_parameter(2, np.reshape(call.constant(2) * np.float32(beta), -1))] if vector else []
    result = call.make(
        "FullyConnected", data, call.as_parameter(1, weight), *bias, num_hidden=weight.shape[0], no_bias=not bias
    )
    if call.has(2) and not vector:
        return call.make("broadcast_add", result, call.symbol(2) * beta)
    return result


@rule("MatMul")
def _matmul(call: OnnxCall) -> Symbol:
    if not isinstance(call.inputs[1], Symbol) and call.constant(1).ndim == 2:
        weight = call.constant(1).T
        return call.make("FullyConnected", call.symbol(), call.as_parameter(1, weight), num_hidden=weight.shape[0],
                         no_bias=True, flatten=False)  # fmt: skip
    lhs_shape, right = call.shape(0), call.shape(1)
    if len(lhs_shape) == len(right) == 2:
        return call.make("dot", call.symbol(), call.symbol(1))
    if len(lhs_shape) != len(right) or lhs_shape[:-2] != right[:-2]:
        raise call.refuse(f"a product of shapes {lhs_shape} and {right} is not read")
    flat = [call.make("reshape", call.symbol(k), shape=(-1, *shape[-2:])) for k, shape in enumerate((lhs_shape, right))]
    return call.make("reshape", call.make("batch_dot", *flat), shape=(*lhs_shape[:-1], right[-1]))
