"""Operators that concatenate and split tensors: Concat, stack, SliceChannel.

The gradient of a concatenation is a split, and the gradient of a split is a concatenation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weftplan.errors import MXNetError, ShapeError
from weftplan.ops.core.forms import context_kernel, kernel
from weftplan.ops.core.params import p_bool, p_int, p_outputs
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_dim, merge_shape, normalize_axis, same_dtype
from weftplan.ops.core.schema import Arrays, EntryRef, GradientBuilder, Op, OpContext, Param, Params, Shape, TensorSpec
from weftplan.ops.elementwise.add_n import NUM_ARGS, numbered, numbered_inputs
from weftplan.support.array_types import ArrayModule, RawArray


def _pieces(tensor: RawArray, axis: int, sizes: Sequence[int]) -> list[RawArray]:
    """Return consecutive views of ``tensor`` that have ``sizes`` along ``axis``."""
    views = []
    start = 0
    leading = (slice(None),) * axis
    for size in sizes:
        views.append(tensor[(*leading, slice(start, start + size))])
        start += size
    return views


def _every_input(params: Params) -> tuple[int, ...]:
    return tuple(range(params["num_args"]))


# --------------------------------------------------------------------------------------------------------------- Concat


def _concat_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    out = outs[0]
    shapes = [shape for shape in (*ins, out) if shape is not None]
    if not shapes:
        return ins, outs
    rank = len(shapes[0])
    axis = normalize_axis(params["dim"], rank, "dim of Concat")
    merged: Shape | None = None
    for position, shape in enumerate((*ins, out)):
        if shape is None:
            continue
        if len(shape) != rank:
            raise ShapeError(f"Concat: shapes {shapes[0]} and {shape} differ in rank")
        which = f"Concat along {axis}, input {position}" if position < len(ins) else "output of Concat"
        merged = merge_shape(merged, (*shape[:axis], 0, *shape[axis + 1 :]), which)
    assert merged is not None
    sizes = [0 if shape is None else shape[axis] for shape in ins]
    total = 0 if out is None else out[axis]
    if 0 not in sizes:
        total = merge_dim(total, sum(sizes), f"dimension {axis} of the output of Concat")
    elif total and sizes.count(0) == 1:
        missing = total - sum(sizes)
        if missing <= 0:
            raise ShapeError(
                f"Concat: inputs of sizes {sizes} along {axis} leave nothing of {total} for the unknown one"
            )
        sizes[sizes.index(0)] = missing

    def filled(size: int) -> Shape:
        return (*merged[:axis], size, *merged[axis + 1 :])

    return [filled(size) for size in sizes], [filled(total)]


def _parameters_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer as Concat, but split the remaining size equally among several unknown inputs.

    They are the weights of the first layer's two directions, which read the same input and so have equal sizes.
    """
    ins, outs = _concat_shape(params, ins, outs)
    total = outs[0][0] if outs[0] is not None and len(outs[0]) == 1 else 0
    sizes = [0 if shape is None else shape[0] for shape in ins]
    missing, unknown = total - sum(sizes), sizes.count(0)
    if total and unknown > 1 and missing > 0 and not missing % unknown:
        ins = [(size or missing // unknown,) for size in sizes]
    return ins, outs


def _concat_bare(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Callable[..., object]:
    axis = params["dim"] % len(outputs[0].shape)
    return lambda *arrays: np.concatenate(arrays[:-1], axis, arrays[-1])


@kernel(bare_form=_concat_bare)
def _concat(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    axis = p["dim"] % out.ndim
    for piece, x in zip(_pieces(out, axis, [x.shape[axis] for x in inputs]), inputs, strict=True):
        xp.copyto(piece, x)


def _sizes(ctx: OpContext, total: int, axis: int, outputs: Arrays) -> list[tuple[int, int]]:
    """Return (start, stop) along ``axis`` of each output.

    Without ``ctx.output_shapes`` the sizes of outputs that are None are unknown. Their ranges are then (0, 0), and an
    output between two of them cannot be located.

    Raises:
        MXNetError: an output cannot be located.
    """
    if ctx.output_shapes:
        sizes = [shape[axis] for shape in ctx.output_shapes]
        return [(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]
    spans = [(0, 0)] * len(outputs)
    start = 0
    for k, out in enumerate(outputs):
        if out is None:
            break
        spans[k] = (start, start + out.shape[axis])
        start += out.shape[axis]
    stop = total
    for k in range(len(outputs) - 1, -1, -1):
        if outputs[k] is None:
            break
        spans[k] = (stop - outputs[k].shape[axis], stop)
        stop -= outputs[k].shape[axis]
    for span, out in zip(spans, outputs, strict=True):
        if out is not None and span == (0, 0) and out.size:
            raise MXNetError(
                "the gradient of Concat has unwanted outputs on both sides of a wanted one: "
                "give OpContext.output_shapes"
            )
    return spans


@context_kernel
def _backward_concat(ctx: OpContext, p: Params, g: RawArray, *outputs: RawArray | None) -> None:
    axis = p["dim"] % g.ndim
    leading = (slice(None),) * axis
    for out, span in zip(outputs, _sizes(ctx, g.shape[axis], axis, outputs), strict=True):
        if out is not None:
            ctx.xp.copyto(out, g[(*leading, slice(*span))])


_CONCAT = (NUM_ARGS, Param("dim", p_int, 1, "axis along which the inputs are joined"))
register(
    Op(
        name="Concat",
        forward=_concat,
        infer_shape=_concat_shape,
        infer_dtype=same_dtype,
        params=_CONCAT,
        inputs=numbered_inputs,
        variadic="num_args",
        gradient=grad("_backward_Concat", "g0"),
        aliases=("concat",),
        doc="The inputs one after the other along dim.",
    )
)
backward("Concat", _backward_concat, ("ograd",), grad_inputs=_every_input, params=_CONCAT)
register(
    Op(
        name="_rnn_param_concat",
        forward=_concat,
        infer_shape=_parameters_shape,
        infer_dtype=same_dtype,
        params=_CONCAT,
        inputs=numbered_inputs,
        variadic="num_args",
        gradient=grad("_backward_rnn_param_concat", "g0"),
        doc="Concat, by the name that exported recurrent layers use for joining their parameters.",
    )
)
backward(
    "_rnn_param_concat",
    _backward_concat,
    ("ograd",),
    grad_inputs=_every_input,
    params=_CONCAT,
)


# ---------------------------------------------------------------------------------------------------------------- stack


def _stack_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    merged: Shape | None = None
    for position, shape in enumerate(ins):
        merged = merge_shape(merged, shape, f"input {position} of stack against the inputs before it")
    out = outs[0]
    count = params["num_args"]
    if out is not None:
        axis = normalize_axis(params["axis"], len(out), "axis of stack")
        merge_dim(out[axis], count, f"dimension {axis} of the output of stack")
        merged = merge_shape(merged, out[:axis] + out[axis + 1 :], "output of stack without its new axis")
    if merged is None:
        return ins, outs
    axis = normalize_axis(params["axis"], len(merged) + 1, "axis of stack")
    return [merged] * count, [(*merged[:axis], count, *merged[axis:])]


@kernel
def _stack(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    leading = (slice(None),) * (p["axis"] % out.ndim)
    for k, x in enumerate(inputs):
        xp.copyto(out[(*leading, k, ...)], x)


@kernel
def _backward_stack(xp: ArrayModule, p: Params, g: RawArray, *outputs: RawArray | None) -> None:
    leading = (slice(None),) * (p["axis"] % g.ndim)
    for k, out in enumerate(outputs):
        if out is not None:
            xp.copyto(out, g[(*leading, k)])


_STACK = (NUM_ARGS, Param("axis", p_int, 0, "where the new axis stands in the output"))
register(
    Op(
        name="stack",
        forward=_stack,
        infer_shape=_stack_shape,
        infer_dtype=same_dtype,
        params=_STACK,
        inputs=numbered_inputs,
        variadic="num_args",
        gradient=grad("_backward_stack", "g0"),
        doc="The inputs side by side along a new axis.",
    )
)
backward("stack", _backward_stack, ("ograd",), grad_inputs=_every_input, params=_STACK)


# --------------------------------------------------------------------------------------------------------- SliceChannel


def _split_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    count, squeeze = params["num_outputs"], params["squeeze_axis"]
    part: Shape | None = None
    for position, shape in enumerate(outs):
        part = merge_shape(part, shape, f"output {position} of SliceChannel against the outputs before it")
    if source is not None:
        axis = normalize_axis(params["axis"], len(source), "axis of SliceChannel")
        size = source[axis]
        if size % count:
            raise ShapeError(f"SliceChannel: dimension {axis} of {source} cannot be split into {count} equal parts")
        if squeeze and size not in (0, count):
            raise ShapeError(f"SliceChannel: squeeze_axis needs {count} slices of size 1 of {source}, axis {axis}")
        middle = () if squeeze else (size // count,)
        part = merge_shape(part, (*source[:axis], *middle, *source[axis + 1 :]), f"outputs of SliceChannel of {source}")
    if part is None:
        return ins, outs
    rank = len(part) + squeeze
    axis = normalize_axis(params["axis"], rank, "axis of SliceChannel")
    joined = (*part[:axis], count, *part[axis:]) if squeeze else (*part[:axis], part[axis] * count, *part[axis + 1 :])
    return [joined], [part] * count


def _slots(params: Params, tensor: RawArray) -> list[RawArray]:
    """Return a view of ``tensor``, the input or its gradient, for each output."""
    axis = params["axis"] % tensor.ndim
    count = params["num_outputs"]
    if params["squeeze_axis"]:
        return [tensor[(*(slice(None),) * axis, k, ...)] for k in range(count)]  # with ..., a scalar is a view, too
    return _pieces(tensor, axis, [tensor.shape[axis] // count] * count)


@kernel
def _split(xp: ArrayModule, p: Params, data: RawArray, *outputs: RawArray | None) -> None:
    for out, piece in zip(outputs, _slots(p, data), strict=True):
        if out is not None:
            xp.copyto(out, piece)


@kernel
def _backward_split(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    for g, piece in zip(inputs, _slots(p, out), strict=True):
        xp.copyto(piece, g)


def _split_outputs(params: Params) -> tuple[str, ...]:
    return numbered("output", params["num_outputs"])


def _split_gradient(builder: GradientBuilder) -> list[EntryRef | None]:
    count = builder.params["num_outputs"]
    return list(builder.node("_backward_SliceChannel", [builder.ograd(k) for k in range(count)]))


_SPLIT = (
    Param("num_outputs", p_outputs, doc="number of equal parts"),
    Param("axis", p_int, 1, "axis to split"),
    Param("squeeze_axis", p_bool, False, "drop the axis, which must be split into parts of size 1"),
)
register(
    Op(
        name="SliceChannel",
        forward=_split,
        infer_shape=_split_shape,
        infer_dtype=same_dtype,
        params=_SPLIT,
        outputs=_split_outputs,
        gradient=_split_gradient,
        aliases=("split",),
        doc="The input in num_outputs equal parts along axis.",
    )
)
backward(
    "SliceChannel",
    _backward_split,
    lambda params: numbered("ograd", params["num_outputs"]),
    params=_SPLIT,
)
