"""amp_cast, amp_multicast and loss scaling, as in MXNet's automatic mixed precision.

``amp_cast`` converts float16, bfloat16 and float32 data to one dtype, ``amp_multicast`` all floats to the widest or
narrowest of their dtypes; both leave other data unchanged. ``_scale_gradient`` returns its data and multiplies the
gradient by an array of one element, which a training loop can change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftplan.ops.core.floats import is_float, is_half
from weftplan.ops.core.forms import kernel, workspace_kernel
from weftplan.ops.core.kernels import blocks
from weftplan.ops.core.params import p_bool, p_dtype
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    IDENTITY_INPLACE,
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    merge_dtype,
    merge_shape,
    same_dtype,
    same_shape,
)
from weftplan.ops.core.schema import DType, EntryRef, GradientBuilder, InplacePair, Op, Param, Params, Workspace
from weftplan.ops.elementwise.add_n import p_count
from weftplan.support.array_types import ArrayModule, RawArray


def _cast_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = ins[0]
    if data is None:
        return ins, outs
    target: DType = params["dtype"] if is_half(data) or data == np.float32 else data
    return ins, [merge_dtype(outs[0], target, f"output of amp_cast of {data}")]


@workspace_kernel
def _casts(ctx: Workspace, p: Params, *arrays: Any) -> None:
    count = len(arrays) // 2
    for source, out in zip(arrays[:count], arrays[count:], strict=True):
        if out is not None:
            for x, y in blocks(ctx, (source, out)):  # in blocks: NumPy copies an array that it converts in place
                ctx.xp.copyto(y, x, casting="unsafe")


register(
    Op(
        name="amp_cast",
        forward=_casts,
        infer_shape=same_shape,
        infer_dtype=_cast_dtype,
        params=(Param("dtype", p_dtype, doc="dtype of the output where data is float16, bfloat16 or float32"),),
        gradient=lambda builder: builder.node("_backward_amp_cast", [builder.ograd()], {}),
        inplace=UNARY_INPLACE,
        doc="float16, bfloat16 or float32 data in another dtype; anything else unchanged.",
    )
)
backward("amp_cast", _casts, ("ograd",), inplace=UNARY_INPLACE)


def _names(prefix: str) -> Callable[[Params], tuple[str, ...]]:
    return lambda params: tuple(f"{prefix}{k}" for k in range(params["num_outputs"]))


def _outputs(params: Params) -> tuple[str, ...]:
    count = params["num_outputs"]
    return ("output",) if count == 1 else tuple(f"output{k}" for k in range(count))


def _pairs(params: Params) -> tuple[InplacePair, ...]:
    return tuple(InplacePair(k, k) for k in range(params["num_outputs"]))


def _multicast_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    merged = [
        merge_shape(a, b, f"amp_multicast: input and output {k}")
        for k, (a, b) in enumerate(zip(ins, outs, strict=True))
    ]
    return merged, merged


def _multicast_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    dtypes = [dtype for dtype in ins if dtype is not None]
    if len(dtypes) < len(ins):
        return ins, outs
    floats = [dtype for dtype in dtypes if is_float(dtype)]
    chosen = min if params["cast_narrow"] else max
    target = chosen(floats, key=lambda dtype: dtype.itemsize) if floats else None
    cast = [target if is_float(dtype) else dtype for dtype in dtypes]
    return ins, [merge_dtype(a, b, "output of amp_multicast") for a, b in zip(outs, cast, strict=True)]


def _multicast_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    return builder.node("_backward_amp_multicast", [builder.ograd(k) for k in range(builder.num_inputs)])


_MULTICAST = (
    Param("num_outputs", p_count, doc="number of inputs and outputs"),
    Param("cast_narrow", p_bool, False, "to the narrowest of the dtypes, not the widest"),
)
register(
    Op(
        name="amp_multicast",
        forward=_casts,
        infer_shape=_multicast_shape,
        infer_dtype=_multicast_dtype,
        params=_MULTICAST,
        inputs=_names("data_"),
        variadic="num_outputs",
        outputs=_outputs,
        gradient=_multicast_gradient,
        inplace=_pairs,
        doc="All floats in the widest of their dtypes.",
    )
)
backward(
    "amp_multicast",
    _casts,
    _names("ograd_"),
    grad_inputs=lambda params: tuple(range(params["num_outputs"])),
    params=_MULTICAST,
    inplace=_pairs,
)


def _scaled_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "_scale_gradient: data and output")
    return [data, merge_shape(ins[1], (1,), "scale of _scale_gradient")], [data]


@kernel
def _forwards(xp: ArrayModule, p: Params, data: RawArray, scale: RawArray | None, out: RawArray) -> None:
    if out is not data:
        xp.copyto(out, data)


@kernel
def _scales(xp: ArrayModule, p: Params, ograd: RawArray, scale: RawArray, out: RawArray) -> None:
    xp.multiply(ograd, scale, out=out)


register(
    Op(
        name="_scale_gradient",
        forward=_forwards,
        infer_shape=_scaled_shape,
        infer_dtype=same_dtype,
        inputs=("data", "scale"),
        gradient=lambda builder: [
            builder.node("_backward_scale_gradient", [builder.ograd(), builder.input(1)], {})[0],
            None,
        ],
        inplace=IDENTITY_INPLACE,
        ignored_inputs=(1,),
        in_mxnet=False,
        doc="data, whose gradient is multiplied by scale, an array of one element.",
    )
)
backward("_scale_gradient", _scales, ("ograd", "scale"), inplace=(InplacePair(0, 0),))
