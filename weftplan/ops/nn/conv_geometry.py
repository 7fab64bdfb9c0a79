"""Sizes of a convolution and of its tiles.

A *tile* is some images (whole), or some rows of the first spatial axis of one image when a single image is too large.
Its size depends on shapes, parameters and the type of the device only, so results depend neither on the machine nor on
the number of threads.

A tile's columns have one of two layouts. *Exact*: one column per window. *Wide* (stride 1): one column per position of
the padded image, row by row, so that a whole tile of one tap is a single contiguous run of the image. Copying and
adding back then run at the speed of memory; some columns belong to no window, and their results are dropped.

On a host a large convolution is cut into *parts* for idle cores: smaller convolutions with tiles and scratch of their
own. A part is a range of images, or a range of channels if the weight's gradient is wanted. Each part then sums over
all images, and no sum runs over parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weftplan.ops.core import tiling
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.products import FEW, MOST, SHARE, ranges
from weftplan.ops.core.schema import Shape, aligned
from weftplan.support.array_types import DType

WIDE_FILTERS = 192
"""With more filters per group the products cost more than the copies, and superfluous columns do not pay."""


def output_extent(extent: int, kernel: int, stride: int, pad: int, dilate: int) -> int:
    """Return the number of windows along one axis.

    >>> output_extent(8, 3, 1, 1, 1), output_extent(8, 3, 2, 0, 1)
    (8, 3)
    """
    return (extent + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one convolution. ``image`` is the side that is padded, ``grid`` the side of the windows."""

    batch: int
    groups: int
    channels: int
    filters: int
    image: Shape
    kernel: Shape
    stride: Shape
    dilate: Shape
    pad: Shape
    grid: Shape
    dtype: np.dtype[Any]
    acc: np.dtype[Any]
    padded: Shape
    """Spatial extents of an image with its padding."""
    wide: bool
    rest: Shape
    """Extents of a tile's columns on all spatial axes but the first."""
    slack: int
    """Elements that the last wide columns reach beyond a channel."""
    images_per_tile: int
    rows_per_tile: int
    workspace: int
    tile_bytes: int

    @property
    def taps(self) -> int:
        """Rows of the column matrix: channels times kernel positions."""
        return self.channels * math.prod(self.kernel)

    @property
    def columns_per_tile(self) -> int:
        """Columns of the matrix of a full tile."""
        return self.images_per_tile * self.rows_per_tile * math.prod(self.rest)

    @property
    def pointwise(self) -> bool:
        """True when the image itself is the column matrix: 1x1 kernel, stride 1, no padding, no widening."""
        same = all(s == 1 for s in self.stride) and all(k == 1 for k in self.kernel) and not any(self.pad)
        return same and self.acc == self.dtype

    @property
    def copies_image(self) -> bool:
        """True when a copy of the image is needed: padded, widened or with slack."""
        return any(self.pad) or self.acc != self.dtype or self.slack > 0

    @property
    def direct(self) -> bool:
        """True if a tile is one whole image, column for column, so that the product is written in place."""
        exact = self.rest == self.grid[1:] and self.acc == self.dtype
        return exact and self.images_per_tile == 1 and self.rows_per_tile == self.grid[0]

    @property
    def channel_size(self) -> int:
        """Elements of one channel in the copy of the image."""
        return math.prod(self.padded) + self.slack

    def tiles(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the first and last image, first and last row of each tile (half-open)."""
        for n in range(0, self.batch, self.images_per_tile):
            for r in range(0, self.grid[0], self.rows_per_tile):
                yield n, min(n + self.images_per_tile, self.batch), r, min(r + self.rows_per_tile, self.grid[0])

    def _nbytes(self, elements: int) -> int:
        return aligned(elements * self.acc.itemsize)

    def _buffer_nbytes(self) -> int:
        """Return the copy of the image, the columns, and the window side of a tile."""
        image = self._nbytes(self.images_per_tile * self.channels * self.channel_size) if self.copies_image else 0
        grid = 0 if self.direct else self._nbytes(self.filters * self.columns_per_tile)
        return image + self._nbytes(self.taps * self.columns_per_tile) + grid

    def _weight_nbytes(self) -> int:
        return self._nbytes(self.filters * self.taps // self.groups)

    def part_nbytes(self, *, weight: bool) -> int:
        """Return the scratch bytes of one part of these sizes, with the gradient of the weight or without."""
        sums = self._weight_nbytes() * (1 + (self.acc != self.dtype)) if weight else 0
        return self._buffer_nbytes() + sums

    def forward_nbytes(self) -> int:
        """Return the scratch bytes of :func:`weftplan.ops.nn.conv_gemm.correlate`."""
        if self.pointwise:
            return 0
        return self._rooms_nbytes(weight=False) + (self._weight_nbytes() if self.acc != self.dtype else 0)

    def backward_nbytes(self, *, data: bool = True, weight: bool = True) -> int:
        """Return the scratch of :func:`weftplan.ops.nn.conv_gemm.adjoint` for the gradients of data and weight, or one
        of them."""
        turned = self._weight_nbytes() if self.pointwise and data and self.turns else 0
        if self.pointwise and not weight:
            return turned
        widened = self._weight_nbytes() if self.acc != self.dtype and data else 0
        passes = {True, False} if data and weight else {weight}  # a caller may want less than is declared for it
        return max(self._rooms_nbytes(weight=one) for one in passes) + widened + turned

    def _rooms_nbytes(self, *, weight: bool) -> int:
        pieces = parts(self, weight=weight)
        return len(pieces) * room_nbytes(pieces, weight=weight)

    @property
    def turns(self) -> bool:
        """Whether the transposed weight of a pointwise product is copied first: in a batched product CuPy makes a copy
        of its own, which no plan counts."""
        return self.tile_bytes == tiling.GPU.tile_bytes


class Part(NamedTuple):
    """A convolution within another, and where its arrays are in those of the whole."""

    geo: Geometry
    data: tuple[slice, slice] = (slice(None), slice(None))
    grid: tuple[slice, slice] = (slice(None), slice(None))
    weight: tuple[slice, slice] = (slice(None), slice(None))


COPY = 32
"""Cost of copying an element of the columns, or of adding it back, in multiplications."""
LEAST_ROWS = 32
"""Minimum rows of the columns matrix in a part of the channels: fewer would not fill the tiles of BLAS."""


@functools.lru_cache(maxsize=4096)
def parts(geo: Geometry, *, weight: bool) -> tuple[Part, ...]:
    """Return the parts of a pass: ranges of channels (or groups) if it computes the gradient of the ``weight``, else
    ranges of images.

    A small pass, and any pass on a GPU, is one part. There are more than two parts only if their scratch is small.
    """
    per_group = geo.channels // geo.groups, geo.filters // geo.groups
    if not weight:
        units = geo.batch
    elif geo.groups > 1:
        units = geo.groups
    else:
        units = geo.taps // LEAST_ROWS
    work = geo.batch * math.prod(geo.grid) * geo.taps * (per_group[1] + COPY)
    arrays = geo.batch * (geo.channels * math.prod(geo.image) + geo.filters * math.prod(geo.grid)) * geo.acc.itemsize
    most = min(MOST, max(2, arrays // max(1, SHARE * geo.part_nbytes(weight=False))))
    count = 1 if geo.turns else min(work // FEW, most, units)
    if count < 2:
        return (Part(geo),)
    every = slice(None)
    if not weight:
        return tuple(
            Part(_inner(geo, batch=_size(some)), (some, every), (some, every)) for some in ranges(geo.batch, count)
        )
    if geo.groups == 1:
        return tuple(
            Part(_inner(geo, channels=_size(some)), (every, some), (every, every), (every, some))
            for some in ranges(geo.channels, count)
        )
    pieces = []
    for some in ranges(geo.groups, count):
        channels, filters = (slice(some.start * size, some.stop * size) for size in per_group)
        inner = _inner(geo, groups=_size(some), channels=_size(channels), filters=_size(filters))
        pieces.append(Part(inner, (every, channels), (every, filters), (filters, every)))
    return tuple(pieces)


def room_nbytes(found: tuple[Part, ...], *, weight: bool) -> int:
    """Return the scratch bytes that suffice for any of these parts."""
    return max(part.geo.part_nbytes(weight=weight) for part in found)


def _size(some: slice) -> int:
    return int(some.stop - some.start)


def _inner(geo: Geometry, **less: int) -> Geometry:
    """Return the same windows on fewer images, channels or filters."""
    sizes = {"batch": geo.batch, "channels": geo.channels, "filters": geo.filters, "groups": geo.groups, **less}
    return tiled(
        (sizes["batch"], sizes["channels"], *geo.image), sizes["filters"], geo.kernel, geo.stride, geo.dilate, geo.pad,
        geo.grid, sizes["groups"], geo.dtype, geo.workspace, geo.tile_bytes,
    )  # fmt: skip


def geometry(*sizes: object) -> Geometry:
    """:func:`tiled` with tiles for the device that this thread works for: columns beyond the size of a cache gain
    nothing on a CPU, even when ``workspace`` allows more."""
    return tiled(*sizes, tiling.tile_bytes())


@functools.lru_cache(maxsize=4096)
def tiled(
    image: Shape,
    filters: int,
    kernel: Shape,
    stride: Shape,
    dilate: Shape,
    pad: Shape,
    grid: Shape,
    groups: int,
    dtype: DType,
    workspace: int,
    tile_bytes: int,
) -> Geometry:
    """Return sizes and tiles for ``image`` (batch, channels, extents…) and windows ``grid``.

    The columns of a tile and its windows take at most ``workspace`` MiB and ``tile_bytes``, unless a single row of
    windows takes more.
    """
    acc = accumulator(dtype)
    batch, channels, *extents = image
    padded = tuple(extent + 2 * p for extent, p in zip(extents, pad, strict=True))
    wide = all(s == 1 for s in stride) and math.prod(kernel) > 1 and filters // groups <= WIDE_FILTERS
    inner = padded[1:] if wide else grid[1:]
    slack = 0
    if wide:
        steps = [math.prod(padded[axis + 1 :]) for axis in range(len(padded))]
        slack = sum((k - 1) * d * step for k, d, step in list(zip(kernel, dilate, steps, strict=True))[1:])
    row = max(1, (channels * math.prod(kernel) + filters) * math.prod(inner) * acc.itemsize)
    rows = max(1, min(workspace << 20, tile_bytes) // row)
    return Geometry(
        batch=batch,
        groups=groups,
        channels=channels,
        filters=filters,
        image=tuple(extents),
        kernel=kernel,
        stride=stride,
        dilate=dilate,
        pad=pad,
        grid=grid,
        dtype=dtype,
        acc=acc,
        padded=padded,
        wide=wide,
        rest=inner,
        slack=slack,
        images_per_tile=max(1, min(batch, rows // max(1, grid[0]))),
        rows_per_tile=max(1, min(rows, grid[0])),
        workspace=workspace,
        tile_bytes=tile_bytes,
    )
