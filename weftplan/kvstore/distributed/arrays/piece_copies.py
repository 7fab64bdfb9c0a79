"""Batched copies and sums of all pieces of a bucket, in one compiled call.

Moving a bucket of 1 MB takes less time than dividing its arrays into pieces and calling NumPy for each piece. The
addresses of the pieces are therefore computed once and cached for arrays at the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from weftplan.kvstore.distributed.arrays.contiguous import cuts
from weftplan.kvstore.fixed_order_sums import Array, filler, reduce_each, sum_sequential_block
from weftplan.ops.core.implementations import PAST
from weftplan.support import slots
from weftplan.support.addresses import address
from weftplan.support.array_types import DType

SINGLE_CALL = 2 * PAST
"""Minimum bytes of a bucket whose pieces are copied one by one with stores that bypass the caches.

For a smaller bucket one compiled call is faster.
"""


class OffsetRow(NamedTuple):
    """A flat array with the elements of a concatenation of arrays from index ``origin`` on."""

    array: Array
    origin: int = 0


Operand = OffsetRow | Sequence[Array]
"""A concatenation of arrays: the flat arrays themselves, or a contiguous copy of a part."""

_Addresses = int | tuple[int, ...]
"""The addresses of an operand: of element 0 of a row (as if it began at index 0), or of each array."""


class Span(NamedTuple):
    """A task for elements ``first`` to ``end`` of a concatenation: write the sum of the terms to the targets.

    Terms are added from left to right; a single term is copied. A target is one of the terms, or shares no memory with
    them.
    """

    begin: int
    end: int
    terms: Sequence[Operand]
    targets: Sequence[Operand]


class Mover:
    """Executes spans, with ``threads``, ``bound`` and ``compiled`` as
    :func:`weftplan.kvstore.fixed_order_sums.reduce_arrays`."""

    def __init__(self, *, threads: int = 1, bound: int = 0, compiled: bool = True) -> None:
        self._threads, self._bound, self._compiled = threads, bound, compiled

    def add(self, sums: Sequence[tuple[Sequence[Array], Array]]) -> None:
        """For each (terms, total), write the sum of the terms, from left to right, to the total."""
        reduce_each(
            sums,
            block_sum=sum_sequential_block,
            threads=self._threads,
            bound=self._bound,
            compiled=self._compiled,
        )

    def move(self, sizes: tuple[int, ...], dtype: DType, spans: Sequence[Span]) -> None:
        """Execute spans of a concatenation of arrays with these sizes, in elements.

        All spans have the same number of terms and the same number of targets; a sum has one target.
        """
        size, item = sum(sizes), dtype.itemsize
        if self._compiled and size * item < SINGLE_CALL and (self._threads == 1 or size < self._bound):
            work = _pieces(sizes, dtype, tuple([_with_addresses(span, item) for span in spans]))
            if work is not None:
                work()
                return
        fill, sums = filler(sum(sizes) * dtype.itemsize, compiled=self._compiled), []
        for span in spans:
            for which, low, high, position in cuts(sizes, span.begin, span.end):
                terms = [_piece(operand, which, low, high, position) for operand in span.terms]
                targets = [_piece(operand, which, low, high, position) for operand in span.targets]
                if len(terms) > 1:
                    sums.append((terms, targets[0]))
                    assert len(targets) == 1, "a sum has one target"
                    continue
                for target in targets:  # piece by piece, so that each piece is read from the cache again
                    fill(terms[0], target)
        if sums:
            self.add(sums)


def _piece(operand: Operand, which: int, low: int, high: int, position: int) -> Array:
    if isinstance(operand, OffsetRow):
        start = position - operand.origin
        return operand.array[start : start + high - low]
    return operand[which][low:high]


def _with_addresses(span: Span, item: int) -> tuple[int, int, tuple[_Addresses, ...], tuple[_Addresses, ...]]:
    begin, end, terms, targets = span
    return (
        begin,
        end,
        tuple([_addresses(operand, item) for operand in terms]),
        tuple([_addresses(operand, item) for operand in targets]),
    )


def _addresses(operand: Operand, item: int) -> _Addresses:
    if isinstance(operand, OffsetRow):
        return address(operand.array) - operand.origin * item
    return tuple([address(array) for array in operand])


@lru_cache(1024)
def _pieces(
    sizes: tuple[int, ...],
    dtype: DType,
    spans: tuple[tuple[int, int, tuple[_Addresses, ...], tuple[_Addresses, ...]], ...],
) -> Callable[[], None] | None:
    """Return a cached compiled call that executes spans at these addresses; None if there is no compiled loop."""
    item, pieces = dtype.itemsize, []
    for begin, end, terms, targets in spans:
        for which, low, high, position in cuts(sizes, begin, end):
            piece = [(high - low) * item]
            for operand in (*terms, *targets):
                piece.append(operand + position * item if isinstance(operand, int) else operand[which] + low * item)
            pieces.append(piece)
    return slots.COMPILED_PIECES.get()(pieces, len(spans[0][2]), dtype)
