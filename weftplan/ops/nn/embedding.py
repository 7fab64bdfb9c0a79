"""Embedding: rows of a weight matrix, chosen by indices.

Indices outside the matrix are clipped to its first or last row, as MXNet 1.9.1 does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ops.forms import workspace_kernel
from weftplan.ops.kernels import INDEX, accumulator, gather, to_index
from weftplan.ops.params import p_bool, p_dtype, p_int
from weftplan.ops.registry import register
from weftplan.ops.rules import DTypes, Shapes, backward, merge_dtype, merge_shape, take_bytes
from weftplan.ops.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    Op,
    Param,
    Params,
    Shape,
    TensorSpec,
    Workspace,
)

_INDICES = 4096
"""Indices that are looked up together."""

_PARAMS = (
    Param("input_dim", p_int, doc="Rows of the weight: the size of the vocabulary."),
    Param("output_dim", p_int, doc="Columns of the weight: the size of one embedding."),
    Param("dtype", p_dtype, np.dtype(np.float32), "Dtype of the weight when nothing else tells."),
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


def _block(size: int) -> tuple[Shape, DType]:
    return (min(size, _INDICES),), INDEX


@workspace_kernel
def _forward(ctx: Workspace, p: Params, data: Any, weight: Any, out: Any) -> None:
    indices = data.reshape(-1)
    out = out.reshape(-1, weight.shape[1])
    room = ctx.take(*_block(indices.size))
    for first in range(0, indices.size, _INDICES):
        part = indices[first : first + _INDICES]
        index = room[: part.size]
        to_index(ctx.xp, part, weight.shape[0], "clip", index)
        gather(ctx.xp, weight, index, 0, out[first : first + part.size])


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes(_block(math.prod(inputs[0].shape)))


@workspace_kernel
def _backward(ctx: Workspace, p: Params, ograd: Any, data: Any, wgrad: Any) -> None:
    if wgrad is None:
        return
    xp = ctx.xp
    indices = data.reshape(-1)
    ograd = ograd.reshape(-1, wgrad.shape[1])
    acc = accumulator(wgrad.dtype)
    room = ctx.take(*_block(indices.size))
    sums = wgrad if acc == wgrad.dtype else ctx.take(wgrad.shape, acc)
    sums.fill(0)
    for first in range(0, indices.size, _INDICES):
        part = indices[first : first + _INDICES]
        index = room[: part.size]
        to_index(xp, part, wgrad.shape[0], "clip", index)
        xp.add.at(sums, index, ograd[first : first + part.size])  # in order of position: one fixed order of sums
    if sums is not wgrad:
        wgrad[...] = sums


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    taken = [_block(math.prod(inputs[1].shape))]
    shape, dtype = outputs[0]
    if accumulator(dtype) != dtype:
        taken.append((shape, accumulator(dtype)))
    return take_bytes(*taken)


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
        workspace=_workspace,
        doc="weight[data]: one row of the weight for each index.",
    )
)
backward(
    "Embedding",
    _backward,
    ("ograd", "data"),
    grad_inputs=(1,),
    params=_PARAMS,
    workspace=_backward_workspace,
)
