"""Bilinear image sampling at points, forward and backward, and sampling grids of affine maps.

Coordinates run from -1 (centre of the first pixel) to 1 (centre of the last pixel), or count pixels from 0. Pixels
outside of the image are 0. A sample is the sum of the four pixels around a point, weighted by nearness: Jaderberg et
al., "Spatial Transformer Networks" (2015).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weftplan.ops.core.kernels import BOOL, INDEX, accumulator, gather
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import DType, Shape, Workspace
from weftplan.support.array_types import RawArray


def _scratch(channels: int, points: int, dtype: DType) -> list[tuple[Shape, DType]]:
    row, acc = (points,), accumulator(dtype)
    return [*[(row, acc)] * 8, (row, INDEX), (row, BOOL), (row, BOOL), ((channels, points), dtype)]


def sampler_bytes(channels: int, points: int, dtype: DType) -> int:
    """Return the workspace bytes of one :class:`Sampler`."""
    return take_bytes(*_scratch(channels, points, dtype))


class Sampler:
    """A sampler of images with ``channels`` channels at ``places`` points; all images use the same scratch.

    ``pixels``: coordinates count pixels, else they run from -1 to 1. If a channel has several planes, the argument
    ``planes`` of both passes has, for each point, the index of its plane's first element in the channel.
    """

    def __init__(self, ctx: Workspace, channels: int, points: int, dtype: DType, *, pixels: bool = False) -> None:
        self._xp = ctx.xp
        self._pixels = pixels
        self._arrays = [ctx.take(*spec) for spec in _scratch(channels, points, dtype)]
        self.fit(points)

    def fit(self, points: int) -> None:
        """Set the number of sampled points to ``points``, at most the number at construction."""
        *rows, values = self._arrays
        rows = [row[:points] for row in rows]
        self._x, self._y, self._fx, self._fy, self._near_x, self._near_y, self._weight, self._row = rows[:8]
        self._index, self._bad, self._other = rows[8:]
        self._values = values.reshape(-1)[: values.shape[0] * points].reshape(values.shape[0], points)

    def _corners(self, grid: RawArray, height: int, width: int, planes: object = None) -> Iterator[tuple[int, int]]:
        """Yield (x side, y side), each -1 or 1, of the four pixels around the points.

        Before each yield, fill the arrays for these pixels: index, weights, and ``_bad`` (outside of the image).
        """
        xp = self._xp
        for points, coordinate, extent in ((grid[0], self._x, width), (grid[1], self._y, height)):
            if self._pixels:
                xp.copyto(coordinate, points)
                continue
            xp.add(points, 1.0, out=coordinate, casting="same_kind")
            xp.multiply(coordinate, 0.5 * (extent - 1), out=coordinate)
        for row in (0, 1):
            for column in (0, 1):
                self._bad.fill(False)
                for coordinate, pixel, near, extent, step in (
                    (self._x, self._fx, self._near_x, width, column),
                    (self._y, self._fy, self._near_y, height, row),
                ):
                    xp.floor(coordinate, out=pixel)
                    xp.subtract(coordinate, pixel, out=near)  # the weight of the neighbour at floor + 1
                    if step:
                        xp.add(pixel, 1.0, out=pixel)
                    else:
                        xp.subtract(1.0, near, out=near)
                    xp.greater_equal(pixel, 0, out=self._other)  # NaN is outside, too
                    xp.logical_not(self._other, out=self._other)
                    xp.logical_or(self._bad, self._other, out=self._bad)
                    xp.greater(pixel, extent - 1, out=self._other)
                    xp.logical_or(self._bad, self._other, out=self._bad)
                for array in (self._fx, self._fy, self._near_x, self._near_y):
                    xp.copyto(array, 0, where=self._bad)
                xp.multiply(self._fy, width, out=self._fy)
                xp.copyto(self._index, self._fy, casting="unsafe")
                xp.add(self._index, self._fx, out=self._index, casting="unsafe")
                if planes is not None:
                    xp.add(self._index, planes, out=self._index)
                xp.multiply(self._near_x, self._near_y, out=self._weight)
                yield 2 * column - 1, 2 * row - 1

    def forward(
        self, image: RawArray, grid: RawArray, out: RawArray, *, planes: object = None, add: bool = False
    ) -> None:
        """Write the samples of ``image`` (channels, …, height, width) at ``grid`` (2, places) to ``out``.

        ``out`` is (channels, places). ``add``: add the samples to it instead.
        """
        xp = self._xp
        flat = image.reshape(image.shape[0], -1)
        if not add:
            out.fill(0)
        height, width = image.shape[-2:]
        for _ in self._corners(grid, height, width, planes):
            gather(xp, flat, self._index, 1, self._values)
            xp.multiply(self._values, self._weight, out=self._values, casting="same_kind")
            xp.add(out, self._values, out=out)

    def backward(
        self,
        ograd: RawArray,
        image: RawArray,
        grid: RawArray,
        of_image: RawArray | None,
        of_grid: RawArray | None,
        *,
        planes: RawArray | None = None,
        add: bool = False,
    ) -> None:
        """Compute the gradients ``of_image`` and ``of_grid`` (2, places), each unless None.

        ``add``: add to ``of_image`` instead of overwriting it.
        """
        xp = self._xp
        channels: int = image.shape[0]
        height, width = image.shape[-2:]
        flat = image.reshape(channels, -1)
        if of_image is not None and not add:
            of_image.fill(0)
        if of_grid is not None:
            of_grid.fill(0)
        scale_x, scale_y = (1.0, 1.0) if self._pixels else (0.5 * (width - 1), 0.5 * (height - 1))
        for side_x, side_y in self._corners(grid, height, width, planes):
            if of_image is not None:
                xp.multiply(ograd, self._weight, out=self._values, casting="same_kind")
                rows = of_image.reshape(channels, -1)
                for channel in range(channels):  # adds in the order of the points, always the same
                    xp.add.at(rows[channel], self._index, self._values[channel])
            if of_grid is not None:
                gather(xp, flat, self._index, 1, self._values)
                xp.multiply(self._values, ograd, out=self._values)
                xp.sum(self._values, axis=0, dtype=self._row.dtype, out=self._row)
                for target, near, factor in (
                    (of_grid[0], self._near_y, scale_x * side_x),
                    (of_grid[1], self._near_x, scale_y * side_y),
                ):
                    xp.multiply(self._row, near, out=self._weight)
                    xp.copyto(self._weight, 0, where=self._bad)
                    xp.multiply(self._weight, factor, out=self._weight)
                    xp.add(target, self._weight, out=target, casting="same_kind")


def base_bytes(height: int, width: int, dtype: DType) -> int:
    """Return the workspace bytes of :func:`base_grid`."""
    return take_bytes(((3, height, width), dtype))


def base_grid(ctx: Workspace, height: int, width: int, dtype: DType) -> RawArray:
    """Return an array (3, height · width) of x, y and 1 of every pixel, for multiplication by affine maps (2, 3).

    The coordinate along an axis of one pixel is NaN.
    """
    xp = ctx.xp
    base = ctx.take((3, height, width), dtype)
    line = xp.arange(max(height, width))
    base[0] = line[:width] * (2.0 / (width - 1) if width > 1 else math.nan) - 1.0
    base[1] = (line[:height] * (2.0 / (height - 1) if height > 1 else math.nan) - 1.0).reshape(-1, 1)
    base[2] = 1.0
    return base.reshape(3, height * width)
