"""CTCLoss: negative log probability of a label sequence over all alignments (Graves et al. 2006).

A label sequence, extended by blanks before, between and after the labels, has 2 · labels + 1 *places*. The hidden
output ``alpha`` (steps, batch, places) is the log probability of all partial alignments that reach a place at a step.
The backward pass computes the counterpart of alpha from the last step to the first, one row (batch, places) at a time.
A label sequence that has no alignment has loss and gradient 0, as in MXNet 1.9.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from weftplan.errors import DTypeError, ShapeError
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import BOOL, INDEX, accumulator, gather
from weftplan.ops.core.params import p_bool, p_enum
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, merge_dim, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import (
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
from weftplan.support.array_types import RawArray

_NEVER = -1e30
"""Substitute for log(0); it is finite, so that its product with 0 is 0."""
_PARAMS = (
    Param("use_data_lengths", p_bool, False, "True: the input data_lengths has each sample's number of steps."),
    Param(
        "use_label_lengths",
        p_bool,
        False,
        "True: label_lengths has each sample's number of labels; False: padding ends the labels.",
    ),
    Param(
        "blank_label",
        p_enum("first", "last"),
        "first",
        "Channel of the blank; labels are padded with 0 (first) or -1 (last).",
    ),
)


def inputs_of(params: Params) -> tuple[str, ...]:
    """Return the names of the inputs; each kind of lengths is an input only if its flag is set."""
    lengths = (("use_data_lengths", "data_lengths"), ("use_label_lengths", "label_lengths"))
    return ("data", "label", *(name for flag, name in lengths if params[flag]))


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], (0, 0, 0), "CTCLoss: data (steps, batch, channels)")
    label = merge_shape(ins[1], (0, 0), "CTCLoss: label (batch, labels)")
    out = merge_shape(outs[0], (0,), "CTCLoss: output (batch,)")
    assert data is not None
    assert label is not None
    assert out is not None
    batch = merge_dim(merge_dim(data[1], label[0], "CTCLoss: batch of data and label"), out[0], "CTCLoss: batch")
    for shape in ins[2:]:
        if shape is not None and len(shape) == 1:
            batch = merge_dim(batch, shape[0], "CTCLoss: batch of data and lengths")
    if data[0] and label[1] > data[0]:
        raise ShapeError(f"CTCLoss: {label[1]} labels do not fit into {data[0]} steps; expected at most one a step")
    alpha: Shape | None = outs[1]
    if label[1]:
        alpha = merge_shape(alpha, (data[0], batch, 2 * label[1] + 1), "CTCLoss: alpha")
    lengths = [merge_shape(shape, (batch,), "CTCLoss: lengths") for shape in ins[2:]]
    return [(data[0], batch, data[2]), (batch, label[1]), *lengths], [(batch,), alpha]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "CTCLoss: data and output")
    if data is None:
        return ins, outs
    if not is_float(data):
        raise DTypeError(f"CTCLoss expects floats, got {data}: cast the data first (Cast, astype)")
    dtypes = [data if dtype is None else dtype for dtype in ins[1:]]
    return [data, *dtypes], [data, merge_dtype(accumulator(data), outs[1], "CTCLoss: alpha (float32 for float16)")]


class _Plan(NamedTuple):
    """Scratch arrays derived from labels and lengths, which both passes read."""

    places: Any
    """(batch, places) int64: the channel of each place."""
    cells: Any
    """(batch, places) int64: the sample's index · channels + the channel of the place."""
    skips: Any
    """(batch, places) bool: whether an alignment may step from place i - 2 to place i."""
    steps: Any
    """(batch, 1) int64: number of steps of each sample."""
    ends: Any
    """(batch,) int64: the last place of each sample."""
    misfit: Any
    """(batch,) bool: whether the sample has no alignment."""


def _plan_scratch(batch: int, labels: int) -> list[tuple[Shape, DType]]:
    wide = (batch, 2 * labels + 1)
    return [(wide, INDEX), (wide, INDEX), (wide, BOOL), ((batch, 1), INDEX), ((batch,), INDEX), ((batch,), BOOL)]


def _plan(ctx: Workspace, params: Params, data: Shape, label: RawArray, lengths: Sequence[object]) -> _Plan:
    xp = ctx.xp
    steps, batch, channels = data
    count = label.shape[1]
    plan = _Plan(*(ctx.take(*spec) for spec in _plan_scratch(batch, count)))
    by_name = dict(zip(inputs_of(params)[2:], lengths, strict=True))
    blank_first = params["blank_label"] == "first"
    plan.places.fill(0 if blank_first else channels - 1)
    labels = plan.places[:, 1::2]
    xp.copyto(labels, label, casting="unsafe")
    if "data_lengths" in by_name:
        xp.copyto(plan.steps[:, 0], by_name["data_lengths"], casting="unsafe")
    else:
        plan.steps.fill(steps)
    if "label_lengths" in by_name:
        xp.copyto(plan.ends, by_name["label_lengths"], casting="unsafe")
    else:  # the first padding ends the labels
        counted = plan.skips[:, 1::2]
        xp.not_equal(labels, 0 if blank_first else -1, out=counted)
        for k in range(1, count):
            xp.logical_and(counted[:, k], counted[:, k - 1], out=counted[:, k])
        xp.sum(counted, axis=1, out=plan.ends)
    xp.clip(labels, 0, channels - 1, out=labels)
    plan.skips.fill(False)
    xp.not_equal(labels[:, 1:], labels[:, :-1], out=plan.skips[:, 3::2])
    for item in range(batch):
        num_labels = int(plan.ends[item])
        skips = int(xp.count_nonzero(plan.skips[item, 3 : 2 * num_labels : 2]))
        needed = num_labels + max(num_labels - 1 - skips, 0)  # a blank stands between equal labels
        plan.misfit[item] = needed > int(plan.steps[item, 0])
        xp.add(plan.places[item], item * channels, out=plan.cells[item])
    xp.multiply(plan.ends, 2, out=plan.ends)
    return plan


def _row_scratch(batch: int, channels: int, labels: int, acc: DType) -> list[tuple[Shape, DType]]:
    wide, padded = (batch, 2 * labels + 1), (batch, 2 * labels + 3)
    every = (batch, channels)
    return [
        *[(every, acc)] * 2,
        ((batch, 1), acc),
        *[(wide, acc)] * 4,
        (padded, acc),
        ((batch, 1), BOOL),
        ((batch,), acc),
    ]


class _Rows:
    """The recursion over steps, on one row (batch, places) of log probabilities at a time."""

    def __init__(self, ctx: Workspace, plan: _Plan, channels: int, acc: DType) -> None:
        self.xp = ctx.xp
        self.plan = plan
        batch, places = plan.places.shape
        buffers = [ctx.take(*spec) for spec in _row_scratch(batch, channels, places // 2, acc)]
        self.logs, self.shares, self.norm, self.emitted, self.row, self.following, self.spare, self.padded = buffers[:8]
        self.active, self.total = buffers[8:]

    def emit(self, logits: RawArray) -> None:
        """Compute :attr:`shares` = softmax of a step's ``logits`` (batch, channels).

        Also compute :attr:`emitted` (batch, places), the logarithm of the softmax at the channel of each place.
        """
        xp = self.xp
        xp.copyto(self.logs, logits)
        xp.max(self.logs, axis=1, keepdims=True, out=self.norm)
        xp.subtract(self.logs, self.norm, out=self.logs)
        xp.exp(self.logs, out=self.shares)
        xp.sum(self.shares, axis=1, keepdims=True, out=self.norm)
        xp.divide(self.shares, self.norm, out=self.shares)
        xp.log(self.norm, out=self.norm)
        xp.subtract(self.logs, self.norm, out=self.logs)
        gather(xp, self.logs.reshape(-1), self.plan.cells, 0, self.emitted)

    def advance(self, source: RawArray, *, ahead: bool) -> None:
        """Compute :attr:`following` = log-sum-exp of ``source`` over each place's predecessors.

        These are the place itself, the place before it and, if ``skips`` allows, the second place before it.
        ``ahead``: over the successors instead.
        """
        xp, count, skips = self.xp, source.shape[1], self.plan.skips[:, 2:]
        self.padded.fill(_NEVER)
        self.spare.fill(_NEVER)
        if ahead:
            xp.copyto(self.padded[:, :count], source)
            xp.copyto(self.spare[:, :-2], source[:, 2:], where=skips)
        else:
            xp.copyto(self.padded[:, 2:], source)
            xp.copyto(self.spare[:, 2:], source[:, :-2], where=skips)
        xp.logaddexp(source, self.padded[:, 1 : count + 1], out=self.following)
        xp.logaddexp(self.following, self.spare, out=self.following)

    def sum_ends(self, row: RawArray) -> None:
        """Compute :attr:`total` (batch,) = log-sum-exp of ``row`` over the last two places of each sample."""
        for item in range(row.shape[0]):
            end = int(self.plan.ends[item])
            total = self.total[item : item + 1]
            self.xp.copyto(total, row[item, end : end + 1])
            if end:
                self.xp.logaddexp(total, row[item, end - 1 : end], out=total)

    def begin_at_ends(self) -> None:
        """Set :attr:`row` to log(1) at the last two places of each sample, and to log(0) at the others."""
        self.row.fill(_NEVER)
        for item in range(self.row.shape[0]):
            end = int(self.plan.ends[item])
            self.row[item, max(end - 1, 0) : end + 1] = 0


@workspace_kernel
def _forward(ctx: Workspace, p: Params, *arrays: Any) -> None:
    *inputs, out, alpha = arrays
    xp, data = ctx.xp, inputs[0]
    plan = _plan(ctx, p, data.shape, inputs[1], inputs[2:])
    rows = _Rows(ctx, plan, data.shape[2], accumulator(data.dtype))
    row = rows.row
    row.fill(_NEVER)
    for t in range(data.shape[0]):
        rows.emit(data[t])
        if t == 0:
            xp.copyto(row[:, :2], rows.emitted[:, :2])
        else:
            rows.advance(row, ahead=False)
            xp.add(rows.following, rows.emitted, out=rows.following)
            xp.greater(plan.steps, t, out=rows.active)
            xp.copyto(row, rows.following, where=rows.active)
        if alpha is not None:
            xp.copyto(alpha[t], row)
    if out is not None:
        rows.sum_ends(row)
        xp.negative(rows.total, out=rows.total)
        xp.copyto(rows.total, 0, where=plan.misfit)
        xp.copyto(out, rows.total, casting="same_kind")


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (_, batch, channels), dtype = inputs[0]
    labels = inputs[1].shape[1]
    return take_bytes(*_plan_scratch(batch, labels), *_row_scratch(batch, channels, labels, accumulator(dtype)))


@workspace_kernel
def _backward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    """Compute the gradient of data: ograd · (softmax - probability of each channel given the labels)."""
    ograd, alpha, data, label, *lengths, target = arrays
    xp = ctx.xp
    plan = _plan(ctx, p, data.shape, label, lengths)
    rows = _Rows(ctx, plan, data.shape[2], accumulator(data.dtype))
    rows.sum_ends(alpha[-1])
    rows.begin_at_ends()
    steps = data.shape[0]
    for t in range(steps - 1, -1, -1):
        if t + 1 < steps:  # rows.emitted still has the values of step t + 1
            xp.greater(plan.steps, t + 1, out=rows.active)
            xp.add(rows.row, rows.emitted, out=rows.following)
            xp.copyto(rows.emitted, rows.following)
            rows.advance(rows.emitted, ahead=True)
            xp.copyto(rows.row, rows.following, where=rows.active)
        rows.emit(data[t])
        xp.add(alpha[t], rows.row, out=rows.spare)
        xp.subtract(rows.spare, rows.total[:, None], out=rows.spare)
        xp.exp(rows.spare, out=rows.spare)
        xp.negative(rows.spare, out=rows.spare)
        xp.add.at(rows.shares.reshape(-1), plan.cells, rows.spare)
        xp.less_equal(plan.steps, t, out=rows.active)
        xp.logical_or(rows.active, plan.misfit[:, None], out=rows.active)
        xp.copyto(rows.shares, 0, where=rows.active)
        xp.multiply(rows.shares, ograd[:, None], out=target[t], casting="same_kind")


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    lengths = range(1, builder.num_inputs)
    uses = [builder.ograd(), builder.output(1), builder.input(0), *(builder.input(k) for k in lengths)]
    return [builder.node("_backward_CTCLoss", uses)[0], *[None] * len(lengths)]


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return _workspace(params, inputs[2:], outputs)


register(
    Op(
        name="CTCLoss",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=_infer_dtype,
        params=_PARAMS,
        inputs=inputs_of,
        positions=("data", "label", "data_lengths", "label_lengths"),
        outputs=("output0", "alpha"),
        visible_outputs=1,
        gradient=_gradient,
        workspace=_workspace,
        aliases=("ctc_loss", "_contrib_CTCLoss", "_contrib_ctc_loss"),
        doc="Negative log probability (batch,) of each row of label (batch, labels), given the logits data "
        "(steps, batch, classes).",
    )
)
backward(
    "CTCLoss",
    _backward,
    lambda params: ("ograd", "alpha", *inputs_of(params)),
    params=_PARAMS,
    workspace=_backward_workspace,
)
