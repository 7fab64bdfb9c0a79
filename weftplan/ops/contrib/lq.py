"""linalg_gelqf (A = L · Q, orthonormal rows of Q) and linalg_syevd (symmetric A = Uᵀ · diag(Λ) · U).

Householder reflections compute Q with LAPACK's signs, batched over the matrices. The array module's ``eigh`` computes
eigenvectors, matrix by matrix; no memory plan counts its temporaries, which are a few times as large as one matrix. The
sign of an eigenvector makes its element of largest magnitude positive, as in MXNet.

The gradient of LQ is that of Seeger et al. 2017, "Auto-Differentiating Linear Algebra", as in MXNet. The gradient of
eigenvectors is a first-order perturbation; pairs of equal eigenvalues contribute nothing.
"""

from __future__ import annotations

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import BOOL, INDEX
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_shape
from weftplan.ops.core.schema import Op, Params, SpecLike
from weftplan.ops.linalg.core import (
    batch_of,
    batched,
    diagonal,
    flip,
    mirror,
    solve,
    solve_scratch,
    square_shape,
    triangle,
    wide_floats,
)
from weftplan.support.array_types import ArrayModule, RawArray

# ---------------------------------------------------------------------------------------------------------------- gelqf


def _gelqf_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    a = merge_shape(ins[0], outs[0], "linalg_gelqf: input and Q")
    factor = outs[1]
    if a is None and factor is not None and len(factor) >= 2:
        a = (*factor[:-1], 0)
    if a is None:
        return ins, outs
    if len(a) < 2:
        raise ShapeError(f"linalg_gelqf expects matrices in the last two of at least 2 dimensions, got shape {a}")
    factor = merge_shape((*a[:-1], a[-2]), factor, f"linalg_gelqf: L of {a}")
    if factor is not None:
        a = merge_shape(a, (*factor[:-1], a[-1]), "linalg_gelqf: input and L") or a
        side = factor[-1] or factor[-2]
        factor = (*factor[:-2], side, side)
    if 0 < a[-1] < a[-2]:
        raise ShapeError(f"linalg_gelqf expects matrices with at least as many columns as rows, got shape {a}")
    return [a], [a, factor]


def _gelqf_scratch(params: Params, A: SpecLike, Q: SpecLike | None, L: SpecLike | None) -> ScratchSpecs:
    """Return the scratch (work, outer, product, scales, norm, beta, diagonals); ``work`` has the reflection vectors."""
    batch, (rows, columns) = batch_of(A.shape), A.shape[-2:]
    matrix, column, number = (batch, rows, columns), (batch, rows, 1), (batch, 1, 1)
    return [(shape, A.dtype) for shape in (matrix, matrix, column, column, number, number, column)]


def _reflect(
    xp: ArrayModule, rows: RawArray, head: RawArray, scale: RawArray, product: RawArray, outer: RawArray
) -> None:
    """Subtract scale · (rows · headᵀ) · head from ``rows`` (batch, m, k), where ``head`` is (batch, 1, k).

    ``product`` and ``outer`` are scratch.
    """
    if rows.shape[1] == 0:
        return
    dots = product[:, : rows.shape[1]]
    multiply(xp, rows, flip(head), dots)
    xp.multiply(dots, scale, out=dots)
    spread = outer.reshape(-1)[: rows.size].reshape(rows.shape)
    multiply(xp, dots, head, spread)
    xp.subtract(rows, spread, out=rows)


@kernel(scratch=_gelqf_scratch)
def _gelqf(xp: ArrayModule, p: Params, A: RawArray, Q: RawArray | None, L: RawArray | None, *buffers: RawArray) -> None:
    work, outer, product, scales, norm, beta, diagonals = buffers
    batch, m, n = work.shape
    xp.copyto(work, batched(A))
    scales.fill(0)
    for k in range(m):
        row = work[:, k : k + 1, k:]
        corner = row[:, :, :1]
        scale = scales[:, k : k + 1]
        xp.copyto(diagonals[:, k : k + 1], corner)
        if k + 1 == n:
            break  # the last reflection of a square matrix is the identity
        multiply(xp, row, flip(row), norm)
        xp.sqrt(norm, out=norm)
        xp.copysign(norm, corner, out=beta)
        xp.multiply(beta, -1.0, out=beta)
        # The reflection with v = row - beta·e maps the row to beta·e; a row of zeros is left alone.
        xp.subtract(corner, beta, out=corner)
        xp.multiply(beta, corner, out=norm)
        xp.divide(-1.0, norm, out=scale)
        xp.copyto(scale, 0, where=norm == 0)
        xp.copyto(diagonals[:, k : k + 1], beta)
        _reflect(xp, work[:, k + 1 :, k:], row, scale, product, outer)
    q, factor = (None if out is None else batched(out) for out in (Q, L))
    if factor is not None:
        xp.copyto(factor, work[:, :, :m])
        diagonal(factor)[...] = diagonals[:, :, 0]
        triangle(xp, factor, factor)
    if q is not None:
        q.fill(0)
        diagonal_of_rows = q.reshape(batch, m * n)[:, : (m - 1) * (n + 1) + 1 : n + 1]
        diagonal_of_rows[...] = 1
        for k in range(m - 1, -1, -1):
            _reflect(xp, q[:, k:, k:], work[:, k : k + 1, k:], scales[:, k : k + 1], product, outer)


def _gelqf_backward_scratch(
    params: Params, ograd_Q: SpecLike, ograd_L: SpecLike, Q: SpecLike, L: SpecLike, out: SpecLike
) -> ScratchSpecs:
    batch, (m, n) = batch_of(Q.shape), Q.shape[-2:]
    square = (batch, m, m)
    return [(square, Q.dtype), (square, Q.dtype), ((solve_scratch(batch, m, n),), Q.dtype)]


@kernel(scratch=_gelqf_backward_scratch)
def _backward_gelqf(
    xp: ArrayModule,
    p: Params,
    ograd_Q: RawArray,
    ograd_L: RawArray,
    Q: RawArray,
    L: RawArray,
    out: RawArray,
    product: RawArray,
    term: RawArray,
    scratch: RawArray,
) -> None:
    """Compute L⁻ᵀ (dQ + S Q); S is symmetric and has the lower triangle of Lᵀ dL - dQ Qᵀ."""
    dq, dl, q, factor = (batched(x) for x in (ograd_Q, ograd_L, Q, L))
    out = batched(out)
    multiply(xp, flip(factor), dl, product)
    multiply(xp, dq, flip(q), term)
    xp.subtract(product, term, out=product)
    mirror(xp, product)
    multiply(xp, product, q, out)
    xp.add(out, dq, out=out)
    solve(xp, flip(factor), out, scratch, lower=False)


register(
    Op(
        name="_linalg_gelqf",
        forward=_gelqf,
        infer_shape=_gelqf_shape,
        infer_dtype=wide_floats("linalg_gelqf"),
        inputs=("A",),
        outputs=("output0", "output1"),
        gradient=grad("_backward_linalg_gelqf", "g0", "g1", "y0", "y1"),
        aliases=("linalg_gelqf",),
        doc="Q with orthonormal rows and lower triangular L, A = L · Q, of each matrix with no more rows than columns.",
    )
)
backward("_linalg_gelqf", _backward_gelqf, ("ograd_Q", "ograd_L", "Q", "L"))

# ---------------------------------------------------------------------------------------------------------------- syevd


@kernel(scratch=lambda p, A, U, L: [(A.shape[-2:], A.dtype), (A.shape[-1:], INDEX), (A.shape[-1:], BOOL)])
def _syevd(
    xp: ArrayModule,
    p: Params,
    A: RawArray,
    U: RawArray | None,
    L: RawArray | None,
    sizes: RawArray,
    greatest: RawArray,
    negative: RawArray,
) -> None:
    a = batched(A)
    n = a.shape[-1]
    vectors = None if U is None else batched(U)
    values = None if L is None else L.reshape(-1, n)
    for item in range(a.shape[0]):
        eigenvalues, columns = xp.linalg.eigh(a[item], UPLO="L")
        if values is not None:
            xp.copyto(values[item], eigenvalues)
        if vectors is None:
            continue
        rows = vectors[item]
        xp.copyto(rows, columns.T)
        xp.absolute(rows, out=sizes)
        xp.argmax(sizes, axis=1, out=greatest)
        xp.less(xp.take_along_axis(rows, greatest[:, None], axis=1)[:, 0], 0, out=negative)
        xp.multiply(rows, -1.0, out=rows, where=negative[:, None])


def _syevd_backward_scratch(
    params: Params, du: SpecLike, dvalues: SpecLike, u: SpecLike, values: SpecLike, out: SpecLike
) -> ScratchSpecs:
    square = (batch_of(u.shape), *u.shape[-2:])
    return [(square, u.dtype), (square, u.dtype), (square, BOOL)]


@kernel(scratch=_syevd_backward_scratch)
def _backward_syevd(
    xp: ArrayModule,
    p: Params,
    du: RawArray,
    dvalues: RawArray,
    u: RawArray,
    values: RawArray,
    out: RawArray,
    inner: RawArray,
    gaps: RawArray,
    equal: RawArray,
) -> None:
    """Compute Uᵀ (diag(dΛ) + S) U.

    The symmetric S is half of (dU Uᵀ - U dUᵀ), divided by the differences of eigenvalues; 0 for equal eigenvalues.
    """
    du, u, out = batched(du), batched(u), batched(out)
    n = u.shape[-1]
    rows = values.reshape(-1, n)
    multiply(xp, du, flip(u), inner)
    xp.subtract(inner, flip(inner), out=out)
    xp.subtract(rows[:, :, None], rows[:, None, :], out=gaps)
    xp.equal(gaps, 0, out=equal)
    xp.divide(out, gaps, out=out)
    xp.multiply(out, 0.5, out=out)
    xp.copyto(out, 0, where=equal)
    diagonal(out)[...] = dvalues.reshape(-1, n)
    multiply(xp, flip(u), out, inner)
    multiply(xp, inner, u, out)


register(
    Op(
        name="_linalg_syevd",
        forward=_syevd,
        infer_shape=square_shape("linalg_syevd", ("same", "row")),
        infer_dtype=wide_floats("linalg_syevd"),
        inputs=("A",),
        outputs=("output0", "output1"),
        gradient=grad("_backward_linalg_syevd", "g0", "g1", "y0", "y1"),
        doc="Eigenvectors, the rows of U, and ascending eigenvalues L of each symmetric matrix.",
    )
)
backward("_linalg_syevd", _backward_syevd, ("ograd_U", "ograd_L", "U", "L"))
