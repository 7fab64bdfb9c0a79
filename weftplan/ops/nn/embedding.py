"""Embedding: rows of a weight matrix, chosen by indices.

Indices outside the matrix are clipped to its first or last row, as MXNet 1.9.1 does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import INDEX, accumulator, gather, to_index
from weftplan.ops.core.params import p_bool, p_dtype, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, merge_dtype, merge_shape
from weftplan.ops.core.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    Op,
    Param,
    Params,
    Shape,
    SpecLike,
)
from weftplan.support.array_types import ArrayModule, RawArray

_INDICES = 4096
"""Number of indices that are looked up at a time."""

_LONG = 96
"""Minimum number of columns at which one addition per row is faster than ``np.add.at``: it takes 1.4 times as long at
64 columns, and a third of the time at 200."""

_PARAMS = (
    Param("input_dim", p_int, doc="Rows of the weight: the size of the vocabulary."),
    Param("output_dim", p_int, doc="Columns of the weight: the size of one embedding."),
    Param("dtype", p_dtype, np.dtype(np.float32), "Dtype of the weight if neither weight nor output has one."),
    Param("sparse_grad", p_bool, False, "Accepted; the gradient is dense."),
)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    rows, columns = params["input_dim"], params["output_dim"]
    if rows < 1 or columns < 1:
        raise ParameterError(f"Embedding: input_dim={rows}, output_dim={columns}: expected positive numbers")
    weight = merge_shape((rows, columns), ins[1], "Embedding: weight (input_dim, output_dim), and given")
    data, out = ins[0], outs[0]
    if out is not None:
        data = merge_shape(data, out[:-1], "Embedding: data, and output without its last axis")
    if data is not None:
        out = merge_shape((*data, columns), out, f"Embedding: output for data {data}, and given")
    return [data, weight], [out]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    weight = merge_dtype(ins[1], outs[0], "Embedding: weight and output")
    if weight is None:
        weight = params["dtype"]
    return [ins[0], weight], [weight]


def _block(indices: Shape) -> tuple[Shape, DType]:
    return (min(math.prod(indices), _INDICES),), INDEX


@kernel(scratch=lambda p, data, weight, out: [_block(data.shape)])
def _forward(xp: ArrayModule, p: Params, data: RawArray, weight: RawArray, out: RawArray, buffer: RawArray) -> None:
    indices = data.reshape(-1)
    out = out.reshape(-1, weight.shape[1])
    for start in range(0, indices.size, _INDICES):
        part = indices[start : start + _INDICES]
        index = buffer[: part.size]
        to_index(xp, part, weight.shape[0], "clip", index)
        gather(xp, weight, index, 0, out[start : start + part.size])


def _backward_scratch(params: Params, ograd: SpecLike, data: SpecLike, wgrad: SpecLike) -> ScratchSpecs:
    """Return the scratch specs: a block of indices, and the weight's gradient if it needs a wider dtype."""
    acc = accumulator(wgrad.dtype)
    return [_block(data.shape), *([] if acc == wgrad.dtype else [(wgrad.shape, acc)])]


@kernel(scratch=_backward_scratch)
def _backward(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    data: RawArray,
    wgrad: RawArray,
    buffer: RawArray,
    wide: RawArray | None = None,
) -> None:
    indices = data.reshape(-1)
    ograd = ograd.reshape(-1, wgrad.shape[1])
    sums = wgrad if wide is None else wide
    sums.fill(0)
    for start in range(0, indices.size, _INDICES):
        part = indices[start : start + _INDICES]
        index = buffer[: part.size]
        to_index(xp, part, wgrad.shape[0], "clip", index)
        _add_rows(xp, sums, index, ograd[start : start + part.size])
    if sums is not wgrad:
        wgrad[...] = sums


def _add_rows(xp: ArrayModule, sums: RawArray, index: RawArray, rows: RawArray) -> None:
    """Add each of ``rows`` to the row of ``sums`` at its ``index``, always in the same order."""
    if xp is np and rows.shape[1] >= _LONG and rows.dtype == sums.dtype:
        for target, row in zip(map(sums.__getitem__, index.tolist()), rows, strict=True):
            np.add(target, row, target)
    else:
        xp.add.at(sums, index, rows)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    return [None, *builder.node("_backward_Embedding", [builder.ograd(), builder.input(0)])]


register(
    Op(
        name="Embedding",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=_infer_dtype,
        params=_PARAMS,
        inputs=("data", "weight"),
        gradient=_gradient,
        doc="weight[data]: the row of weight (input_dim, output_dim) at each index; the output is "
        "(*data.shape, output_dim).",
    )
)
backward(
    "Embedding",
    _backward,
    ("ograd", "data"),
    grad_inputs=(1,),
    params=_PARAMS,
)
