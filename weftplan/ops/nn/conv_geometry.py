"""Sizes of a convolution and of its tiles.

A *tile* is a range of whole images, or, if a single image is too large, a range of its window rows (the first spatial
axis). Its size depends only on shapes, parameters and the type of the device, so results depend neither on the machine
nor on the number of threads.

On a CPU, a large convolution is cut into *parts* for idle cores. A part is a smaller convolution with its own tiles and
scratch: a range of images, or a range of channels (or groups) if the weight's gradient is computed. In that case each
part sums over all images, so that no sum crosses parts.
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


def output_extent(extent: int, kernel: int, stride: int, pad: int, dilate: int) -> int:
    """Return the number of windows along one axis.

    >>> output_extent(8, 3, 1, 1, 1), output_extent(8, 3, 2, 0, 1)
    (8, 3)
    """
    return (extent + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one convolution and of its tiles.

    ``image`` has the spatial extents, without padding, of the data of a convolution or the output of a deconvolution.
    ``grid`` has the number of windows along each axis, which are the extents of the other array, the *window side*.
    ``acc`` is the accumulator's dtype; arrays of a narrower ``dtype`` are widened to it.
    """

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
    images_per_tile: int
    rows_per_tile: int
    workspace: int
    tile_bytes: int

    @property
    def taps(self) -> int:
        """Number of rows of the column matrix: channels · kernel positions."""
        return self.channels * math.prod(self.kernel)

    @property
    def columns_per_tile(self) -> int:
        """Number of columns of a full tile's matrix."""
        return self.images_per_tile * self.rows_per_tile * math.prod(self.grid[1:])

    @property
    def pointwise(self) -> bool:
        """Whether the image itself is the column matrix: 1x1 kernel, stride 1, no padding, no widening."""
        same = all(s == 1 for s in self.stride) and all(k == 1 for k in self.kernel) and not any(self.pad)
        return same and self.acc == self.dtype

    @property
    def copies_image(self) -> bool:
        """Whether images must be copied, to pad or to widen them."""
        return any(self.pad) or self.acc != self.dtype

    @property
    def direct(self) -> bool:
        """Whether products use the window side without a buffer: each tile is one whole image that is not widened."""
        return self.acc == self.dtype and self.images_per_tile == 1 and self.rows_per_tile == self.grid[0]

    def tiles(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first image, last image, first row, last row) of each tile; both ranges are half-open."""
        for n in range(0, self.batch, self.images_per_tile):
            for r in range(0, self.grid[0], self.rows_per_tile):
                yield n, min(n + self.images_per_tile, self.batch), r, min(r + self.rows_per_tile, self.grid[0])

    def _nbytes(self, elements: int) -> int:
        return aligned(elements * self.acc.itemsize)

    def _buffer_nbytes(self) -> int:
        """Return the bytes of a tile's buffers: the copy of its images, the columns, and the window side."""
        image = self._nbytes(self.images_per_tile * self.channels * math.prod(self.padded)) if self.copies_image else 0
        grid = 0 if self.direct else self._nbytes(self.filters * self.columns_per_tile)
        return image + self._nbytes(self.taps * self.columns_per_tile) + grid

    def _weight_nbytes(self) -> int:
        return self._nbytes(self.filters * self.taps // self.groups)

    def part_nbytes(self, *, weight: bool) -> int:
        """Return the scratch bytes of a part; ``weight``: whether the pass computes the gradient of the weight."""
        sums = self._weight_nbytes() * (1 + (self.acc != self.dtype)) if weight else 0
        return self._buffer_nbytes() + sums

    def forward_nbytes(self) -> int:
        """Return the scratch bytes of :func:`weftplan.ops.nn.conv_gemm.correlate`."""
        if self.pointwise:
            return 0
        return self._parts_nbytes(weight=False) + (self._weight_nbytes() if self.acc != self.dtype else 0)

    def backward_nbytes(self, *, data: bool = True, weight: bool = True) -> int:
        """Return the scratch bytes of :func:`weftplan.ops.nn.conv_gemm.adjoint` for the wanted gradients."""
        turned = self._weight_nbytes() if self.pointwise and data and self.turns else 0
        if self.pointwise and not weight:
            return turned
        widened = self._weight_nbytes() if self.acc != self.dtype and data else 0
        passes = {True, False} if data and weight else {weight}  # a call may compute fewer gradients than declared
        return max(self._parts_nbytes(weight=is_weight) for is_weight in passes) + widened + turned

    def _parts_nbytes(self, *, weight: bool) -> int:
        pieces = parts(self, weight=weight)
        return len(pieces) * max_part_nbytes(pieces, weight=weight)

    @property
    def turns(self) -> bool:
        """Whether the tile size is that of a GPU, where a pointwise product copies its transposed weight first.

        Without that copy, CuPy's batched product would make its own, which no plan counts.
        """
        return self.tile_bytes == tiling.GPU.tile_bytes


class PassPart(NamedTuple):
    """A part of a convolution: its geometry, and its slices of the data, the window side and the weight."""

    geo: Geometry
    data: tuple[slice, slice] = (slice(None), slice(None))
    grid: tuple[slice, slice] = (slice(None), slice(None))
    weight: tuple[slice, slice] = (slice(None), slice(None))


COPY = 32
"""Cost of copying one element of the columns, or of adding it back, as a number of multiplications."""
LEAST_ROWS = 32
"""Minimum number of column-matrix rows in a part of the channels: fewer would not fill the tiles of BLAS."""


@functools.lru_cache(maxsize=4096)
def parts(geo: Geometry, *, weight: bool) -> tuple[PassPart, ...]:
    """Return the parts of a pass; ``weight``: the pass computes the gradient of the weight.

    With ``weight`` the parts are ranges of channels (or groups), else ranges of images. A small pass, and any pass on a
    GPU, is one part. There are more than two parts only if their scratch is small compared with the arrays.
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
    limit = min(MOST, max(2, arrays // max(1, SHARE * geo.part_nbytes(weight=False))))
    count = 1 if geo.turns else min(work // FEW, limit, units)
    if count < 2:
        return (PassPart(geo),)
    every = slice(None)
    if not weight:
        return tuple(
            PassPart(_inner(geo, batch=_size(part_range)), (part_range, every), (part_range, every))
            for part_range in ranges(geo.batch, count)
        )
    if geo.groups == 1:
        return tuple(
            PassPart(_inner(geo, channels=_size(part_range)), (every, part_range), (every, every), (every, part_range))
            for part_range in ranges(geo.channels, count)
        )
    pieces = []
    for part_range in ranges(geo.groups, count):
        channels, filters = (slice(part_range.start * size, part_range.stop * size) for size in per_group)
        inner = _inner(geo, groups=_size(part_range), channels=_size(channels), filters=_size(filters))
        pieces.append(PassPart(inner, (every, channels), (every, filters), (filters, every)))
    return tuple(pieces)


def max_part_nbytes(pieces: tuple[PassPart, ...], *, weight: bool) -> int:
    """Return the scratch bytes of the part that needs the most."""
    return max(part.geo.part_nbytes(weight=weight) for part in pieces)


def _size(part_range: slice) -> int:
    return int(part_range.stop - part_range.start)


def _inner(geo: Geometry, **less: int) -> Geometry:
    """Return ``geo`` with the numbers in ``less`` (batch, channels, filters or groups), and with tiles for them."""
    sizes = {"batch": geo.batch, "channels": geo.channels, "filters": geo.filters, "groups": geo.groups, **less}
    return tiled(
        (sizes["batch"], sizes["channels"], *geo.image), sizes["filters"], geo.kernel, geo.stride, geo.dilate, geo.pad,
        geo.grid, sizes["groups"], geo.dtype, geo.workspace, geo.tile_bytes,
    )  # fmt: skip


def geometry(*sizes: object) -> Geometry:
    """Return :func:`tiled` of ``sizes`` (all its arguments but the last) for the device that this thread works for.

    On a CPU, tiles are limited to the size of a cache: larger tiles gain nothing, even if ``workspace`` allows them.
    """
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
    """Return the geometry of a convolution of ``image`` (batch, channels, extents…) with ``grid`` windows per axis.

    A tile's columns and outputs take at most ``workspace`` MiB and at most ``tile_bytes``, unless a single row of
    windows takes more.
    """
    acc = accumulator(dtype)
    batch, channels, *extents = image
    padded = tuple(extent + 2 * p for extent, p in zip(extents, pad, strict=True))
    row = max(1, (channels * math.prod(kernel) + filters) * math.prod(grid[1:]) * acc.itemsize)
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
        images_per_tile=max(1, min(batch, rows // max(1, grid[0]))),
        rows_per_tile=max(1, min(rows, grid[0])),
        workspace=workspace,
        tile_bytes=tile_bytes,
    )
