"""Operators that create tensors: zeros, ones, ranges, and tensors shaped like another tensor.

Shape and dtype come from parameters or, if these leave them open, from the readers of the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import kernel, workspace_kernel
from weftplan.ops.core.kernels import block_bytes, blocks, converted
from weftplan.ops.core.params import p_bool, p_dtype, p_float, p_int, p_optional, p_shape, p_str
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    merge_dtype,
    merge_shape,
    normalize_axis,
    same_dtype,
    same_shape,
    zero_gradient,
)
from weftplan.ops.core.schema import Kernel, Op, Param, Params, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, DType, RawArray

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)


def declared_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer the output's shape from parameter ``shape``; its readers decide unknown dimensions (None, (), 0, -1)."""
    shape = tuple(0 if dim == -1 else dim for dim in params["shape"] or ())
    return [], [merge_shape(outs[0], shape or None, "output and the parameter shape")]


def declared_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer the output's dtype from parameter ``dtype``; None leaves it to the output's readers."""
    dtype = params["dtype"]
    return [], [merge_dtype(outs[0], dtype, "output and the parameter dtype")]


def _flexible_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return [], [outs[0] if params["dtype"] is None else params["dtype"]]


def _fill(value: float | None) -> Kernel:
    """Return a kernel that fills its output with ``value``; None: with the parameter ``value``."""

    @kernel
    def compute(xp: ArrayModule, p: Params, *arrays: Any) -> None:
        out = arrays[-1]
        out.fill(converted(p["value"], out.dtype) if value is None else value)

    return compute


def placed(dtype: Param) -> tuple[Param, ...]:
    """Return the parameters ``ctx`` and ``dtype`` of operators without inputs."""
    return (Param("ctx", p_str, "", "context, such as cpu(0)"), dtype)


_SHAPE = Param("shape", p_optional(p_shape), (), "shape; 0 or nothing: as the users of the output need")
_DTYPE = Param("dtype", p_dtype, FLOAT32, "dtype")


def _no_dtype(value: object) -> DType | None:
    """Return the dtype that ``value`` names; None for None and for -1, MXNet's "not given"."""
    return None if str(value).strip() == "-1" else p_optional(p_dtype)(value)


def _maker(name: str, value: float | None, doc: str, extra: tuple[Param, ...] = ()) -> None:
    register(
        Op(
            name=name,
            forward=_fill(value),
            infer_shape=declared_shape,
            infer_dtype=declared_dtype,
            params=(_SHAPE, *placed(_DTYPE), *extra),
            inputs=(),
            gradient=zero_gradient,
            doc=doc,
        )
    )


_maker("_zeros", 0.0, "Zeros.")
_maker("_ones", 1.0, "Ones.")
_maker("_full", None, "A tensor full of value.", extra=(Param("value", p_float, doc="the number"),))
register(
    Op(
        name="_zeros_without_dtype",
        forward=_fill(0.0),
        infer_shape=declared_shape,
        infer_dtype=_flexible_dtype,
        params=(_SHAPE, *placed(Param("dtype", _no_dtype, None, "dtype; -1 or None: as the users need"))),
        inputs=(),
        gradient=zero_gradient,
        doc="Zeros in the dtype that the users of the output need.",
    )
)
for _name, _value in (("zeros_like", 0.0), ("ones_like", 1.0)):
    register(
        Op(
            name=_name,
            forward=_fill(_value),
            infer_shape=same_shape,
            infer_dtype=same_dtype,
            gradient=zero_gradient,
            ignored_inputs=(0,),
            doc=f"{_name.split('_')[0].capitalize()} in the shape and dtype of data.",
        )
    )


LONGEST = 2.0**62
"""A length that exceeds that of any array."""


def _length(params: Params) -> int | None:
    """Return the number of elements of the range; None (``infer_range``): the readers of the output decide."""
    start, stop, step = params["start"], params["stop"], params["step"]
    if params["infer_range"]:
        return None
    if stop is None:
        start, stop = 0.0, start
    if step == 0:
        raise ShapeError("_arange: step must not be 0")
    if params["repeat"] < 1:
        raise ShapeError(f"_arange: repeat must be at least 1, got {params['repeat']}")
    exact = (stop - start) / step
    if not abs(exact) < LONGEST:  # refuses NaN and infinity, too
        raise ShapeError(f"_arange from {start} to {stop} by {step} has no length that an array could have")
    count = math.ceil(exact)
    if count <= 0:
        raise ShapeError(f"_arange from {start} to {stop} by {step} is empty")
    length: int = count * params["repeat"]
    return length


def _arange_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    length = _length(params)
    return [], [outs[0] if length is None else merge_shape(outs[0], (length,), "output of _arange")]


@workspace_kernel
def _arange(ctx: Workspace, p: Params, out: RawArray) -> None:
    start = 0.0 if p["stop"] is None and not p["infer_range"] else p["start"]
    _range(ctx, out, start, p["step"], p["repeat"])


def _range(ctx: Workspace, out: RawArray, start: float, step: float, repeat: int) -> None:
    """Fill ``out`` with start, start + step, …, each ``repeat`` times; for integers, truncate start and step first."""
    xp = ctx.xp
    if not is_float(out.dtype):  # so that equal distances remain equal
        start, step = float(math.trunc(start)), float(math.trunc(step))
    position = 0
    for y, t in blocks(ctx, (out,), (FLOAT64,)):
        t.fill(1.0)
        xp.cumsum(t, out=t)  # 1, 2, … exactly
        xp.add(t, float(position - 1), out=t)
        if repeat != 1:
            xp.divide(t, float(repeat), out=t)
            xp.floor(t, out=t)
        xp.multiply(t, step, out=t)
        xp.add(t, start, out=t)
        xp.copyto(y, t, casting="unsafe")
        position += y.size


def _arange_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return block_bytes(math.prod(outputs[0].shape), [FLOAT64])


register(
    Op(
        name="_arange",
        forward=_arange,
        infer_shape=_arange_shape,
        infer_dtype=declared_dtype,
        params=(
            Param("start", p_float, doc="first value; the end, counting from 0, when stop is None"),
            Param("stop", p_optional(p_float), None, "end, not included"),
            Param("step", p_float, 1.0, "distance of neighbours"),
            Param("repeat", p_int, 1, "how often each value comes"),
            Param("infer_range", p_bool, False, "take the length from the users of the output"),
            *placed(_DTYPE),
        ),
        inputs=(),
        gradient=zero_gradient,
        workspace=_arange_workspace,
        doc="start, start + step, … below stop; of integers start and step lose their fractions first.",
    )
)


def _like_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if params["repeat"] < 1:
        raise ShapeError(f"arange_like: repeat must be at least 1, got {params['repeat']}")
    if params["axis"] is None:
        merged = merge_shape(ins[0], outs[0], "arange_like: data and output")
        return [merged], [merged]
    if ins[0] is None:
        return ins, [merge_shape((0,), outs[0], "output of arange_like along an axis")]
    axis = normalize_axis(params["axis"], len(ins[0]), "axis of arange_like")
    out = merge_shape((ins[0][axis],), outs[0], f"output of arange_like along axis {axis} of {ins[0]}")
    assert out is not None
    return [(*ins[0][:axis], out[0], *ins[0][axis + 1 :])], [out]


@workspace_kernel
def _arange_like(ctx: Workspace, p: Params, data: RawArray | None, out: RawArray) -> None:
    _range(ctx, out, p["start"], p["step"], p["repeat"])


register(
    Op(
        name="_contrib_arange_like",
        forward=_arange_like,
        infer_shape=_like_shape,
        infer_dtype=same_dtype,
        params=(
            Param("start", p_float, 0.0, "first value"),
            Param("step", p_float, 1.0, "distance of neighbours"),
            Param("repeat", p_int, 1, "how often each value comes"),
            Param("ctx", p_str, "", "accepted, no effect: the context is that of data"),
            Param("axis", p_optional(p_int), None, "axis whose length the range has; None: the shape of data"),
        ),
        gradient=zero_gradient,
        ignored_inputs=(0,),
        workspace=_arange_workspace,
        doc="start, start + step, … in the shape of data, or along one axis of it.",
    )
)
