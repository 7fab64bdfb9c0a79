"""Products of stacks of matrices: linalg_gemm, linalg_gemm2, linalg_syrk, linalg_trmm.

The last two axes are the matrices; ``linalg_gemm`` and ``linalg_gemm2`` can take the rows from another axis. The
gradients are products of matrices, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import kernel, workspace_kernel
from weftplan.ops.core.kernels import block_bytes, blocks
from weftplan.ops.core.params import p_bool, p_float, p_int
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_dim, merge_shape, normalize_axis
from weftplan.ops.core.schema import Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.linalg.core import batched, flip, triangle, wide_floats
from weftplan.ops.linalg.matrix import batch_shape
from weftplan.support.array_types import ArrayModule, RawArray

_ALPHA = Param("alpha", p_float, 1.0, "factor of the product")

# ------------------------------------------------------------------------------------------------------- gemm and gemm2

_GEMM2 = (
    Param("transpose_a", p_bool, False, "use the transpose of A"),
    Param("transpose_b", p_bool, False, "use the transpose of B"),
    _ALPHA,
    Param("axis", p_int, -2, "axis of the rows; the columns are the last axis"),
)
_GEMM = (*_GEMM2[:3], Param("beta", p_float, 1.0, "factor of C"), _GEMM2[3])


def _rows_last(shape: Shape | None, params: Params) -> Shape | None:
    """Return ``shape`` with the row axis and the last axis but one exchanged; a second call restores it."""
    if shape is None:
        return None
    if len(shape) < 2:
        raise ShapeError(f"linalg_gemm expects at least 2 dimensions, got shape {shape}")
    axis = normalize_axis(params["axis"], len(shape), "axis of linalg_gemm")
    if axis == len(shape) - 1:
        raise ShapeError(f"linalg_gemm: axis {params['axis']} is that of the columns, expected another one")
    dims = list(shape)
    dims[axis], dims[-2] = dims[-2], dims[axis]
    return tuple(dims)


def _gemm_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    out = outs[0]
    for shape in ins[2:]:
        out = merge_shape(out, shape, "linalg_gemm: C and output")
    factors, products = batch_shape(params, [_rows_last(s, params) for s in ins[:2]], [_rows_last(out, params)])
    out = _rows_last(products[0], params)
    return [*(_rows_last(s, params) for s in factors), *[out] * len(ins[2:])], [out]


def _matrices(x: RawArray, params: Params) -> RawArray:
    return x.swapaxes(params["axis"], -2)


def _product(xp: ArrayModule, params: Params, a: RawArray, b: RawArray, out: RawArray) -> None:
    a, b = flip(_matrices(a, params), params["transpose_a"]), flip(_matrices(b, params), params["transpose_b"])
    multiply(xp, a, b, _matrices(out, params))
    if params["alpha"] != 1.0:
        xp.multiply(out, params["alpha"], out=out)


@kernel
def _gemm2(xp: ArrayModule, p: Params, A: RawArray, B: RawArray, out: RawArray) -> None:
    _product(xp, p, A, B, out)


@workspace_kernel
def _gemm(ctx: Workspace, p: Params, A: RawArray, B: RawArray, C: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    _product(xp, p, A, B, out)
    for summand, target, spare in blocks(ctx, (C, out), (out.dtype,)):
        xp.multiply(summand, p["beta"], out=spare)
        xp.add(target, spare, out=target)


def _gemm_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return block_bytes(math.prod(outputs[0].shape), [outputs[0].dtype])


@kernel
def _backward_gemm(
    xp: ArrayModule, p: Params, ograd: RawArray, A: RawArray, B: RawArray, *outputs: RawArray | None
) -> None:
    g, a, b = (_matrices(x, p) for x in (ograd, A, B))
    a, b = flip(a, p["transpose_a"]), flip(b, p["transpose_b"])
    for out, left, right, transpose in (
        (outputs[0], g, flip(b), p["transpose_a"]),
        (outputs[1], flip(a), g, p["transpose_b"]),
    ):
        if out is None:
            continue
        if transpose:
            left, right = flip(right), flip(left)
        multiply(xp, left, right, _matrices(out, p))
        if p["alpha"] != 1.0:
            xp.multiply(out, p["alpha"], out=out)
    if len(outputs) > 2 and outputs[2] is not None:
        xp.multiply(ograd, p["beta"], out=outputs[2])


for _name, _kernel, _names, _params, _doc in (
    ("gemm", _gemm, ("A", "B", "C"), _GEMM, "alpha · A · B + beta · C, for each pair of matrices."),
    ("gemm2", _gemm2, ("A", "B"), _GEMM2, "alpha · A · B, for each pair of matrices."),
):
    register(
        Op(
            name=f"_linalg_{_name}",
            forward=_kernel,
            infer_shape=_gemm_shape,
            infer_dtype=floats_only(f"_linalg_{_name}"),
            params=_params,
            inputs=_names,
            gradient=grad(f"_backward_linalg_{_name}", "g0", "x0", "x1"),
            workspace=_gemm_workspace if _name == "gemm" else None,
            aliases=(f"linalg_{_name}",),
            doc=_doc,
        )
    )
    backward(
        f"_linalg_{_name}",
        _backward_gemm,
        ("ograd", "A", "B"),
        grad_inputs=tuple(range(len(_names))),
        params=_params,
    )

# ----------------------------------------------------------------------------------------------------------------- syrk

_SYRK = (Param("transpose", p_bool, False, "Aᵀ · A instead of A · Aᵀ"), _ALPHA)


def _syrk_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    a, out = ins[0], outs[0]
    for shape in (a, out):
        if shape is not None and len(shape) < 2:
            raise ShapeError(f"linalg_syrk expects at least 2 dimensions, got shape {shape}")
    if a is None and out is None:
        return ins, outs
    axis = -1 if params["transpose"] else -2
    if a is None:
        assert out is not None
        a = (*out[:-2], 0, 0)
    out = merge_shape((*a[:-2], a[axis], a[axis]), out, f"output of linalg_syrk of {a}")
    assert out is not None
    side = merge_dim(out[-2], out[-1], "linalg_syrk: rows and columns of the output")
    a = (*out[:-2], a[-2], side) if params["transpose"] else (*out[:-2], side, a[-1])
    return [a], [(*out[:-2], side, side)]


@kernel
def _syrk(xp: ArrayModule, p: Params, A: RawArray, out: RawArray) -> None:
    a = flip(A, p["transpose"])
    xp.matmul(a, flip(a), out=out)  # not multiply(): of equal factors, matmul computes one triangle
    xp.multiply(out, p["alpha"], out=out)


@kernel(scratch=lambda p, g, a, out: [(a.shape, a.dtype)])
def _backward_syrk(xp: ArrayModule, p: Params, g: RawArray, a: RawArray, out: RawArray, spare: RawArray) -> None:
    if p["transpose"]:
        multiply(xp, a, g, out)
        multiply(xp, a, flip(g), spare)
    else:
        multiply(xp, g, a, out)
        multiply(xp, flip(g), a, spare)
    xp.add(out, spare, out=out)
    xp.multiply(out, p["alpha"], out=out)


register(
    Op(
        name="_linalg_syrk",
        forward=_syrk,
        infer_shape=_syrk_shape,
        infer_dtype=wide_floats("linalg_syrk"),
        params=_SYRK,
        inputs=("A",),
        gradient=grad("_backward_linalg_syrk", "g0", "x0"),
        aliases=("linalg_syrk",),
        doc="alpha times the product of each matrix and its transpose.",
    )
)
backward("_linalg_syrk", _backward_syrk, ("ograd", "A"), params=_SYRK)

# ----------------------------------------------------------------------------------------------------------------- trmm

TRIANGULAR = (
    Param("transpose", p_bool, False, "use the transpose of A"),
    Param("rightside", p_bool, False, "A stands on the right of B"),
    Param("lower", p_bool, True, "A is its lower triangle, else its upper one"),
    _ALPHA,
)


def triangular_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer shapes: A is square with B's number of rows (``rightside``: columns); the output has B's shape."""
    a, b = ins[0], merge_shape(ins[1], outs[0], "B and output beside a triangular matrix")
    for shape in (a, b):
        if shape is not None and len(shape) < 2:
            raise ShapeError(f"a triangular product expects at least 2 dimensions, got shape {shape}")
    side = -1 if params["rightside"] else -2
    if a is not None:
        rows = merge_dim(a[-2], a[-1], f"rows and columns of the triangular matrix {a}")
        a = (*a[:-2], rows, rows)
    if b is not None:
        a = merge_shape((*b[:-2], b[side], b[side]), a, f"A beside B of shape {b} (rightside={params['rightside']})")
        assert a is not None
        b = (*a[:-2], b[-2], a[-1]) if params["rightside"] else (*a[:-2], a[-1], b[-1])
    return [a, b], [b]


@kernel(scratch=lambda p, a, b, out: [(a.shape, a.dtype)])
def _trmm(xp: ArrayModule, p: Params, a: RawArray, b: RawArray, out: RawArray, clean: RawArray) -> None:
    clean = batched(clean)
    triangle(xp, batched(a), clean, p["lower"])
    clean = flip(clean, p["transpose"])
    if p["rightside"]:
        multiply(xp, batched(b), clean, batched(out))
    else:
        multiply(xp, clean, batched(b), batched(out))
    xp.multiply(out, p["alpha"], out=out)


@kernel(scratch=lambda p, ograd, A, B, d_A, d_B: [(A.shape, A.dtype)])
def _backward_trmm(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    A: RawArray,
    B: RawArray,
    d_A: RawArray | None,
    d_B: RawArray | None,
    clean: RawArray,
) -> None:
    g, a, b, clean = (batched(x) for x in (ograd, A, B, clean))
    if d_A is not None:
        out = batched(d_A)
        left, right = (flip(b), g) if p["rightside"] else (g, flip(b))
        if p["transpose"]:
            left, right = flip(right), flip(left)
        multiply(xp, left, right, out)
        triangle(xp, out, out, p["lower"])
        xp.multiply(out, p["alpha"], out=out)
    if d_B is not None:
        out = batched(d_B)
        triangle(xp, a, clean, p["lower"])
        clean = flip(clean, not p["transpose"])
        if p["rightside"]:
            multiply(xp, g, clean, out)
        else:
            multiply(xp, clean, g, out)
        xp.multiply(out, p["alpha"], out=out)


register(
    Op(
        name="_linalg_trmm",
        forward=_trmm,
        infer_shape=triangular_shape,
        infer_dtype=wide_floats("linalg_trmm"),
        params=TRIANGULAR,
        inputs=("A", "B"),
        gradient=grad("_backward_linalg_trmm", "g0", "x0", "x1"),
        aliases=("linalg_trmm",),
        doc="alpha times the product of a triangular matrix and B.",
    )
)
backward("_linalg_trmm", _backward_trmm, ("ograd", "A", "B"), grad_inputs=(0, 1), params=TRIANGULAR)
