"""Tiled matrix products for Convolution and Deconvolution.

For each tile, the windows of the input are copied into the columns of a matrix (im2col), and one product combines them
with the weight. All tiles share the buffers. float16 data is widened to float32 in the buffers; results are rounded
when they are written. Idle cores share a large convolution: it is cut into parts, each with its own buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from weftplan.ops.core.products import multiply, stacked_product
from weftplan.ops.core.schema import Workspace
from weftplan.ops.nn.conv_geometry import Geometry, PassPart, max_part_nbytes, parts
from weftplan.support.array_types import ArrayModule, RawArray
from weftplan.support.core_sharing import split_in_rooms


class _Buffers:
    """The scratch of one call: padded images, columns and outputs, each as a view of a tile's size."""

    def __init__(self, ctx: Workspace, geo: Geometry) -> None:
        self.geo = geo
        self._image = None
        if geo.copies_image:
            self._image = ctx.take((geo.images_per_tile, geo.channels, *geo.padded), geo.acc)
        self._columns = ctx.take((geo.taps * geo.columns_per_tile,), geo.acc)
        self._grid = None if geo.direct else ctx.take((geo.filters * geo.columns_per_tile,), geo.acc)

    @property
    def copies(self) -> bool:
        """Whether there is a buffer for padded images."""
        return self._image is not None

    def columns(self, images: int, rows: int) -> RawArray:
        """Return the buffer of a tile's columns, one per window: (channels, *kernel, images, rows, *grid[1:])."""
        geo = self.geo
        shape = (geo.channels, *geo.kernel, images, rows, *geo.grid[1:])
        return self._columns[: math.prod(shape)].reshape(shape)

    def grid(self, images: int, rows: int) -> RawArray:
        """Return the buffer of a tile's outputs: (filters, images, rows, *grid[1:])."""
        geo = self.geo
        shape = (geo.filters, images, rows, *geo.grid[1:])
        assert self._grid is not None
        return self._grid[: math.prod(shape)].reshape(shape)

    def image(self, images: int) -> tuple[RawArray, RawArray]:
        """Return the buffer of padded images (images, channels, *padded), and a view of it without the padding."""
        geo = self.geo
        assert self._image is not None
        padded = self._image[:images]
        inside = (slice(pad, pad + extent) for pad, extent in zip(geo.pad, geo.image, strict=True))
        return padded, padded[(slice(None), slice(None), *inside)]


def _widened(ctx: Workspace, geo: Geometry, weight: RawArray) -> RawArray:
    if geo.acc == geo.dtype:
        return weight
    wide = ctx.take(weight.shape, geo.acc)
    wide[...] = weight
    return wide


def _matrices(geo: Geometry, weight: RawArray) -> RawArray:
    """Return a view of a weight, or of its gradient, as (groups, filters per group, taps per group)."""
    return weight.reshape(geo.groups, geo.filters // geo.groups, geo.taps // geo.groups)


def _for_parts(ctx: Workspace, geo: Geometry, work: Callable[[Workspace, PassPart], None], *, weight: bool) -> None:
    """Call ``work(scratch, part)`` for each part of a pass; several parts run on idle cores.

    ``weight``: whether the pass computes the gradient of the weight.
    """
    pieces = parts(geo, weight=weight)
    if len(pieces) == 1:
        work(ctx, pieces[0])
        return
    buffers = ctx.take((len(pieces), max_part_nbytes(pieces, weight=weight)), np.uint8)
    split_in_rooms(lambda part, slot: work(Workspace(ctx.xp, buffers[slot]), pieces[part]), len(pieces))


def _fill(buffers: _Buffers, data: RawArray, start: int, stop: int, *, padded: bool = False) -> RawArray:
    """Return images ``start`` to ``stop`` (exclusive) with their padding: a copy if ``buffers.copies``, else a view.

    ``padded``: the padding in the buffer is already zero, because an earlier tile filled it.
    """
    if not buffers.copies:
        return data[start:stop]
    image, inner = buffers.image(stop - start)
    if any(buffers.geo.pad) and not padded:
        image.fill(0)
    inner[...] = data[start:stop]
    return image


def _lay_out(ctx: Workspace, geo: Geometry, image: RawArray, first_row: int, columns: RawArray) -> None:
    """Copy the windows of padded images, from window row ``first_row`` on, into ``columns``."""
    steps = image.strides[2:]
    taps = (image.strides[1], *(step * dilate for step, dilate in zip(steps, geo.dilate, strict=True)))
    windows = (image.strides[0], *(step * stride for step, stride in zip(steps, geo.stride, strict=True)))
    begin = image[:, :, first_row * geo.stride[0] :]
    columns[...] = ctx.xp.lib.stride_tricks.as_strided(begin, columns.shape, (*taps, *windows))


def _add_back(ctx: Workspace, geo: Geometry, columns: RawArray, first_row: int, image: RawArray) -> None:
    """Add every column to the elements of the padded images that :func:`_lay_out` copies it from."""
    counts = (columns.shape[2 + len(geo.kernel)], *geo.grid[1:])
    for tap in product(*(range(extent) for extent in geo.kernel)):
        element_slices = [slice(None), slice(None)]
        for axis, index in enumerate(tap):
            stride = geo.stride[axis]
            start = index * geo.dilate[axis] + (first_row * stride if axis == 0 else 0)
            element_slices.append(slice(start, start + stride * (counts[axis] - 1) + 1, stride))
        target = image[tuple(element_slices)]
        at: tuple[slice | int, ...] = (slice(None), *tap)
        ctx.xp.add(target, columns[at].swapaxes(0, 1), out=target)


def correlate(
    ctx: Workspace, geo: Geometry, data: RawArray, weight: RawArray, bias: RawArray | None, out: RawArray
) -> None:
    """Compute ``out`` = Convolution of ``data`` with ``weight``, plus ``bias`` unless None."""
    if geo.pointwise:
        xp = ctx.xp
        size = math.prod(geo.grid)
        kernel = _matrices(geo, weight)
        shaped = data.reshape(geo.batch, geo.groups, geo.channels // geo.groups, size)
        stacked_product(xp, kernel, shaped, out.reshape(geo.batch, geo.groups, geo.filters // geo.groups, size))
        if bias is not None:
            xp.add(out, _per_filter(geo, bias), out=out)
        return
    kernel = _matrices(geo, _widened(ctx, geo, weight))
    _for_parts(
        ctx,
        geo,
        lambda inner, part: _correlate(inner, part.geo, data[part.data], kernel, bias, out[part.grid]),
        weight=False,
    )


def _per_filter(geo: Geometry, bias: RawArray) -> RawArray:
    return bias.reshape((1, geo.filters, *(1 for _ in geo.grid)))


def _correlate(
    ctx: Workspace, geo: Geometry, data: RawArray, kernel: RawArray, bias: RawArray | None, out: RawArray
) -> None:
    """Compute :func:`correlate` for one part; ``kernel`` is the widened weight as :func:`_matrices` returns it."""
    xp = ctx.xp
    buffers = _Buffers(ctx, geo)
    image: Any = None
    for start, stop, top, bottom in geo.tiles():
        if top == 0:
            image = _fill(buffers, data, start, stop, padded=start > 0)
        images, rows = stop - start, bottom - top
        columns = buffers.columns(images, rows)
        _lay_out(ctx, geo, image, top, columns)
        part = out[start:stop, :, top:bottom]
        result = part if geo.direct else buffers.grid(images, rows)
        multiply(
            xp,
            kernel,
            columns.reshape(geo.groups, geo.taps // geo.groups, -1),
            result.reshape(geo.groups, geo.filters // geo.groups, -1),
        )
        turned = result if geo.direct else result.swapaxes(0, 1)
        if bias is not None:
            xp.add(turned, _per_filter(geo, bias), out=part, casting="same_kind")
        elif not geo.direct:
            part[...] = turned


def adjoint(
    ctx: Workspace,
    geo: Geometry,
    data: Any,
    ograd: RawArray,
    weight: Any,
    dgrad: RawArray | None,
    wgrad: RawArray | None,
) -> None:
    """Compute the gradients of :func:`correlate`: ``dgrad`` of ``data``, ``wgrad`` of ``weight``.

    Either gradient may be None. ``data`` is read only for ``wgrad``, ``weight`` only for ``dgrad``.
    """
    xp = ctx.xp
    if geo.pointwise and dgrad is not None:
        size = math.prod(geo.grid)
        kernel = _matrices(geo, weight).swapaxes(1, 2)
        if geo.turns:
            turned = ctx.take(kernel.shape, geo.dtype)
            xp.copyto(turned, kernel)
            kernel = turned
        shaped = ograd.reshape(geo.batch, geo.groups, geo.filters // geo.groups, size)
        stacked_product(xp, kernel, shaped, dgrad.reshape(geo.batch, geo.groups, geo.channels // geo.groups, size))
        dgrad = None
    if dgrad is None and wgrad is None:
        return
    if dgrad is not None:
        weight = _widened(ctx, geo, weight)

    def work(inner: Workspace, part: PassPart) -> None:
        _adjoint(
            inner,
            part.geo,
            None if wgrad is None else data[part.data],
            ograd[part.grid],
            None if dgrad is None else weight[part.weight],
            None if dgrad is None else dgrad[part.data],
            None if wgrad is None else wgrad[part.weight],
        )

    _for_parts(ctx, geo, work, weight=wgrad is not None)


def _adjoint(
    ctx: Workspace,
    geo: Geometry,
    data: Any,
    ograd: RawArray,
    weight: Any,
    dgrad: RawArray | None,
    wgrad: RawArray | None,
) -> None:
    """Compute :func:`adjoint` for one part; ``weight`` has the accumulator dtype."""
    xp = ctx.xp
    buffers = _Buffers(ctx, geo)
    kernel: Any = None if dgrad is None else _matrices(geo, weight).swapaxes(1, 2)
    sums, term = _weight_sums(ctx, geo, wgrad)
    image: Any = None
    for count, (start, stop, top, bottom) in enumerate(geo.tiles()):
        columns = buffers.columns(stop - start, bottom - top)
        matrix = columns.reshape(geo.groups, geo.taps // geo.groups, -1)
        part = _turned(geo, buffers, ograd, (start, stop, top, bottom))
        if wgrad is not None:
            # The data gradient below overwrites the copy of the image, so every tile copies it again.
            image = _fill(buffers, data, start, stop) if dgrad is not None or top == 0 else image
            _lay_out(ctx, geo, image, top, columns)
            _multiply(xp, part, matrix.swapaxes(1, 2), term if count else sums)
            if count:
                xp.add(sums, term, out=sums)
        if dgrad is not None:
            # With one filter per group this is an outer product, which matmul computes slowly.
            if part.shape[1] == 1:
                xp.multiply(kernel, part, out=matrix)
            else:
                _multiply(xp, kernel, part, matrix)
            _scatter(ctx, geo, buffers, columns, (start, stop, top, bottom), dgrad)
    if wgrad is not None and geo.acc != geo.dtype:
        wgrad[...] = sums.reshape(wgrad.shape)


def _multiply(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out`` = ``a`` · ``b`` for each group (the first axis).

    On a GPU, a single group is multiplied without the group axis: CuPy copies transposed operands of a batched product.
    """
    if xp is not np and out.shape[0] == 1:
        multiply(xp, a[0], b[0], out[0])
    else:
        multiply(xp, a, b, out)


def _turned(geo: Geometry, buffers: _Buffers, ograd: RawArray, tile: tuple[int, int, int, int]) -> RawArray:
    """Return a tile of ``ograd`` as (groups, filters per group, columns): a view, or a copy in the output buffer.

    ``tile`` is (first image, last image, first row, last row), both ranges half-open.
    """
    start, stop, top, bottom = tile
    part = ograd[start:stop, :, top:bottom]
    if not geo.direct:
        grid = buffers.grid(stop - start, bottom - top)
        grid[...] = part.swapaxes(0, 1)
        part = grid
    return part.reshape(geo.groups, geo.filters // geo.groups, -1)


def _weight_sums(ctx: Workspace, geo: Geometry, wgrad: RawArray | None) -> tuple[Any, Any]:
    """Return the accumulator of the weight's gradient and the buffer for one tile's term; (None, None) if unwanted."""
    if wgrad is None:
        return None, None
    shape = (geo.groups, geo.filters // geo.groups, geo.taps // geo.groups)
    sums = _matrices(geo, wgrad) if geo.acc == geo.dtype else ctx.take(shape, geo.acc)
    return sums, ctx.take(shape, geo.acc)


def _scatter(
    ctx: Workspace,
    geo: Geometry,
    buffers: _Buffers,
    columns: RawArray,
    tile: tuple[int, int, int, int],
    dgrad: RawArray,
) -> None:
    """Add a tile's columns to the data gradient of its images; the first tile of an image overwrites the gradient."""
    start, stop, top, _ = tile
    target = dgrad[start:stop]
    if not buffers.copies:
        if top == 0:
            target.fill(0)
        _add_back(ctx, geo, columns, top, target)
        return
    image, inner = buffers.image(stop - start)
    image.fill(0)
    _add_back(ctx, geo, columns, top, image)
    if top == 0:
        target[...] = inner
    else:
        ctx.xp.add(target, inner, out=target, casting="same_kind")
