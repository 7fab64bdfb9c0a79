"""FullyConnected: one matrix product and a bias.

Operands of float16 and bfloat16 are copied to float32 scratch and multiplied there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import WorkspaceKernel, workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_bool
from weftplan.ops.core.products import FEW, multiply, product, products
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_dim, merge_shape, same_dtype, take_bytes
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.elementwise.add_n import p_count
from weftplan.support.array_types import RawArray

_PARAMS = (
    Param("num_hidden", p_count, doc="Columns of the output."),
    Param("no_bias", p_bool, False, "True: no bias input."),
    Param("flatten", p_bool, True, "True: all axes but the first form a row; False: the last axis is the row."),
)


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "weight") if params["no_bias"] else ("data", "weight", "bias")


def _columns(shape: Shape, params: Params) -> int:
    """Return the length of a row of data of this ``shape``; 0 if unknown."""
    if not params["flatten"]:
        return shape[-1]
    return math.prod(shape[1:])


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    hidden = params["num_hidden"]
    data, weight, out = ins[0], ins[1], outs[0]
    weight = merge_shape((hidden, 0), weight, "FullyConnected: weight (num_hidden, columns of data)")
    assert weight is not None
    if data is not None:
        if len(data) == 0:
            raise ShapeError("FullyConnected: data has shape (), expected at least one dimension")
        lead = data[:1] if params["flatten"] else data[:-1]
        out = merge_shape((*lead, hidden), out, f"FullyConnected: output for data {data}, num_hidden={hidden}")
        assert out is not None
        lead = out[:-1]
        if params["flatten"]:
            data = (*lead, *data[1:])
            if len(data) == 2 and data[1] == 0:
                data = (*lead, weight[1])
        else:
            data = (*lead, data[-1] or weight[1])
        columns = _columns(data, params)
        weight = merge_shape((hidden, columns), weight, f"FullyConnected: weight needed for data {data}, and given")
    elif out is not None and out[-1:] not in ((hidden,), (0,)):
        raise ShapeError(f"FullyConnected: output has shape {out}, expected last dimension num_hidden={hidden}")
    new: Shapes = [data, weight]
    if not params["no_bias"]:
        new.append(merge_shape((hidden,), ins[2], "FullyConnected: bias (num_hidden,), and given"))
        merge_dim(hidden, new[2][0] if new[2] else 0, "FullyConnected: bias")
    return new, [out]


def _wide_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the scratch bytes for float32 copies of half-precision operands; 0 for other dtypes."""
    dtype = specs[0].dtype
    acc = accumulator(dtype)
    return 0 if acc == dtype else take_bytes(*((shape, acc) for shape, _ in specs))


def _widen(ctx: Workspace, array: RawArray) -> RawArray:
    """Return ``array``, or a float32 copy in workspace if it has half precision."""
    acc = accumulator(array.dtype)
    if acc == array.dtype:
        return array
    wide = ctx.take(array.shape, acc)
    wide[...] = array
    return wide


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return _wide_bytes((*inputs[:2], outputs[0]))


def _forward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    xp = ctx.xp
    data, weight = inputs[:2]
    hidden = p["num_hidden"]
    rows = _widen(ctx, data).reshape(-1, weight.shape[1])
    matrix = _widen(ctx, weight)
    acc = accumulator(out.dtype)
    wide = out if acc == out.dtype else ctx.take(out.shape, acc)
    flat = wide.reshape(-1, hidden)
    product(xp, rows, matrix.T, flat)
    if not p["no_bias"]:
        xp.add(flat, inputs[2], out=out.reshape(-1, hidden), casting="same_kind")
    elif wide is not out:
        xp.copyto(out, wide, casting="same_kind")


def _bare_form(
    params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Callable[..., object] | None:
    if _workspace(params, inputs, outputs):
        return None
    columns, hidden, biased = inputs[1].shape[1], params["num_hidden"], not params["no_bias"]
    flat = len(inputs[0].shape) == len(outputs[0].shape) == 2
    rows = math.prod(outputs[0].shape) // hidden
    times: Any = partial(product, np)
    if rows * hidden * columns < 2 * FEW:
        times = np.matmul if rows != hidden else partial(multiply, np)

    def call(data: RawArray, weight: RawArray, *arrays: RawArray) -> None:
        out = arrays[-1]
        if not flat:
            data, out = data.reshape(-1, columns), out.reshape(-1, hidden)
        times(data, weight.T, out)
        if biased:
            np.add(out, arrays[0], out)

    return call


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return _wide_bytes((*inputs[:3], *outputs[:2]))


@workspace_kernel
def _backward(ctx: Workspace, p: Params, ograd: RawArray, data: RawArray, weight: RawArray, *outputs: Any) -> None:
    xp = ctx.xp
    dgrad, wgrad = outputs[:2]
    bgrad = None if p["no_bias"] else outputs[2]
    acc = accumulator(ograd.dtype)
    rows = ograd.reshape(-1, p["num_hidden"])
    if bgrad is not None:
        xp.sum(rows, axis=0, dtype=acc, out=bgrad)
    if dgrad is None and wgrad is None:
        return
    shares_products = wgrad is not None and dgrad is not None and acc == ograd.dtype and xp is np
    if shares_products and data is not None and not np.may_share_memory(dgrad, data):
        columns = data.reshape(rows.shape[0], -1)
        products((rows.T, columns, wgrad), (rows, weight, dgrad.reshape(columns.shape)))
        return
    wide_rows = _widen(ctx, rows)
    # Compute the weight's gradient first: the data's gradient may overwrite the data.
    if wgrad is not None:
        columns = _widen(ctx, data).reshape(rows.shape[0], -1)
        target = wgrad if acc == wgrad.dtype else ctx.take(wgrad.shape, acc)
        product(xp, wide_rows.T, columns, target)
        if target is not wgrad:
            xp.copyto(wgrad, target, casting="same_kind")
    if dgrad is not None:
        matrix = _widen(ctx, weight)
        target = dgrad if acc == dgrad.dtype else ctx.take(dgrad.shape, acc)
        product(xp, wide_rows, matrix, target.reshape(rows.shape[0], -1))
        if target is not dgrad:
            xp.copyto(dgrad, target, casting="same_kind")


register(
    Op(
        name="FullyConnected",
        forward=WorkspaceKernel(_forward, _bare_form),
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        inputs=_inputs,
        positions=("data", "weight", "bias"),
        gradient=grad("_backward_FullyConnected", "g0", "x0", "x1"),
        workspace=_workspace,
        doc="data · weightᵀ + bias, with weight (num_hidden, inputs) and bias (num_hidden,): (batch, num_hidden), or "
        "with flatten=False (*data.shape[:-1], num_hidden).",
    )
)
backward(
    "FullyConnected",
    _backward,
    ("ograd", "data", "weight"),
    grad_inputs=lambda params: tuple(range(len(_inputs(params)))),
    params=_PARAMS,
    inplace=(InplacePair(1, 0),),
    workspace=_backward_workspace,
)
