"""SVMOutput: identity with the gradient of a hinge loss, regardless of the incoming gradient.

For a row of scores s with label k, let m[k] = margin - s[k], and m[j] = margin + s[j] for every other class j. If m > 0
for a class, the gradient of the squared hinge loss is -2 · m[k] for the label and 2 · m[j] for another class, and that
of the plain hinge loss (``use_linear``) is -1 and 1. Otherwise it is 0. ``regularization_coefficient`` multiplies it.

As in MXNet 1.9.1, the loss classifies each class against the rest. If a label is outside the classes, all classes of
the row are treated as wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import INDEX, copy_kernel, row_blocks, rows_per_block
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, Shapes, backward, merge_shape, same_dtype
from weftplan.ops.core.schema import (
    EntryRef,
    GradientBuilder,
    InplacePair,
    Op,
    Param,
    Params,
    Shape,
    SpecLike,
)
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    Param("margin", p_float, 1.0, "The label's score should exceed it; the others should be below its negative."),
    Param("regularization_coefficient", p_float, 1.0, "Factor of the gradient."),
    Param("use_linear", p_bool, False, "True: the plain hinge loss; False: its square."),
)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "SVMOutput: data and output")
    if data is None:
        return ins, outs
    if len(data) < 2:
        raise ShapeError(f"SVMOutput: data has shape {data}, expected rows and, last, classes")
    label = merge_shape(data[:-1], ins[1], f"SVMOutput: label for data {data}, and given")
    assert label is not None
    data = (*label, data[-1])
    return [data, label], [data]


def _rows(shape: Shape) -> Shape:
    return math.prod(shape[:-1]), shape[-1]


def _scratch(params: Params, output: SpecLike, label: SpecLike, out: SpecLike) -> ScratchSpecs:
    rows, columns = _rows(output.shape)
    step = rows_per_block((rows, columns))
    return [((step, columns), output.dtype), ((step, 1), INDEX), ((columns,), INDEX)]


@kernel(scratch=_scratch)
def _backward(
    xp: ArrayModule,
    p: Params,
    output: RawArray,
    label: RawArray,
    out: RawArray,
    signs: RawArray,
    labels: RawArray,
    classes: RawArray,
) -> None:
    shape = _rows(output.shape)
    scores, out = output.reshape(shape), out.reshape(shape)
    label = label.reshape(-1)
    classes.fill(1)
    xp.cumsum(classes, out=classes)
    xp.subtract(classes, 1, out=classes)
    margin, factor = p["margin"], p["regularization_coefficient"]
    for rows in row_blocks(shape):
        s, y = scores[rows], out[rows]
        sign, index = signs[: s.shape[0]], labels[: s.shape[0]]
        xp.copyto(index[:, 0], label[rows], casting="unsafe")
        xp.not_equal(index, classes, out=sign, casting="unsafe")
        xp.multiply(sign, 2.0, out=sign)
        xp.subtract(sign, 1.0, out=sign)  # -1 for the label, 1 for the other classes
        xp.multiply(s, sign, out=y)
        xp.add(y, margin, out=y)
        if p["use_linear"]:
            xp.greater(y, 0, out=y, casting="unsafe")
            xp.multiply(y, factor, out=y)
        else:
            xp.maximum(y, 0, out=y)
            xp.multiply(y, 2.0 * factor, out=y)
        xp.multiply(y, sign, out=y)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    return [*builder.node("_backward_SVMOutput", [builder.output(0), builder.input(1)]), None]


register(
    Op(
        name="SVMOutput",
        forward=copy_kernel,
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        inputs=("data", "label"),
        gradient=_gradient,
        inplace=UNARY_INPLACE,
        ignored_inputs=(1,),
        loss=True,
        doc="data (*rows, classes), unchanged, with the gradient of a hinge loss with label (*rows,) instead of the "
        "incoming gradient.",
    )
)
backward(
    "SVMOutput",
    _backward,
    ("output", "label"),
    params=_PARAMS,
    inplace=(InplacePair(0, 0),),
)
