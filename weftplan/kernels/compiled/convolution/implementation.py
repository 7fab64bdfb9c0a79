"""Compiled implementations of Convolution and Deconvolution, forward and backward.

This module decides which sizes the implementations take, when NumPy is expected to be faster, and how much scratch each
declares. The kernels are those of ``dense.py``, ``pointwise/``, ``depthwise/`` and ``winograd/``. Any worker may call
them: they write only to their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from weftplan.kernels.compiled.batch_norm import implementation as batch_norm
from weftplan.kernels.compiled.convolution import dense
from weftplan.kernels.compiled.depthwise import tables as depthwise_tables
from weftplan.kernels.compiled.offset_tables import Scaling
from weftplan.kernels.compiled.pointwise import implementation as pointwise
from weftplan.kernels.compiled.pointwise import weights as pointwise_weights
from weftplan.kernels.compiled.replay import Call, Maker, RepeatedKernel, in_sequence, nothing
from weftplan.kernels.compiled.scratch import Scratch, data_scratch, forward_scratch, weight_scratch
from weftplan.kernels.compiled.size_table import ConvSizes, sizes
from weftplan.kernels.compiled.target import host
from weftplan.kernels.compiled.winograd import implementation as winograd
from weftplan.kernels.compiled.winograd import weights as winograd_weights
from weftplan.ops.core import registry
from weftplan.ops.core.forms import bind
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.products import stacked_product
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, OpContext, Params, TensorSpec, aligned
from weftplan.ops.fusion import relu as joined
from weftplan.ops.nn import convolution, deconvolution
from weftplan.ops.nn.batch_norm import NORM
from weftplan.ops.nn.conv_geometry import Geometry
from weftplan.support.array_types import RawArray

_T = TypeVar("_T")


def _refusal(spec: TensorSpec, geo: Geometry) -> str:
    """Return the reason why these kernels cannot compute a convolution of this data; empty if they can."""
    target = host()
    if isinstance(target, str):
        return target
    if spec.dtype not in (np.float16, np.float32, np.float64):
        return f"compiled kernels are written for float16, float32 and float64, not {spec.dtype}"
    if spec.dtype == np.float16 and not target.halves:
        return f"the processor ({target.cpu}) has no instructions for float16"
    return ""


def _slower(geo: Geometry, *, forward: bool) -> str:
    """Return the reason why NumPy is expected to be faster; empty if it is not."""
    s = sizes(geo)
    if forward and geo.pointwise and pointwise.forward_pass(s) is None:
        return "a plain matrix product"
    if s.groups > 1 and min(s.channels, s.filters) == 1 and not depthwise_tables.takes(s):
        return "groups of single channels, in a form that has no kernel of its own"
    return ""


def _nbytes(s: ConvSizes, *scratches: Scratch) -> int:
    """Return the scratch bytes of passes that run one after another: the maximum of ``scratches``.

    A convolution that the depthwise kernels take needs their scratch instead.
    """
    if depthwise_tables.takes(s):
        return aligned(depthwise_tables.scratch(s))
    return max(need.nbytes for need in scratches)


def _take_scratch(ctx: OpContext, s: ConvSizes, *scratches: Scratch) -> RawArray:
    return ctx.take((_nbytes(s, *scratches),), np.uint8)


def _buffers(scratch: RawArray, need: Scratch) -> tuple[RawArray, RawArray | None, RawArray | None]:
    """Cut ``scratch`` into the buffers of a dense pass: (packed, padded or None, widened or None); None: not needed."""
    begin = aligned(need.packed)
    end = begin + aligned(need.padded)
    return (
        scratch[: need.packed],
        scratch[begin : begin + need.padded] if need.padded else None,
        scratch[end : end + need.widened] if need.widened else None,
    )


def _plain(s: ConvSizes) -> bool:
    """Return whether the gradient of the data is a plain matrix product of a dtype that BLAS supports."""
    return s.pointwise and not s.halves


def _forward_scratch(s: ConvSizes) -> Scratch:
    """Return the scratch of :func:`_correlate`, unless the convolution is depthwise (:func:`_nbytes`)."""
    small = pointwise.forward_pass(s)
    return forward_scratch(s) if small is None else Scratch(small.nbytes, 0)


def _data_scratch(s: ConvSizes) -> Scratch:
    """Return the scratch of the data gradient in :func:`_adjoint`; a plain matrix product needs none."""
    small = pointwise.data_pass(s)
    if small is not None:
        return Scratch(small.nbytes, 0)
    return Scratch(0, 0) if _plain(s) else data_scratch(s)


def _weight_scratch(s: ConvSizes) -> Scratch:
    """Return the scratch of the weight's gradient in :func:`_adjoint`."""
    return weight_scratch(s) if pointwise_weights.weight_pass(s) is None else Scratch(0, 0)


def _sum_to_bias(ograd: RawArray, target: RawArray) -> Call:
    return partial(np.sum, ograd, axis=(0, *range(2, ograd.ndim)), dtype=accumulator(ograd.dtype), out=target)


def _convolution(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return convolution.sizes(params, inputs[0], outputs[0].shape)


def _convolution_backward(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return convolution.sizes(params, inputs[1], inputs[0].shape)


def _deconvolution(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return deconvolution.sizes(params, inputs[0].shape, outputs[0].shape, inputs[0].dtype)


def _deconvolution_backward(params: Params, inputs: Specs, outputs: Specs) -> Geometry:
    return deconvolution.sizes(params, inputs[1].shape, inputs[0].shape, inputs[1].dtype)


def _spec(array: RawArray) -> TensorSpec:
    return TensorSpec(array.shape, array.dtype)


def _correlate(
    s: ConvSizes,
    data: RawArray,
    weight: RawArray,
    bias: RawArray | None,
    out: RawArray,
    scratch: RawArray,
    *,
    scaling: Scaling | None = None,
    relu: bool = False,
) -> Call:
    """Return a call that convolves ``data`` with ``weight`` into ``out``.

    The call adds ``bias`` unless None, multiplies by the scale of ``scaling`` and adds its shift, and applies a relu if
    ``relu``.
    """
    if depthwise_tables.takes(s):
        return depthwise_tables.forward_call(s, data, weight, bias, out, scratch, scaling=scaling, relu=relu)
    small = pointwise.forward_pass(s)
    if small is not None:
        return pointwise.call(small, data, weight, bias, out, scratch, scaling=scaling, relu=relu)
    packed, padded, widened = _buffers(scratch, forward_scratch(s))
    return dense.forward(s, data, weight, bias, out, packed, padded, widened=widened, scaling=scaling, relu=relu)


def _adjoint(
    s: ConvSizes,
    data: Any,
    ograd: RawArray,
    weight: Any,
    dgrad: RawArray | None,
    wgrad: RawArray | None,
    scratch: RawArray,
) -> list[Call]:
    """Return calls that compute the gradients of :func:`_correlate`: ``dgrad`` and ``wgrad``, each unless None."""
    single, small, turned = depthwise_tables.takes(s), pointwise.data_pass(s), pointwise_weights.weight_pass(s)
    calls: list[Call] = []
    if dgrad is not None and single:
        calls.append(depthwise_tables.data_call(s, ograd, weight, dgrad, scratch))
    elif dgrad is not None and small is not None:
        calls.append(pointwise.call(small, ograd, weight, None, dgrad, scratch))
    elif dgrad is not None and _plain(s):
        kernel = weight.reshape(s.groups, s.filters, s.channels).swapaxes(1, 2)
        shaped = ograd.reshape(s.batch, s.groups, s.filters, s.pixels)
        target = dgrad.reshape(s.batch, s.groups, s.channels, s.pixels)
        calls.append(partial(stacked_product, np, kernel, shaped, target))
    elif dgrad is not None:
        packed, padded, _ = _buffers(scratch, data_scratch(s))
        calls.append(dense.data_gradient(s, ograd, weight, dgrad, packed, padded))
    if wgrad is not None and single:
        calls.append(depthwise_tables.weight_call(s, data, ograd, wgrad, scratch))
    elif wgrad is not None and turned is not None:
        calls.append(pointwise_weights.call(turned, data, ograd, wgrad))
    elif wgrad is not None:
        packed, padded, widened = _buffers(scratch, weight_scratch(s))
        calls.append(dense.weight_gradient(s, data, ograd, wgrad, packed, padded, widened=widened))
    return calls


def _forward(
    ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, scaling: Scaling | None = None,
    relu: bool = False, fast: bool = False,
) -> Call:  # fmt: skip
    out = outputs[0]
    if out is None:
        return nothing
    s = sizes(_convolution(params, [_spec(inputs[0])], [_spec(out)]))
    bias = None if params["no_bias"] else inputs[2]
    if fast:
        need = winograd.forward_pass(s)
        scratch = ctx.take((winograd.layout(need).nbytes,), np.uint8)
        return winograd.call(need, inputs[0], inputs[1], bias, out, scratch, scaling=scaling, relu=relu)
    scratch = _take_scratch(ctx, s, _forward_scratch(s))
    return _correlate(s, inputs[0], inputs[1], bias, out, scratch, scaling=scaling, relu=relu)


def _normalized(
    ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, relu: bool = False, fast: bool = False
) -> Call:
    """Return a call that computes a convolution and then a batch norm, in one pass if the statistics are fixed.

    ``fast``: convolve by Winograd's algorithm.
    """
    norm, conv_inputs, statistics = _split_inputs(params, inputs)
    if outputs[0] is None and not batch_norm.moves_statistics(ctx, norm):
        return nothing
    outputs = [ctx.memory_of(outputs, 0, inputs[0].dtype)]
    out = outputs[0]
    fixed_statistics = not ctx.is_train or norm["use_global_stats"]
    if not fixed_statistics or batch_norm.refusal(norm, _spec(out), statistics[1].dtype):
        return _and_norm(_forward(ctx, params, conv_inputs, outputs, fast=fast), ctx, norm, out, statistics, relu=relu)
    scale, shift = (ctx.take((out.shape[1],), out.dtype) for _ in range(2))
    scaling = batch_norm.scaling(norm, statistics, scale, shift)
    return in_sequence(
        scaling, _forward(ctx, params, conv_inputs, outputs, scaling=(scale, shift), relu=relu, fast=fast)
    )


def _split_inputs(params: Params, inputs: Sequence[_T]) -> tuple[Params, Sequence[_T], Sequence[_T]]:
    """Split a fused node into (batch norm's parameters, convolution's inputs, batch norm's inputs except the data)."""
    return params[NORM], [*inputs[:2], *inputs[6:]], inputs[2:6]


def _and_norm(convolve: Call, ctx: OpContext, norm: Params, out: RawArray, statistics: Arrays, *, relu: bool) -> Call:
    """Return a call that runs ``convolve``, then the batch norm in place on ``out``, with the bits of two nodes."""
    # Convolution and batch norm use the same scratch, one after the other.
    norm_ctx = OpContext(np, is_train=ctx.is_train, recompute=ctx.recompute, workspace=ctx.flat[0])
    norm_inputs, norm_outputs = [out, *statistics], [out, None, None]
    if not batch_norm.refusal(norm, _spec(out), statistics[1].dtype):
        return in_sequence(convolve, batch_norm.normalization(norm_ctx, norm, norm_inputs, norm_outputs, relu=relu))
    kernel = joined.norm_of(joined.RELU * relu).forward
    return in_sequence(convolve, bind(kernel, norm_ctx, norm, norm_inputs, norm_outputs))


def _with_norm(nbytes: int, params: Params, inputs: Specs, outputs: Specs, relu: str) -> int:
    """Return the scratch bytes of a convolution, which needs ``nbytes``, followed by a batch norm.

    ``relu``: the suffix of a batch norm with a relu, else empty.
    """
    norm, _, statistics = _split_inputs(params, inputs)
    out = outputs[0]
    if batch_norm.refusal(norm, out, statistics[1].dtype):
        specs = [out, statistics[1], statistics[1]]
        return max(nbytes, joined.norm_of(relu).workspace_bytes(norm, [out, *statistics], specs))
    vector = take_bytes(((out.shape[1],), out.dtype))
    return max(nbytes + 2 * vector, 3 * vector)


def _plain_normalized(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, relu: bool = False) -> Call:
    """Return a call that runs NumPy's convolution, then the batch norm."""
    norm, conv_inputs, statistics = _split_inputs(params, inputs)
    if outputs[0] is None and not batch_norm.moves_statistics(ctx, norm):
        return nothing
    outputs = [ctx.memory_of(outputs, 0, inputs[0].dtype)]
    out = outputs[0]
    convolve = bind(registry.get("Convolution").forward, ctx, params, conv_inputs, outputs)
    return _and_norm(convolve, ctx, norm, out, statistics, relu=relu)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, fast: bool = False) -> Call:
    ograd, data, weight = inputs
    s = sizes(_convolution_backward(params, [_spec(ograd), _spec(data)], []))
    if fast:
        scratch = ctx.take((_fast_backward_nbytes(s),), np.uint8)
        calls: list[Call] = []
        if outputs[0] is not None:
            calls.append(winograd.call(winograd.data_pass(s), ograd, weight, None, outputs[0], scratch))
        if outputs[1] is not None:
            calls.append(winograd_weights.call(winograd.forward_pass(s), data, ograd, outputs[1], scratch))
    else:
        scratch = _take_scratch(ctx, s, _data_scratch(s), _weight_scratch(s))
        calls = _adjoint(s, data, ograd, weight, outputs[0], outputs[1], scratch)
    if not params["no_bias"] and outputs[2] is not None:
        calls.append(_sum_to_bias(ograd, outputs[2]))
    return in_sequence(*calls)


def _fast_backward_nbytes(s: ConvSizes) -> int:
    """Return the scratch bytes that both gradients share if Winograd's kernels compute them, one after the other."""
    return max(winograd.layout(winograd.data_pass(s)).nbytes, winograd_weights.layout(winograd.forward_pass(s)).nbytes)


def _transposed(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    out = outputs[0]
    if out is None:
        return nothing
    s = sizes(_deconvolution(params, [_spec(inputs[0])], [_spec(out)]))
    calls = _adjoint(s, None, inputs[0], inputs[1], out, None, _take_scratch(ctx, s, _data_scratch(s)))
    if not params["no_bias"]:
        calls.append(partial(np.add, out, inputs[2].reshape(1, -1, *[1] * (out.ndim - 2)), out=out))
    return in_sequence(*calls)


def _transposed_backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    ograd, data, weight = inputs
    s = sizes(_deconvolution_backward(params, [_spec(ograd), _spec(data)], []))
    scratch = _take_scratch(ctx, s, _forward_scratch(s), _weight_scratch(s))
    calls = _adjoint(s, ograd, data, None, None, outputs[1], scratch)
    if outputs[0] is not None:
        calls.append(_correlate(s, ograd, weight, None, outputs[0], scratch))
    if not params["no_bias"] and outputs[2] is not None:
        calls.append(_sum_to_bias(ograd, outputs[2]))
    return in_sequence(*calls)


def _provide(
    op: str, make: Maker, geometry: Callable[[Params, Specs, Specs], Geometry], data: int,
    scratch: Callable[[ConvSizes], Sequence[Scratch]], fast: tuple[Maker, Callable[[ConvSizes], int]] | None = None,
) -> None:  # fmt: skip
    """Register the compiled implementations of ``op``.

    Args:
        make: prepares the calls of the dense, pointwise and depthwise kernels.
        geometry: derives the geometry from parameters, inputs and outputs.
        data: index of the input whose dtype these kernels must support.
        scratch: returns the scratch of each pass.
        fast: prepares the calls of Winograd's kernels, and returns their scratch bytes; None: there are none.
    """
    relu = joined.RELU * op.endswith(joined.RELU)

    def needed(nbytes: int, params: Params, inputs: Specs, outputs: Specs) -> int:
        return _with_norm(nbytes, params, inputs, outputs, relu) if "+BatchNorm" in op else nbytes

    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        s = sizes(geometry(params, inputs, outputs))
        return needed(_nbytes(s, *scratch(s)), params, inputs, outputs)

    def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
        return _refusal(inputs[data], geometry(params, inputs, outputs))

    native = Implementation(
        name="native",
        kernel=RepeatedKernel(make),
        workspace=workspace,
        refusal=refusal,
        slower=lambda params, inputs, outputs: _slower(
            geometry(params, inputs, outputs), forward=op.startswith("Convolution")
        ),
        otherwise=_mixed(relu) if "+BatchNorm" in op else None,
    )
    if fast is None:
        provide(op, native)
        return
    maker, nbytes = fast
    provide(
        op,
        Implementation(
            name="winograd",
            kernel=RepeatedKernel(maker),
            workspace=lambda params, inputs, outputs: needed(
                nbytes(sizes(geometry(params, inputs, outputs))), params, inputs, outputs
            ),
            refusal=lambda params, inputs, outputs: (
                refusal(params, inputs, outputs) or winograd.refusal(sizes(geometry(params, inputs, outputs)))
            ),
            otherwise=native,
            special=True,
        ),
    )


def _mixed(relu: str) -> Implementation:
    """Return an implementation that runs NumPy's convolution, then the compiled batch norm, with the bits of two nodes.

    ``relu``: the suffix of a batch norm with a relu, else empty.
    """

    def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
        norm, _, statistics = _split_inputs(params, inputs)
        return batch_norm.refusal(norm, outputs[0], statistics[1].dtype)

    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        _, conv_inputs, _ = _split_inputs(params, inputs)
        nbytes = registry.get("Convolution").workspace_bytes(params, conv_inputs, outputs)
        return _with_norm(nbytes, params, inputs, outputs, relu)

    return Implementation(
        name="mixed",
        kernel=RepeatedKernel(partial(_plain_normalized, relu=bool(relu))),
        workspace=workspace,
        refusal=refusal,
        special=True,
    )


for _name, _make in (("Convolution", _forward), ("Convolution+BatchNorm", _normalized)):
    for _relu in (False, True):
        _provide(
            _name + joined.RELU * _relu, partial(_make, relu=_relu), _convolution, 0, lambda s: [_forward_scratch(s)],
            (partial(_make, relu=_relu, fast=True), lambda s: winograd.layout(winograd.forward_pass(s)).nbytes),
        )  # fmt: skip
_provide(
    "_backward_Convolution",
    _backward,
    _convolution_backward,
    1,
    lambda s: [_data_scratch(s), _weight_scratch(s)],
    (partial(_backward, fast=True), _fast_backward_nbytes),
)
_provide("Deconvolution", _transposed, _deconvolution, 0, lambda s: [_data_scratch(s)])
_provide(
    "_backward_Deconvolution",
    _transposed_backward,
    _deconvolution_backward,
    1,
    lambda s: [_forward_scratch(s), _weight_scratch(s)],
)
