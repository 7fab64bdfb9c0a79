"""SequenceMask, SequenceLast, SequenceReverse: batches of sequences of different lengths.

Without ``use_sequence_length`` every sequence fills the whole axis. Lengths may have any dtype; their fraction is
dropped. Lengths above the extent of the time axis count as that extent, and SequenceLast takes step 0 of a sequence
of length 0 (MXNet 1.9.1 reads beyond the array in both cases). No gradient flows to the lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import WorkspaceKernel, workspace_kernel
from weftplan.ops.core.kernels import INDEX, converted
from weftplan.ops.core.params import p_bool, p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, DTypes, Shapes, backward, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    Kernel,
    Op,
    Param,
    Params,
    Shape,
    ShapeRule,
    TensorSpec,
    Workspace,
    WorkspaceRule,
)
from weftplan.support.array_types import RawArray

_BOOL = np.dtype(bool)
_LENGTHS = Param("use_sequence_length", p_bool, False, "True: the input sequence_length has each sequence's length.")
_AXIS = Param("axis", p_int, 0, "The time axis, 0 or 1; the other is the batch axis.")


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "sequence_length") if params["use_sequence_length"] else ("data",)


def _check(name: str, params: Params, data: Shape) -> int:
    """Check the time axis and the number of axes of ``data``; return the time axis."""
    axis: int = params["axis"]
    if axis not in ((0,) if name == "SequenceReverse" else (0, 1)):
        raise ParameterError(f"{name}: axis={axis}: expected 0" + ("" if name == "SequenceReverse" else " or 1"))
    if len(data) < 2:
        raise ShapeError(f"{name}: data has shape {data}, expected at least 2 axes: time and batch")
    return axis


def _lengths(name: str, ins: Shapes, data: Shape | None, batch: int) -> tuple[Shape | None, Shape | None]:
    """Return the shapes (data, lengths), each with the batch size of the other if its own is unknown.

    ``batch`` is the batch axis of data. The lengths are None if they are not an input.
    """
    if len(ins) == 1:
        return data, None
    lengths = ins[1]
    if data is not None:
        lengths = merge_shape((data[batch],), lengths, f"{name}: sequence_length for data {data}, and given")
        assert lengths is not None
        data = (*data[:batch], lengths[0], *data[batch + 1 :])
    return data, lengths


def _same_shape(name: str) -> Callable[[Params, Shapes, Shapes], tuple[Shapes, Shapes]]:
    def rule(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        data = merge_shape(ins[0], outs[0], f"{name}: data and output")
        if data is not None:
            data, lengths = _lengths(name, ins, data, 1 - _check(name, params, data))
            return [data, lengths][: len(ins)], [data]
        return ins, outs

    return rule


def _last_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, out = ins[0], outs[0]
    if data is None:
        return ins, outs
    axis = _check("SequenceLast", params, data)
    if out is not None and len(out) == len(data) - 1:
        data = merge_shape(data, (*out[:axis], 0, *out[axis:]), "SequenceLast: data and output with the axis of time")
        assert data is not None
    data, lengths = _lengths("SequenceLast", ins, data, 1 - axis)
    assert data is not None
    remaining = (*data[:axis], *data[axis + 1 :])
    return [data, lengths][: len(ins)], [
        merge_shape(outs[0], remaining, f"SequenceLast: output for data {data}, and given")
    ]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "sequences: data and output")
    return [data, *(data if dtype is None else dtype for dtype in ins[1:])], [data]


# -------------------------------------------------------------------------------------------------------------- kernels


def _time_first(array: RawArray, axis: int) -> RawArray:
    """Return ``array`` as a view (time, batch, …); ``axis`` is its time axis."""
    return array if axis == 0 else array.swapaxes(0, 1)


def _int_lengths(ctx: Workspace, lengths: RawArray, low: int, steps: int) -> RawArray:
    """Return the lengths as integers, clipped to ``low`` … ``steps``, in scratch."""
    xp = ctx.xp
    clipped = ctx.take(lengths.shape, INDEX)
    xp.copyto(clipped, lengths, casting="unsafe")
    xp.clip(clipped, low, steps, out=clipped)
    return clipped


def _length_bytes(batch: int, *more: tuple[Shape, DType]) -> int:
    return take_bytes(((batch,), INDEX), *more)


def _masked(fill: Callable[[Params], float]) -> WorkspaceKernel:
    """Return a kernel that copies input 0 and sets the steps after each sequence's end to ``fill(params)``."""

    @workspace_kernel
    def compute(ctx: Workspace, p: Params, data: RawArray, *arrays: RawArray) -> None:
        out = arrays[-1]
        xp = ctx.xp
        xp.copyto(out, data)
        if not p["use_sequence_length"]:
            return
        target = _time_first(out, p["axis"])
        steps, batch = target.shape[:2]
        ends = _int_lengths(ctx, arrays[0], 0, steps)
        beyond = ctx.take((batch,), _BOOL)
        shaped = beyond.reshape(batch, *[1] * (target.ndim - 2))
        value = converted(fill(p), out.dtype)
        for step in range(steps):
            xp.less_equal(ends, step, out=beyond)
            xp.copyto(target[step], value, where=shaped)

    return compute


def _mask_bytes(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    if not params["use_sequence_length"]:
        return 0
    batch = outputs[0].shape[1 - params["axis"]]
    return _length_bytes(batch, ((batch,), _BOOL))


@workspace_kernel
def _last_step(ctx: Workspace, p: Params, data: RawArray, *arrays: RawArray) -> None:
    out = arrays[-1]
    data = _time_first(data, p["axis"])
    if not p["use_sequence_length"]:
        ctx.xp.copyto(out, data[-1])
        return
    for sequence, length in enumerate(_int_lengths(ctx, arrays[0], 1, data.shape[0]).tolist()):
        out[sequence] = data[length - 1, sequence]


@workspace_kernel
def _last_backward(ctx: Workspace, p: Params, ograd: RawArray, *arrays: RawArray) -> None:
    out = arrays[-1]
    target = _time_first(out, p["axis"])
    out.fill(0)
    if not p["use_sequence_length"]:
        ctx.xp.copyto(target[-1], ograd)
        return
    for sequence, length in enumerate(_int_lengths(ctx, arrays[0], 1, target.shape[0]).tolist()):
        target[length - 1, sequence] = ograd[sequence]


@workspace_kernel
def _reverse(ctx: Workspace, p: Params, data: RawArray, *arrays: RawArray) -> None:
    """Reverse each sequence. The operation is its own inverse, so it is also its own gradient."""
    out = arrays[-1]
    if not p["use_sequence_length"]:
        ctx.xp.copyto(out, data[::-1])
        return
    ctx.xp.copyto(out, data)
    for sequence, length in enumerate(_int_lengths(ctx, arrays[0], 0, data.shape[0]).tolist()):
        ctx.xp.copyto(out[:length, sequence], data[:length, sequence][::-1])


def _batch_bytes(position: int) -> Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int]:
    """Return the rule for the scratch bytes of integer lengths.

    The batch size is that of input ``position``, or of output 0 if ``position`` is negative.
    """

    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        data = outputs[0] if position < 0 else inputs[position]
        return _length_bytes(data.shape[1 - params["axis"]]) if params["use_sequence_length"] else 0

    return workspace


def _gradient(name: str) -> Callable[[GradientBuilder], Sequence[EntryRef | None]]:
    def rule(builder: GradientBuilder) -> Sequence[EntryRef | None]:
        lengths = [builder.input(1)] if builder.params["use_sequence_length"] else []
        gradient = builder.node(f"_backward_{name}", [builder.ograd(), *lengths])
        return [*gradient, *[None] * len(lengths)]

    return rule


def _sequence(
    name: str,
    forward: Kernel,
    reverse: Kernel,
    *,
    value: bool = False,
    inplace: bool = False,
    sizes: tuple[WorkspaceRule, WorkspaceRule],
    shape: ShapeRule | None = None,
    doc: str,
) -> None:
    filled = (Param("value", p_float, 0.0, "Value of the steps after the end of a sequence."),) if value else ()
    params = (_LENGTHS, *filled, _AXIS)
    register(
        Op(
            name=name,
            forward=forward,
            infer_shape=shape or _same_shape(name),
            infer_dtype=_dtype,
            params=params,
            inputs=_inputs,
            positions=("data", "sequence_length"),
            gradient=_gradient(name),
            inplace=UNARY_INPLACE if inplace else (),
            workspace=sizes[0],
            doc=doc,
        )
    )
    backward(
        name,
        reverse,
        lambda values: ("ograd", *_inputs(values)[1:]),
        params=params,
        inplace=UNARY_INPLACE if inplace else (),
        workspace=sizes[1],
    )


_sequence(
    "SequenceMask",
    _masked(lambda params: float(params["value"])),
    _masked(lambda params: 0.0),
    value=True,
    inplace=True,
    sizes=(_mask_bytes, _mask_bytes),
    doc="data (steps, batch, *rest) with value in the steps after the end of each sequence.",
)
_sequence(
    "SequenceLast",
    _last_step,
    _last_backward,
    sizes=(_batch_bytes(0), _batch_bytes(-1)),
    shape=_last_shape,
    doc="The last step of each sequence in data (steps, batch, *rest): (batch, *rest).",
)
_sequence(
    "SequenceReverse",
    _reverse,
    _reverse,
    sizes=(_batch_bytes(0), _batch_bytes(0)),
    doc="data (steps, batch, *rest) with each sequence reversed; the steps after its end stay in place.",
)
