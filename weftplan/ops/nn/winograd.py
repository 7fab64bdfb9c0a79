"""3x3 convolutions, stride 1, by Winograd's F(2x2, 3x3) in NumPy: 2.25 times fewer multiplications.

Windows of 4x4 elements overlap by 2, and each gives a tile of 2x2. With B, G and A of Winograd's algorithm, a window d
and a kernel g: tile = Aᵀ [(G g Gᵀ) · (Bᵀ d B)] A, where · is a product of matrices (filters by channels, channels by
tiles) at each of the 16 places. A pass transforms the weight to *u* and the source to *v*, multiplies them to *m*, and
transforms m back.

Three choices make it fast in NumPy. The source is first split into even and odd rows and columns (*phases*), so that
each step of a transform is one addition of long runs. The images of a block are the innermost axis, which lengthens the
runs and turns a block's tiles into the columns of one product. The 16 places are computed in rows of 4, so a block's
arrays stay in a core's cache. u is one product with a matrix of 16 by 9.

Errors are those of the plain products, within a factor of two; an infinity may turn into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from weftplan.ops.core.products import multiply
from weftplan.ops.core.schema import Workspace
from weftplan.ops.nn.winograd_sizes import APART, BEHIND, PLACES, ROW, SOME, Part, Pass, parts
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import split_in_rooms

F32 = np.dtype(np.float32)
_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], F32)
KERNEL = np.kron(_G, _G)
"""The matrix that maps the 9 elements of a kernel to the 16 of u."""
_TURNED = np.ascontiguousarray(KERNEL[:, ::-1])
"""The same matrix for a kernel rotated by half a turn."""


def convolve(ctx: Workspace, p: Pass, source: Any, weight: Any, bias: Any, out: Any) -> None:
    """Compute ``out`` = windows of ``source`` times ``weight``, plus ``bias`` unless None.

    The first axis of ``weight`` is that of the forward pass's filters, in a data gradient as well.
    """
    kept = None
    if p.whole:
        kept = ctx.take((PLACES, p.channels * p.filters + APART), F32)[:, : p.channels * p.filters]
        multiply(np, _TURNED if p.back else KERNEL, weight.reshape(-1, 9).T, kept)
        kept = kept.reshape(PLACES, *weight.shape[:2])
        kept = kept.swapaxes(1, 2) if p.back else kept
    pieces = parts(p)
    room = max(p.room_nbytes(part.filters.stop - part.filters.start) for part in pieces)
    rooms = ctx.take((len(pieces), room), np.uint8)

    def work(number: int, room: int) -> None:
        part = pieces[number]
        block = _Block(Workspace(ctx.xp, rooms[room]), p, part, weight, kept)
        some = None if bias is None else bias[part.filters].reshape(-1, 1, 1)
        block.run(source[part.images], some, out[part.images, part.filters])

    split_in_rooms(work, len(pieces))


class Windows:
    """Rows of *v* of a block of images; all blocks use the same scratch."""

    def __init__(self, ctx: Workspace, p: Pass) -> None:
        self.p = p
        self._flat = [ctx.take((size,), F32) for size in p.window_sizes]

    def cut(self, images: int, rows: int) -> None:
        """Views of the scratch for blocks of this size."""
        p = self.p
        self.images, self.rows, self.columns = images, rows, p.columns(images)
        self.tiles = rows * self.columns * images
        wide = p.grid[1] + 1
        phases, combined, v = self._flat
        self.phases = view(phases, 2, 2, p.channels, rows + 1, wide, images)
        self.combined = view(combined, 2, min(SOME, p.channels), rows, wide, images)
        self.v = view(v, ROW, p.channels, self.tiles + BEHIND)[:, :, : self.tiles]
        if self.columns == wide:
            self.v[:, :, -images:] = 0  # no tiles, and nothing writes them

    def fill(self, source: RawArray, top: int) -> None:
        """Copy the pixels that the tiles from row ``top`` on read, split into even and odd rows and columns."""
        above, left = self.p.pad
        take_apart(self.phases, source, 2 * top - above, -left)

    def transform(self, row: int) -> None:
        """Compute row ``row`` of v = Bᵀ d B."""
        even, odd = self.phases
        for first in range(0, self.p.channels, SOME):
            channels = slice(first, min(first + SOME, self.p.channels))
            e, o = even[:, channels], odd[:, channels]
            combined = self.combined[:, : e.shape[1]]
            _combine(row, (e[:, :, :-1], o[:, :, :-1], e[:, :, 1:], o[:, :, 1:]), combined)
            v = self.v[:, channels]
            images = self.images
            if self.columns > self.p.grid[1]:  # rows in one run
                a, b = combined.reshape(2, e.shape[1], -1)
                v = v[:, :, :-images]
                four = a[:, :-images], b[:, :-images], a[:, images:], b[:, images:]
            else:
                a, b = combined
                v = v.reshape(ROW, e.shape[1], self.rows, self.columns, images)
                four = a[:, :, :-1], b[:, :, :-1], a[:, :, 1:], b[:, :, 1:]
            for place in range(ROW):
                _combine(place, four, v[place])


def view(flat: Any, *shape: int) -> Any:
    """Return an array of this shape at the beginning of flat scratch."""
    return flat[: math.prod(shape)].reshape(shape)


def blocks(p: Pass, images: int) -> Iterator[tuple[slice, int, int]]:
    """Yield the images, the first row of tiles and the number of rows of each block of ``images`` images."""
    for first in range(0, images, p.images):
        for top in range(0, p.grid[0], p.rows):
            yield slice(first, min(first + p.images, images)), top, min(p.rows, p.grid[0] - top)


def take_apart(phases: RawArray, source: RawArray, above: int, left: int) -> None:
    """Copy ``source`` (images, channels, rows, columns), from row ``above`` and column ``left`` on, which may be
    negative, into ``phases`` (odd row, odd column, channels, rows, columns, images), with zeros around it."""
    phases.fill(0)
    height, width = source.shape[2:]
    for odd_row in (0, 1):
        to_rows, of_rows = _places(odd_row + above, height, phases.shape[3])
        for odd_column in (0, 1):
            to_columns, of_columns = _places(odd_column + left, width, phases.shape[4])
            target = phases[odd_row, odd_column, :, to_rows, to_columns]
            for image in range(len(source)):  # NumPy would go through the images innermost, which are far apart
                target[..., image] = source[image, :, of_rows, of_columns]


class _Block:
    """The computation of a part, block by block in the same scratch."""

    def __init__(self, ctx: Workspace, p: Pass, part: Part, weight: Any, kept: Any) -> None:
        self.p = p
        self.part = part
        self.weight = weight
        self.kept = kept
        self.filters = part.filters.stop - part.filters.start
        self.some = min(p.some, self.filters)
        self.windows = Windows(ctx, p)
        tiles = p.tiles_of_block
        sizes = ROW * self.some * tiles, 2 * ROW * self.filters * tiles, 2 * self.some * tiles
        self._flat = [ctx.take((size,), F32) for size in sizes]
        if kept is None:
            self.piece = ctx.take((ROW, self.some * p.channels + APART), F32)
            self.turned = ctx.take((self.some * p.channels * 9,), F32) if p.back else None

    def run(self, source: Any, bias: Any, out: Any) -> None:
        """Compute the part, block by block."""
        cut = None
        for images, top, rows in blocks(self.p, len(source)):
            sizes = images.stop - images.start, rows
            if sizes != cut:
                self._cut(*sizes)
                cut = sizes
            self.windows.fill(source[images], top)
            for row in range(ROW):
                self.windows.transform(row)
                self._multiply(row)
            self._finish(bias, out[images], top)

    def _cut(self, images: int, rows: int) -> None:
        """Views of the scratch for blocks of this size."""
        self.windows.cut(images, rows)
        m, sums, done = self._flat
        self.m = view(m, ROW, self.some, self.windows.tiles)
        self.sums = view(sums, 2, ROW, self.filters, self.windows.tiles)
        self.done = view(done, 2, self.some, rows, self.windows.columns, images)

    def _u(self, row: int, some: slice) -> Any:
        """Return row ``row`` of u for the filters ``some`` of the part; transform the weight unless u is kept."""
        places = slice(ROW * row, ROW * (row + 1))
        if self.kept is not None:
            return self.kept[places, some]
        filters, channels = some.stop - some.start, self.p.channels
        there = slice(self.part.filters.start + some.start, self.part.filters.start + some.stop)
        piece = self.piece[:, : filters * channels]
        if self.turned is None:
            multiply(np, KERNEL[places], self.weight[there].reshape(-1, 9).T, piece)
            return piece.reshape(ROW, filters, channels)
        turned = self.turned[: filters * channels * 9].reshape(channels, filters, 9)
        turned[...] = self.weight[:, there].reshape(turned.shape)
        multiply(np, _TURNED[places], turned.reshape(-1, 9).T, piece)
        return piece.reshape(ROW, channels, filters).swapaxes(1, 2)

    def _multiply(self, row: int) -> None:
        """Compute row ``row`` of m and add it to the sums over rows: Aᵀ m."""
        above, below = self.sums
        for some in self._filters():
            u, upper, lower = self._u(row, some), above[:, some], below[:, some]
            m = (upper, lower, self.m[:, : some.stop - some.start], self.m[:, : some.stop - some.start])[row]
            multiply(np, u, self.windows.v, m)
            if row in (1, 2):
                np.add(upper, m, out=upper)
            if row in (2, 3):
                np.subtract(lower, m, out=lower)

    def _finish(self, bias: Any, out: Any, top: int) -> None:
        """Sum over columns and write the results to ``out``: (Aᵀ m) A."""
        for some in self._filters():
            done = self.done[:, : some.stop - some.start]
            flat = done.reshape(2, some.stop - some.start, -1)
            for odd_row in (0, 1):
                first, second, third, fourth = self.sums[odd_row, :, some]
                np.add(second, third, out=flat[0])
                np.add(flat[0], first, out=flat[0])
                np.subtract(second, third, out=flat[1])
                np.subtract(flat[1], fourth, out=flat[1])
                for odd_column in (0, 1):
                    target = out[:, some, 2 * top + odd_row : 2 * (top + done.shape[2]) : 2, odd_column::2]
                    values = done[odd_column, :, : target.shape[2], : target.shape[3]]
                    for image in range(len(out)):
                        if bias is None:
                            target[image] = values[..., image]
                        else:
                            np.add(values[..., image], bias[some], out=target[image])

    def _filters(self) -> Iterator[slice]:
        for first in range(0, self.filters, self.some):
            yield slice(first, min(first + self.some, self.filters))


def _combine(place: int, four: tuple[Any, Any, Any, Any], out: RawArray) -> None:
    """Apply row ``place`` of Bᵀ to four neighbours, for example first minus third for row 0."""
    first, second, third, fourth = four
    if place == 0:
        np.subtract(first, third, out=out)
    elif place == 1:
        np.add(second, third, out=out)
    elif place == 2:
        np.subtract(third, second, out=out)
    else:
        np.subtract(second, fourth, out=out)


def _places(begin: int, size: int, count: int) -> tuple[slice, slice]:
    """Return which of ``count`` places, every second element from ``begin`` on, are within ``size``; and which
    elements."""
    first, last = max(0, -(begin // 2)), min(count, (size - begin + 1) // 2)
    last = max(first, last)
    return slice(first, last), slice(begin + 2 * first, max(0, begin + 2 * last - 1), 2)
