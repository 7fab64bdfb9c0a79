"""Compiled implementations of FullyConnected, forward and backward.

The three products are those of a 1x1 convolution of one image, so the kernels are those of
``pointwise/implementation.py`` and ``pointwise/weights.py``. The output is a matrix times a transposed matrix, like the
weight gradient of a 1x1 convolution. Both gradients are plain products. The weight gradient reads the output's gradient
transposed, as the data gradient of a 1x1 convolution reads its weight. Any worker may call the kernels: they write only
to their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from weftplan.kernels.compiled.pointwise import implementation as pointwise
from weftplan.kernels.compiled.pointwise import weights as pointwise_weights
from weftplan.kernels.compiled.replay import Call, Maker, RepeatedKernel, in_sequence, nothing
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.products import product
from weftplan.ops.core.schema import Arrays, OpContext, Params, TensorSpec, aligned
from weftplan.support.array_types import RawArray

LEAST = 8
"""Minimum rows, columns and hidden units for these kernels; fewer do not fill their registers."""

SHARE = 32
"""A part's scratch for the weight gradient is at most 1 / SHARE of the weight; more would be a few percent faster."""
LEAST_GATHERED = 64 << 10
"""Minimum of the limit by :data:`SHARE`, in bytes."""
FAR = 512
"""Hidden units above which a BLAS computes the data gradient as fast, on processors with vectors of at most 256 bits:
the weight's rows for a block of registers no longer fit the first-level cache."""


class Matrices:
    """Sizes of a layer: data of (rows, columns), a weight of (hidden, columns), results of (rows, hidden).

    Args:
        layers: number of results of this shape, whose rows are concatenated.
    """

    __slots__ = ("columns", "hidden", "itemsize", "rows")

    def __init__(self, weight: TensorSpec, result: TensorSpec, layers: int = 1) -> None:
        self.hidden, self.columns = weight.shape
        self.rows = layers * math.prod(result.shape) // self.hidden
        self.itemsize = weight.dtype.itemsize

    @property
    def forward(self) -> pointwise_weights.ProductPass:
        """Data times the transpose of the weight."""
        return pointwise_weights.ProductPass(1, self.hidden, self.rows, self.columns, self.itemsize, little=True)

    @property
    def to_weight(self) -> pointwise.PlanePass:
        """The transpose of the result's gradient times data."""
        gathered_bytes = max(LEAST_GATHERED, self.hidden * self.columns * self.itemsize // SHARE)
        return pointwise.PlanePass(
            1,
            self.rows,
            self.hidden,
            self.columns,
            self.itemsize,
            True,
            min(gathered_bytes, pointwise.GATHERED_BYTES),
            little=True,
        )

    @property
    def to_data(self) -> pointwise.PlanePass:
        """The result's gradient times the weight."""
        return pointwise.PlanePass(1, self.hidden, self.rows, self.columns, self.itemsize, False, little=True)

    @property
    def back_bytes(self) -> int:
        """Scratch bytes of both gradients, which are computed one after the other."""
        return max(self.to_weight.nbytes, self.to_data.nbytes)


def refusal(inputs: Specs) -> str:
    """Return the reason why these kernels refuse layers with these inputs; empty if they accept them."""
    target = host()
    if isinstance(target, str):
        return target
    dtype = inputs[0].dtype
    if dtype not in (np.float32, np.float64):
        return f"compiled kernels are written for float32 and float64, not {dtype}"
    if any(0 in spec.shape for spec in inputs):
        return "nothing to compute"
    return ""


def slower(m: Matrices) -> str:
    """Return the reason why NumPy is expected to be faster; empty if these kernels are."""
    if min(m.rows, m.columns, m.hidden) < LEAST:
        return f"fewer than {LEAST} rows, columns or hidden units"
    return ""


def _by_blas(m: Matrices) -> bool:
    target = host()
    return isinstance(target, Target) and target.bits < 512 and m.hidden > FAR


def data_gradient(m: Matrices, ograd: RawArray, weight: RawArray, dgrad: RawArray, scratch: RawArray) -> Call:
    """Return a call that computes the gradient of the data, by a BLAS or in scratch of ``m.to_data.nbytes``."""
    if not _by_blas(m):
        return pointwise.call(m.to_data, weight, ograd, None, dgrad, scratch)
    return partial(product, np, ograd.reshape(m.rows, m.hidden), weight, dgrad.reshape(m.rows, m.columns))


def spec(array: RawArray) -> TensorSpec:
    """Return the shape and dtype of an array."""
    return TensorSpec(array.shape, array.dtype)


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    data, weight, *bias = inputs
    out = outputs[0]
    if out is None:
        return nothing
    m = Matrices(spec(weight), spec(out))
    return pointwise_weights.call(m.forward, weight, data, out, bias=bias[0] if bias else None)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    ograd, data, weight = inputs
    dgrad, wgrad = outputs[:2]
    m = Matrices(spec(weight), spec(ograd))
    scratch = ctx.take((m.back_bytes,), np.uint8)
    calls: list[Call] = []
    # The weight gradient is computed first, because the data gradient may overwrite the data.
    if wgrad is not None:
        calls.append(pointwise.call(m.to_weight, data, ograd, None, wgrad, scratch))
    if dgrad is not None:
        calls.append(data_gradient(m, ograd, weight, dgrad, scratch))
    if not params["no_bias"] and outputs[2] is not None:
        calls.append(partial(np.add.reduce, ograd.reshape(m.rows, m.hidden), axis=0, out=outputs[2]))
    return in_sequence(*calls) if calls else nothing


def _provide(op: str, make: Maker, sizes: Callable[[Specs, Specs], Matrices], *, gradient: bool) -> None:
    """Register the kernel whose calls ``make`` prepares for ``op``.

    Args:
        sizes: derives the matrices from the specs of inputs and outputs.
        gradient: whether ``op`` is the backward operator, which needs scratch.
    """

    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        if not gradient:
            return 0
        return aligned(sizes(inputs, outputs).back_bytes)

    provide(
        op,
        Implementation(
            name="native",
            kernel=RepeatedKernel(make),
            workspace=workspace,
            refusal=lambda params, inputs, outputs: refusal(inputs),
            slower=lambda params, inputs, outputs: slower(sizes(inputs, outputs)),
        ),
    )


_provide("FullyConnected", _forward, lambda inputs, outputs: Matrices(inputs[1], outputs[0]), gradient=False)
_provide("_backward_FullyConnected", _backward, lambda inputs, _: Matrices(inputs[2], inputs[0]), gradient=True)
