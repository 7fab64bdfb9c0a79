"""Access to the concatenation of several arrays without a copy: as one view if they are adjacent, or by pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from weftplan.kvstore.fixed_order_sums import Array
from weftplan.support.addresses import address


def side_by_side(arrays: Sequence[Array]) -> Array | None:
    """Return a flat view over contiguous arrays of one dtype if each begins where the previous ends, else None.

    Empty arrays are ignored. Return None if all are empty. The view keeps only the first array alive.
    """
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return None
    next_address, size = address(arrays[0]), 0
    for array in arrays:
        if address(array) != next_address or array.dtype != arrays[0].dtype:
            return None
        next_address += array.nbytes
        size += array.size
    return np.lib.stride_tricks.as_strided(arrays[0].reshape(-1), (size,), (arrays[0].itemsize,))


@lru_cache(512)
def cuts(sizes: tuple[int, ...], begin: int, end: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return the parts of the arrays that make up elements ``begin`` to ``end`` of their concatenation, in order.

    ``sizes`` are the elements of each array. A part is (index of the array, its first element, its end element, index
    of the first element in the concatenation). Results are cached, since each step has the same buckets.

    >>> cuts((3, 4), 1, 5)
    ((0, 1, 3, 1), (1, 0, 2, 3))
    """
    ranges, position = [], 0
    for which, size in enumerate(sizes):
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            ranges.append((which, low - position, high - position, low))
        position += size
    return tuple(ranges)


def flat(arrays: Sequence[Array]) -> list[Array]:
    """Return a flat view of each of these contiguous arrays."""
    return [array if array.ndim == 1 else array.reshape(-1) for array in arrays]


def pieces(arrays: Sequence[Array], begin: int, end: int) -> Iterator[tuple[int, Array]]:
    """Yield views of the parts that make up elements ``begin`` to ``end`` of the arrays' concatenation, in order.

    A pair is (index of the part's first element in the concatenation, the view).

    >>> [(place, piece.tolist()) for place, piece in pieces([np.arange(3), np.arange(10, 14)], 1, 5)]
    [(1, [1, 2]), (3, [10, 11])]
    """
    for which, low, high, position in cuts(tuple([array.size for array in arrays]), begin, end):
        yield position, arrays[which].reshape(-1)[low:high]
