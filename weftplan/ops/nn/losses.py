"""Losses and gradient barriers: regression outputs, MakeLoss, make_loss, BlockGrad.

A loss ignores the incoming gradient and starts its own, scaled by ``grad_scale`` (``make_loss``: 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from weftplan.errors import ShapeError
from weftplan.ops.core.expression import Expr, f
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.kernels import blocks, copy_kernel
from weftplan.ops.core.params import p_enum, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    ADDITIVE_INPLACE,
    IDENTITY_INPLACE,
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    floats_only,
    grad,
    merge_dtype,
    merge_shape,
    same_dtype,
    same_shape,
    zero_gradient,
)
from weftplan.ops.core.schema import Kernel, Op, Param, Params, Workspace
from weftplan.ops.nn.activation import sigmoid
from weftplan.support.array_types import RawArray

_loss = partial(
    Op, forward=copy_kernel, infer_shape=same_shape, infer_dtype=same_dtype, inplace=IDENTITY_INPLACE, loss=True
)
"""A function that returns a declaration: data, unchanged, with another gradient than the incoming one."""
_SCALE = (Param("grad_scale", p_float, 1.0, "Factor of the gradient."),)


def _label_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer the shapes of data, label and output.

    By default the label has the data's shape, or (n,) for data (n, 1). A shape with another number of axes is valid if
    it has the data's batch size and number of elements.
    """
    data = merge_shape(ins[0], outs[0], "regression output: data and output")
    label = ins[1]
    if data is None:
        return ins, outs
    if label is None:
        # Data of one column gets a flat label, as in MXNet 1.9.1.
        return [data, data[:1] if len(data) == 2 and data[1] == 1 else data], [data]
    if len(label) == len(data):
        data = label = merge_shape(data, label, "regression output: data and label")
    elif 0 not in (*data, *label) and (data[:1] != label[:1] or math.prod(data) != math.prod(label)):
        raise ShapeError(f"regression output: label has shape {label}, expected {data} or as many elements")
    return [data, label], [data]


def _label_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "regression output: data and output")
    return [data, data if ins[1] is None else ins[1]], [data]


def _regression(name: str, slope: Callable[[Expr], Expr], doc: str, *, forward: Kernel = copy_kernel) -> None:
    """Register a loss; ``slope`` of the difference of output and label is its gradient for an output of one number."""
    formula = FormulaKernel(
        lambda p, y, label: slope(y - label) * p.scale if p.scales else slope(y - label),
        2,
        overlaps=(0, 1),
        choices={"scales": lambda p: p["scale"] != 1.0},
    )

    @workspace_kernel
    def reverse(ctx: Workspace, p: Params, output: RawArray, label: RawArray, out: RawArray) -> None:
        scale = p["grad_scale"] / max(1, math.prod(output.shape[1:]))
        *inputs, target = (array.reshape(-1) for array in (output, label, out))  # the label may have another shape
        formula(ctx, {"scale": scale}, inputs, [target])

    register(
        _loss(
            name=name,
            forward=forward,
            infer_shape=_label_shape,
            infer_dtype=_label_dtype if forward is copy_kernel else floats_only(name, _label_dtype),
            params=_SCALE,
            inputs=("data", "label"),
            gradient=grad(f"_backward_{name}", "y0", "x1"),
            inplace=UNARY_INPLACE,
            ignored_inputs=(1,),
            lenient=True,
            doc=doc,
        )
    )
    backward(name, reverse, ("output", "label"), params=_SCALE, inplace=ADDITIVE_INPLACE)


_regression(
    "LinearRegressionOutput",
    lambda difference: difference,
    "data, unchanged; its gradient is that of half the squared error to label, which has the shape of data.",
)
_regression(
    "MAERegressionOutput",
    f.sign,
    "data, unchanged; its gradient is that of the absolute error to label, which has the shape of data.",
)
_regression(
    "LogisticRegressionOutput",
    lambda difference: difference,
    "sigmoid of data; its gradient is that of the cross entropy with label, which has the shape of data.",
    forward=FormulaKernel(lambda p, data, label: sigmoid(data), 2, overlaps=(0,), compute="float"),
)


# ------------------------------------------------------------------------------------------------ MakeLoss, make_loss

_MAKE_LOSS = (
    Param("grad_scale", p_float, 1.0, "The gradient of every element, before normalization."),
    Param("valid_thresh", p_float, 0.0, "normalization='valid' counts the elements above this value."),
    Param(
        "normalization",
        p_enum("null", "batch", "valid"),
        "null",
        "Divisor of the gradient. null: 1; batch: the product of all dimensions but the last; valid: the number of "
        "elements above valid_thresh, at least 1.",
    ),
)


def _uses_data(params: Params) -> bool:
    return bool(params["normalization"] == "valid")


@workspace_kernel
def _make_loss_backward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    scale = p["grad_scale"]
    if p["normalization"] == "batch":
        scale /= math.prod(out.shape[:-1])  # MXNet 1.9.1 sees a matrix: all axes but the last are the batch
    elif _uses_data(p):
        count = 0
        for (part,) in blocks(ctx, (inputs[0],)):
            count += int(ctx.xp.count_nonzero(part > p["valid_thresh"]))
        scale /= max(1, count)
    out.fill(scale)


register(
    _loss(
        name="MakeLoss",
        params=_MAKE_LOSS,
        gradient=lambda g: g.node("_backward_MakeLoss", [g.output(0)] if _uses_data(g.params) else []),
        inplace=UNARY_INPLACE,
        doc="data, unchanged, as a loss: the incoming gradient is ignored, and each element has gradient grad_scale.",
    )
)
backward(
    "MakeLoss",
    _make_loss_backward,
    lambda params: ("output",) if _uses_data(params) else (),
    params=_MAKE_LOSS,
    inplace=lambda params: UNARY_INPLACE if _uses_data(params) else (),
)
register(
    _loss(
        name="make_loss",
        outputs=("loss",),
        gradient=lambda g: g.node("ones_like", [g.output(0)], {}),
        doc="data, unchanged, as a loss: the incoming gradient is ignored, and each element has gradient 1.",
    )
)
register(
    _loss(
        name="BlockGrad",
        gradient=zero_gradient,
        loss=False,
        aliases=("stop_gradient",),
        doc="data, unchanged; its gradient is 0.",
    )
)
