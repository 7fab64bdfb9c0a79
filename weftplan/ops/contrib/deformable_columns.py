"""Column matrices of deformable convolutions, whose window elements are sampled at offsets.

``deformable_convolution.py`` multiplies the columns by the weight. A tile is a range of the windows of one image. The
buffers widen float16 and bfloat16 data to float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from weftplan.ops.core import tiling
from weftplan.ops.core.kernels import BOOL, accumulator
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import DType, Shape, Workspace
from weftplan.ops.nn.sampling import Sampler, sampler_bytes
from weftplan.support.array_types import ArrayModule, RawArray


@dataclass(frozen=True, slots=True)
class DeformableSizes:
    """Sizes of one call. A *tap* is an element of the window."""

    batch: int
    channels: int
    image: Shape
    grid: Shape
    kernel: Shape
    stride: Shape
    dilate: Shape
    pad: Shape
    filters: int
    groups: int
    moved: int
    """Number of groups of channels; each group has its own offsets."""
    dtype: DType
    modulated: bool

    @property
    def acc(self) -> DType:
        return accumulator(self.dtype)

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def windows(self) -> int:
        return math.prod(self.grid)

    @property
    def tile(self) -> int:
        """Number of windows of a full tile."""
        row = self.channels * self.taps * self.acc.itemsize
        return max(1, min(self.windows, tiling.tile_bytes() // row))

    def buffers(self, *, backward: bool) -> list[tuple[Shape, DType]]:
        """Return the specs of the scratch arrays, some of which may be empty.

        They are two bool rows, the points, columns and outputs of a tile, the widened weight, and the widened image.
        ``backward`` adds the gradients of columns, points and image, the sums of the weight's gradient, and two rows
        for the mask's gradient.
        """
        wide = self.acc != self.dtype
        points = self.taps * self.tile
        columns = self.channels * points
        weight = self.filters * self.channels // self.groups * self.taps
        image = self.channels * math.prod(self.image)
        sizes = [2 * points, columns, self.filters * self.tile, weight * wide, image * wide]
        if backward:
            sizes += [columns, 2 * points, image * wide, weight * (1 + wide), 2 * points * self.modulated]
        return [((points,), BOOL), ((points,), BOOL), *(((size,), self.acc) for size in sizes)]

    def nbytes(self, *, backward: bool) -> int:
        """Return the workspace bytes of one call."""
        points = self.taps * self.tile
        return take_bytes(*self.buffers(backward=backward)) + sampler_bytes(
            self.channels // self.moved, points, self.acc
        )


def cut(space: RawArray, *shape: int) -> RawArray:
    return space[: math.prod(shape)].reshape(shape)


class Columns:
    """The buffers of one call, with the operations that the forward and backward passes share."""

    def __init__(self, ctx: Workspace, sizes: DeformableSizes, weight: RawArray, *, backward: bool) -> None:
        self.xp, self.sizes = ctx.xp, sizes
        buffers = [ctx.take(*spec) for spec in sizes.buffers(backward=backward)]
        self._inside, self._other, self._points, self._columns, self._grid, wide_weight, self._image, *self.more = (
            buffers
        )
        self.sampler = Sampler(ctx, sizes.channels // sizes.moved, sizes.taps * sizes.tile, sizes.acc, pixels=True)
        self._weight = weight
        if sizes.acc != sizes.dtype:
            self._weight = wide_weight.reshape(weight.shape)
            self.xp.copyto(self._weight, weight)

    @property
    def weight(self) -> RawArray:
        """The weight, widened if needed: (groups, filters per group, channels per group · taps)."""
        sizes = self.sizes
        return self._weight.reshape(sizes.groups, sizes.filters // sizes.groups, -1)

    def image(self, data: RawArray) -> RawArray:
        """Return one image (channels, height, width), converted to the wider dtype if needed."""
        if self.sizes.acc == self.sizes.dtype:
            return data
        wide = self._image.reshape(data.shape)
        self.xp.copyto(wide, data)
        return wide

    def tiles(self) -> Iterator[tuple[slice, RawArray, RawArray]]:
        """Yield (slice of windows, columns (channels, taps, windows), outputs (filters, windows)) of each tile.

        Columns and outputs are uninitialised buffers, which the next tile reuses.
        """
        sizes = self.sizes
        for start in range(0, sizes.windows, sizes.tile):
            count = min(sizes.tile, sizes.windows - start)
            self.sampler.fit(sizes.taps * count)
            columns = cut(self._columns, sizes.channels, sizes.taps, count)
            yield slice(start, start + count), columns, cut(self._grid, sizes.filters, count)

    def moved(self, offset: RawArray, windows: slice) -> Iterator[tuple[int, slice, RawArray]]:
        """Yield (group, slice of channels, sample points (2, taps, windows)) of each group, for ``windows``.

        The points are x, then y, in pixels, clamped unless ``modulated``. The next group overwrites them.
        """
        xp, sizes = self.xp, self.sizes
        points = cut(self._points, 2, sizes.taps, windows.stop - windows.start)
        numbers, taps = xp.arange(windows.start, windows.stop), xp.arange(sizes.taps)
        width, columns = sizes.kernel[1], sizes.grid[1]
        base = (
            (numbers % columns * sizes.stride[1] - sizes.pad[1], taps % width * sizes.dilate[1]),
            (numbers // columns * sizes.stride[0] - sizes.pad[0], taps // width * sizes.dilate[0]),
        )
        channels = sizes.channels // sizes.moved
        moves = offset.reshape(sizes.moved, sizes.taps, 2, sizes.windows)
        for group in range(sizes.moved):
            for axis, (start, tap) in enumerate(base):
                xp.copyto(points[axis], moves[group, :, 1 - axis, windows])
                xp.add(points[axis], start, out=points[axis], casting="same_kind")
                xp.add(points[axis], tap[:, None], out=points[axis], casting="same_kind")
            if not sizes.modulated:
                self._clamp(points)
            yield group, slice(group * channels, (group + 1) * channels), points

    def _clamp(self, points: RawArray) -> None:
        """Move points between the last pixel and ``extent`` onto the last pixel; set points off the image to -2."""
        xp, shape = self.xp, points.shape[1:]
        inside, clamped = cut(self._inside, *shape), cut(self._other, *shape)
        inside.fill(True)
        for coordinate, extent in zip(points, self.sizes.image[::-1], strict=True):
            for compare, bound in ((xp.greater_equal, 0), (xp.less, extent)):  # NaN is outside, too
                compare(coordinate, bound, out=clamped)
                xp.logical_and(inside, clamped, out=inside)
            xp.minimum(coordinate, extent - 1, out=coordinate)
        xp.logical_not(inside, out=inside)
        for coordinate in points:
            xp.copyto(coordinate, -2, where=inside)

    def still(self, points: RawArray, of_points: RawArray) -> None:
        """Set the gradients of points to 0 along each axis on which they lie on the last pixel.

        Do nothing for a modulated convolution, whose points are not clamped.
        """
        if self.sizes.modulated:
            return
        clamped = cut(self._other, *points.shape[1:])
        for coordinate, gradient, extent in zip(points, of_points, self.sizes.image[::-1], strict=True):
            self.xp.equal(coordinate, extent - 1, out=clamped)
            self.xp.copyto(gradient, 0, where=clamped)

    def sample(self, image: RawArray, offset: RawArray, windows: slice, columns: RawArray) -> None:
        """Fill ``columns`` of ``windows`` with samples of ``image``, without applying the mask."""
        for _, channels, points in self.moved(offset, windows):
            target = columns[channels]
            self.sampler.forward(image[channels], points.reshape(2, -1), target.reshape(len(target), -1))


def masked(xp: ArrayModule, sizes: DeformableSizes, mask: RawArray, windows: slice, columns: RawArray) -> None:
    """Multiply ``columns`` of ``windows`` by the ``mask`` of one image, in place."""
    by_group = columns.reshape(sizes.moved, -1, *columns.shape[1:])
    values = mask.reshape(sizes.moved, 1, sizes.taps, sizes.windows)[..., windows]
    xp.multiply(by_group, values, out=by_group)
