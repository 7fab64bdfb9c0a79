"""Axis permutations and matrix products: transpose, SwapAxis, dot, batch_dot.

The array module's BLAS computes the products; the engine sets its number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.params import p_bool, p_enum, p_int, p_optional, p_shape
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_dim, merge_shape, normalize_axis, same_dtype
from weftplan.ops.core.schema import Op, Param, Params, Shape
from weftplan.support.array_types import ArrayModule, RawArray

# ------------------------------------------------------------------------------------------------------------ transpose


def _permutation(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    if not axes:
        return tuple(reversed(range(rank)))
    normal = tuple(normalize_axis(axis, rank, "axis of transpose") for axis in axes)
    if sorted(normal) != list(range(rank)):
        raise ShapeError(f"transpose: axes {tuple(axes)} are not a permutation of {rank} axes")
    return normal


def _permuted_shape(order: tuple[int, ...], ins: Shapes, outs: Shapes, what: str) -> tuple[Shapes, Shapes]:
    """Infer the shapes of input and output from each other, given out.shape[k] = in.shape[order[k]]."""
    source, out = ins[0], outs[0]
    if source is not None:
        out = merge_shape(out, tuple(source[axis] for axis in order), f"output of {what} of {source}")
    if out is not None:
        if len(out) != len(order):
            raise ShapeError(f"{what} of {len(order)} axes cannot give shape {out}")
        dims = [0] * len(order)
        for position, axis in enumerate(order):
            dims[axis] = out[position]
        source = tuple(dims)
    return [source], [out]


def _transpose_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    shape = ins[0] if ins[0] is not None else outs[0]
    if shape is None:
        return ins, outs
    return _permuted_shape(_permutation(params["axes"], len(shape)), ins, outs, "transpose")


@kernel
def _transpose(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    xp.copyto(out, data.transpose(_permutation(p["axes"], out.ndim)))


@kernel
def _backward_transpose(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    order = _permutation(p["axes"], out.ndim)
    xp.copyto(out.transpose(order), ograd)


_TRANSPOSE = (Param("axes", p_shape, (), "input axis of each output axis; (): reversed"),)
register(
    Op(
        name="transpose",
        forward=_transpose,
        infer_shape=_transpose_shape,
        infer_dtype=same_dtype,
        params=_TRANSPOSE,
        gradient=grad("_backward_transpose", "g0"),
        doc="The axes in another order.",
    )
)
backward("transpose", _backward_transpose, ("ograd",), params=_TRANSPOSE)


def _swap_order(params: Params, rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    axis1 = normalize_axis(params["dim1"], rank, "dim1 of SwapAxis")
    second = normalize_axis(params["dim2"], rank, "dim2 of SwapAxis")
    order[axis1], order[second] = order[second], order[axis1]
    return tuple(order)


def _swap_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    shape = ins[0] if ins[0] is not None else outs[0]
    if shape is None:
        return ins, outs
    return _permuted_shape(_swap_order(params, len(shape)), ins, outs, "SwapAxis")


@kernel
def _swap(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    xp.copyto(out, data.swapaxes(p["dim1"], p["dim2"]))


_SWAP = (Param("dim1", p_int, 0, "first axis"), Param("dim2", p_int, 0, "second axis"))
register(
    Op(
        name="SwapAxis",
        forward=_swap,
        infer_shape=_swap_shape,
        infer_dtype=same_dtype,
        params=_SWAP,
        gradient=grad("_backward_SwapAxis", "g0"),
        aliases=("swapaxes",),
        doc="Axes dim1 and dim2 exchanged.",
    )
)
backward("SwapAxis", _swap, ("ograd",), params=_SWAP)


# ------------------------------------------------------------------------------------------------------------------ dot

_STYPE = Param("forward_stype", p_optional(p_enum("default")), None, "accepted when None or default: dense")
_PRODUCT = (
    Param("transpose_a", p_bool, False, "use the transpose of lhs"),
    Param("transpose_b", p_bool, False, "use the transpose of rhs"),
    _STYPE,
)


def _contract(shape: Shape, leading: bool) -> tuple[int, Shape]:
    """Return (size of the summed axis, other sizes); the summed axis is the first if ``leading``, else the last."""
    return (shape[0], shape[1:]) if leading else (shape[-1], shape[:-1])


def _dot_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    lhs, rhs = ins
    if lhs is None or rhs is None:
        return ins, outs
    if not lhs or not rhs:
        raise ShapeError(f"dot expects at least 1 dimension, got {lhs} and {rhs}")
    a_first, b_first = params["transpose_a"], not params["transpose_b"]
    a_sum, a_free = _contract(lhs, a_first)
    b_sum, b_free = _contract(rhs, b_first)
    flags = f"transpose_a={params['transpose_a']}, transpose_b={params['transpose_b']}"
    summed = merge_dim(a_sum, b_sum, f"dot of {lhs} and {rhs} ({flags}): the axes summed over")
    out = merge_shape(outs[0], (*a_free, *b_free) or (1,), f"output of dot of {lhs} and {rhs}")
    if out is not None and (a_free or b_free):
        a_free, b_free = out[: len(a_free)], out[len(a_free) :]
    new_lhs = (summed, *a_free) if a_first else (*a_free, summed)
    new_rhs = (summed, *b_free) if b_first else (*b_free, summed)
    return [new_lhs, new_rhs], [out]


def _matrix(x: RawArray, leading: bool) -> RawArray:
    """Return ``x`` as a matrix whose columns are the summed axis (the first axis when ``leading``, else the last)."""
    if leading:
        return x.reshape(x.shape[0], -1).T
    return x.reshape(-1, x.shape[-1])


@kernel
def _dot(xp: ArrayModule, p: Params, lhs: RawArray, rhs: RawArray, out: RawArray) -> None:
    a = _matrix(lhs, p["transpose_a"])
    b = _matrix(rhs, not p["transpose_b"])
    multiply(xp, a, b.T, out.reshape(a.shape[0], b.shape[0]))


@kernel
def _backward_dot(
    xp: ArrayModule,
    p: Params,
    g: RawArray,
    lhs: RawArray,
    rhs: RawArray,
    d_lhs: RawArray | None,
    d_rhs: RawArray | None,
) -> None:
    a = _matrix(lhs, p["transpose_a"])
    b = _matrix(rhs, not p["transpose_b"])
    g = g.reshape(a.shape[0], b.shape[0])
    # Each gradient is a matrix (rest, summed) in its own layout; write the transpose if the summed axis is first.
    if d_lhs is not None:
        if p["transpose_a"]:
            multiply(xp, b.T, g.T, d_lhs.reshape(a.shape[1], a.shape[0]))
        else:
            multiply(xp, g, b, d_lhs.reshape(a.shape))
    if d_rhs is not None:
        if p["transpose_b"]:
            multiply(xp, g.T, a, d_rhs.reshape(b.shape))
        else:
            multiply(xp, a.T, g, d_rhs.reshape(b.shape[1], b.shape[0]))


register(
    Op(
        name="dot",
        forward=_dot,
        infer_shape=_dot_shape,
        infer_dtype=same_dtype,
        params=_PRODUCT,
        inputs=("lhs", "rhs"),
        gradient=grad("_backward_dot", "g0", "x0", "x1"),
        doc="Sum over the last axis of lhs and the first of rhs (first of lhs, last of rhs when transposed).",
    )
)
backward("dot", _backward_dot, ("ograd", "lhs", "rhs"), grad_inputs=(0, 1), params=_PRODUCT)


# -------------------------------------------------------------------------------------------------------- batch_dot


def batch_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer the shapes of two stacks of matrices, either of which may be transposed, and of their products."""
    lhs, rhs = ins
    if lhs is None or rhs is None:
        return ins, outs
    if len(lhs) != len(rhs) or len(lhs) < 2:
        raise ShapeError(f"a batched product expects two shapes of one rank, at least 2, got {lhs} and {rhs}")
    batch = merge_shape(lhs[:-2], rhs[:-2], f"leading axes of {lhs} and {rhs}")
    rows, summed_a = lhs[-2:][:: -1 if params["transpose_a"] else 1]
    summed_b, columns = rhs[-2:][:: -1 if params["transpose_b"] else 1]
    flags = f"transpose_a={params['transpose_a']}, transpose_b={params['transpose_b']}"
    summed = merge_dim(summed_a, summed_b, f"product of {lhs} and {rhs} ({flags}): the axes summed over")
    assert batch is not None
    out = merge_shape(outs[0], (*batch, rows, columns), f"output of the product of {lhs} and {rhs}")
    assert out is not None
    *batch_dims, rows, columns = out
    left = (summed, rows) if params["transpose_a"] else (rows, summed)
    right = (columns, summed) if params["transpose_b"] else (summed, columns)
    return [(*batch_dims, *left), (*batch_dims, *right)], [out]


def _batch_dot_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    for shape in ins:
        if shape is not None and len(shape) < 3:
            raise ShapeError(f"batch_dot expects at least 3 dimensions, got {shape}")
    return batch_shape(params, ins, outs)


def _flipped(x: RawArray, transpose: bool) -> RawArray:
    return x.swapaxes(-1, -2) if transpose else x


@kernel
def _batch_product(xp: ArrayModule, p: Params, lhs: RawArray, rhs: RawArray, out: RawArray) -> None:
    a, b = (_flipped(x, p[flag]) for x, flag in zip((lhs, rhs), ("transpose_a", "transpose_b"), strict=True))
    multiply(xp, a, b, out)


@kernel
def _backward_batch(
    xp: ArrayModule,
    p: Params,
    g: RawArray,
    lhs: RawArray,
    rhs: RawArray,
    d_lhs: RawArray | None,
    d_rhs: RawArray | None,
) -> None:
    a, b = _flipped(lhs, p["transpose_a"]), _flipped(rhs, p["transpose_b"])
    if d_lhs is not None:
        if p["transpose_a"]:
            multiply(xp, b, g.swapaxes(-1, -2), d_lhs)
        else:
            multiply(xp, g, b.swapaxes(-1, -2), d_lhs)
    if d_rhs is not None:
        if p["transpose_b"]:
            multiply(xp, g.swapaxes(-1, -2), a, d_rhs)
        else:
            multiply(xp, a.swapaxes(-1, -2), g, d_rhs)


register(
    Op(
        name="batch_dot",
        forward=_batch_product,
        infer_shape=_batch_dot_shape,
        infer_dtype=same_dtype,
        params=_PRODUCT,
        inputs=("lhs", "rhs"),
        gradient=grad("_backward_batch_dot", "g0", "x0", "x1"),
        doc="Products of the matrices in the last two axes, one for each index of the leading axes.",
    )
)
backward("batch_dot", _backward_batch, ("ograd", "lhs", "rhs"), grad_inputs=(0, 1), params=_PRODUCT)
