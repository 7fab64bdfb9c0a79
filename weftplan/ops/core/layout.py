"""Layouts: how arrays that broadcast are cut into blocks, for formulas and for the sums of gradients.

A block is a part of the full shape, of whole rows if these fit. Blocks depend only on shapes and the limit of their
elements, so every sum over blocks has one fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from weftplan.ops.core.kernels import MAX_PREPARED, collapse, rows_per_block
from weftplan.ops.core.schema import Shape
from weftplan.support.array_types import RawArray

Align = Callable[[Shape, Shape], Shape]
"""``align(full, shape)`` returns the shape in which an array of another shape broadcasts to the full one."""


class Block(NamedTuple):
    """A block.

    Attributes:
        cuts: the slices of the leading axes.
        parts: for each of the shapes the index of the part of its array.
        trim: the index of its part of scratch that was made for the greatest block; None: all.
    """

    cuts: tuple[slice, ...]
    parts: tuple[tuple[slice, ...], ...]
    trim: tuple[slice, ...] | None

    def trimmed(self, spaces: Sequence[RawArray | None]) -> Sequence[RawArray | None]:
        """Return the parts of scratch arrays for this block."""
        trim = self.trim
        return spaces if trim is None else [None if space is None else space[trim] for space in spaces]


class Layout(NamedTuple):
    """The blocks of arrays that broadcast.

    Attributes:
        shapes: that of each array, the full one last, with as few axes as possible.
        block: the shape of the greatest block.
        axes: number of leading axes that are cut.
        number: number of blocks.
        few: the blocks, if they are so few that they are made only once; else empty.
    """

    shapes: tuple[Shape, ...]
    block: Shape
    axes: int
    number: int
    few: tuple[Block, ...]

    def blocks(self) -> Iterable[Block]:
        """Return the blocks in order."""
        return self.few or self._blocks()

    def _blocks(self) -> Iterable[Block]:
        if not self.axes:
            yield Block((), ((),) * len(self.shapes), None)
            return
        ranges = [
            [slice(start, min(start + step, dim)) for start in range(0, dim, step)]
            for dim, step in zip(self.shapes[-1][: self.axes], self.block, strict=False)
        ]
        indices = [_index(shape[: self.axes]) for shape in self.shapes]
        last = self.block[self.axes - 1]  # along earlier axes a block has one element
        for cuts in product(*ranges):
            is_whole = cuts[-1].stop - cuts[-1].start == last
            trim = None if is_whole else tuple([slice(cut.stop - cut.start) for cut in cuts])
            yield Block(cuts, tuple([index(cuts) for index in indices]), trim)


def _index(dims: Shape) -> Callable[[tuple[slice, ...]], tuple[slice, ...]]:
    """Return a function of a block's slices: the index of its part of an array; axes of length 1 are not cut."""
    count = max((axis + 1 for axis, dim in enumerate(dims) if dim != 1), default=0)
    if 1 not in dims[:count]:
        return lambda cuts: cuts[:count]
    whole = slice(None)
    return lambda cuts: tuple([whole if dim == 1 else cut for dim, cut in zip(dims, cuts, strict=True)])


def layout(shapes: Sequence[Shape], align: Align | None, limit: int, *, rows: bool = False) -> Layout:
    """Return the layout of arrays that broadcast to the last of ``shapes``, or have as many elements.

    Args:
        align: None: arrays broadcast by NumPy's rule.
        limit: the greatest number of elements of a block.
        rows: whether a block has at least one whole row, even if this has more elements.

    >>> layout([(10,), (4, 100, 10)], None, 20)[:4]
    (((1, 10), (400, 10)), (2, 10), 1, 200)
    >>> layout([(100, 1), (4, 100, 10)], None, 300)[:4]
    (((1, 100, 1), (4, 100, 10)), (1, 30, 10), 2, 16)
    """
    full = shapes[-1]
    size = math.prod(full)
    if align is not None:
        shapes = [align(full, shape) for shape in shapes]
    shape, *collapsed = collapse(full, *[full if math.prod(shape) == size else shape for shape in shapes])
    axis = 0
    while not rows and axis + 1 < len(shape) and math.prod(shape[axis + 1 :]) > limit:
        axis += 1
    block = (*(1,) * axis, rows_per_block(shape[axis:], limit), *shape[axis + 1 :])
    axes = next((axis + 1 for axis in reversed(range(len(shape))) if shape[axis] != block[axis]), 0)
    count = math.prod([-(-dim // step) for dim, step in zip(shape[:axes], block, strict=False)])
    result = Layout(tuple(collapsed), block, axes, count, ())
    return result._replace(few=tuple(result._blocks())) if count <= MAX_PREPARED else result
