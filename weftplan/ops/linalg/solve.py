"""Triangular systems and Cholesky factors (linalg_trsm, linalg_potrf, linalg_potri).

Only one triangle of a triangular or symmetric matrix is read. The gradient of the Cholesky factor is that of Murray
(2016); the gradients of the other operators follow from d(A⁻¹) = -A⁻¹ dA A⁻¹.
"""

from __future__ import annotations

from weftplan.ops.core.forms import kernel
from weftplan.ops.core.params import p_bool
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, backward, grad
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, Shape, SpecLike
from weftplan.ops.linalg.core import (
    batch_of,
    batched,
    cholesky,
    cholesky_scratch,
    flip,
    identity,
    mirror,
    solve,
    solve_scratch,
    square_shape,
    triangle,
    wide_floats,
)
from weftplan.ops.linalg.products import TRIANGULAR, triangular_shape
from weftplan.support.array_types import ArrayModule, DType, RawArray


def _solve_spec(x: SpecLike, rows: int, columns: int) -> tuple[Shape, DType]:
    return (solve_scratch(batch_of(x.shape), rows, columns),), x.dtype


# ----------------------------------------------------------------------------------------------------------------- trsm


def _solved(
    xp: ArrayModule, params: Params, a: RawArray, b: RawArray, scratch: RawArray, adjoint: bool = False
) -> None:
    """Replace ``b`` by the solution of the system, or of its transpose if ``adjoint``.

    A system with ``a`` on the right side is solved as the transposed system.
    """
    transpose = params["transpose"] != adjoint
    right = params["rightside"]
    a = flip(a, transpose != right)
    solve(xp, a, flip(b, right), scratch, lower=params["lower"] != (transpose != right))


def _trsm_scratch(params: Params, b: SpecLike) -> tuple[Shape, DType]:
    rows, columns = b.shape[-2:]
    return _solve_spec(b, columns, rows) if params["rightside"] else _solve_spec(b, rows, columns)


@kernel(scratch=lambda p, A, B, out: [_trsm_scratch(p, out)])
def _trsm(xp: ArrayModule, p: Params, A: RawArray, B: RawArray, out: RawArray, scratch: RawArray) -> None:
    xp.multiply(B, p["alpha"], out=out)
    _solved(xp, p, batched(A), batched(out), scratch)


@kernel(scratch=lambda p, g, a, x, d_A, d_B: [(g.shape, g.dtype), _trsm_scratch(p, g)])
def _backward_trsm(
    xp: ArrayModule,
    p: Params,
    g: RawArray,
    a: RawArray,
    x: RawArray,
    d_A: RawArray | None,
    d_B: RawArray | None,
    inner: RawArray,
    scratch: RawArray,
) -> None:
    xp.copyto(inner, g)
    _solved(xp, p, batched(a), batched(inner), scratch, adjoint=True)
    if d_A is not None:
        out = batched(d_A)
        left, right = batched(inner), flip(batched(x))
        if p["rightside"]:
            left, right = right, left
        if p["transpose"]:
            left, right = flip(right), flip(left)
        multiply(xp, left, right, out)
        triangle(xp, out, out, p["lower"])
        xp.negative(out, out=out)
    if d_B is not None:
        xp.multiply(inner, p["alpha"], out=d_B)


register(
    Op(
        name="_linalg_trsm",
        forward=_trsm,
        infer_shape=triangular_shape,
        infer_dtype=wide_floats("linalg_trsm"),
        params=TRIANGULAR,
        inputs=("A", "B"),
        gradient=grad("_backward_linalg_trsm", "g0", "x0", "y0"),
        inplace=(InplacePair(1, 0),),
        aliases=("linalg_trsm",),
        doc="X with A · X = alpha · B (X · A on the right side), A triangular.",
    )
)
backward("_linalg_trsm", _backward_trsm, ("ograd", "A", "output"), grad_inputs=(0, 1), params=TRIANGULAR)

# ------------------------------------------------------------------------------------------------------ potrf and potri


_LOWER = (Param("lower", p_bool, True, "False: the factor is upper triangular", by_name=True),)


def _square_scratch(x: SpecLike) -> tuple[Shape, DType]:
    n = x.shape[-1]
    return _solve_spec(x, n, n)


@kernel(scratch=lambda p, A, out: [((cholesky_scratch(batch_of(A.shape), A.shape[-1]),), A.dtype)])
def _potrf(xp: ArrayModule, p: Params, A: RawArray, out: RawArray, scratch: RawArray) -> None:
    if out is not A:
        xp.copyto(out, A)
    cholesky(xp, flip(batched(out), not p["lower"]), scratch)


@kernel(scratch=lambda p, ograd, output, out: [_square_scratch(out)])
def _backward_potrf(
    xp: ArrayModule, p: Params, ograd: RawArray, output: RawArray, out: RawArray, scratch: RawArray
) -> None:
    g, factor = (flip(batched(x), not p["lower"]) for x in (ograd, output))
    out = batched(out)  # symmetric, so it needs no flip
    multiply(xp, flip(factor), g, out)
    mirror(xp, out)
    solve(xp, flip(factor), out, scratch, lower=False)
    solve(xp, flip(factor), flip(out), scratch, lower=False)
    xp.multiply(out, 0.5, out=out)


@kernel(scratch=lambda p, A, out: [_square_scratch(out)])
def _potri(xp: ArrayModule, p: Params, A: RawArray, out: RawArray, scratch: RawArray) -> None:
    factor, out = flip(batched(A), not p["lower"]), batched(out)
    identity(xp, out)
    solve(xp, factor, out, scratch, lower=True)
    solve(xp, flip(factor), out, scratch, lower=False)


@kernel(scratch=lambda p, ograd, A, output, out: [(ograd.shape, ograd.dtype), _square_scratch(out)])
def _backward_potri(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    A: RawArray,
    output: RawArray,
    out: RawArray,
    product: RawArray,
    scratch: RawArray,
) -> None:
    """Compute the lower triangle of -(B (G + Gᵀ) L⁻ᵀ), where B is the output.

    An upper triangular factor is the same problem, transposed.
    """
    g, factor, inverse, product = (batched(x) for x in (ograd, A, output, product))
    factor, out = (flip(x, not p["lower"]) for x in (factor, batched(out)))
    xp.add(g, flip(g), out=product)
    multiply(xp, inverse, product, out)
    solve(xp, factor, flip(out), scratch, lower=True)
    triangle(xp, out, out)
    xp.multiply(out, -1.0, out=out)


register(
    Op(
        name="_linalg_potrf",
        forward=_potrf,
        infer_shape=square_shape("linalg_potrf"),
        infer_dtype=wide_floats("linalg_potrf"),
        params=_LOWER,
        inputs=("A",),
        gradient=grad("_backward_linalg_potrf", "g0", "y0"),
        inplace=UNARY_INPLACE,
        aliases=("linalg_potrf",),
        doc="The Cholesky factor L of each positive definite matrix L · Lᵀ, or the upper one; that triangle is read.",
    )
)
backward("_linalg_potrf", _backward_potrf, ("ograd", "output"), params=_LOWER)
register(
    Op(
        name="_linalg_potri",
        forward=_potri,
        infer_shape=square_shape("linalg_potri"),
        infer_dtype=wide_floats("linalg_potri"),
        params=_LOWER,
        inputs=("A",),
        gradient=grad("_backward_linalg_potri", "g0", "x0", "y0"),
        aliases=("linalg_potri",),
        doc="The inverse of L · Lᵀ for each lower triangular matrix L, or of Uᵀ · U for each upper one.",
    )
)
backward("_linalg_potri", _backward_potri, ("ograd", "A", "output"), params=_LOWER)
