"""Operators that reinterpret or copy memory: Reshape, Flatten, expand_dims, squeeze, casts.

Except for Cast and _CrossDeviceCopy, the output may be the input's memory (an identity in-place pair). The gradients
need only the output's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from weftplan.errors import ShapeError
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import BoundKernel, Call
from weftplan.ops.core.kernels import INDEX, block_bytes, blocks, bound_blocks, copy_kernel
from weftplan.ops.core.params import p_bool, p_dtype, p_int, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    IDENTITY_INPLACE,
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    grad,
    is_known,
    merge_dim,
    merge_dtype,
    merge_shape,
    normalize_axis,
    same_dtype,
    same_shape,
)
from weftplan.ops.core.schema import (
    Arrays,
    DType,
    EntryRef,
    GradientBuilder,
    Op,
    Param,
    Params,
    Shape,
    ShapeRule,
    TensorSpec,
    Workspace,
)
from weftplan.ops.shape.reshape_codes import reshaped
from weftplan.support.array_types import ArrayModule, RawArray


def _solve_dimension(partial: Shape, size: int, what: str) -> Shape:
    """Return ``partial`` with its unknown dimension (0) set so that the shape has ``size`` elements.

    Return it unchanged unless exactly one dimension is unknown.
    """
    if partial.count(0) != 1:
        return partial
    product = math.prod(dim for dim in partial if dim)
    if size % product:
        raise ShapeError(f"{what}: {size} elements do not fit a tensor of shape {partial}")
    return tuple(dim or size // product for dim in partial)


def _reshape_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, out = ins[0], outs[0]
    codes, target = params["shape"], params["target_shape"]
    if not codes and not target:
        raise ShapeError("Reshape needs the parameter shape")
    if source is None:
        if codes and min(codes) > 0:
            out = merge_shape(out, codes, "output of Reshape")
        return [None], [out]
    if codes:
        shape = reshaped(source, codes, reverse=params["reverse"])
    else:  # the older form, without special codes: 0 is inferred, keep_highest keeps dimension 0
        shape = (source[0], *target[1:]) if params["keep_highest"] else target
        if is_known(source):
            shape = _solve_dimension(shape, math.prod(source), f"Reshape of {source} to {target}")
            if math.prod(shape) != math.prod(source):
                raise ShapeError(f"Reshape of {source} to {target}: {math.prod(source)} elements do not fit")
    out = merge_shape(out, shape, f"output of Reshape of {source}")
    if out is not None and is_known(out):
        source = _solve_dimension(source, math.prod(out), f"input of Reshape to {out}")
    return [source], [out]


def _flatten_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, out = ins[0], outs[0]
    if out is not None and len(out) != 2:
        raise ShapeError(f"the output of Flatten has 2 dimensions, got {out}")
    if source is None:
        return [None], [out]
    if not source:
        raise ShapeError("Flatten expects at least 1 dimension, got shape ()")
    batch, *features = source
    out = merge_shape(out, (batch, math.prod(features)), f"output of Flatten of {source}")
    assert out is not None
    tail = _solve_dimension(tuple(features), out[1], f"input of Flatten to {out}") if out[1] else tuple(features)
    return [(out[0], *tail)], [out]


def _expand_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, out = ins[0], outs[0]
    if source is not None:
        axis = normalize_axis(params["axis"], len(source) + 1, "axis of expand_dims")
        out = merge_shape(out, (*source[:axis], 1, *source[axis:]), f"output of expand_dims of {source}")
    if out is not None:
        axis = normalize_axis(params["axis"], len(out), "axis of expand_dims")
        merge_dim(out[axis], 1, f"dimension {axis} of the output of expand_dims")
        source = out[:axis] + out[axis + 1 :]
    return [source], [out]


def _squeeze_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source, out = ins[0], outs[0]
    if source is None:
        return [None], [out]
    axes = params["axis"]
    if axes is None:
        if not is_known(source):
            return [source], [out]
        dropped = {axis for axis, dim in enumerate(source) if dim == 1}
    else:
        dropped = {normalize_axis(axis, len(source), "axis of squeeze") for axis in axes}
        for axis in dropped:
            if source[axis] > 1:
                raise ShapeError(f"squeeze: dimension {axis} of {source} is not 1")
    dims = tuple(dim for axis, dim in enumerate(source) if axis not in dropped)
    return [source], [merge_shape(out, dims or (1,), f"output of squeeze of {source}")]


def _reshape_like_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    lhs, rhs = ins
    if lhs is None or rhs is None:
        return ins, outs
    begin, end = _span(params["lhs_begin"], params["lhs_end"], len(lhs), "lhs")
    rhs_begin, rhs_end = _span(params["rhs_begin"], params["rhs_end"], len(rhs), "rhs")
    shape = lhs[:begin] + rhs[rhs_begin:rhs_end] + lhs[end:]
    if is_known(lhs) and is_known(shape) and math.prod(lhs) != math.prod(shape):
        raise ShapeError(f"reshape_like: {lhs} cannot take the shape {shape}")
    return ins, [merge_shape(outs[0], shape, "output of reshape_like")]


def _span(begin: int | None, end: int | None, rank: int, which: str) -> tuple[int, int]:
    start = 0 if begin is None else begin + rank * (begin < 0)
    stop = rank if end is None else end + rank * (end < 0)
    if not 0 <= start <= stop <= rank:
        raise ShapeError(f"reshape_like: {which}_begin={begin}, {which}_end={end} do not fit {rank} dimensions")
    return start, stop


def _first_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer one dtype for input 0 and the output, from either of them; other inputs may have any dtype."""
    dtype = merge_dtype(ins[0], outs[0], "input 0 and the output")
    return [dtype, *ins[1:]], [dtype]


def _renaming(
    name: str,
    infer_shape: ShapeRule,
    doc: str,
    params: tuple[Param, ...] = (),
    aliases: tuple[str, ...] = (),
    inputs: tuple[str, ...] = ("data",),
) -> None:
    """Register an operator whose output has input 0's elements in order; further inputs only provide a shape."""
    register(
        Op(
            name=name,
            forward=copy_kernel,
            infer_shape=infer_shape,
            infer_dtype=_first_dtype,
            params=params,
            inputs=inputs,
            gradient=grad(f"_backward_{name}", "g0", params={}),
            inplace=IDENTITY_INPLACE,
            ignored_inputs=tuple(range(1, len(inputs))),
            aliases=aliases,
            doc=doc,
        )
    )
    backward(name, copy_kernel, ("ograd",), inplace=IDENTITY_INPLACE)


_renaming(
    "Reshape",
    _reshape_shape,
    "The same elements in another shape; special codes 0, -1, -2, -3, -4 in shape.",
    params=(
        Param("shape", p_shape, (), "sizes and special codes"),
        Param("reverse", p_bool, False, "match the codes from the right"),
        Param("target_shape", p_shape, (), "older form of shape: 0 is inferred"),
        Param("keep_highest", p_bool, False, "with target_shape: keep dimension 0"),
    ),
    aliases=("reshape",),
)
_renaming("Flatten", _flatten_shape, "All dimensions after the first joined into one.", aliases=("flatten",))
_renaming(
    "expand_dims",
    _expand_shape,
    "A dimension of size 1 inserted at axis.",
    params=(Param("axis", p_int, doc="where the new dimension stands in the output"),),
)
_renaming(
    "squeeze",
    _squeeze_shape,
    "Dimensions of size 1 removed: those of axis, or all.",
    params=(Param("axis", p_optional(p_shape), None, "axes to remove (None: all of size 1)"),),
)
_renaming(
    "reshape_like",
    _reshape_like_shape,
    "lhs in the shape of rhs, or with the axes lhs_begin:lhs_end replaced by rhs_begin:rhs_end of rhs.",
    params=tuple(
        Param(f"{side}_{edge}", p_optional(p_int), None, f"{edge} of the axes of {side}")
        for side in ("lhs", "rhs")
        for edge in ("begin", "end")
    ),
    inputs=("lhs", "rhs"),
)


def _identity_like_gradient(builder: GradientBuilder) -> list[EntryRef | None]:
    return [builder.ograd(), None]


register(
    Op(
        name="_copy",
        forward=copy_kernel,
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        gradient=grad("_copy", "g0", params={}),
        inplace=IDENTITY_INPLACE,
        aliases=("identity",),
        doc="The input.",
    )
)
register(
    Op(
        name="_identity_with_attr_like_rhs",
        forward=copy_kernel,
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        inputs=("lhs", "rhs"),
        gradient=_identity_like_gradient,
        inplace=IDENTITY_INPLACE,
        ignored_inputs=(1,),
        doc="lhs, which has the shape and dtype of rhs; made by the gradient pass for head gradients.",
    )
)
register(
    Op(
        name="_CrossDeviceCopy",
        forward=copy_kernel,
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        gradient=grad("_CrossDeviceCopy", "g0", params={}),
        aliases=("_copyto",),
        doc="The input on another device; the executor replaces the kernel by a copy between devices.",
    )
)


def _cast_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return ins, [merge_dtype(outs[0], params["dtype"], "output of Cast and its dtype")]


def _cast_steps(source: DType, target: DType) -> list[DType]:
    """Return a cast's intermediate dtypes: int64 from floats to smaller integers (300.0 wraps to 44 in uint8)."""
    return [INDEX] if is_float(source) and target.kind in "iu" and target.itemsize < 8 else []


def _convert(xp: ArrayModule, x: RawArray, out: RawArray, between: RawArray | None = None) -> None:
    if between is not None:
        xp.copyto(between, x, casting="unsafe")
        x = between
    xp.copyto(out, x, casting="unsafe")


class CastKernel(BoundKernel):
    """A kernel that converts input 0 to the dtype of output 0."""

    __slots__ = ()

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call that converts each block, because NumPy copies an array that it converts in place."""
        scratch = _cast_steps(inputs[0].dtype, outputs[0].dtype)
        return bound_blocks(ctx, partial(_convert, ctx.xp), partial(blocks, ctx, (inputs[0], outputs[0]), scratch))


_cast = CastKernel()


def _cast_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return block_bytes(math.prod(inputs[0].shape), _cast_steps(inputs[0].dtype, outputs[0].dtype))


register(
    Op(
        name="Cast",
        forward=_cast,
        infer_shape=same_shape,
        infer_dtype=_cast_dtype,
        params=(Param("dtype", p_dtype, doc="dtype of the output"),),
        gradient=grad("_backward_Cast", "g0", params={}),
        # Not an identity pair: the dtypes may differ, and other readers of the input would then see the bits of
        # another dtype.
        inplace=UNARY_INPLACE,
        workspace=_cast_workspace,
        aliases=("cast",),
        doc="The input converted to dtype; floats are truncated to integers.",
    )
)
backward("Cast", _cast, ("ograd",), inplace=UNARY_INPLACE, workspace=_cast_workspace)
