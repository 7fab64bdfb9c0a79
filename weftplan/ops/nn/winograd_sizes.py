"""Sizes of NumPy's Winograd convolutions: eligible passes, blocks, partition, scratch.

Everything follows from shapes alone. :mod:`weftplan.ops.nn.winograd` has the arithmetic and the names of the arrays,
:mod:`weftplan.ops.nn.winograd_weights` that of the weight's gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from weftplan.ops.core.products import FEW, MOST, SHARE, ranges
from weftplan.ops.core.schema import aligned

PLACES = 16
"""Number of elements of a transformed window (4 rows of 4), and of matrix products of a pass."""
ROW = 4
"""Number of products that are computed at a time: a row, whose operands stay in the cache between steps."""
ITEM = 4
"""Bytes of a float32."""
LEAST = 64
"""Minimum channels and filters at which this algorithm is faster: with fewer, transforms cost more than they save."""
LEAST_TILES = 64
"""Minimum tiles of a batch at which this algorithm is faster: with fewer, transforming the weight costs too much."""
WHOLE = 1 << 22
"""Bytes of a transformed weight that is kept whole and made once. A larger one is made in pieces, again for each block.
"""
TILES = 256
"""Maximum tiles of a block: larger products are no faster."""
TILES_IN_TRAINING = 512
"""The same for gradients. A training plan is large, so their scratch hardly counts, and larger blocks hand over the
interpreter lock less often: with two cores, 64 channels of 32x32 at batch 32 take 34 ms instead of 41."""
MANY = 4
"""Factor by which blocks may be larger if the transformed weight is not kept."""
RUN = 32
"""Elements of one run of a copy or a sum. Where exact rows of tiles are shorter, each has a column that is no tile, so
that all rows of a channel are one run."""
SOME = 64
"""Channels whose rows are combined at a time; also filters whose weight is transformed at a time, if the transformed
weight is not kept."""
BEHIND = 16
"""Padding elements after each row of v, so that no other operand of a product has its strides."""
APART = 48
"""Padding elements between rows of the transformed weight, which would otherwise share cache sets."""


class Part(NamedTuple):
    """A range of images for all filters, or a range of filters for all images."""

    images: slice
    filters: slice


@dataclass(frozen=True, slots=True)
class Pass:
    """A 3x3 convolution, or its data gradient, in blocks of ``images`` whole images or of ``rows`` rows of tiles.

    A tile is 2x2 elements of the result and reads 4x4 of the source.
    """

    batch: int
    channels: int
    """Channels of the source, which are summed over."""
    filters: int
    """Channels of the result."""
    source: tuple[int, int]
    result: tuple[int, int]
    pad: tuple[int, int]
    back: bool
    """Whether this is a data gradient: the weight is rotated by half a turn, and its first two axes are exchanged."""
    block_bytes: int
    """Maximum bytes of the right operands of all products of a block."""
    most_tiles: int = TILES

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles of an image."""
        return -(-self.result[0] // 2), -(-self.result[1] // 2)

    @property
    def tiles(self) -> int:
        """Tiles of all images."""
        return self.batch * self.grid[0] * self.grid[1]

    @property
    def whole(self) -> bool:
        """Whether all of the transformed weight is kept."""
        return PLACES * self.channels * self.filters * ITEM <= WHOLE

    @property
    def some(self) -> int:
        """Number of filters that are multiplied at a time."""
        return min(self.filters, 2 * SOME if self.whole else SOME)

    @property
    def images(self) -> int:
        """Images of a block."""
        return _fitting(self)[0]

    @property
    def rows(self) -> int:
        """Rows of tiles of a block."""
        return _fitting(self)[1]

    def columns(self, images: int) -> int:
        """Return the number of columns of a row of tiles of a block of ``images``."""
        count = self.grid[1]
        return count if count * images >= RUN else count + 1

    @property
    def kept_nbytes(self) -> int:
        """Scratch bytes that all parts share: the transformed weight, if it is kept."""
        return aligned(PLACES * (self.channels * self.filters + APART) * ITEM) if self.whole else 0

    @property
    def tiles_of_block(self) -> int:
        """Columns of the products of a block."""
        return self.rows * self.columns(self.images) * self.images

    @property
    def window_sizes(self) -> list[int]:
        """Elements of the phases of a block, of combined rows, and of a row of v."""
        wide = (self.grid[1] + 1) * self.images
        phases, combined = 4 * self.channels * (self.rows + 1) * wide, 2 * min(SOME, self.channels) * self.rows * wide
        return [phases, combined, ROW * self.channels * (self.tiles_of_block + BEHIND)]

    def room_nbytes(self, filters: int) -> int:
        """Return the scratch bytes of a part of ``filters`` filters."""
        some, tiles = min(self.some, filters), self.tiles_of_block
        sizes = [*self.window_sizes, ROW * some * tiles, 2 * ROW * filters * tiles, 2 * some * tiles]
        if not self.whole:
            sizes.append(ROW * (some * self.channels + APART))
            if self.back:
                sizes.append(some * self.channels * 9)
        return sum(aligned(size * ITEM) for size in sizes)

    @property
    def weight_sizes(self) -> list[int]:
        """Elements of the arrays of a block of the weight's gradient: those of windows, phases of the result's
        gradient, their combined rows, one place's factor, and its product."""
        tiles = self.filters * self.tiles_of_block
        return [*self.window_sizes, 4 * tiles, 2 * tiles, tiles, self.filters * self.channels]

    @property
    def weight_room_nbytes(self) -> int:
        """Scratch of one part of the weight's gradient, with its sums."""
        sums = PLACES * (self.channels * self.filters + APART)
        return sum(aligned(size * ITEM) for size in (*self.weight_sizes, sums))

    @property
    def weight_nbytes(self) -> int:
        """Scratch of the weight's gradient."""
        return len(weight_parts(self)) * self.weight_room_nbytes

    @property
    def nbytes(self) -> int:
        """Scratch of the pass."""
        pieces = parts(self)
        return self.kept_nbytes + len(pieces) * max(
            self.room_nbytes(part.filters.stop - part.filters.start) for part in pieces
        )

    @property
    def arrays(self) -> int:
        """Bytes of the source and the result."""
        source, result = (size[0] * size[1] for size in (self.source, self.result))
        return self.batch * (self.channels * source + self.filters * result) * ITEM


@functools.lru_cache(maxsize=1024)
def _fitting(p: Pass) -> tuple[int, int]:
    """Return the number of images, and of rows of tiles, of a block."""
    rows, columns = p.grid
    most = max(1, min(p.most_tiles, p.block_bytes // (PLACES * ITEM * max(p.channels, p.filters)))) * (
        1 if p.whole else MANY
    )
    images = min(p.batch, most // (rows * columns))
    if images < 1:
        return 1, max(1, min(rows, most // columns))
    return -(-p.batch // -(-p.batch // images)), rows


@functools.lru_cache(maxsize=1024)
def parts(p: Pass) -> tuple[Part, ...]:
    """Return the parts of a pass, for idle cores: ranges of images if all share the transformed weight, else ranges of
    filters, each of which transforms its own weights."""
    units = p.batch if p.whole else p.filters // SOME
    most = min(MOST, max(2, p.arrays // (SHARE * p.room_nbytes(p.filters))))
    count = min(PLACES * p.tiles * p.channels * p.filters // FEW, most, units)
    every = slice(0, p.filters)
    if p.whole:
        return tuple(Part(some, every) for some in ranges(p.batch, max(1, count)))
    return tuple(Part(slice(0, p.batch), some) for some in ranges(p.filters, max(1, count)))


@functools.lru_cache(maxsize=1024)
def weight_parts(p: Pass) -> tuple[slice, ...]:
    """Return the parts of the weight's gradient: ranges of images, each with sums of its own, which are added up in
    order."""
    most = min(MOST, max(2, p.arrays // (SHARE * p.weight_room_nbytes)))
    count = min(PLACES * p.tiles * p.channels * p.filters // FEW, most, p.batch)
    return tuple(ranges(p.batch, max(1, count)))


def fits(p: Pass, other: int) -> bool:
    """Return whether this algorithm computes a pass: it is faster, and its scratch is acceptable.

    Acceptable is at most ``other`` bytes, the scratch of the other algorithm, or twice the bytes it reads and writes.
    """
    return _large(p) and p.nbytes <= max(other, 2 * (p.arrays + _weight_nbytes(p)))


def weight_fits(p: Pass, other: int) -> bool:
    """Return :func:`fits` for the weight gradient; ``p`` is the forward pass.

    Its sums must be small enough to be kept whole. They are written as well, and count like the weight.
    """
    return _large(p) and p.whole and p.weight_nbytes <= max(other, 2 * (p.arrays + 2 * _weight_nbytes(p)))


def _large(p: Pass) -> bool:
    return min(p.channels, p.filters) >= LEAST and p.tiles >= LEAST_TILES


def _weight_nbytes(p: Pass) -> int:
    return p.channels * p.filters * 9 * ITEM
