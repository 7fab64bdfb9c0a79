"""BatchNorm: normalisation of each channel over batch and space, and its backward kernel fused with a relu.

Only the planner creates the operator fused with a relu (``ops/fusion/relu.py``). Its backward kernel also reads beta,
and recomputes the relu's input from the data, bit for bit: reading the relu's output would cost one more array.

Outputs 1 and 2 are the mean and 1 / sqrt(variance + eps) that normalise the data. They are the batch's in training
(without ``use_global_stats``), else the moving statistics'. The backward pass therefore needs no moving statistics.

Intended differences from MXNet 1.9.1: the training forward pass updates the moving statistics (MXNet: the backward
pass), and with ``fix_gamma`` the stored gamma stays unchanged (MXNet fills it with 1). In both systems, ``fix_gamma``
computes with gamma = 1 and sets its gradient to 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core import tiling
from weftplan.ops.core.forms import context_kernel, workspace_kernel
from weftplan.ops.core.kernels import BOOL, accumulator
from weftplan.ops.core.params import p_bool, p_float, p_int, p_optional
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    backward,
    floats_only,
    merge_dtype,
    merge_shape,
    normalize_axis,
    take_bytes,
)
from weftplan.ops.core.schema import (
    EntryRef,
    GradientBuilder,
    InplacePair,
    Op,
    OpContext,
    Param,
    Params,
    Shape,
    TensorSpec,
    Workspace,
)
from weftplan.support.array_types import ArrayModule, RawArray

NORM = "norm"
"""Name of the parameter of a convolution fused with a batch norm; its value is the batch norm's parameters."""
BATCH_NORMS = ("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm")
"""Batch norm operators, which compute the same values outside training; all but the first have channels on axis 1."""
_PARAMS = (
    Param("eps", p_float, 1e-3, "Added to the variance."),
    Param("momentum", p_float, 0.9, "Share of the old value in new moving statistics."),
    Param("fix_gamma", p_bool, True, "True: gamma counts as 1 and has gradient 0."),
    Param("use_global_stats", p_bool, False, "True: the moving statistics normalise in training too."),
    Param("output_mean_var", p_bool, False, "True: the mean and 1 / sqrt(variance + eps) are visible outputs."),
    Param("axis", p_int, 1, "The channel axis."),
    Param("cudnn_off", p_bool, False, "Accepted, no effect."),
    Param("min_calib_range", p_optional(p_float), None, "Accepted, no effect."),
    Param("max_calib_range", p_optional(p_float), None, "Accepted, no effect."),
)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "BatchNorm: data and output")
    vector: Shape | None = None
    for shape, what in zip(
        [*ins[1:], *outs[1:]], ("gamma", "beta", "moving_mean", "moving_var", "mean", "var"), strict=True
    ):
        vector = merge_shape(vector, shape, f"BatchNorm: {what} against the vectors before it")
    if data is not None:
        if not data:
            raise ShapeError("BatchNorm: data has shape (), expected at least one dimension")
        axis = normalize_axis(params["axis"], len(data), "BatchNorm: axis")
        vector = merge_shape((data[axis],), vector, f"BatchNorm: channels of data {data} on axis {axis}, and vectors")
        assert vector is not None
        data = (*data[:axis], vector[0], *data[axis + 1 :])
    return [data, *[vector] * 4], [data, vector, vector]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "BatchNorm: data and output")
    vector = None if data is None else accumulator(data)
    for dtype in [*ins[1:], *outs[1:]]:
        vector = merge_dtype(vector, dtype, "BatchNorm: gamma, beta and statistics (float32 for float16 data)")
    if data is None and vector == np.float64:
        data = vector
    return [data, *[vector] * 4], [data, vector, vector]


class _Split:
    """The blocks of an array viewed as (outer, channels, inner): ranges of channels, each cut along the outer axis."""

    def __init__(self, params: Params, shape: Shape) -> None:
        axis = params["axis"] % len(shape)
        self.outer, self.channels, self.inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        self.channel_step = max(1, min(self.channels, tiling.block() // max(1, self.inner)))
        self.outer_step = max(1, min(self.outer, tiling.block() // max(1, self.channel_step * self.inner)))
        self.count = self.outer * self.inner

    @property
    def shape(self) -> Shape:
        return self.outer, self.channels, self.inner

    @property
    def block(self) -> Shape:
        return self.outer_step, self.channel_step, self.inner

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield (outer range, channel range) of each block."""
        for c in range(0, self.channels, self.channel_step):
            channels = slice(c, min(c + self.channel_step, self.channels))
            for o in range(0, self.outer, self.outer_step):
                yield slice(o, min(o + self.outer_step, self.outer)), channels

    def cut(self, buffer: RawArray, block: tuple[slice, slice]) -> RawArray:
        """Return the start of ``buffer`` (of shape :attr:`block`) as a contiguous view in the shape of ``block``.

        ``block`` is (outer range, channel range).
        """
        outer, channels = (part.stop - part.start for part in block)
        return buffer.reshape(-1)[: outer * channels * self.inner].reshape(outer, channels, self.inner)


def _add_up(xp: ArrayModule, values: RawArray, block: tuple[slice, slice], total: RawArray, part: RawArray) -> None:
    """Add each channel's sum over ``block`` to ``total``; the first block of a channel sets ``total``.

    ``part`` is scratch of ``total``'s shape.
    """
    channels = block[1]
    if block[0].start == 0:
        xp.sum(values, axis=(0, 2), dtype=total.dtype, out=total[channels])
    else:
        xp.sum(values, axis=(0, 2), dtype=total.dtype, out=part[channels])
        xp.add(total[channels], part[channels], out=total[channels])


def _statistics(
    xp: ArrayModule, split: _Split, data: RawArray, mean: RawArray, var: RawArray, part: RawArray, buffer: RawArray
) -> None:
    """Compute ``mean`` and the biased variance ``var`` of each channel; the variance is that of the centred data.

    ``part`` (channels,) and ``buffer`` (:attr:`_Split.block`) are scratch.
    """
    if xp is not np and split.outer_step == split.outer and split.channel_step == split.channels:
        xp.mean(data, axis=(0, 2), dtype=mean.dtype, out=mean)  # one launch less than a sum and a product
        xp.subtract(data, mean[:, None], out=buffer)
        xp.multiply(buffer, buffer, out=buffer)
        xp.mean(buffer, axis=(0, 2), dtype=var.dtype, out=var)
        return
    for block in split:
        _add_up(xp, data[block], block, mean, part)
    xp.multiply(mean, 1.0 / split.count, out=mean)
    for block in split:
        centred = split.cut(buffer, block)
        xp.subtract(data[block], mean[block[1], None], out=centred)
        xp.multiply(centred, centred, out=centred)
        _add_up(xp, centred, block, var, part)
    xp.multiply(var, 1.0 / split.count, out=var)


@context_kernel
def _forward(
    ctx: OpContext,
    p: Params,
    data: RawArray,
    gamma: RawArray | None,
    beta: RawArray,
    moving_mean: RawArray,
    moving_var: RawArray,
    out: RawArray | None,
    saved_mean: RawArray | None,
    saved_inverse: RawArray | None,
) -> None:
    xp = ctx.xp
    split = _Split(p, data.shape)
    data = data.reshape(split.shape)
    acc = moving_mean.dtype
    buffer = ctx.take(split.block, acc)
    mean, var, scale, shift = (ctx.take((split.channels,), acc) for _ in range(4))
    inverse = scale
    if saved_mean is not None:
        mean = saved_mean
    if saved_inverse is not None:
        inverse = saved_inverse
    if ctx.is_train and not p["use_global_stats"]:
        _statistics(xp, split, data, mean, var, scale, buffer)
        if not ctx.recompute:
            for moving, batch in ((moving_mean, mean), (moving_var, var)):
                xp.multiply(moving, p["momentum"], out=moving)
                xp.multiply(batch, 1.0 - p["momentum"], out=scale)
                xp.add(moving, scale, out=moving)
        xp.add(var, p["eps"], out=inverse)
    else:
        mean[...] = moving_mean
        xp.add(moving_var, p["eps"], out=inverse)
    xp.sqrt(inverse, out=inverse)
    xp.divide(1.0, inverse, out=inverse)
    if out is None:
        return
    if p["fix_gamma"]:
        scale = inverse
    else:
        xp.multiply(inverse, gamma, out=scale)
    xp.multiply(mean, scale, out=shift)
    xp.subtract(beta, shift, out=shift)
    out = out.reshape(split.shape)
    for block in split:
        target = out[block]
        wide = target if acc == target.dtype else split.cut(buffer, block)
        xp.multiply(data[block], scale[block[1], None], out=wide)
        xp.add(wide, shift[block[1], None], out=target, casting="same_kind")


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    split = _Split(params, inputs[0].shape)
    acc = inputs[1].dtype
    return take_bytes((split.block, acc), *[((split.channels,), acc)] * 4)


@workspace_kernel
def _backward(ctx: Workspace, p: Params, ograd: RawArray, *arrays: Any) -> None:
    """Compute the gradients of data, gamma and beta.

    With d = data - mean and v = var + eps, the data's gradient is gamma / sqrt(v) · (ograd - mean(ograd) -
    d · mean(ograd · d) / v), or gamma / sqrt(v) · ograd with ``use_global_stats``.
    """
    _backward_of(ctx, p, ograd, None, *arrays)


@workspace_kernel
def backward_behind_relu(
    ctx: Workspace,
    p: Params,
    ograd: RawArray,
    data: RawArray,
    gamma: RawArray | None,
    beta: RawArray,
    *arrays: Any,
) -> None:
    """Compute the gradients of a batch norm followed by a relu, from the gradient ``ograd`` of the relu's output."""
    _backward_of(ctx, p, ograd, beta, data, gamma, *arrays)


def _backward_of(
    ctx: Workspace,
    params: Params,
    ograd: RawArray,
    beta: RawArray | None,
    data: RawArray,
    gamma: RawArray | None,
    mean: RawArray,
    inverse: RawArray,
    dgrad: RawArray | None,
    ggrad: RawArray | None,
    bgrad: RawArray | None,
) -> None:
    xp = ctx.xp
    split = _Split(params, data.shape)
    data, ograd = data.reshape(split.shape), ograd.reshape(split.shape)
    acc = mean.dtype
    buffer = ctx.take(split.block, acc)
    second = ctx.take(split.block, acc) if acc != data.dtype else None
    sums, products, part, scale = (ctx.take((split.channels,), acc) for _ in range(4))
    if params["fix_gamma"]:
        scale = inverse
    else:
        xp.multiply(inverse, gamma, out=scale)
    if beta is not None:
        masked, mask = ctx.take(split.block, ograd.dtype), ctx.take(split.block, BOOL)
        shift = ctx.take((split.channels,), acc)
        xp.multiply(mean, scale, out=shift)
        xp.subtract(beta, shift, out=shift)

    def incoming(block: tuple[slice, slice]) -> RawArray:
        """Return the gradient of the batch norm's output in ``block``; with a relu, overwrite ``buffer``."""
        if beta is None:
            return ograd[block]
        wide, passed, let = (split.cut(array, block) for array in (buffer, masked, mask))
        xp.multiply(data[block], scale[block[1], None], out=wide)
        xp.add(wide, shift[block[1], None], out=passed, casting="same_kind")
        xp.less_equal(passed, 0, out=let)
        xp.logical_not(let, out=let)  # NaN counts as above 0: the incoming gradient must not vanish there
        xp.multiply(ograd[block], let, out=passed)
        return passed

    total = sums if bgrad is None else bgrad
    for block in split:
        coming, term = incoming(block), split.cut(buffer, block)
        _add_up(xp, coming, block, total, part)
        xp.subtract(data[block], mean[block[1], None], out=term)
        xp.multiply(term, coming, out=term)
        _add_up(xp, term, block, products, part)
    slope = products
    if ggrad is not None:
        if params["fix_gamma"]:
            ggrad.fill(0)
        else:
            slope = ggrad
    xp.multiply(products, inverse, out=slope)  # the gradient of gamma
    if dgrad is None:
        return
    # dgrad = slope·data + scale·ograd + offset per channel; slope and offset overwrite products and sums.
    xp.multiply(slope, inverse, out=products)
    xp.multiply(scale, -1.0 / split.count, out=part)
    xp.multiply(products, part, out=products)
    xp.multiply(total, part, out=sums)
    xp.multiply(products, mean, out=part)
    xp.subtract(sums, part, out=sums)
    out = dgrad.reshape(split.shape)
    for block in split:
        target, channels = out[block], block[1]
        wide = target if second is None else split.cut(second, block)
        # Read the whole block before writing the target, which may share memory with ograd or data.
        coming = incoming(block)
        if params["use_global_stats"]:
            xp.multiply(coming, scale[channels, None], out=wide)
        else:
            term = split.cut(buffer, block)
            xp.multiply(data[block], products[channels, None], out=term)
            xp.add(term, sums[channels, None], out=term)
            xp.multiply(coming, scale[channels, None], out=wide)
            xp.add(wide, term, out=wide)
        if second is not None:
            target[...] = wide


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (shape, dtype), acc = inputs[1], inputs[3].dtype
    split = _Split(params, shape)
    return take_bytes(*[(split.block, acc)] * (1 if acc == dtype else 2), *[((split.channels,), acc)] * 4)


def workspace_behind_relu(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Return the scratch bytes of :func:`backward_behind_relu`."""
    ograd, data, gamma, beta, *statistics = inputs
    split = _Split(params, data.shape)
    nbytes = _backward_workspace(params, [ograd, data, gamma, *statistics], outputs)
    return nbytes + take_bytes((split.block, ograd.dtype), (split.block, BOOL), ((split.channels,), beta.dtype))


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    reads = [builder.ograd(), builder.input(0), builder.input(1), builder.output(1), builder.output(2)]
    return [*builder.node("_backward_BatchNorm", reads), None, None]


register(
    Op(
        name="BatchNorm",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("BatchNorm", _infer_dtype),
        params=_PARAMS,
        inputs=("data", "gamma", "beta", "moving_mean", "moving_var"),
        aux=(3, 4),
        outputs=("output", "mean", "var"),
        visible_outputs=lambda params: 3 if params["output_mean_var"] else 1,
        gradient=_gradient,
        needs_training=lambda params: not params["use_global_stats"],
        inplace=(InplacePair(0, 0),),
        ignored_inputs=lambda params: (1,) if params["fix_gamma"] else (),
        workspace=_workspace,
        input_init={3: '["zero", {}]', 4: '["one", {}]'},
        doc="(data - mean) / sqrt(var + eps) · gamma + beta for each channel, in the shape of data; the other inputs "
        "are (channels,).",
    )
)
backward(
    "BatchNorm",
    _backward,
    ("ograd", "data", "gamma", "mean", "var"),
    grad_inputs=(0, 1, 2),
    params=_PARAMS,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    ignored_inputs=lambda params: (2,) if params["fix_gamma"] else (),
    workspace=_backward_workspace,
)
