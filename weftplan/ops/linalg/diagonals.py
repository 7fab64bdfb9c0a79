"""Matrix diagonals and triangles as vectors, and back: extractdiag, maketrian and others.

A packed lower triangle consists of its rows one after the other, a packed upper triangle of its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ArrayKernel, kernel
from weftplan.ops.core.params import p_bool, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_dim, merge_shape
from weftplan.ops.core.schema import Op, Param, Params, Shape, ShapeRule
from weftplan.ops.linalg.core import batch_of, batched, diagonal, flip, square_shape, wide_floats
from weftplan.support.array_types import ArrayModule, RawArray

# ----------------------------------------------------------------------------------------------------------- sumlogdiag


@kernel(scratch=lambda p, A, out: [((batch_of(A.shape), A.shape[-1]), A.dtype)])
def _sumlogdiag(xp: ArrayModule, p: Params, A: RawArray, out: RawArray, logs: RawArray) -> None:
    xp.log(diagonal(batched(A)), out=logs)
    xp.sum(logs, axis=1, out=out.reshape(-1))


@kernel
def _backward_sumlogdiag(xp: ArrayModule, p: Params, ograd: RawArray, A: RawArray, out: RawArray) -> None:
    out.fill(0)
    xp.divide(ograd.reshape(-1, 1), diagonal(batched(A)), out=diagonal(batched(out)))


register(
    Op(
        name="_linalg_sumlogdiag",
        forward=_sumlogdiag,
        infer_shape=square_shape("linalg_sumlogdiag", ("one",)),
        infer_dtype=wide_floats("linalg_sumlogdiag"),
        inputs=("A",),
        gradient=grad("_backward_linalg_sumlogdiag", "g0", "x0"),
        aliases=("linalg_sumlogdiag",),
        doc="The sum of the logarithms of each matrix's diagonal.",
    )
)
backward("_linalg_sumlogdiag", _backward_sumlogdiag, ("ograd", "A"))

# ------------------------------------------------------------------------------------------------ diagonals, triangles

_OFFSET = Param("offset", p_int, 0, "diagonal 0 is the main one, positive ones lie above it, negative ones below")
_DIAGONAL = (_OFFSET,)
_TRIANGLE = (_OFFSET, Param("lower", p_bool, True, "for offset 0: the lower triangle, else the upper one"))


def _length(params: Params, side: int, packed: bool, name: str) -> int:
    """Return the number of elements of the diagonal, or triangle if ``packed``, of a matrix of ``side`` rows."""
    rows: int = side - abs(params["offset"])
    if rows < 1:
        raise ShapeError(f"{name}: matrices of {side} rows have no diagonal {params['offset']}")
    return rows * (rows + 1) // 2 if packed else rows


def _side(params: Params, length: int, packed: bool, name: str) -> int:
    """Return the number of rows of the matrix whose diagonal, or triangle if ``packed``, has ``length`` elements."""
    rows = (math.isqrt(8 * length + 1) - 1) // 2 if packed else length
    side: int = rows + abs(params["offset"])
    if _length(params, side, packed, name) != length:
        raise ShapeError(f"{name}: {length} elements make no triangle, expected 1, 3, 6, 10, …")
    return side


def _relate(
    name: str, packed: bool, params: Params, matrix: Shape | None, vector: Shape | None
) -> tuple[Shape | None, Shape | None]:
    """Return the shapes of matrix and vector, each completed from the other; None if both are unknown."""
    if matrix is not None:
        if len(matrix) < 2:
            raise ShapeError(f"{name} expects matrices in the last two of at least 2 dimensions, got shape {matrix}")
        side = merge_dim(matrix[-2], matrix[-1], f"{name}: rows and columns of square matrices {matrix}")
        matrix = (*matrix[:-2], side, side)
        count = _length(params, side, packed, name) if side else 0
        vector = merge_shape((*matrix[:-2], count), vector, f"{name}: vector beside matrices {matrix}")
    if vector is not None:
        if not vector:
            raise ShapeError(f"{name} expects at least 1 dimension, got shape ()")
        side = _side(params, vector[-1], packed, name) if vector[-1] else 0
        matrix = merge_shape((*vector[:-1], side, side), matrix, f"{name}: matrices beside vectors {vector}")
    return matrix, vector


def _cells(params: Params, packed: bool, matrix: RawArray) -> Iterator[tuple[slice, RawArray]]:
    """Yield (slice of the vector, view of the matrices) of the diagonal, or of each row or column of the triangle."""
    offset = params["offset"]
    if not packed:
        yield slice(None), diagonal(matrix, offset)
        return
    above = offset > 0 or (offset == 0 and not params["lower"])
    lying = flip(matrix, above)
    at = 0
    for row in range(matrix.shape[-1] - abs(offset)):
        yield slice(at, at + row + 1), lying[:, row + abs(offset), : row + 1]
        at += row + 1


def _extract(packed: bool) -> ArrayKernel:
    @kernel
    def compute(xp: ArrayModule, p: Params, A: RawArray, out: RawArray) -> None:
        out = out.reshape(-1, out.shape[-1])
        for packed_index, cells in _cells(p, packed, batched(A)):
            xp.copyto(out[:, packed_index], cells)

    return compute


def _make(packed: bool) -> ArrayKernel:
    @kernel
    def compute(xp: ArrayModule, p: Params, A: RawArray, out: RawArray) -> None:
        vector = A.reshape(-1, A.shape[-1])
        out.fill(0)
        for packed_index, cells in _cells(p, packed, batched(out)):
            xp.copyto(cells, vector[:, packed_index])

    return compute


def _extract_shape(name: str, packed: bool) -> ShapeRule:
    def rule(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        matrix, vector = _relate(name, packed, params, ins[0], outs[0])
        return [matrix], [vector]

    return rule


def _make_shape(name: str, packed: bool) -> ShapeRule:
    def rule(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        matrix, vector = _relate(name, packed, params, outs[0], ins[0])
        return [vector], [matrix]

    return rule


for _what, _packed, _params, _words in (
    ("diag", False, _DIAGONAL, "diagonal"),
    ("trian", True, _TRIANGLE, "triangle, packed"),
):
    for _verb, _kernel, _inverse, _rule, _doc in (
        ("extract", _extract, _make, _extract_shape, f"The {_words} of each matrix."),
        ("make", _make, _extract, _make_shape, f"A matrix with each vector as its {_words}, zeros elsewhere."),
    ):
        _name = f"linalg_{_verb}{_what}"
        register(
            Op(
                name=f"_{_name}",
                forward=_kernel(_packed),
                infer_shape=_rule(_name, _packed),
                infer_dtype=wide_floats(_name),
                params=_params,
                inputs=("A",),
                gradient=grad(f"_backward_{_name}", "g0"),
                aliases=(_name,),
                doc=_doc,
            )
        )
        backward(f"_{_name}", _inverse(_packed), ("ograd",), params=_params)
