"""Convolution as matrix products over bounded tiles: what Convolution and Deconvolution share.

A *tile* is some images (whole), or some rows of the first spatial axis of one image when a single image is too large.
For each tile the windows of the input are laid out as the columns of a matrix (im2col), one product does the work, and
the buffers are used again for the next tile. The size of a tile depends on shapes and parameters only, so results do
not depend on the machine or on the number of threads.

float16 data is widened to float32 in the column buffer and rounded once at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from weftplan.ops.kernels import accumulator
from weftplan.ops.schema import OpContext, Shape, aligned

TILE_BYTES = 4 << 20
"""Columns beyond the size of a cache gain nothing, so a tile stays below this even when ``workspace`` allows more."""


def output_extent(extent: int, kernel: int, stride: int, pad: int, dilate: int) -> int:
    """Number of windows along one axis.

    >>> output_extent(8, 3, 1, 1, 1), output_extent(8, 3, 2, 0, 1)
    (8, 3)
    """
    return (extent + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one convolution, and of its tiles. ``image`` is the wide side, ``grid`` the side of the windows."""

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
    images_per_tile: int
    rows_per_tile: int

    @property
    def padded(self) -> Shape:
        """Spatial extents of an image with its padding."""
        return tuple(extent + 2 * pad for extent, pad in zip(self.image, self.pad, strict=True))

    @property
    def taps(self) -> int:
        """Rows of the column matrix: channels times kernel positions."""
        return self.channels * math.prod(self.kernel)

    @property
    def columns_per_tile(self) -> int:
        """Columns of the matrix of a full tile."""
        return self.images_per_tile * self.rows_per_tile * math.prod(self.grid[1:])

    @property
    def pointwise(self) -> bool:
        """True when the image itself is the column matrix: 1x1 kernel, stride 1, no padding, no widening."""
        same = all(s == 1 for s in self.stride) and all(k == 1 for k in self.kernel) and not any(self.pad)
        return same and self.acc == self.dtype

    @property
    def copies_image(self) -> bool:
        """True when a padded or widened copy of the image is needed."""
        return any(self.pad) or self.acc != self.dtype

    @property
    def direct(self) -> bool:
        """True when a tile is one whole image, so that the product can be written where it belongs."""
        return self.images_per_tile == 1 and self.rows_per_tile == self.grid[0] and self.acc == self.dtype

    def tiles(self) -> Iterator[tuple[int, int, int, int]]:
        """First and last image, first and last row of each tile (half-open)."""
        for n in range(0, self.batch, self.images_per_tile):
            for r in range(0, self.grid[0], self.rows_per_tile):
                yield n, min(n + self.images_per_tile, self.batch), r, min(r + self.rows_per_tile, self.grid[0])

    def _nbytes(self, elements: int) -> int:
        return aligned(elements * self.acc.itemsize)

    def _image_nbytes(self) -> int:
        return self._nbytes(self.images_per_tile * self.channels * math.prod(self.padded)) if self.copies_image else 0

    def _grid_nbytes(self) -> int:
        return 0 if self.direct else self._nbytes(self.filters * self.columns_per_tile)

    def _weight_nbytes(self) -> int:
        return self._nbytes(self.filters * self.taps // self.groups)

    def _column_nbytes(self) -> int:
        return self._nbytes(self.taps * self.columns_per_tile)

    def forward_nbytes(self) -> int:
        """Scratch of :func:`correlate`."""
        if self.pointwise:
            return 0
        widened = self._weight_nbytes() if self.acc != self.dtype else 0
        return self._image_nbytes() + self._column_nbytes() + self._grid_nbytes() + widened

    def backward_nbytes(self, *, data: bool = True, weight: bool = True) -> int:
        """Scratch of :func:`adjoint` for the gradients of data and weight, or one of them."""
        if self.pointwise and not weight:
            return 0
        wide = self.acc != self.dtype
        widened = self._weight_nbytes() if wide and data else 0
        sums = self._weight_nbytes() * (1 + wide) if weight else 0
        return self._image_nbytes() + self._column_nbytes() + self._grid_nbytes() + widened + sums


@functools.lru_cache(maxsize=4096)
def geometry(
    image: Shape,
    filters: int,
    kernel: Shape,
    stride: Shape,
    dilate: Shape,
    pad: Shape,
    grid: Shape,
    groups: int,
    dtype: np.dtype[Any],
    workspace: int,
) -> Geometry:
    """Tiles for ``image`` (batch, channels, extents…) and windows ``grid``; a tile takes at most ``workspace`` MiB."""
    acc = accumulator(dtype)
    batch, channels, *extents = image
    row = max(1, channels * math.prod(kernel) * math.prod(grid[1:]) * acc.itemsize)
    rows = max(1, min(workspace << 20, TILE_BYTES) // row)
    images = max(1, min(batch, rows // max(1, grid[0])))
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
        images_per_tile=images,
        rows_per_tile=max(1, min(rows, grid[0])),
    )


class _Buffers:
    """The scratch of one call, cut to the size of each tile."""

    def __init__(self, ctx: OpContext, geo: Geometry) -> None:
        self.geo = geo
        self.image = None
        if geo.copies_image:
            self.image = ctx.take((geo.images_per_tile, geo.channels, *geo.padded), geo.acc)
        self.columns = ctx.take((geo.taps * geo.columns_per_tile,), geo.acc)
        self.grid = None if geo.direct else ctx.take((geo.filters * geo.columns_per_tile,), geo.acc)

    def columns_of(self, images: int, rows: int) -> Any:
        """Column buffer of a tile: (channels, *kernel, images, rows, *rest of grid)."""
        geo = self.geo
        shape = (geo.channels, *geo.kernel, images, rows, *geo.grid[1:])
        return self.columns[: math.prod(shape)].reshape(shape)

    def grid_of(self, images: int, rows: int) -> Any:
        """Buffer of the window side of a tile: (filters, images, rows, *rest of grid)."""
        geo = self.geo
        shape = (geo.filters, images, rows, *geo.grid[1:])
        assert self.grid is not None
        return self.grid[: math.prod(shape)].reshape(shape)


def _interior(geo: Geometry) -> tuple[slice, ...]:
    bounds = zip(geo.pad, geo.image, strict=True)
    return (slice(None), slice(None), *(slice(pad, pad + extent) for pad, extent in bounds))


def _widened(ctx: OpContext, geo: Geometry, weight: Any) -> Any:
    if geo.acc != geo.dtype:
        wide = ctx.take(weight.shape, geo.acc)
        wide[...] = weight
        weight = wide
    return weight.reshape(geo.groups, geo.filters // geo.groups, geo.taps // geo.groups)


def _padded(buffers: _Buffers, data: Any, first: int, last: int) -> Any:
    """Images first…last with their padding."""
    if buffers.image is None:
        return data[first:last]
    image = buffers.image[: last - first]
    if any(buffers.geo.pad):
        image.fill(0)
    image[_interior(buffers.geo)] = data[first:last]
    return image


def _lay_out(ctx: OpContext, geo: Geometry, image: Any, first_row: int, columns: Any) -> None:
    """Copy the windows of ``image`` into ``columns``."""
    steps = image.strides[2:]
    start = image[:, :, first_row * geo.stride[0] :]
    windows = ctx.xp.lib.stride_tricks.as_strided(
        start,
        columns.shape,
        (
            image.strides[1],
            *(step * dilate for step, dilate in zip(steps, geo.dilate, strict=True)),
            image.strides[0],
            *(step * stride for step, stride in zip(steps, geo.stride, strict=True)),
        ),
    )
    columns[...] = windows


def _add_back(ctx: OpContext, geo: Geometry, columns: Any, first_row: int, rows: int, image: Any) -> None:
    """Add every column to the places of ``image`` it was taken from: the transpose of :func:`_lay_out`."""
    counts = (rows, *geo.grid[1:])
    for tap in product(*(range(extent) for extent in geo.kernel)):
        place = [slice(None), slice(None)]
        for axis, index in enumerate(tap):
            stride = geo.stride[axis]
            begin = index * geo.dilate[axis] + (first_row * stride if axis == 0 else 0)
            place.append(slice(begin, begin + stride * (counts[axis] - 1) + 1, stride))
        target = image[tuple(place)]
        ctx.xp.add(target, columns[(slice(None), *tap)].swapaxes(0, 1), out=target)


def correlate(ctx: OpContext, geo: Geometry, data: Any, weight: Any, bias: Any, out: Any) -> None:
    """``out`` = windows of ``data`` times ``weight``, plus ``bias`` unless None. Shapes as in Convolution."""
    xp = ctx.xp
    per_filter = (1, geo.filters, *(1 for _ in geo.grid))
    if geo.pointwise:
        size = math.prod(geo.grid)
        kernel = weight.reshape(geo.groups, geo.filters // geo.groups, -1)
        shaped = data.reshape(geo.batch, geo.groups, geo.channels // geo.groups, size)
        xp.matmul(kernel, shaped, out=out.reshape(geo.batch, geo.groups, geo.filters // geo.groups, size))
        if bias is not None:
            xp.add(out, bias.reshape(per_filter), out=out)
        return
    buffers = _Buffers(ctx, geo)
    kernel = _widened(ctx, geo, weight)
    image = None
    for first, last, top, bottom in geo.tiles():
        if top == 0:
            image = _padded(buffers, data, first, last)
        images, rows = last - first, bottom - top
        columns = buffers.columns_of(images, rows)
        _lay_out(ctx, geo, image, top, columns)
        part = out[first:last, :, top:bottom]
        result = part if geo.direct else buffers.grid_of(images, rows)
        xp.matmul(
            kernel,
            columns.reshape(geo.groups, geo.taps // geo.groups, -1),
            out=result.reshape(geo.groups, geo.filters // geo.groups, -1),
        )
        turned = result if geo.direct else result.swapaxes(0, 1)
        if bias is not None:
            xp.add(turned, bias.reshape(per_filter), out=part, casting="same_kind")
        elif not geo.direct:
            part[...] = turned


def adjoint(ctx: OpContext, geo: Geometry, data: Any, ograd: Any, weight: Any, dgrad: Any, wgrad: Any) -> None:
    """Gradients of :func:`correlate` with respect to ``data`` (into ``dgrad``) and ``weight`` (into ``wgrad``).

    Either target may be None; ``data`` is read for ``wgrad`` only, ``weight`` for ``dgrad`` only.
    """
    xp = ctx.xp
    if geo.pointwise and dgrad is not None:
        size = math.prod(geo.grid)
        kernel = weight.reshape(geo.groups, geo.filters // geo.groups, -1).swapaxes(1, 2)
        shaped = ograd.reshape(geo.batch, geo.groups, geo.filters // geo.groups, size)
        xp.matmul(kernel, shaped, out=dgrad.reshape(geo.batch, geo.groups, geo.channels // geo.groups, size))
        dgrad = None
    if dgrad is None and wgrad is None:
        return
    buffers = _Buffers(ctx, geo)
    kernel = None if dgrad is None else _widened(ctx, geo, weight).swapaxes(1, 2)
    sums, term = _weight_sums(ctx, geo, wgrad)
    image = None
    for count, (first, last, top, bottom) in enumerate(geo.tiles()):
        images, rows = last - first, bottom - top
        columns = buffers.columns_of(images, rows)
        matrix = columns.reshape(geo.groups, geo.taps // geo.groups, -1)
        part = ograd[first:last, :, top:bottom]
        if not geo.direct:
            turned = buffers.grid_of(images, rows)
            turned[...] = part.swapaxes(0, 1)
            part = turned
        part = part.reshape(geo.groups, geo.filters // geo.groups, -1)
        if wgrad is not None:
            # The padded copy is overwritten by the data gradient below, so it is made anew for every tile.
            image = _padded(buffers, data, first, last) if dgrad is not None or top == 0 else image
            _lay_out(ctx, geo, image, top, columns)
            xp.matmul(part, matrix.swapaxes(1, 2), out=term if count else sums)
            if count:
                xp.add(sums, term, out=sums)
        if dgrad is not None:
            xp.matmul(kernel, part, out=matrix)
            _scatter(ctx, geo, buffers, columns, (first, last, top, bottom), dgrad)
    if wgrad is not None and geo.acc != geo.dtype:
        wgrad[...] = sums.reshape(wgrad.shape)


def _weight_sums(ctx: OpContext, geo: Geometry, wgrad: Any) -> tuple[Any, Any]:
    """Where the weight's gradient is summed, and the buffer of one tile's term."""
    if wgrad is None:
        return None, None
    shape = (geo.groups, geo.filters // geo.groups, geo.taps // geo.groups)
    sums = wgrad.reshape(shape) if geo.acc == geo.dtype else ctx.take(shape, geo.acc)
    return sums, ctx.take(shape, geo.acc)


def _scatter(
    ctx: OpContext, geo: Geometry, buffers: _Buffers, columns: Any, tile: tuple[int, int, int, int], dgrad: Any
) -> None:
    """Add the columns of a tile to the data gradient of its images."""
    first, last, top, bottom = tile
    whole = bottom - top == geo.grid[0]
    if buffers.image is None:
        image = dgrad[first:last]
        if top == 0:
            image.fill(0)
        _add_back(ctx, geo, columns, top, bottom - top, image)
        return
    image = buffers.image[: last - first]
    image.fill(0)
    _add_back(ctx, geo, columns, top, bottom - top, image)
    inner = image[_interior(geo)]
    if whole or top == 0:
        dgrad[first:last] = inner
    else:
        ctx.xp.add(dgrad[first:last], inner, out=dgrad[first:last], casting="same_kind")
