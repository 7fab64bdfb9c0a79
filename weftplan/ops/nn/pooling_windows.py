"""Pooling windows, and their reduction on a block of planes (planes, *spatial).

A *tap* is one position within the window. The functions loop over the taps, with one operation for all windows, on
strided views of the image. So nothing is copied or padded.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from weftplan.ops.core.floats import is_float, limits
from weftplan.ops.core.schema import Shape
from weftplan.support.array_types import ArrayModule, DType, DTypeLike, RawArray, Scalar


@dataclass(frozen=True, slots=True)
class Grid:
    """The windows of one image, and the elements of the image that the windows have at each tap.

    A window is left out at a tap at which it has padding.
    """

    image: Shape
    grid: Shape
    taps: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]
    """(windows, elements) per tap in row-major order; both index (planes, *spatial)."""
    covering: tuple[bool, ...]
    """For each tap, whether the element of every window is in the image, not in the padding."""
    disjoint: bool
    """Whether no element belongs to two windows."""
    counts: tuple[tuple[int, ...], ...]
    """For each axis, the number of elements along it that the average of each window counts."""


@functools.lru_cache(maxsize=1024)
def make_grid(image: Shape, grid: Shape, kernel: Shape, stride: Shape, pad: Shape, include_pad: bool) -> Grid:
    """Return the windows of ``kernel`` over an image; ``grid`` has their number along each axis.

    ``include_pad``: whether the divisor of an average counts padding.
    """
    along: list[list[tuple[slice, slice]]] = []
    counts = []
    for extent, size, k, s, p in zip(image, grid, kernel, stride, pad, strict=True):
        ranges = []
        for tap in range(k):
            start = max(0, -(-(p - tap) // s))
            stop = min(size, (extent - 1 + p - tap) // s + 1)
            if stop > start:
                begin = start * s - p + tap
                ranges.append((slice(start, stop), slice(begin, begin + (stop - start - 1) * s + 1, s)))
        along.append(ranges)
        spans = []
        for position in range(size):
            begin, end = position * s - p, min(position * s - p + k, extent + p)
            if not include_pad:
                begin, end = max(begin, 0), min(end, extent)
            spans.append(max(1, end - begin))
        counts.append(tuple(spans))
    every = slice(None)
    taps = tuple(((every, *(pair[0] for pair in tap)), (every, *(pair[1] for pair in tap))) for tap in product(*along))
    covering = tuple(
        all(s.start == 0 and s.stop == size for s, size in zip(windows[1:], grid, strict=True)) for windows, _ in taps
    )
    return Grid(image, grid, taps, covering, all(s >= k for s, k in zip(stride, kernel, strict=True)), tuple(counts))


def lowest(dtype: DType) -> Scalar:
    """Return the lowest finite number of ``dtype``, which is the maximum of a window without elements."""
    least: Scalar = limits(dtype).min if is_float(dtype) else np.iinfo(dtype).min
    return least


def divisors(xp: ArrayModule, grid: Grid, dtype: DTypeLike) -> RawArray | float:
    """Return 1 / count of each window: a number if all counts are equal, else an array of shape ``grid.grid``."""
    if all(len(set(spans)) == 1 for spans in grid.counts):
        return 1.0 / math.prod(spans[0] for spans in grid.counts)
    counts = functools.reduce(np.multiply.outer, (np.array(spans, np.float64) for spans in grid.counts))
    shares: RawArray = xp.asarray((1.0 / counts).astype(dtype))
    return shares


def _power(xp: ArrayModule, source: RawArray, p: int, out: RawArray) -> None:
    """Compute ``out`` = ``source`` to the power ``p`` (0, 1, 2 or 3); ``out`` must not be ``source``."""
    if p == 0:
        out.fill(1)
    elif p == 1:
        out[...] = source
    else:
        xp.multiply(source, source, out=out)
        if p == 3:
            xp.multiply(out, source, out=out)


def root(xp: ArrayModule, array: RawArray, p: int) -> None:
    """Replace ``array`` by its ``p``-th root; ``p`` is 1, 2 or 3."""
    if p == 2:
        xp.sqrt(array, out=array)
    elif p == 3:
        xp.cbrt(array, out=array)


def reduce_max(xp: ArrayModule, grid: Grid, source: RawArray, target: RawArray) -> None:
    """Compute ``target`` = maximum of each window of ``source`` (planes, *spatial)."""
    begun = grid.covering[0]
    if not begun:
        target.fill(lowest(target.dtype))
    for number, (windows, elements) in enumerate(grid.taps):
        if begun and number == 0:
            target[...] = source[elements]
        else:
            xp.maximum(target[windows], source[elements], out=target[windows])


def reduce_sum(
    xp: ArrayModule, grid: Grid, source: RawArray, target: RawArray, p: int, powers: RawArray | None
) -> None:
    """Compute ``target`` = sum over each window of the elements of ``source`` to the power ``p``.

    ``powers`` is scratch at least as large as ``target``; None if ``p`` is 1.
    """
    target.fill(0)
    for windows, elements in grid.taps:
        part = target[windows]
        term = source[elements]
        if powers is not None:
            raised = powers[: source.shape[0]][windows]
            _power(xp, term, p, raised)
            term = raised
        xp.add(part, term, out=part)


def spread_max(
    xp: ArrayModule,
    grid: Grid,
    data: RawArray,
    output: RawArray,
    remaining: RawArray,
    term: RawArray,
    mask: RawArray,
    target: RawArray,
) -> None:
    """Add each window's gradient to the element of ``target`` that is the window's first maximum.

    ``remaining`` holds the gradients of the windows; a window's entry becomes 0 when its maximum is found. ``term`` and
    ``mask`` are scratch.
    """
    for windows, elements in grid.taps:
        hit, share, unclaimed = mask[windows], term[windows], remaining[windows]
        xp.equal(data[elements], output[windows], out=hit)
        xp.multiply(unclaimed, hit, out=share)
        xp.subtract(unclaimed, share, out=unclaimed)
        if grid.disjoint:
            target[elements] = share
        else:
            xp.add(target[elements], share, out=target[elements])


def spread_power(
    xp: ArrayModule,
    grid: Grid,
    data: RawArray,
    output: RawArray,
    p: int,
    share: RawArray,
    term: RawArray,
    target: RawArray,
) -> None:
    """Add to ``target`` the gradient of each window, ``share``, times d out / d x = (x / out)^(p-1).

    A divisor of 0 counts as 1, so that nothing becomes infinite. ``share`` is overwritten; ``term`` is scratch.
    """
    _power(xp, output, p - 1, term)
    xp.copyto(term, 1, where=term == 0)
    xp.divide(share, term, out=share)
    for windows, elements in grid.taps:
        part = term[windows]
        _power(xp, data[elements], p - 1, part)
        xp.multiply(part, share[windows], out=part)
        xp.add(target[elements], part, out=target[elements])
