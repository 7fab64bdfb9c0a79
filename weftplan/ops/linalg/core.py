"""Batched triangular algorithms on views, the basis of the linalg operators.

All arrays have shape (batch, rows, columns) and may be any views; a transposed problem is the same call on transposed
views. The algorithms process panels of :data:`PANEL` rows, so that matrix products do nearly all of the arithmetic. The
caller provides scratch: a flat array of at least the number of elements that the ``*_scratch`` functions return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weftplan.errors import DTypeError, MXNetError, ShapeError
from weftplan.ops.core.products import multiply
from weftplan.ops.core.rules import DTypes, Shapes, merge_dim, merge_shape, same_dtype
from weftplan.ops.core.schema import DTypeRule, Params, Shape, ShapeRule
from weftplan.support.array_types import ArrayModule, RawArray

PANEL = 32
"""Rows of one panel."""


def batched(x: RawArray) -> RawArray:
    """Return ``x`` of shape (…, m, n) reshaped to (batch, m, n)."""
    return x.reshape(-1, *x.shape[-2:])


def batch_of(shape: Shape) -> int:
    """Return the number of matrices in an array of ``shape`` (…, m, n)."""
    return math.prod(shape[:-2])


def flip(x: RawArray, transpose: bool = True) -> RawArray:
    """Return a view with every matrix transposed; ``x`` itself without ``transpose``."""
    return x.swapaxes(-1, -2) if transpose else x


def _cut(scratch: RawArray, shape: Shape) -> RawArray:
    return scratch.reshape(-1)[: math.prod(shape)].reshape(shape)


def triangle(xp: ArrayModule, source: RawArray, out: RawArray, lower: bool = True) -> None:
    """Copy the lower (or upper) triangle of ``source`` to ``out``, zeros elsewhere; ``out`` may be ``source``."""
    source, out = flip(source, not lower), flip(out, not lower)
    for row in range(source.shape[-1]):
        if out is not source:
            xp.copyto(out[:, row, : row + 1], source[:, row, : row + 1])
        out[:, row, row + 1 :] = 0


def mirror(xp: ArrayModule, x: RawArray) -> None:
    """Copy the lower triangle of every matrix to the upper one, in place."""
    for row in range(x.shape[-1] - 1):
        xp.copyto(x[:, row, row + 1 :], x[:, row + 1 :, row])


def identity(xp: ArrayModule, out: RawArray) -> None:
    """Set every matrix of ``out`` to the identity."""
    out.fill(0)
    diagonal(out)[...] = 1


def diagonal(x: RawArray, offset: int = 0) -> RawArray:
    """Return a writable view of the diagonals of contiguous matrices (batch, n, n); ``offset`` > 0 is above."""
    n = x.shape[-1]
    start = offset if offset >= 0 else -offset * n
    count = n - abs(offset)
    return x.reshape(x.shape[0], n * n)[:, start : start + (count - 1) * (n + 1) + 1 : n + 1]


def solve_scratch(batch: int, rows: int, columns: int) -> int:
    """Return the number of scratch elements that :func:`solve` needs."""
    return batch * min(PANEL, rows) * columns


def solve(xp: ArrayModule, a: RawArray, b: RawArray, scratch: RawArray, *, lower: bool, unit: bool = False) -> None:
    """Replace ``b`` by a⁻¹ b, where ``a`` (batch, n, n) is triangular.

    The other triangle of ``a`` is not read. ``unit``: the diagonal counts as 1 and is not read either.
    """
    n = a.shape[-1]
    starts = range(0, n, PANEL)
    for start in starts if lower else reversed(starts):
        stop = min(start + PANEL, n)
        solved = slice(0, start) if lower else slice(stop, n)
        panel = b[:, start:stop]
        if solved.start < solved.stop:
            product = _cut(scratch, panel.shape)
            multiply(xp, a[:, start:stop, solved], b[:, solved], product)
            xp.subtract(panel, product, out=panel)
        for row in range(start, stop) if lower else range(stop - 1, start - 1, -1):
            column = b[:, row : row + 1]
            near = slice(start, row) if lower else slice(row + 1, stop)
            if near.start < near.stop:
                product = _cut(scratch, column.shape)
                multiply(xp, a[:, row : row + 1, near], b[:, near], product)
                xp.subtract(column, product, out=column)
            if not unit:
                xp.divide(column, a[:, row : row + 1, row : row + 1], out=column)


def cholesky_scratch(batch: int, rows: int) -> int:
    """Return the number of scratch elements that :func:`cholesky` needs."""
    return batch * rows * min(PANEL, rows)


def cholesky(xp: ArrayModule, a: RawArray, scratch: RawArray) -> None:
    """Replace ``a`` by its lower triangular factor L, a = L Lᵀ; only the lower triangle is read.

    Raises:
        MXNetError: a matrix is not positive definite.
    """
    n = a.shape[-1]
    for start in range(0, n, PANEL):
        stop = min(start + PANEL, n)
        if start:
            below = a[:, start:, start:stop]
            product = _cut(scratch, below.shape)
            multiply(xp, a[:, start:, :start], flip(a[:, start:stop, :start]), product)
            xp.subtract(below, product, out=below)
        for column in range(start, stop):
            below = a[:, column:, column : column + 1]
            if column > start:
                product = _cut(scratch, below.shape)
                near = slice(start, column)
                multiply(xp, a[:, column:, near], flip(a[:, column : column + 1, near]), product)
                xp.subtract(below, product, out=below)
            corner = a[:, column : column + 1, column : column + 1]
            xp.sqrt(corner, out=corner)
            below = below[:, 1:]
            xp.divide(below, corner, out=below)
    triangle(xp, a, a)
    if not bool(xp.min(diagonal(a if a.flags.c_contiguous else flip(a))) > 0):  # or NaN: the root of a negative number
        raise MXNetError(
            "potrf expects symmetric positive definite matrices, but a pivot was not positive: add a multiple of the "
            "identity, or check the input for NaN"
        )


def lu_scratch(batch: int, rows: int) -> int:
    """Return the number of scratch elements that :func:`lu` needs."""
    return (batch + 1) * rows


def lu(xp: ArrayModule, a: RawArray, pivots: RawArray, scratch: RawArray) -> None:
    """Replace ``a`` by its factors: U and, below the diagonal, L with a diagonal of 1. Fill ``pivots`` (batch, n).

    Step k exchanges row k with row ``pivots[:, k]`` >= k, which has the column's element of largest magnitude.
    """
    count, n = a.shape[:2]
    for k in range(n):
        column = a[:, k:, k : k + 1]
        if k:
            product = _cut(scratch, column.shape)
            multiply(xp, a[:, k:, :k], a[:, :k, k : k + 1], product)
            xp.subtract(column, product, out=column)
        size = _cut(scratch, (count, n - k))
        xp.absolute(column[:, :, 0], out=size)
        for item in range(count):
            chosen = k + int(xp.argmax(size[item]))
            pivots[item, k] = chosen
            if chosen != k:
                spare = scratch[count * n :]
                xp.copyto(spare, a[item, k])
                xp.copyto(a[item, k], a[item, chosen])
                xp.copyto(a[item, chosen], spare)
        right = a[:, k : k + 1, k + 1 :]
        if k and k + 1 < n:
            product = _cut(scratch, right.shape)
            multiply(xp, a[:, k : k + 1, :k], a[:, :k, k + 1 :], product)
            xp.subtract(right, product, out=right)
        below = a[:, k + 1 :, k : k + 1]
        xp.divide(below, a[:, k : k + 1, k : k + 1], out=below)


# ------------------------------------------------------------------------------------------------------------ inference


def square_shape(name: str, outputs: Sequence[str] = ("same",)) -> ShapeRule:
    """Return the shape rule of an operator on square matrices.

    ``outputs`` has the kind of each output: the "same" shape, "one" number for each matrix, or a "row" for each.
    """

    def rule(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        a = ins[0]
        for kind, out in zip(outputs, outs, strict=True):
            if kind == "same":
                a = merge_shape(a, out, f"{name}: input and output")
        if a is None:
            return ins, outs
        if len(a) < 2:
            raise ShapeError(f"{name} expects matrices in the last two of at least 2 dimensions, got shape {a}")
        side = merge_dim(a[-2], a[-1], f"{name}: rows and columns of square matrices {a}")
        a = (*a[:-2], side, side)
        shapes = {"same": a, "one": a[:-2] or (1,), "row": a[:-1]}
        merged = [merge_shape(shapes[kind], out, f"{name}: output") for kind, out in zip(outputs, outs, strict=True)]
        return [a], merged

    return rule


def wide_floats(name: str) -> DTypeRule:
    """Return the dtype rule of an operator whose arrays are all float32 or all float64."""

    def rule(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        new_ins, new_outs = same_dtype(params, ins, outs)
        dtype = new_ins[0]
        if dtype is not None and dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise DTypeError(f"{name} computes in float32 and float64, got {dtype}; cast its input (Cast)")
        return new_ins, new_outs

    return rule
