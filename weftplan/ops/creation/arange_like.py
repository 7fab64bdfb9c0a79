"""_eye and _linspace: identity matrices, and evenly spaced numbers of an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import kernel, workspace_kernel
from weftplan.ops.core.kernels import block_bytes, blocks
from weftplan.ops.core.params import p_bool, p_dtype, p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.creation.filling import FLOAT32, FLOAT64, declared_dtype, placed
from weftplan.support.array_types import ArrayModule, RawArray

_DTYPE = Param("dtype", p_dtype, FLOAT32, "dtype")


# ----------------------------------------------------------------------------------------------------------------- _eye


def _eye_size(params: Params) -> Shape:
    rows, columns = params["N"], params["M"]
    if rows < 1 or columns < 0:
        raise ParameterError(f"_eye: N={rows}, M={columns}: expected positive numbers of rows and columns (M=0: N)")
    return rows, columns or rows


def _eye_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    return [], [merge_shape(outs[0], _eye_size(params), "output of _eye")]


@kernel
def _eye(xp: ArrayModule, p: Params, out: RawArray) -> None:
    rows, columns = out.shape
    above = p["k"]
    out.fill(0)
    length = min(rows + min(above, 0), columns - max(above, 0))
    if length > 0:
        start = above if above >= 0 else -above * columns
        out.reshape(-1)[start : start + (length - 1) * (columns + 1) + 1 : columns + 1] = 1


register(
    Op(
        name="_eye",
        forward=_eye,
        infer_shape=_eye_shape,
        infer_dtype=declared_dtype,
        params=(
            Param("N", p_int, doc="number of rows"),
            Param("M", p_int, 0, "number of columns; 0: as many as rows"),
            Param("k", p_int, 0, "which diagonal: 0 the main one, above it positive, below it negative"),
            *placed(_DTYPE),
        ),
        inputs=(),
        gradient=zero_gradient,
        doc="Ones on a diagonal, zeros elsewhere.",
    )
)


# ------------------------------------------------------------------------------------------------------------ _linspace


def _linspace_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    count = params["num"]
    if count < 1:
        raise ParameterError(f"_linspace: num={count}: expected at least 1")
    return [], [merge_shape(outs[0], (count,), "output of _linspace")]


@workspace_kernel
def _linspace(ctx: Workspace, p: Params, out: RawArray) -> None:
    xp = ctx.xp
    start, count = p["start"], p["num"]
    gaps = count - 1 if p["endpoint"] else count
    step = (p["stop"] - start) / gaps if gaps else 0.0
    position = 0
    for y, t in blocks(ctx, (out,), (FLOAT64,)):
        t.fill(1.0)
        xp.cumsum(t, out=t)  # 1, 2, … exactly
        xp.add(t, float(position - 1), out=t)
        xp.multiply(t, step, out=t)
        xp.add(t, start, out=t)
        xp.copyto(y, t, casting="unsafe")
        position += y.size
    if p["endpoint"] and count > 1:
        out[-1:] = p["stop"]


def _linspace_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return block_bytes(math.prod(outputs[0].shape), [FLOAT64])


register(
    Op(
        name="_linspace",
        forward=_linspace,
        infer_shape=_linspace_shape,
        infer_dtype=declared_dtype,
        params=(
            Param("start", p_float, doc="first value"),
            Param("stop", p_float, doc="last value, or with endpoint=False the end, which is left out"),
            Param("num", p_int, doc="how many"),
            Param("endpoint", p_bool, True, "whether stop is the last value"),
            *placed(_DTYPE),
        ),
        inputs=(),
        gradient=zero_gradient,
        workspace=_linspace_workspace,
        doc="num values at equal distances from start to stop.",
    )
)
