"""Compiled implementation of a fused depthwise convolution between two batch norms, with gradient.

For one channel of all images after another, a function calls the kernels of ``batch_norm/kernels.py`` and
``implementation.py``, so that intermediate results stay in the cache. The first batch norm and its relu are applied
while planes are copied with their padding. The gradient of the convolution's output uses the memory of the data's
gradient until that is written. Bits are those of the kernels called one after another on whole arrays. Channels are
independent, so idle cores may take ranges of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.kernels.compiled.batch_norm import implementation as batch_norm
from weftplan.kernels.compiled.batch_norm import kernels as batch_norm_kernels
from weftplan.kernels.compiled.batch_norm.implementation import ChannelPass
from weftplan.kernels.compiled.batch_norm.kernels import EARLY, LATE
from weftplan.kernels.compiled.depthwise import implementation as depthwise
from weftplan.kernels.compiled.depthwise import tables as depthwise_tables
from weftplan.kernels.compiled.depthwise.implementation import PASS
from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.parts import in_parts
from weftplan.kernels.compiled.replay import Call, Maker, RepeatedKernel, holding, in_sequence
from weftplan.kernels.compiled.size_table import ConvSizes, sizes
from weftplan.kernels.compiled.target import Target
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params, TensorSpec, aligned
from weftplan.ops.fusion.depthwise_block import BEFORE, BEHIND, BLOCK, BLOCK_GRADIENT, LAYER, RELU, memory_of_inner
from weftplan.ops.nn import convolution
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

Blocks = Mapping[str, Sequence[str]]
"""For each kernel call of a function, by the call's name: the names of the kernel's argument words."""
_FORWARD: Blocks = {"first": batch_norm_kernels.FORWARD, "layer": PASS, "second": batch_norm_kernels.FORWARD}
_BACKWARD: Blocks = {
    "second": batch_norm_kernels.BACKWARD,
    "weight": PASS,
    "data": PASS,
    "first": batch_norm_kernels.BACKWARD,
}
_RANGE = ("first", "last", "weighs")
"""Words before those of the kernels: the range of channels, and whether the weight's gradient is wanted."""


def _names(blocks: Blocks) -> tuple[str, ...]:
    return (*_RANGE, *(f"{block}.{name}" for block, names in blocks.items() for name in names))


class _Driver:
    """Builder of a function that runs several kernels on one channel after another.

    One array contains the argument words of all kernels.
    """

    def __init__(self, name: str, blocks: Blocks, scalar: str) -> None:
        self.f = Function(name, (("ptr", "words"),), scalar, batch_norm_kernels.LANES[scalar])
        self.blocks = blocks
        self._names = _names(blocks)
        self.range_words = {name: self.f.word("%words", index) for index, name in enumerate(_RANGE)}
        self._begins = {
            block: self.f.at("%words", 8 * self._names.index(f"{block}.{names[0]}")) for block, names in blocks.items()
        }

    def on(self, channel: str) -> None:
        """Emit stores that make every kernel process this channel alone."""
        behind = self.f.add(channel, 1)
        for block in self.blocks:
            self.set(f"{block}.first", channel)
            self.set(f"{block}.last", behind)

    def set(self, name: str, value: Value) -> None:
        """Emit a store of ``value`` to the word called ``name``."""
        self.f.keep(value, "%words", self._names.index(name))

    def pointer(self, name: str) -> str:
        """Emit a load of the pointer called ``name``."""
        return self.f.pointer("%words", self._names.index(name))

    def run(self, kernel: Function, block: str) -> None:
        """Emit a call of ``kernel`` on the argument words of ``block``."""
        self.f.call(kernel, self._begins[block])

    def normalizes(self, channel: str, layer: str, scratch: str) -> None:
        """Emit code that stores a channel's scale and shift in the first batch norm to ``scratch``.

        The word ``before`` of block ``layer`` gets their address.
        """
        f = self.f
        offset = f.mul(channel, f.size)
        of = {name: self.pointer(f"first.{name}") for name in ("gamma", "beta", "mean", "inverse")}
        mean, inverse = (f.scalar_at(f.at(of[name], offset)) for name in ("mean", "inverse"))
        scale, shift = batch_norm_kernels.scale_and_shift(f, of, offset, mean, inverse)
        f.put_scalar(scale, scratch)
        f.put_scalar(shift, f.at(scratch, f.size))
        self.set(f"{layer}.before", f.value(f"ptrtoint ptr {scratch} to i64"))


def functions(scalar: str, stride: int) -> list[Function]:
    """Return all functions of the module for 3x3 windows with this stride."""
    norm = batch_norm_kernels.forward(scalar).within("norm")
    layer = depthwise.forward(scalar, stride, after_norm=True).within("layer")
    forward = _Driver("forward", _FORWARD, scalar)
    scratch = forward.f.local(scalar, 2)
    with forward.f.loop(forward.range_words["first"], forward.range_words["last"]) as channel:
        forward.on(channel)
        forward.run(norm, "first")
        forward.normalizes(channel, "layer", scratch)
        forward.run(layer, "layer")
        forward.run(norm, "second")

    norm_back = batch_norm_kernels.backward(scalar).within("norm_back")
    weights = depthwise.weights(scalar, stride, after_norm=True).within("weights")
    data = (depthwise.forward(scalar, 1) if stride == 1 else depthwise.data_by_two(scalar, depthwise.PADDED)).within(
        "data"
    )
    backward = _Driver("backward", _BACKWARD, scalar)
    weighs = backward.f.compare("ne", backward.range_words["weighs"], 0)
    scratch = backward.f.local(scalar, 2)
    with backward.f.loop(backward.range_words["first"], backward.range_words["last"]) as channel:
        backward.on(channel)
        backward.run(norm_back, "second")
        with backward.f.when(weighs):
            backward.normalizes(channel, "weight", scratch)
            backward.run(weights, "weight")
        backward.run(data, "data")
        backward.run(norm_back, "first")
    return [forward.f, backward.f, norm, layer, norm_back, weights, data]


def entries(dtype: DType, stride: int, target: Target | None = None) -> dict[str, Entry]:
    """Return the compiled functions ``forward`` and ``backward`` for elements of ``dtype``, by name."""
    scalar = "float" if dtype.itemsize == 4 else "double"
    return library(
        f"depthwise-block-{scalar}-{stride}", lambda _: functions(scalar, stride), ("forward", "backward"), target
    )


def _sizes(params: Params, data: TensorSpec, inner: TensorSpec) -> ConvSizes:
    return sizes(convolution.sizes(params[LAYER], data, inner.shape))


def refusal(params: Params, data: TensorSpec, inner: TensorSpec, vector: DType) -> str:
    """Return the reason why these kernels refuse a fused block; empty if they accept it.

    ``data``: its input; ``inner``: the output of its convolution; ``vector``: dtype of its statistics.
    """
    for name, image in ((BEFORE, data), (BEHIND, inner)):
        why = batch_norm.refusal(params[name], image, vector)
        if why:
            return why
    s = _sizes(params, data, inner)
    fit = depthwise_tables.takes(s) and s.kernel[1:] == (3, 3) and s.dilate[1:] == s.pad[1:] == (1, 1)
    if not fit or not params[LAYER]["no_bias"] or any(params[name]["axis"] != 1 for name in (BEFORE, BEHIND)):
        return "another convolution than a depthwise one of 3x3 with padding of one"
    return ""


def _scratch_bytes(s: ConvSizes) -> int:
    return aligned(depthwise_tables.scratch(s))


class _Words:
    """The argument words of all kernels of a call, and the tables that they point to."""

    def __init__(self, blocks: Blocks) -> None:
        self._names = _names(blocks)
        self._values: dict[str, int] = {}
        self._tables: list[Any] = []

    def norm(self, block: str, settled: ChannelPass, **more: int) -> None:
        """Set the words of ``block``, a batch norm, to those of ``settled`` and ``more``."""
        self._put(block, {**settled.words, **more})
        self._tables.append(settled.constants)

    def layer(self, block: str, plan: KernelArguments, **more: int) -> None:
        """Set the words of ``block``, a convolution, to those of ``plan`` and ``more``."""
        self._put(block, {**dict(zip(plan.names, plan.words.tolist(), strict=True)), **more})
        self._tables += plan.tables

    def _put(self, block: str, values: Mapping[str, int]) -> None:
        self._values |= {f"{block}.{name}": value for name, value in values.items()}

    def call(
        self, entry: Entry, s: ConvSizes, scratch: RawArray, layers: Mapping[str, KernelArguments], *, weighs: bool
    ) -> Call:
        """Return a call that runs ``entry`` on all channels, in parts.

        Args:
            scratch: scratch of all parts.
            layers: the arguments of each convolution, by block.
            weighs: whether the weight's gradient is wanted.
        """
        moves = {}
        begin, nbytes = address(scratch), depthwise_tables.scratch(s) // depthwise_tables.parts(s)
        for block, plan in layers.items():
            copied, separated, _ = depthwise_tables.plan_bytes(plan)
            for name, offset in (("buffer", 0), ("second", copied), ("sums", copied + separated)):
                self._values[f"{block}.{name}"] = begin + offset
                moves[f"{block}.{name}"] = nbytes
        self._values["weighs"] = int(weighs)
        words = np.array([self._values.get(name, 0) for name in self._names], np.int64)
        arguments = KernelArguments(self._names, words, self._tables)
        return in_parts(entry, arguments, s.groups, depthwise_tables.parts(s), moves=moves)


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    data, weight = inputs[0], inputs[5]
    out, _, *statistics = outputs
    inner = memory_of_inner(ctx, data, outputs)
    s = _sizes(params, TensorSpec(data.shape, data.dtype), TensorSpec(inner.shape, inner.dtype))
    scratch = ctx.take((_scratch_bytes(s),), np.uint8)
    first_norm = batch_norm.forward_pass(ctx, params[BEFORE], inputs[:5], [None, *statistics[:2]])
    second_norm = batch_norm.forward_pass(
        ctx, params[BEHIND], [inner, *inputs[6:]], [out, *statistics[2:]], relu=params[RELU]
    )
    plan = depthwise_tables.forward(s)
    words = _Words(_FORWARD)
    # Prefetches use memory while a channel is in the cache: of results before they are written, then of the next
    # channel.
    (image, channel), (small_image, small_channel) = data.strides[:2], inner.strides[:2]
    to_inner = batch_norm.fetching(EARLY, address(inner), small_image, small_channel, channel)
    to_out = batch_norm.fetching(EARLY, 0 if out is None else address(out), small_image, small_channel, small_channel)
    to_data = batch_norm.fetching(LATE, address(data), image, channel, small_channel, behind=1)
    words.norm("first", first_norm, **to_inner)
    words.layer("layer", plan, x=address(data), w=address(weight), y=address(inner))
    words.norm("second", second_norm, **to_out, **to_data)
    run = words.call(entries(data.dtype, s.stride[2])["forward"], s, scratch, {"layer": plan}, weighs=False)
    run = holding(run, data, weight, inner, out, scratch)
    return in_sequence(first_norm.prepare, second_norm.prepare, run, first_norm.finish, second_norm.finish)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    ograd, inner, data, weight, *vectors = inputs
    first_vectors, second_vectors = vectors[:4], vectors[4:]
    _, *of_first, wgrad, second_ggrad, second_bgrad = outputs
    dgrad = ctx.memory_of(outputs, 0, data.dtype)
    s = _sizes(params, TensorSpec(data.shape, data.dtype), TensorSpec(inner.shape, inner.dtype))
    scratch = ctx.take((_scratch_bytes(s),), np.uint8)

    def norm(
        name: str, ograd: RawArray, data: RawArray, vectors: Sequence[RawArray | None], outputs: Arrays, *, relu: bool
    ) -> ChannelPass:
        gamma, beta, *statistics = vectors
        return batch_norm.backward_pass(
            ctx, params[name], [ograd, data, gamma, *statistics], outputs, beta=beta if relu else None
        )

    # The gradient of the convolution's output shares the memory of its image's gradient, which is no smaller.
    (image, channel), (small_image, small_channel) = dgrad.strides[:2], inner.strides[:2]
    to_dgrad = batch_norm.fetching(EARLY, address(dgrad), image, channel, small_channel)
    to_data = batch_norm.fetching(LATE, address(data), image, channel, small_channel)
    to_ograd = batch_norm.fetching(EARLY, address(ograd), small_image, small_channel, channel, behind=1)
    to_inner = batch_norm.fetching(LATE, address(inner), small_image, small_channel, channel, behind=1)
    second_pass = norm(BEHIND, ograd, inner, second_vectors, [dgrad, second_ggrad, second_bgrad], relu=params[RELU])
    first_pass = norm(BEFORE, dgrad, data, first_vectors, [dgrad, *of_first], relu=True)
    weights, gradient = depthwise_tables.weight(s), depthwise_tables.data(s)
    words = _Words(_BACKWARD)
    words.norm("second", second_pass, dx_image=image, dx_channel=channel, **to_dgrad, **to_data)
    words.layer("weight", weights, x=address(data), w=0 if wgrad is None else address(wgrad), y=address(dgrad),
                y_image=image, y_channel=channel)  # fmt: skip
    words.layer("data", gradient, x=address(dgrad), w=address(weight), y=address(dgrad), x_image=image,
                x_channel=channel)  # fmt: skip
    words.norm("first", first_pass, **to_ograd, **to_inner)
    plans = {"weight": weights, "data": gradient}
    run = words.call(entries(data.dtype, s.stride[2])["backward"], s, scratch, plans, weighs=wgrad is not None)
    run = holding(run, data, weight, wgrad, dgrad, scratch)
    return in_sequence(run, second_pass.finish, first_pass.finish)


def _provide(
    name: str, make: Maker, data: int, beta: int, inner: Callable[[Specs, Specs], TensorSpec], vectors: int
) -> None:
    """Register the kernel whose calls ``make`` prepares for ``name``.

    Args:
        data: index of the input that is the block's data.
        beta: index of an input with the dtype of the statistics.
        inner: returns the spec of the convolution's output from the specs of inputs and outputs.
        vectors: number of scratch vectors with one element per channel.
    """

    def refused(params: Params, inputs: Specs, outputs: Specs) -> str:
        return refusal(params, inputs[data], inner(inputs, outputs), inputs[beta].dtype)

    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        image = inputs[data]
        s = _sizes(params, image, inner(inputs, outputs))
        return _scratch_bytes(s) + take_bytes(*[((s.groups,), image.dtype)] * vectors)

    provide(name, Implementation(name="native", kernel=RepeatedKernel(make), workspace=workspace, refusal=refused))


_provide(BLOCK.name, _forward, 0, 2, lambda inputs, outputs: outputs[1], vectors=6)
_provide(BLOCK_GRADIENT.name, _backward, 2, 5, lambda inputs, outputs: inputs[1], vectors=4)
