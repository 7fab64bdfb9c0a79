"""The gradient of a 3x3 weight by Winograd's products, summed over tiles.

With the names of :mod:`weftplan.ops.nn.winograd` and a tile y of the result's gradient: Gᵀ [Σ (A y Aᵀ) · (Bᵀ d B)ᵀ] G.
The last row of A is taken without its sign, which the matrix at the end has in its place, so that of four factors two
are in y as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan.ops.core.products import multiply
from weftplan.ops.core.schema import Workspace
from weftplan.ops.nn.winograd import F32, KERNEL, Windows, blocks, take_apart, view
from weftplan.ops.nn.winograd_sizes import APART, PLACES, ROW, Pass, weight_parts
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import split_in_rooms

_SIGNS = np.array([1, 1, 1, -1], F32)
_BACK = KERNEL * np.kron(_SIGNS, _SIGNS)[:, None]
"""The matrix that maps the sums at 16 places to the 9 elements of a kernel."""


def sum_up(ctx: Workspace, p: Pass, data: Any, ograd: Any, wgrad: Any) -> None:
    """Compute ``wgrad`` = the sum over images and tiles; ``p`` is the pass forward."""
    pieces = weight_parts(p)
    sums = ctx.take((len(pieces), PLACES, p.filters * p.channels + APART), F32)[:, :, : p.filters * p.channels]
    rooms = ctx.take((len(pieces), p.weight_room_nbytes - sums.strides[0]), np.uint8)

    def work(number: int, room: int) -> None:
        some = pieces[number]
        _Sums(Workspace(ctx.xp, rooms[room]), p).run(data[some], ograd[some], sums[number])

    split_in_rooms(work, len(pieces))
    for one in sums[1:]:
        np.add(sums[0], one, out=sums[0])
    multiply(np, sums[0].T, _BACK, wgrad.reshape(-1, 9))


class _Sums:
    """The computation of one part's sums, block by block in the same scratch."""

    def __init__(self, ctx: Workspace, p: Pass) -> None:
        self.p = p
        self.windows = Windows(ctx, p)
        self._flat = [ctx.take((size,), F32) for size in p.weight_sizes[len(p.window_sizes) :]]

    def run(self, data: Any, ograd: Any, sums: Any) -> None:
        """Compute the sums of the part."""
        cut = None
        first = True
        sums = sums.reshape(PLACES, self.p.filters, self.p.channels)
        for images, top, rows in blocks(self.p, len(data)):
            sizes = images.stop - images.start, rows
            if sizes != cut:
                self._cut(*sizes)
                cut = sizes
            self.windows.fill(data[images], top)
            take_apart(self.phases, ograd[images], 2 * top, 0)
            for row in range(ROW):
                self.windows.transform(row)
                self._add(row, sums[ROW * row : ROW * (row + 1)], first=first)
            first = False

    def _cut(self, images: int, rows: int) -> None:
        """Views of the scratch for blocks of this size."""
        self.windows.cut(images, rows)
        phases, combined, factor, term = self._flat
        filters, tiles = self.p.filters, self.windows.tiles
        self.phases = view(phases, 2, 2, filters, rows, self.windows.columns, images)
        self.combined = view(combined, 2, filters, tiles)
        self.factor = view(factor, filters, tiles)
        self.term = view(term, filters, self.p.channels)

    def _add(self, row: int, sums: RawArray, *, first: bool) -> None:
        """Add the products of row ``row`` to their sums; the ``first`` sets them."""
        even, odd = self.phases.reshape(2, *self.combined.shape)
        a, b = _combine(row, even, odd, self.combined)
        for place in range(ROW):
            factor, v = _combine(place, a, b, self.factor), self.windows.v[place].T
            if first:
                multiply(np, factor, v, sums[place])
            else:
                multiply(np, factor, v, self.term)
                np.add(sums[place], self.term, out=sums[place])


def _combine(place: int, even: RawArray, odd: RawArray, out: RawArray) -> RawArray:
    """Return one row of A, but for the sign of the last: one of the two, their sum or their difference."""
    if place == 0:
        return even
    if place == ROW - 1:
        return odd
    return (np.add if place == 1 else np.subtract)(even, odd, out=out)
