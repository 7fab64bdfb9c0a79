"""Compiled implementations of Convolution and Deconvolution, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftplan.ops.compiled import dense, tables
from weftplan.ops.compiled.tables import Scratch, Sizes, sizes
from weftplan.ops.compiled.target import host
from weftplan.ops.implementations import Implementation, Specs, provide
from weftplan.ops.nn import convolution, deconvolution
from weftplan.ops.nn.conv_geometry import Geometry
from weftplan.ops.schema import OpContext, Params, TensorSpec, aligned

GeometryOf = Callable[[Params, TensorSpec, tuple[int, ...]], Geometry]
"""From parameters, the data and the shape of the output."""


def _refusal(spec: TensorSpec, geo: Geometry) -> str:
    """Why these kernels cannot compute it; empty when they can."""
    found = host()
    if isinstance(found, str):
        return found
    if spec.dtype not in (np.float32, np.float64):
        return f"compiled kernels are written for float32 and float64, not {spec.dtype}"
    if geo.groups > 1 and geo.groups == geo.channels == geo.filters:
        return "depthwise: a product of single channels"
    return ""


def _slower(geo: Geometry) -> str:
    if min(geo.channels, geo.filters) // geo.groups < 2 and geo.groups > 1:
        return "groups of single channels"
    return ""


def _nbytes(*scratches: Scratch) -> int:
    """What :func:`_buffers` takes for the most demanding of these passes."""
    return aligned(max(s.packed for s in scratches)) + aligned(max(s.padded for s in scratches))


def _buffers(ctx: OpContext, *scratches: Scratch) -> tuple[Any, Any]:
    packed, padded = max(s.packed for s in scratches), max(s.padded for s in scratches)
    return ctx.take((packed,), np.uint8), ctx.take((padded,), np.uint8) if padded else None


def _sum_to_bias(ograd: Any, target: Any) -> None:
    np.sum(ograd, axis=(0, *range(2, ograd.ndim)), dtype=ograd.dtype, out=target)


def _convolution(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return convolution.sizes(params, inputs[0], outputs[0].shape)


def _convolution_backward(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return convolution.sizes(params, inputs[1], inputs[0].shape)


def _deconvolution(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return deconvolution.sizes(params, inputs[0].shape, outputs[0].shape, inputs[0].dtype)


def _deconvolution_backward(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return deconvolution.sizes(params, inputs[1].shape, inputs[0].shape, inputs[1].dtype)


def _spec(array: Any) -> TensorSpec:
    return TensorSpec(array.shape, array.dtype)


def _forward(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    s = sizes(_convolution(params, [_spec(inputs[0])], [_spec(out)]))
    packed, padded = _buffers(ctx, tables.forward_scratch(s))
    dense.forward(s, inputs[0], inputs[1], None if params["no_bias"] else inputs[2], out, packed, padded)


def _backward(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    ograd, data, weight = inputs
    s = sizes(_convolution_backward(params, [_spec(ograd), _spec(data)], []))
    packed, padded = _buffers(ctx, tables.data_scratch(s), tables.weight_scratch(s))
    if outputs[0] is not None:
        dense.data_gradient(s, ograd, weight, outputs[0], packed, padded)
    if outputs[1] is not None:
        dense.weight_gradient(s, data, ograd, outputs[1], packed, padded)
    if not params["no_bias"] and outputs[2] is not None:
        _sum_to_bias(ograd, outputs[2])


def _transposed(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    out = outputs[0]
    if out is None:
        return
    s = sizes(_deconvolution(params, [_spec(inputs[0])], [_spec(out)]))
    packed, padded = _buffers(ctx, tables.data_scratch(s))
    dense.data_gradient(s, inputs[0], inputs[1], out, packed, padded)
    if not params["no_bias"]:
        np.add(out, inputs[2].reshape(1, -1, *[1] * (out.ndim - 2)), out=out)


def _transposed_backward(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    ograd, data, weight = inputs
    s = sizes(_deconvolution_backward(params, [_spec(ograd), _spec(data)], []))
    packed, padded = _buffers(ctx, tables.forward_scratch(s), tables.weight_scratch(s))
    if outputs[1] is not None:
        dense.weight_gradient(s, ograd, data, outputs[1], packed, padded)
    if outputs[0] is not None:
        dense.forward(s, ograd, weight, None, outputs[0], packed, padded)
    if not params["no_bias"] and outputs[2] is not None:
        _sum_to_bias(ograd, outputs[2])


def _provide(
    op: str, kernel: Any, geometry: Callable[[Params, Specs, Specs], Geometry], data: int,
    scratch: Callable[[Sizes], Sequence[Scratch]],
) -> None:  # fmt: skip
    """Offer ``kernel`` for ``op``, whose input number ``data`` has the dtype that counts."""
    provide(
        op,
        Implementation(
            name="native",
            kernel=kernel,
            workspace=lambda params, inputs, outputs: _nbytes(*scratch(sizes(geometry(params, inputs, outputs)))),
            refusal=lambda params, inputs, outputs: _refusal(inputs[data], geometry(params, inputs, outputs)),
            slower=lambda params, inputs, outputs: _slower(geometry(params, inputs, outputs)),
        ),
    )


_provide("Convolution", _forward, _convolution, 0, lambda s: [tables.forward_scratch(s)])
_provide(
    "_backward_Convolution",
    _backward,
    _convolution_backward,
    1,
    lambda s: [tables.data_scratch(s), tables.weight_scratch(s)],
)
_provide("Deconvolution", _transposed, _deconvolution, 0, lambda s: [tables.data_scratch(s)])
_provide(
    "_backward_Deconvolution",
    _transposed_backward,
    _deconvolution_backward,
    1,
    lambda s: [tables.forward_scratch(s), tables.weight_scratch(s)],
)
