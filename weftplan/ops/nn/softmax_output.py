"""SoftmaxOutput: softmax with the gradient of cross entropy, regardless of the incoming gradient.

The kernels view the data as (outer, classes, inner). With ``multi_output`` the classes are axis 1, with
``preserve_shape`` the last axis. Otherwise the classes are all axes but the first, and only the first ``outer`` labels
are used.

Labels in the shape of data are probabilities; the gradient is then ``grad_scale · (output - label)``, whatever
``normalization``. If a label is outside the classes, no class is the right one. As in MXNet 1.9.1, ``smooth_alpha`` has
no effect with ``multi_output``. ``out_grad`` multiplies by the incoming gradient (MXNet 1.9.1: by the output).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_bool, p_enum, p_float
from weftplan.ops.core.products import MOST
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    floats_only,
    merge_dtype,
    merge_shape,
    take_bytes,
)
from weftplan.ops.core.schema import (
    EntryRef,
    GradientBuilder,
    InplacePair,
    Op,
    Param,
    Params,
    Shape,
    TensorSpec,
    Workspace,
)
from weftplan.ops.nn.softmax_core import FEW, as_rows, forward_bytes, softmax
from weftplan.support.array_types import ArrayModule, RawArray
from weftplan.support.core_sharing import split

_LABELS = 4096
"""Number of labels that are converted to indices at a time."""

_PARAMS = (
    Param("grad_scale", p_float, 1.0, "Factor of the gradient."),
    Param("ignore_label", p_float, -1.0, "Label without gradient, if use_ignore; not counted by 'valid'."),
    Param("multi_output", p_bool, False, "True: the classes are axis 1, with a label per position."),
    Param("use_ignore", p_bool, False, "True: positions with ignore_label get gradient 0."),
    Param("preserve_shape", p_bool, False, "True: softmax over the last axis."),
    Param(
        "normalization",
        p_enum("null", "batch", "valid"),
        "null",
        "Divisor of the gradient. null: 1, or with multi_output the labels per sample; batch: the number of labels; "
        "valid: the number of labels other than ignore_label.",
    ),
    Param("out_grad", p_bool, False, "True: multiply by the incoming gradient."),
    Param("smooth_alpha", p_float, 0.0, "Share of the label that goes to the other classes."),
)


def as_rows_of(params: Params, shape: Shape) -> Shape:
    """Return the data's shape as (outer, classes, inner)."""
    if params["multi_output"]:
        return as_rows(shape, 1)
    if params["preserve_shape"]:
        return as_rows(shape, -1)
    return shape[0], math.prod(shape[1:]), 1


def _label_shapes(params: Params, data: Shape) -> list[Shape]:
    """Return the shapes that labels may have, the default first; ``data`` may have unknown dimensions."""
    if not params["multi_output"]:
        return [data[:-1], data[:1], data]
    inner = data[2:]
    flat = 0 if 0 in inner else math.prod(inner)
    return [(data[0], flat), (data[0], *inner), (data[0], 1, *inner), data]


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "SoftmaxOutput: data and output")
    label = ins[1]
    if data is None:
        return ins, outs
    if len(data) < 2:
        raise ShapeError(f"SoftmaxOutput: data has shape {data}, expected batch and classes")
    allowed = _label_shapes(params, data)
    if label is None:
        return [data, allowed[0]], [data]
    for shape in allowed:
        if len(shape) == len(label) and all(x == y or 0 in (x, y) for x, y in zip(shape, label, strict=True)):
            label = merge_shape(shape, label, "SoftmaxOutput: label")
            assert label is not None
            return [(data[0] or label[0], *data[1:]), label], [(data[0] or label[0], *data[1:])]
    expected = " or ".join(map(str, dict.fromkeys(allowed)))
    raise ShapeError(f"SoftmaxOutput: label has shape {label}, expected {expected} for data {data}")


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "SoftmaxOutput: data and output")
    return [data, data if ins[1] is None else ins[1]], [data]


@workspace_kernel
def _forward(ctx: Workspace, p: Params, data: RawArray, label: RawArray | None, out: RawArray) -> None:
    rows = as_rows_of(p, data.shape)
    softmax(ctx, data.reshape(rows), out.reshape(rows))


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return forward_bytes(as_rows_of(params, inputs[0].shape), inputs[0].dtype, outputs[0].dtype)


def _label_blocks(labels: RawArray, size: int, index: RawArray) -> Iterator[tuple[int, RawArray]]:
    """Yield (number of the first label, labels as integers) of each block of the first ``size`` labels.

    The integers are written to the start of ``index``.
    """
    flat = labels.reshape(-1)
    for start in range(0, size, _LABELS):
        stop = min(start + _LABELS, size)
        part = index[: stop - start]
        part[...] = flat[start:stop]
        yield start, part


@workspace_kernel
def _backward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    xp = ctx.xp
    output, label = inputs[:2]
    scale = p["grad_scale"]
    if label.shape == output.shape:
        xp.subtract(output, label, out=out, casting="same_kind")
    else:
        scale = _subtract_labels(ctx, p, output, label, out)
    if scale != 1.0:
        _scaled(xp, out, scale)
    if p["out_grad"]:
        xp.multiply(out, inputs[2], out=out)


def _scaled(xp: ArrayModule, out: RawArray, scale: float) -> None:
    """Multiply ``out`` by ``scale`` in place; CPU cores share a large array."""
    parts = min(MOST, out.size // FEW)
    if xp is not np or parts < 2:
        xp.multiply(out, scale, out=out)
        return
    flat = out.reshape(-1)
    step = -(-flat.size // parts)

    def part(number: int) -> None:
        block = flat[number * step : (number + 1) * step]
        np.multiply(block, scale, out=block)

    split(part, parts)


def _subtract_labels(ctx: Workspace, params: Params, output: RawArray, label: RawArray, out: RawArray) -> float:
    """Compute ``out`` = output minus the labels' distribution; return the factor that the caller must apply to it."""
    xp = ctx.xp
    outer, classes, inner = as_rows_of(params, output.shape)
    size = outer * inner
    index = ctx.take((min(label.size, _LABELS),), INDEX)
    class_index = ctx.take((min(label.size, _LABELS),), INDEX)
    alpha = 0.0 if params["multi_output"] else params["smooth_alpha"]
    smoothed = alpha / (classes - 1) if alpha and classes > 1 else 0.0
    ignore = int(params["ignore_label"])
    if smoothed:
        xp.subtract(output, smoothed, out=out)
    else:
        xp.copyto(out, output)  # no copy if they share memory
    flat = out.reshape(-1)
    columns = out.reshape(outer, classes, inner)
    for start, part in _label_blocks(label, size, index):
        chosen = class_index[: part.size]
        hit = part.view(np.uint64) < classes  # a negative label becomes a large number
        xp.multiply(part, hit, out=chosen)  # class 0 if the label is outside the classes: 0 is subtracted there
        # place = (outer index · classes + class) · inner + inner index
        if inner == 1:
            xp.add(chosen, xp.arange(start * classes, (start + part.size) * classes, classes), out=chosen)
        else:
            position = xp.arange(start, start + part.size)
            xp.multiply(chosen, inner, out=chosen)
            xp.add(chosen, position // inner * (classes * inner) + position % inner, out=chosen)
        flat[chosen] -= hit * out.dtype.type(1.0 - alpha - smoothed)
        if params["use_ignore"]:
            ignored = start + xp.flatnonzero(part == ignore)
            columns[ignored // inner, :, ignored % inner] = 0
    scale: float = params["grad_scale"]
    if params["normalization"] == "valid":
        counts = (int((part != ignore).sum()) for _, part in _label_blocks(label, label.size, index))
        return scale / max(1, sum(counts))
    batch = outer if params["multi_output"] else label.size
    return scale / inner / (batch if params["normalization"] == "batch" else 1)


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape = inputs[0].shape
    if inputs[1].shape == shape:
        return 0
    block: tuple[Shape, np.dtype[Any]] = ((min(math.prod(inputs[1].shape), _LABELS),), INDEX)
    return take_bytes(block, block)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    uses = [builder.output(0), builder.input(1)]
    if builder.params["out_grad"]:
        uses.append(builder.ograd())
    return [*builder.node("_backward_SoftmaxOutput", uses), None]


register(
    Op(
        name="SoftmaxOutput",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("SoftmaxOutput", _infer_dtype),
        params=_PARAMS,
        inputs=("data", "label"),
        gradient=_gradient,
        inplace=UNARY_INPLACE,
        ignored_inputs=(1,),
        workspace=_workspace,
        loss=True,
        aliases=("Softmax",),
        doc="softmax of data, in its shape, with the gradient of the cross entropy with label instead of the incoming "
        "gradient.",
    )
)
backward(
    "SoftmaxOutput",
    _backward,
    lambda params: ("output", "label", "ograd") if params["out_grad"] else ("output", "label"),
    params=_PARAMS,
    inplace=(InplacePair(0, 0),),
    workspace=_backward_workspace,
)
