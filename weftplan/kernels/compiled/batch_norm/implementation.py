"""Compiled implementation of BatchNorm, forward and backward.

Channels are independent, so idle cores may take ranges of them. Fused operators prepare a :class:`ChannelPass` and run
its kernel together with other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weftplan.kernels.compiled.batch_norm.kernels import (
    BACKWARD,
    EARLY,
    FORWARD,
    LATE,
    LINE,
    SAVED_STATISTICS,
    SCALES,
    STRETCH,
    backward,
    forward,
    scales,
)
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.replay import Call, Maker, RepeatedKernel, holding, in_sequence, nothing
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params, Shape, TensorSpec
from weftplan.ops.fusion.normalize import NORMALIZE
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

FEW = 1 << 17
"""Minimum elements of a part, which is a range of channels."""
LEAST_PLANE = 2
"""Minimum elements of a plane. The kernels loop over planes; for planes of one element, NumPy is faster."""


def entries(dtype: DType, target: Target | None = None) -> dict[str, Entry]:
    """Return the compiled functions for elements of ``dtype`` by name: ``forward``, ``backward`` and ``scales``."""
    scalar = "float" if dtype.itemsize == 4 else "double"
    return library(
        f"batch-norm-{scalar}",
        lambda _: [forward(scalar), backward(scalar), scales(scalar)],
        ("forward", "backward", "scales"),
        target,
    )


def _extents(params: Params, shape: Shape) -> tuple[int, int, int]:
    """Return (elements of the axes before the channels, number of channels, elements of the axes after them)."""
    axis = params["axis"] % len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _on_channels(name: str, names: Sequence[str], data: RawArray, settled: ChannelPass) -> Call:
    channels = settled.words["channels"]
    values = {**settled.words, "last": channels}
    words = np.array([values.get(name, 0) for name in names], dtype=np.int64)
    arguments = KernelArguments(names, words, [settled.constants])
    run = in_parts(entries(data.dtype)[name], arguments, channels, count(data.size, FEW, channels))
    return in_sequence(settled.prepare, run, settled.finish)


def _address(array: RawArray | None) -> int:
    return 0 if array is None else address(array)


def fetching(when: str, at: int, image: int, channel: int, plane: int, *, behind: int = 0) -> dict[str, int]:
    """Return the words that make a pass over planes of ``plane`` bytes prefetch another array, channel by channel.

    Args:
        when: the phase that prefetches, ``EARLY`` or ``LATE``.
        at: address of the array; 0: no prefetch.
        image: bytes between its images.
        channel: bytes between its channels.
        behind: number of channels from the pass's current channel to the prefetched channel.
    """
    lines = -(-channel * STRETCH // (LINE * plane)) if at else 0
    values = {"at": at + behind * channel, "image": image, "channel": channel, "lines": lines}
    return {f"{when}_{name}": value for name, value in values.items()}


def scaling(params: Params, statistics: Arrays, scale: RawArray, shift: RawArray) -> Call:
    """Return a call that computes ``scale`` and ``shift`` of each channel.

    ``statistics``: gamma, beta, mean and variance.
    """
    gamma, beta, mean, var = statistics
    constants = np.array([params["eps"]], scale.dtype)
    values = {
        "gamma": 0 if params["fix_gamma"] else address(gamma), "beta": address(beta), "mean": address(mean),
        "var": address(var), "scale": address(scale), "shift": address(shift), "constants": address(constants),
        "channels": scale.size,
    }  # fmt: skip
    words = KernelArguments(SCALES, np.array([values[name] for name in SCALES], dtype=np.int64), [constants])
    return holding(words.ready(entries(scale.dtype)["scales"]), statistics, scale, shift)


@dataclass(frozen=True, slots=True)
class ChannelPass:
    """A prepared pass over the channels of a BatchNorm: argument words, and calls to make before and after it."""

    words: dict[str, int]
    """Argument words by name; the caller adds ``last``."""
    constants: Any
    """The array to which the word ``constants`` points."""
    prepare: Call
    finish: Call
    """The call to make after the pass."""


def moves_statistics(ctx: OpContext, params: Params) -> bool:
    """Return whether a call with this context updates the moving statistics."""
    return ctx.is_train and not params["use_global_stats"] and not ctx.recompute


def forward_pass(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, relu: bool = False) -> ChannelPass:
    """Return the pass of a BatchNorm, with a relu if ``relu``; ``outputs[0]`` may share the memory of the data."""
    data, gamma, beta, moving_mean, moving_var = inputs
    images, channels, plane = _extents(params, data.shape)
    mean, var, inverse = (ctx.take((channels,), data.dtype) for _ in range(3))
    fixed_statistics = not ctx.is_train or params["use_global_stats"]
    moves = moves_statistics(ctx, params)
    constants = np.array([params["eps"], 1.0 / (images * plane)], data.dtype)
    nbytes = plane * data.itemsize
    words = {
        "x": address(data), "y": _address(outputs[0]), "gamma": 0 if params["fix_gamma"] else address(gamma),
        "beta": address(beta), "mean": address(mean), "var": address(var), "inverse": address(inverse),
        "images": images, "channels": channels, "plane": plane, "given": int(fixed_statistics), "relu": int(relu),
        "constants": address(constants),
        **fetching(EARLY, _address(outputs[0]), channels * nbytes, nbytes, nbytes),
        **fetching(LATE, address(data), channels * nbytes, nbytes, nbytes, behind=1),
    }  # fmt: skip

    def prepare() -> None:
        if fixed_statistics:
            mean[...] = moving_mean
            var[...] = moving_var

    def finish() -> None:
        for target, value in zip(outputs[1:], (mean, inverse), strict=True):
            if target is not None:
                target[...] = value
        if moves:
            for moving, batch in ((moving_mean, mean), (moving_var, var)):
                np.multiply(moving, params["momentum"], out=moving)
                np.multiply(batch, 1.0 - params["momentum"], out=inverse)
                np.add(moving, inverse, out=moving)

    return ChannelPass(words, constants, prepare, holding(finish, data, outputs, gamma, beta))


def _normalize(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    """Return a call that recomputes a batch norm from its saved mean and 1 / sqrt(variance + eps)."""
    data, gamma, beta, mean, inverse = inputs
    images, channels, plane = _extents({"axis": 1}, data.shape)
    nbytes = plane * data.itemsize
    constants = np.zeros(2, data.dtype)
    words = {
        "x": address(data), "y": address(outputs[0]), "gamma": 0 if params["fix_gamma"] else address(gamma),
        "beta": address(beta), "mean": address(mean), "inverse": address(inverse), "images": images,
        "channels": channels, "plane": plane, "given": SAVED_STATISTICS, "relu": int(params["relu"]),
        "constants": address(constants),
        **fetching(LATE, address(data), channels * nbytes, nbytes, nbytes, behind=1),
    }  # fmt: skip
    call = _on_channels("forward", FORWARD, data, ChannelPass(words, constants, nothing, nothing))
    return holding(call, data, gamma, beta, mean, inverse, outputs)


def normalization(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, relu: bool = False) -> Call:
    """Return a call that runs :func:`forward_pass` over all channels, in parts."""
    return _on_channels("forward", FORWARD, inputs[0], forward_pass(ctx, params, inputs, outputs, relu=relu))


def _backward_behind_relu(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    ograd, data, gamma, beta, mean, inverse = inputs
    return _backward(ctx, params, [ograd, data, gamma, mean, inverse], outputs, beta=beta)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, beta: RawArray | None = None) -> Call:
    return _on_channels("backward", BACKWARD, inputs[1], backward_pass(ctx, params, inputs, outputs, beta=beta))


def backward_pass(
    ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays, *, beta: RawArray | None = None
) -> ChannelPass:
    """Return the pass of a BatchNorm's gradients; unless ``beta`` is None, a relu follows the batch norm."""
    ograd, data, gamma, mean, inverse = inputs
    images, channels, plane = _extents(params, data.shape)
    ggrad, bgrad = (ctx.take((channels,), data.dtype) for _ in range(2))
    constants = np.array([params["eps"], 1.0 / (images * plane)], data.dtype)
    nbytes = plane * data.itemsize
    words = {
        "dy": address(ograd), "x": address(data), "dx": _address(outputs[0]),
        "gamma": 0 if params["fix_gamma"] else address(gamma), "mean": address(mean), "inverse": address(inverse),
        "dgamma": address(ggrad), "dbeta": address(bgrad), "images": images, "channels": channels, "plane": plane,
        "given": int(params["use_global_stats"]), "beta": _address(beta), "constants": address(constants),
        "dx_image": channels * nbytes, "dx_channel": nbytes,
        **fetching(EARLY, _address(outputs[0]), channels * nbytes, nbytes, nbytes),
        **fetching(LATE, address(ograd), channels * nbytes, nbytes, nbytes, behind=1),
    }  # fmt: skip

    def finish() -> None:
        if outputs[1] is not None:
            np.copyto(outputs[1], 0 if params["fix_gamma"] else ggrad)
        if outputs[2] is not None:
            np.copyto(outputs[2], bgrad)

    return ChannelPass(words, constants, nothing, holding(finish, ograd, data, outputs[0], gamma, mean, inverse, beta))


def refusal(params: Params, data: TensorSpec, vector: DType) -> str:
    """Return the reason why these kernels refuse ``data`` with statistics of dtype ``vector``; empty if they accept."""
    target = host()
    if isinstance(target, str):
        return target
    if data.dtype not in (np.float32, np.float64) or vector != data.dtype:
        return f"compiled kernels are written for float32 and float64, not {data.dtype}"
    return "planes of few elements" if _extents(params, data.shape)[2] < LEAST_PLANE else ""


def _provide(op: str, make: Maker, data: int, vector: int, count: int) -> None:
    """Register the kernel whose calls ``make`` prepares for ``op``.

    Args:
        data: index of the input that is normalised.
        vector: index of an input with the dtype of the statistics.
        count: number of scratch vectors with one element per channel.
    """

    def refused(params: Params, inputs: Specs, outputs: Specs) -> str:
        return refusal(params, inputs[data], inputs[vector].dtype)

    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        shape, dtype = inputs[data]
        return take_bytes(*[((_extents(params, shape)[1],), dtype)] * count)

    provide(op, Implementation(name="native", kernel=RepeatedKernel(make), workspace=workspace, refusal=refused))


provide(
    NORMALIZE.name,
    Implementation(
        name="native",
        kernel=RepeatedKernel(_normalize),
        workspace=lambda params, inputs, outputs: 0,
        refusal=lambda params, inputs, outputs: refusal({"axis": 1}, inputs[0], inputs[2].dtype),
    ),
)
_provide("BatchNorm", normalization, data=0, vector=2, count=3)
_provide("_backward_BatchNorm", _backward, data=1, vector=3, count=2)
_provide("BatchNorm+relu", partial(normalization, relu=True), data=0, vector=2, count=3)
_provide("_backward_BatchNorm+relu", _backward_behind_relu, data=1, vector=4, count=2)
