"""Operators for optimizers of many weights: all_finite, multi_all_finite, multi_sum_sq, and multi_lars.

all_finite tests one array. multi_all_finite and multi_sum_sq have ``num_arrays`` inputs, and process them one by one.
multi_lars has four vectors as inputs, with an element for each weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weftplan.ops.core.expression import Expr, Parameters, f, where
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.kernels import BOOL, accumulator, block_bytes, blocks
from weftplan.ops.core.params import p_bool, p_float, p_inputs
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    floats_only,
    merge_dtype,
    merge_shape,
    same_dtype,
    same_shape,
    take_bytes,
)
from weftplan.ops.core.schema import Kernel, Op, Param, Params, TensorSpec, Workspace, WorkspaceRule
from weftplan.ops.elementwise.add_n import numbered
from weftplan.ops.optimizer.step import WIDE
from weftplan.support.array_types import RawArray

# ----------------------------------------------------------------------------------------------------- counts of arrays


def _p_true(value: object) -> bool:
    if not p_bool(value):
        raise ValueError("expected True: an output is written, its old value is never read")
    return True


def _to_single(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return same_dtype(params, ins, [])[0], [merge_dtype(WIDE, outs[0], "output of a count over arrays")]


@workspace_kernel
def _all_finite(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    xp = ctx.xp
    out.fill(1)
    number = ctx.take((1,), BOOL)
    for array in inputs:
        for part, finite in blocks(ctx, (array,), (BOOL,)):
            xp.isfinite(part, out=finite)
            xp.all(finite, keepdims=True, out=number)
            xp.multiply(out, number, out=out)


def _finite_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes(((1,), BOOL)) + sum(block_bytes(math.prod(shape), [BOOL]) for shape, _ in inputs)


@workspace_kernel
def _sum_sq(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    xp = ctx.xp
    out.fill(0)
    wide = accumulator(inputs[0].dtype)
    part_sum = ctx.take((1,), wide)
    for k, array in enumerate(inputs):
        total = out[k : k + 1]
        for part, square in blocks(ctx, (array,), (wide,)):
            xp.copyto(square, part)
            xp.multiply(square, square, out=square)
            xp.sum(square, keepdims=True, out=part_sum)
            xp.add(total, part_sum, out=total, casting="same_kind")


def _sum_sq_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    wide = accumulator(inputs[0].dtype)
    return take_bytes(((1,), wide)) + sum(block_bytes(math.prod(shape), [wide]) for shape, _ in inputs)


_INIT = Param("init_output", _p_true, True, "True: the answer does not depend on what the output held")
_COUNT = Param("num_arrays", p_inputs, 1, "number of arrays")


def _count(
    name: str,
    kernel: Kernel,
    workspace: WorkspaceRule,
    params: tuple[Param, ...],
    doc: str,
    length: Callable[[Params], int] = lambda params: 1,
) -> None:
    """Register a count over one array, or over as many as the parameter ``num_arrays`` says, if there is one."""

    def infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        return ins, [merge_shape((length(params),), outs[0], "output of a count over arrays")]

    has_many = "num_arrays" in {param.name for param in params}
    register(
        Op(
            name=name,
            forward=kernel,
            infer_shape=infer_shape,
            infer_dtype=floats_only(name, _to_single),
            params=params,
            inputs=(lambda params: numbered("array_", params["num_arrays"])) if has_many else ("data",),
            positions=() if has_many else None,
            workspace=workspace,
            doc=doc,
        )
    )


_count("all_finite", _all_finite, _finite_workspace, (_INIT,), "1 if all elements are finite, else 0.")
_count("multi_all_finite", _all_finite, _finite_workspace, (_COUNT, _INIT),
       "1 if all elements of all arrays are finite, else 0.")  # fmt: skip
_count("multi_sum_sq", _sum_sq, _sum_sq_workspace, (Param("num_arrays", p_inputs, doc="number of arrays"),),
       "The sum of squares of each array, in float32.", lambda params: int(params["num_arrays"]))  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- multi_lars


def _lars(p: Parameters, rates: Expr, weights: Expr, grads: Expr, decays: Expr) -> Expr:
    """Return rate · eta · |w| / (rescale_grad · |g| + wd · |w| + eps) for each weight, or rate if a norm is 0.

    ``weights`` and ``grads`` are squares of norms.
    """
    is_zero = f.logical_or(f.less_equal(weights, 0), f.less_equal(grads, 0))
    weight = weights.sqrt()
    norm = grads.sqrt() * p.rescale_grad + p.eps + decays * weight
    return rates * where(is_zero, 1, weight * p.eta / norm)


register(
    Op(
        name="multi_lars",
        forward=FormulaKernel(_lars, 4, overlaps=(0,)),
        infer_shape=same_shape,
        infer_dtype=floats_only("multi_lars"),
        params=(
            Param("eta", p_float, doc="share of a weight's norm that a step may be"),
            Param("eps", p_float, doc="added to the norm of the gradient"),
            Param("rescale_grad", p_float, 1.0, "factor of the norm of the gradient"),
        ),
        inputs=("lrs", "weights_sum_sq", "grads_sum_sq", "wds"),
        inplace=UNARY_INPLACE,
        doc="The rates of layers from the squares of the norms of their weights and gradients (LARS).",
    )
)
