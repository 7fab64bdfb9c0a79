"""Tiles: parts of one array with a var each, so that tasks on disjoint tiles run concurrently.

Without tiles all views of a buffer share one var, so two tasks that write disjoint halves run one after the other.
``tiles(a, (64, 64))`` gives each tile of ``a`` its own var; from then on a task on a view of ``a`` is ordered by the
tiles that the view overlaps. A view counts as the smallest box of ``a`` that contains it: a plain slice overlaps
exactly the tiles that share elements with it. A view that is no box of ``a`` (a reshape that runs over the end of rows)
overlaps all tiles of its rows.

This module takes no lock: the registry of owners (``array_vars.py``) holds its lock around every call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from weftplan.engine.core import Engine
from weftplan.engine.var import Var
from weftplan.errors import EngineError
from weftplan.support.array_types import RawArray

_MAX_CACHED = 4096
"""Maximum number of cached views per grid. A full cache is emptied."""


class TileGrid:
    """The layout of an array's tiles in memory, and one var per tile.

    Args:
        array: NumPy or CuPy array whose elements do not overlap.
        tile: elements of a tile along each axis; the last tile of an axis may be smaller.
        engine: makes the vars.

    Raises:
        EngineError: ``tile`` does not fit the array, or the elements are not laid out axis within axis.
    """

    def __init__(self, array: RawArray, tile: tuple[int, ...], engine: Engine) -> None:
        if len(tile) != array.ndim or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in tile):
            raise EngineError(
                f"tiles: expected {array.ndim} integers >= 1, the shape of a tile of an array of shape {array.shape}; "
                f"got {tile!r}"
            )
        if not array.size:
            raise EngineError(f"tiles: an array of shape {array.shape} has no elements to divide")
        self.shape = tuple(-(-n // t) for n, t in zip(array.shape, tile, strict=True))
        self.tile = tile
        self._shape = array.shape
        axes = sorted((s, n, axis) for axis, (s, n) in enumerate(zip(array.strides, array.shape, strict=True)) if n > 1)
        span = array.itemsize
        for stride, count, _ in axes:
            if stride < span:
                raise EngineError(
                    f"tiles: an array with strides {array.strides} cannot be divided: expected positive strides, and "
                    f"no element in two places; divide the array that it is a view of"
                )
            span = stride * (count - 1) + span
        self._axes = axes[::-1]
        self._itemsize = array.itemsize
        self._address = address(array)
        self._span = span
        self.vars: list[Var] = []
        self._cached: dict[tuple[Any, ...], tuple[list[Var], bool]] = {}
        """Cached answers by the view's memory layout; iterations repeat the same look-ups."""
        self.move(engine)

    def move(self, engine: Engine) -> None:
        """Replace the idle vars by new vars of another engine."""
        self.vars = [engine.new_variable() for _ in range(math.prod(self.shape))]
        self._cached.clear()

    def touched(self, view: RawArray) -> tuple[list[Var], bool]:
        """Return the vars of the tiles that a view of the buffer overlaps, and whether it extends beyond the tiles."""
        key = address(view), view.shape, view.strides, view.itemsize
        tiles = self._cached.get(key)
        if tiles is None:
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            tiles = self._cached[key] = self._look(view)
        return tiles

    def covers(self, view: RawArray) -> bool:
        """Return whether ``view`` has all the elements of the tiles that it overlaps."""
        if view.itemsize != self._itemsize or not has_distinct_elements(view):
            return False
        extents = (range(0, n, t) for n, t in zip(self._shape, self.tile, strict=True))
        sizes = [
            math.prod(min(t, n - start) for start, n, t in zip(corner, self._shape, self.tile, strict=True))
            for corner in itertools.product(*extents)
        ]
        touched = set(self.touched(view)[0])
        return bool(view.size == sum(size for size, var in zip(sizes, self.vars, strict=True) if var in touched))

    def _look(self, view: RawArray) -> tuple[list[Var], bool]:
        if not view.size:
            return [], False
        low, high = bounds(view)
        low, high = low - self._address, high - self._address
        if high <= 0 or low >= self._span:
            return [], True
        if low < 0 or high > self._span:
            return self.vars, True
        ranges = self._box(view, low) or self._rows(low, high)
        across = [range(start // tile, stop // tile + 1) for (start, stop), tile in zip(ranges, self.tile, strict=True)]
        return [self.vars[self._number(position)] for position in itertools.product(*across)], False

    def _number(self, position: tuple[int, ...]) -> int:
        number = 0
        for index, count in zip(position, self.shape, strict=True):
            number = number * count + index
        return number

    def _rows(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return first and last index along each axis of the rows (of the outermost axis) that hold the bytes."""
        ranges = [(0, count * tile - 1) for count, tile in zip(self.shape, self.tile, strict=True)]
        if self._axes:
            stride, _, axis = self._axes[0]
            ranges[axis] = low // stride, (high - 1) // stride
        return ranges

    def _box(self, view: RawArray, low: int) -> list[tuple[int, int]] | None:
        """Return first and last index along each axis of the box that contains ``view``; None if it is no box."""
        remainder = low
        lows = [0] * len(self.tile)
        for stride, _, axis in self._axes:
            lows[axis], remainder = divmod(remainder, stride)
        highs = lows[:]
        within = remainder + view.itemsize  # bytes from the start of an element
        for stride, count in zip(map(abs, view.strides), view.shape, strict=True):
            if count == 1 or not stride:
                continue
            divisor = next(((s, axis) for s, _, axis in self._axes if not stride % s), None)
            if divisor is None:
                within += stride * (count - 1)
            else:
                highs[divisor[1]] += stride // divisor[0] * (count - 1)
        if within > self._itemsize:
            if not self._axes:
                return None
            stride, _, axis = self._axes[-1]  # neighbours along the innermost axis, seen through a smaller dtype
            highs[axis] += (within - 1) // stride
        counts = {axis: count for _, count, axis in self._axes}
        if any(highs[axis] >= counts.get(axis, 1) for axis in range(len(highs))):
            return None
        return list(zip(lows, highs, strict=True))


class Tiles:
    """The tiles of an array, as views of it, indexed by their grid position.

    Attributes:
        array: the divided array.
        shape: the number of tiles along each axis.
    """

    def __init__(self, array: RawArray, grid: TileGrid) -> None:
        self.array = array
        self.shape = grid.shape
        self._tile = grid.tile

    def __getitem__(self, index: int | tuple[int, ...]) -> RawArray:
        """Return the tile at a grid position; negative positions count from the end."""
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != len(self.shape):
            raise EngineError(f"a tile of this array has {len(self.shape)} indices, got {indices!r}")
        slices = []
        for position, count, tile in zip(indices, self.shape, self._tile, strict=True):
            if not -count <= position < count:
                raise IndexError(f"there are {self.shape} tiles, so none at {indices}")
            start = position % count * tile
            slices.append(slice(start, start + tile))
        return self.array[tuple(slices)]

    def __iter__(self) -> Iterator[RawArray]:
        """Iterate over all tiles, the last axis fastest."""
        return (self[index] for index in itertools.product(*map(range, self.shape)))

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"<{self.shape} tiles of {self._tile} of an array of shape {self.array.shape}>"


def address(array: RawArray) -> int:
    """Return the address of the first element."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array.__cuda_array_interface__["data"][0])


def bounds(array: RawArray) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte after the last; the array must have elements."""
    low = high = address(array)
    if array.flags.c_contiguous:
        return low, low + int(array.nbytes)
    for stride, count in zip(array.strides, array.shape, strict=True):
        if stride < 0:
            low += stride * (count - 1)
        else:
            high += stride * (count - 1)
    return low, high + array.itemsize


def has_distinct_elements(array: RawArray) -> bool:
    """Return whether no two elements share a byte; False for layouts whose axes are not nested in each other.

    >>> has_distinct_elements(np.zeros((2, 3)).T), has_distinct_elements(np.broadcast_to(np.zeros(1), 3))
    (True, False)
    """
    span = array.itemsize
    for stride, count in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < span:
            return False
        span += stride * (count - 1)
    return True
