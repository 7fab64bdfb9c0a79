"""Batched copies and sums of all pieces of a bucket in one compiled call.

A bucket of a megabyte is moved in less time than it takes to cut its arrays into pieces and to call NumPy for each of
them. So the addresses of the pieces are worked out once, and kept for the next time that all arrays are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import call, is_
from typing import NamedTuple
from weakref import ref

from weftplan.kvstore.distributed.arrays.contiguous import cuts
from weftplan.kvstore.distributed.arrays.lazy_values import Late
from weftplan.kvstore.reduce import Array, filler, reduce_each, sum_sequential_block
from weftplan.ops.compiled.addresses import address
from weftplan.ops.compiled.exchange.rendezvous import MeetingSum
from weftplan.ops.compiled.exchange.sums import PAST, Pieces, compiled_pieces
from weftplan.support.array_types import DType

ONE_CALL = 2 * PAST
"""Bytes from which arrays are moved piece by piece, past the caches: below, one call takes less time, and it need not
write what is stored (``lazy_values.py``). 16 MB take 0.84 of raw Allreduce's time so, not 1.06, and over four
processes 0.66, not 0.77; 32 MB take the same either way."""


class Row(NamedTuple):
    """Elements of a row of arrays, in one array of one dimension: those from place ``origin`` on."""

    array: Array
    origin: int = 0


Operand = Row | Sequence[Array]
"""Elements of a row of arrays: the flat arrays themselves, or a copy."""

_Place = int | tuple[int, ...]
"""Where the elements of an operand are: the first one of the row, or those of each array."""


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

    def pieces(self, sizes: tuple[int, ...], dtype: DType, spans: Sequence[Span]) -> Pieces | None:
        """What makes spans as :meth:`move` does, in one call; None where NumPy is to do it."""
        size, item = sum(sizes), dtype.itemsize
        if not self._compiled or size * item >= ONE_CALL or (self._threads > 1 and size >= self._bound):
            return None
        return _pieces(sizes, dtype, tuple([_placed(span, item) for span in spans]))

    def move(self, sizes: tuple[int, ...], dtype: DType, spans: Sequence[Span]) -> Pieces | None:
        """Make spans of arrays of these sizes; all of them have as many terms, and as many targets.

        Returns:
            What makes them again, as long as all arrays are where they were; None where NumPy does it.
        """
        work = self.pieces(sizes, dtype, spans)
        if work is not None:
            work()
            return work
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
        return None


class Known:
    """What an exchange has moved: one call makes it again when it has the same arrays, and all memory is where it was.

    It keeps no array alive.

    Args:
        rows: the arrays.
        where: what else the places follow from: an object, and a number.
        work: what makes it again; None where that is still to be found out.
        short: likewise, but for the totals.
        late: the totals, where they may be written later.

    Attributes:
        rows: how many.
        begun: which of the two was begun last.
    """

    __slots__ = ("_refs", "_where", "begun", "late", "rows", "short", "work")

    def __init__(
        self,
        rows: Sequence[Sequence[Array]],
        where: tuple[object, int],
        work: MeetingSum | None,
        short: MeetingSum | None = None,
        late: Late | None = None,
    ) -> None:
        self._refs = [ref(array) for row in rows for array in row]
        self.rows, self._where = len(rows), where
        self.work, self.short, self.late, self.begun = work, short, late, work

    def stays(self, where: tuple[object, int]) -> bool:
        """Whether the places still follow from this."""
        known, place = self._where
        return where[0] is known and where[1] == place

    def holds(self, rows: Sequence[Sequence[Array]], where: tuple[object, int]) -> bool:
        """Whether these are its arrays, at the same places."""
        if len(rows) != self.rows or not self.stays(where):
            return False
        found = list(chain.from_iterable(rows))
        return len(found) == len(self._refs) and all(map(is_, map(call, self._refs), found))


def _piece(operand: Operand, which: int, low: int, high: int, place: int) -> Array:
    if isinstance(operand, Row):
        start = place - operand.origin
        return operand.array[start : start + high - low]
    return operand[which][low:high]


def _placed(span: Span, item: int) -> tuple[int, int, tuple[_Place, ...], tuple[_Place, ...]]:
    first, end, terms, targets = span
    return first, end, tuple([_place(one, item) for one in terms]), tuple([_place(one, item) for one in targets])


def _place(operand: Operand, item: int) -> _Place:
    if operand.__class__ is Row:
        return address(operand.array) - operand.origin * item
    return tuple([address(array) for array in operand])


@lru_cache(1024)
def _pieces(
    sizes: tuple[int, ...],
    dtype: DType,
    spans: tuple[tuple[int, int, tuple[_Place, ...], tuple[_Place, ...]], ...],
) -> Pieces | None:
    """What moves spans that are at these places; it follows from numbers alone, so it is right whenever they are."""
    item, pieces = dtype.itemsize, []
    for first, end, terms, targets in spans:
        for which, low, high, place in cuts(sizes, first, end):
            piece = [(high - low) * item]
            for operand in (*terms, *targets):
                piece.append(operand + place * item if isinstance(operand, int) else operand[which] + low * item)
            pieces.append(piece)
    return compiled_pieces(pieces, len(spans[0][2]), dtype)
