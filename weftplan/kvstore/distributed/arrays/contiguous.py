"""Contiguous ranges: adjacent arrays viewed as a single array, and ranges cut out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from weftplan.kvstore.reduce import Array
from weftplan.ops.compiled.addresses import address


def side_by_side(arrays: Sequence[Array]) -> Array | None:
    """Return one array over all of these contiguous arrays if each starts at the previous array's end; else None.

    The result does not keep their memory.
    """
    arrays = [array for array in arrays if array.size]
    if not arrays:
        return None
    place, size = address(arrays[0]), 0
    for array in arrays:
        if address(array) != place or array.dtype != arrays[0].dtype:
            return None
        place += array.nbytes
        size += array.size
    return np.lib.stride_tricks.as_strided(arrays[0].reshape(-1), (size,), (arrays[0].itemsize,))


@lru_cache(512)
def cuts(sizes: tuple[int, ...], first: int, end: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return elements ``first`` to ``end`` of concatenated arrays of these sizes, in order: (array, its first element,
    its end element, position of the first element in the row). The result is cached, since buckets repeat every step.

    >>> cuts((3, 4), 1, 5)
    ((0, 1, 3, 1), (1, 0, 2, 3))
    """
    ranges, place = [], 0
    for which, size in enumerate(sizes):
        low, high = max(first, place), min(end, place + size)
        if low < high:
            ranges.append((which, low - place, high - place, low))
        place += size
    return tuple(ranges)


def flat(arrays: Sequence[Array]) -> list[Array]:
    """These contiguous arrays, each as one of one dimension."""
    return [array if array.ndim == 1 else array.reshape(-1) for array in arrays]


def pieces(arrays: Sequence[Array], first: int, end: int) -> Iterator[tuple[int, Array]]:
    """Elements ``first`` to ``end`` of the arrays in a row: (place, piece of one of them), in order.

    >>> [(place, piece.tolist()) for place, piece in pieces([np.arange(3), np.arange(10, 14)], 1, 5)]
    [(1, [1, 2]), (3, [10, 11])]
    """
    for which, low, high, place in cuts(tuple([array.size for array in arrays]), first, end):
        yield place, arrays[which].reshape(-1)[low:high]
