"""Batched copies and sums of all pieces of a bucket in one compiled call.

A bucket of a megabyte is moved in less time than it takes to cut its arrays into pieces and to call NumPy for each of
them. So the addresses of the pieces are worked out once, and kept for the next time that all arrays are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from weftplan.kvstore.distributed.arrays.contiguous import cuts
from weftplan.kvstore.reduce import Array, filler, reduce_each, sum_sequential_block
from weftplan.ops.compiled.addresses import address
from weftplan.ops.compiled.exchange.sums import PAST, Pieces, compiled_pieces
from weftplan.support.array_types import DType

ONE_CALL = 2 * PAST
"""Least bytes for moving arrays piece by piece, past the caches: below, a single call is faster."""


class Row(NamedTuple):
    """Elements of a row of arrays, in one array of one dimension: those from place ``origin`` on."""

    array: Array
    origin: int = 0


Operand = Row | Sequence[Array]
"""Elements of a row of arrays: the flat arrays themselves, or a copy."""

_Place = int | tuple[int, ...]
"""Addresses of an operand: of the row's first element, or of each array."""


class Span(NamedTuple):
    """Elements ``first`` to ``end`` of a row of arrays: the targets become the sum of the terms, from left to right.

    A target is one of the terms itself or shares no memory with them.
    """

    first: int
    end: int
    terms: Sequence[Operand]
    targets: Sequence[Operand]


class Mover:
    """Makes spans; ``threads``, ``bound`` and ``compiled`` are as for :func:`weftplan.kvstore.reduce.reduce_arrays`."""

    def __init__(self, *, threads: int = 1, bound: int = 0, compiled: bool = True) -> None:
        self._threads, self._bound, self._compiled = threads, bound, compiled

    def add(self, sums: Sequence[tuple[Sequence[Array], Array]]) -> None:
        """Make, for each (terms, total), the total the sum of the terms from left to right."""
        reduce_each(
            sums,
            block_sum=sum_sequential_block,
            threads=self._threads,
            bound=self._bound,
            compiled=self._compiled,
        )

    def move(self, sizes: tuple[int, ...], dtype: DType, spans: Sequence[Span]) -> None:
        """Make spans of arrays of these sizes; all of them have as many terms, and as many targets."""
        size, item = sum(sizes), dtype.itemsize
        if self._compiled and size * item < ONE_CALL and (self._threads == 1 or size < self._bound):
            work = _pieces(sizes, dtype, tuple([_placed(span, item) for span in spans]))
            if work is not None:
                work()
                return
        fill, sums = filler(sum(sizes) * dtype.itemsize, compiled=self._compiled), []
        for span in spans:
            for which, low, high, place in cuts(sizes, span.first, span.end):
                terms = [_piece(operand, which, low, high, place) for operand in span.terms]
                targets = [_piece(operand, which, low, high, place) for operand in span.targets]
                if len(terms) > 1:
                    sums.append((terms, targets[0]))
                    assert len(targets) == 1, "a sum has one target"
                    continue
                for target in targets:  # one after the other, since the piece is in the cache then
                    fill(terms[0], target)
        if sums:
            self.add(sums)


def _piece(operand: Operand, which: int, low: int, high: int, place: int) -> Array:
    if isinstance(operand, Row):
        start = place - operand.origin
        return operand.array[start : start + high - low]
    return operand[which][low:high]


def _placed(span: Span, item: int) -> tuple[int, int, tuple[_Place, ...], tuple[_Place, ...]]:
    first, end, terms, targets = span
    return first, end, tuple([_place(one, item) for one in terms]), tuple([_place(one, item) for one in targets])


def _place(operand: Operand, item: int) -> _Place:
    if isinstance(operand, Row):
        return address(operand.array) - operand.origin * item
    return tuple([address(array) for array in operand])


@lru_cache(1024)
def _pieces(
    sizes: tuple[int, ...],
    dtype: DType,
    spans: tuple[tuple[int, int, tuple[_Place, ...], tuple[_Place, ...]], ...],
) -> Pieces | None:
    """Return a call that moves the spans at these addresses; it depends on numbers alone, so it can be cached."""
    item, pieces = dtype.itemsize, []
    for first, end, terms, targets in spans:
        for which, low, high, place in cuts(sizes, first, end):
            piece = [(high - low) * item]
            for operand in (*terms, *targets):
                piece.append(operand + place * item if isinstance(operand, int) else operand[which] + low * item)
            pieces.append(piece)
    return compiled_pieces(pieces, len(spans[0][2]), dtype)
