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
class Sizes:
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

    def buffers(self, *, back: bool) -> list[tuple[Shape, DType]]:
        """Return the specs of the scratch arrays, some of which may be empty.

        They are two bool rows, the points, columns and outputs of a tile, the widened weight, and the widened image.
        ``back`` adds the gradients of columns, points and image, the sums of the weight's gradient, and two rows for
        the mask's gradient.
        """
        wide = self.acc != self.dtype
        places = self.taps * self.tile
        columns = self.channels * places
        weight = self.filters * self.channels // self.groups * self.taps
        image = self.channels * math.prod(self.image)
        sizes = [2 * places, columns, self.filters * self.tile, weight * wide, image * wide]
        if back:
            sizes += [columns, 2 * places, image * wide, weight * (1 + wide), 2 * places * self.modulated]
        return [((places,), BOOL), ((places,), BOOL), *(((size,), self.acc) for size in sizes)]

    def nbytes(self, *, back: bool) -> int:
        """Return the workspace bytes of one call."""
        places = self.taps * self.tile
        return take_bytes(*self.buffers(back=back)) + sampler_bytes(self.channels // self.moved, places, self.acc)


def cut(space: RawArray, *shape: int) -> RawArray:
    return space[: math.prod(shape)].reshape(shape)


class Columns:
    """The buffers of one call, with the operations that the forward and backward passes share."""

    def __init__(self, ctx: Workspace, sizes: Sizes, weight: RawArray, *, back: bool) -> None:
        self.xp, self.sizes = ctx.xp, sizes
        taken = [ctx.take(*spec) for spec in sizes.buffers(back=back)]
        self._inside, self._other, self._points, self._columns, self._grid, wide_weight, self._image, *self.more = taken
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
        for first in range(0, sizes.windows, sizes.tile):
            count = min(sizes.tile, sizes.windows - first)
            self.sampler.fit(sizes.taps * count)
            columns = cut(self._columns, sizes.channels, sizes.taps, count)
            yield slice(first, first + count), columns, cut(self._grid, sizes.filters, count)

    def moved(self, offset: RawArray, where: slice) -> Iterator[tuple[int, slice, RawArray]]:
        """Yield (group, slice of channels, sample points (2, taps, windows)) of each group, for the windows ``where``.

        The points are x, then y, in pixels, clamped unless ``modulated``. The next group overwrites them.
        """
        xp, sizes = self.xp, self.sizes
        points = cut(self._points, 2, sizes.taps, where.stop - where.start)
        places, taps = xp.arange(where.start, where.stop), xp.arange(sizes.taps)
        width, columns = sizes.kernel[1], sizes.grid[1]
        base = (
            (places % columns * sizes.stride[1] - sizes.pad[1], taps % width * sizes.dilate[1]),
            (places // columns * sizes.stride[0] - sizes.pad[0], taps // width * sizes.dilate[0]),
        )
        each = sizes.channels // sizes.moved
        moves = offset.reshape(sizes.moved, sizes.taps, 2, sizes.windows)
        for group in range(sizes.moved):
            for axis, (start, tap) in enumerate(base):
                xp.copyto(points[axis], moves[group, :, 1 - axis, where])
                xp.add(points[axis], start, out=points[axis], casting="same_kind")
                xp.add(points[axis], tap[:, None], out=points[axis], casting="same_kind")
            if not sizes.modulated:
                self._clamp(points)
            yield group, slice(group * each, (group + 1) * each), points

    def _clamp(self, points: RawArray) -> None:
        """Move points between the last pixel and ``extent`` onto the last pixel; set points off the image to -2."""
        xp, shape = self.xp, points.shape[1:]
        inside, clamped = cut(self._inside, *shape), cut(self._other, *shape)
        inside.fill(True)
        for place, extent in zip(points, self.sizes.image[::-1], strict=True):
            for compare, bound in ((xp.greater_equal, 0), (xp.less, extent)):  # NaN is outside, too
                compare(place, bound, out=clamped)
                xp.logical_and(inside, clamped, out=inside)
            xp.minimum(place, extent - 1, out=place)
        xp.logical_not(inside, out=inside)
        for place in points:
            xp.copyto(place, -2, where=inside)

    def still(self, points: RawArray, of_points: RawArray) -> None:
        """Set the gradients of points to 0 along each axis on which they lie on the last pixel.

        Do nothing for a modulated convolution, whose points are not clamped.
        """
        if self.sizes.modulated:
            return
        clamped = cut(self._other, *points.shape[1:])
        for place, of_place, extent in zip(points, of_points, self.sizes.image[::-1], strict=True):
            self.xp.equal(place, extent - 1, out=clamped)
            self.xp.copyto(of_place, 0, where=clamped)

    def sample(self, image: RawArray, offset: RawArray, where: slice, columns: RawArray) -> None:
        """Fill ``columns`` of the windows ``where`` with samples of ``image``, without applying the mask."""
        for _, channels, points in self.moved(offset, where):
            target = columns[channels]
            self.sampler.forward(image[channels], points.reshape(2, -1), target.reshape(len(target), -1))


def masked(xp: ArrayModule, sizes: Sizes, mask: RawArray, where: slice, columns: RawArray) -> None:
    """Multiply ``columns`` of the windows ``where`` by the ``mask`` of one image, in place."""
    each = columns.reshape(sizes.moved, -1, *columns.shape[1:])
    values = mask.reshape(sizes.moved, 1, sizes.taps, sizes.windows)[..., where]
    xp.multiply(each, values, out=each)
