"""_contrib_allclose: 1 if two tensors agree within tolerances, else 0.

The kernel compares in float64, block by block. Importing the module registers the operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import BOOL, block_bytes, blocks
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params, TensorSpec, Workspace
from weftplan.support.array_types import RawArray

_RESULT = np.dtype(np.uint8)
_FLOAT = np.dtype(np.float64)
_SCRATCH = (_FLOAT, _FLOAT, BOOL, BOOL, BOOL)


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    shape = merge_shape(ins[0], ins[1], "a and b of allclose")
    return [shape, shape], [merge_shape(outs[0], (1,), "output of allclose")]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    dtype = merge_dtype(ins[0], ins[1], "a and b of allclose")
    return [dtype, dtype], [merge_dtype(outs[0], _RESULT, "output of allclose, which is uint8")]


@workspace_kernel
def _kernel(ctx: Workspace, p: Params, lhs: RawArray, rhs: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    result = out.reshape(1)
    result.fill(1)
    for a, b, gap, bound, near, same, scratch in blocks(ctx, (lhs, rhs), _SCRATCH):
        xp.subtract(a, b, out=gap, dtype=_FLOAT)
        xp.absolute(gap, out=gap)
        xp.absolute(b, out=bound, dtype=_FLOAT)
        # An infinite bound would accept any number: elements with an infinite b agree only if they are equal.
        xp.isfinite(bound, out=near)
        xp.multiply(bound, p["rtol"], out=bound)
        xp.add(bound, p["atol"], out=bound)
        xp.less_equal(gap, bound, out=same)
        xp.logical_and(near, same, out=near)
        xp.equal(a, b, out=same)
        xp.logical_or(near, same, out=near)
        if p["equal_nan"] and is_float(a.dtype):
            xp.not_equal(a, a, out=same)
            xp.not_equal(b, b, out=scratch)
            xp.logical_and(same, scratch, out=same)
            xp.logical_or(near, same, out=near)
        result *= near.all().astype(_RESULT)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    size = int(np.prod(inputs[0].shape, dtype=np.int64))
    return block_bytes(size, _SCRATCH)


register(
    Op(
        name="_contrib_allclose",
        forward=_kernel,
        infer_shape=_shape,
        infer_dtype=_dtype,
        gradient=zero_gradient,
        workspace=_workspace,
        inputs=("a", "b"),
        params=(
            Param("rtol", p_float, 1e-5, "tolerance relative to b"),
            Param("atol", p_float, 1e-8, "absolute tolerance"),
            Param("equal_nan", p_bool, False, "whether NaN equals NaN"),
        ),
        doc="1 (uint8, one element) when ``|a - b| <= atol + rtol * |b|`` for all elements, or they are equal; else 0.",
    )
)
