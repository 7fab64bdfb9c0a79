"""Gradients of Embedding, take and gather_nd: sums of rows by index, in a fixed order (``segments.py``)."""

from __future__ import annotations

import math

from weftplan.kernels.cuda.segments import add_slices, sums_scratch
from weftplan.ops.core.cuda_source import floats
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, OpContext, Params, TensorSpec
from weftplan.ops.indexing.gather_nd import flat_bytes, flat_positions


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    if params.get("mode") == "raise":
        return "the host looks for indices out of range"
    if inputs[1].dtype.name not in ("float16", "float32", "float64", "int32", "int64", "uint8", "int8"):
        return f"written for indices of other dtypes than {inputs[1].dtype}"
    if math.prod(inputs[1].shape) >= 1 << 31:
        return "written for fewer than 2^31 indices"
    return str(floats(0)(params, inputs, outputs))


def _embedding(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    if outputs[0] is None:
        return
    ograd, index = inputs
    out = outputs[0]
    add_slices(ctx, index, "clip", ograd.reshape(1, index.size, out.shape[1]), out.reshape(1, *out.shape))


def _take(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    out = outputs[0]
    ograd, index = inputs
    axis = params["axis"] % out.ndim
    outer, inner = math.prod(out.shape[:axis]), math.prod(out.shape[axis + 1 :])
    target = out.reshape(outer, out.shape[axis], inner)
    add_slices(ctx, index, params["mode"], ograd.reshape(outer, index.size, inner), target)


def _gather_nd(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    out = outputs[0]
    ograd, index = inputs
    rows_of_index = flat_positions(ctx, "gather_nd", index, out.shape, wrap=True)
    axes = index.shape[0]
    rows, inner = math.prod(out.shape[:axes]), math.prod(out.shape[axes:])
    add_slices(ctx, rows_of_index, "clip", ograd.reshape(1, rows_of_index.size, inner), out.reshape(1, rows, inner))


def _sums_bytes(count: int, gradient: TensorSpec) -> int:
    """Return the scratch bytes for summing ``count`` slices of a gradient by index."""
    width = math.prod(gradient.shape) // max(1, count)
    return take_bytes(*sums_scratch(count, width, gradient.dtype))


def _sorting(params: Params, inputs: Specs, outputs: Specs) -> int:
    return _sums_bytes(math.prod(inputs[1].shape), inputs[0])


def _sorting_positions(params: Params, inputs: Specs, outputs: Specs) -> int:
    shape = inputs[1].shape
    return flat_bytes(shape) + _sums_bytes(math.prod(shape[1:]), inputs[0])


for _name, _kernel, _bytes in (
    ("_backward_Embedding", _embedding, _sorting),
    ("_backward_take", _take, _sorting),
    ("_backward_gather_nd", _gather_nd, _sorting_positions),
):
    provide(_name, Implementation(name="cuda", kernel=_kernel, workspace=_bytes, refusal=_refusal), on="gpu")
