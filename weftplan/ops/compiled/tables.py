"""The tables of offsets with which :mod:`weftplan.ops.compiled.product` runs a convolution: made from sizes alone.

Everything counts three spatial axes; fewer are filled up in front. A *plan* here is a block of words with the tables
that it points to; it holds no array of a caller, so that it is made once per geometry and copied for each call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product as every
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftplan.ops.compiled.product import GATHER, PACK, PAD, PRODUCT, WEIGHTS
from weftplan.ops.nn.conv_geometry import Geometry

Words = NDArray[np.int64]
Triple = tuple[int, int, int]

INNER = 64
"""Most positions of the inner sum: its table stays in the nearest cache."""
TOGETHER = 64
"""Places below which images are taken together."""
BAND_BYTES = 96 << 10
"""Bytes of an image that are laid close together, to stay in the second cache while the panels of the weight pass."""
BAND_PLACES = 48
"""Fewest places for which the panels of the weight are worth passing by."""
CHUNK = 512
"""Pixels in one chain of additions of a weight's gradient. Part of the result's bits, so it depends on nothing."""
PANEL_BYTES = 64
"""Bytes of a vector on the widest machine: scratch is counted for it, so that a plan is the same on every machine."""


def wide(rows: int, itemsize: int) -> int:
    """``rows`` rounded up to whole panels of the widest machine."""
    lanes = PANEL_BYTES // itemsize
    return -(-rows // lanes) * lanes


def _triple(values: Sequence[int], fill: int) -> Triple:
    a, b, c = (*(fill,) * (3 - len(values)), *values)
    return a, b, c


@dataclass(frozen=True, slots=True)
class Sizes:
    """One convolution with three spatial axes."""

    batch: int
    groups: int
    channels: int
    """Channels of the image in one group."""
    filters: int
    """Filters of one group."""
    image: Triple
    grid: Triple
    kernel: Triple
    stride: Triple
    dilate: Triple
    pad: Triple
    itemsize: int

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return math.prod(self.kernel)

    @property
    def pixels(self) -> int:
        """Windows of an image."""
        return math.prod(self.grid)

    @property
    def padded(self) -> Triple:
        """Extents of an image as far as windows reach, padding included."""
        a, b, c = (
            (g - 1) * s + (k - 1) * d + 1
            for g, s, k, d in zip(self.grid, self.stride, self.kernel, self.dilate, strict=True)
        )
        return a, b, c

    @property
    def pads(self) -> bool:
        """Whether windows reach beyond the image."""
        return any(self.pad) or any(p > i for p, i in zip(self.padded, self.image, strict=True))

    @property
    def pointwise(self) -> bool:
        """True where the image itself is the right side of a matrix product."""
        return self.taps == 1 and self.image == self.grid and not self.pads

    @property
    def source(self) -> Triple:
        """Extents of what windows are taken from: the image or its padded copy."""
        return self.padded if self.pads else self.image

    @property
    def together(self) -> int:
        """Images of which a weight's gradient sums the pixels in one chain."""
        return max(1, min(self.batch, CHUNK // self.pixels))

    @property
    def side_by_side(self) -> int:
        """Images whose places one product takes together: as many as make its tiles worth their weights."""
        return max(1, min(self.batch, TOGETHER // max(self.pixels, math.prod(self.image))))

    @property
    def chunk_rows(self) -> int:
        """Rows of windows in one chain, where an image has more than one chain."""
        return max(1, CHUNK // self.grid[2])


@functools.lru_cache(maxsize=1024)
def sizes(geo: Geometry) -> Sizes:
    """The same convolution with three axes."""
    return Sizes(
        batch=geo.batch,
        groups=geo.groups,
        channels=geo.channels // geo.groups,
        filters=geo.filters // geo.groups,
        image=_triple(geo.image, 1),
        grid=_triple(geo.grid, 1),
        kernel=_triple(geo.kernel, 1),
        stride=_triple(geo.stride, 1),
        dilate=_triple(geo.dilate, 1),
        pad=_triple(geo.pad, 0),
        itemsize=geo.dtype.itemsize,
    )


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes of the two buffers of a pass."""

    packed: int
    padded: int


@dataclass(frozen=True, slots=True)
class Bands:
    """How the source of a gathered product is copied: in bands of rows, with padding, or not at all."""

    copies: bool
    rows: int
    """Rows of windows in a band; the last band may have fewer."""
    count: int
    extents: Triple
    """Extents of a plane: of the copy, or of the source itself."""
    lead: Triple
    """Zeros in front of the first band."""
    step: int
    """Rows of the source from band to band."""


def _bands(
    planes: int, source: Triple, reach: Triple, lead: Triple, rows: int, row_places: int, step: int, *, pads: bool,
    itemsize: int,
) -> Bands:  # fmt: skip
    """Bands for ``rows`` rows of windows, each of ``row_places``, that are ``step`` source rows apart.

    ``reach`` is what all of them read, padding included.
    """
    if not pads and planes * math.prod(source) * itemsize <= BAND_BYTES:
        return Bands(False, rows, 1, source, (0, 0, 0), 0)
    halo = reach[1] - (rows - 1) * step
    row_bytes = planes * reach[0] * reach[2] * itemsize
    most = (BAND_BYTES // row_bytes - halo) // step + 1
    some = min(rows, max(most, -(-BAND_PLACES // row_places), 1))
    count = -(-rows // some)
    some = -(-rows // count)
    return Bands(True, some, -(-rows // some), (reach[0], (some - 1) * step + halo, reach[2]), lead, some * step)


@functools.lru_cache(maxsize=1024)
def _forward_bands(s: Sizes) -> Bands:
    planes = s.side_by_side * s.groups * s.channels
    return _bands(planes, s.image, s.padded, s.pad, s.grid[1], s.grid[0] * s.grid[2], s.stride[1], pads=s.pads,
                  itemsize=s.itemsize)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _data_bands(s: Sizes) -> Bands:
    reach = _reach(s)
    planes = s.side_by_side * s.groups * s.filters
    rows, depth, width = (max(count for _, count, _ in reach.phases[axis]) for axis in (1, 0, 2))
    return _bands(planes, s.grid, reach.extents, reach.lead, rows, depth * width, 1, pads=reach.pads,
                  itemsize=s.itemsize)  # fmt: skip


def forward_scratch(s: Sizes) -> Scratch:
    """The weight as panels, and a band of an image."""
    packed = s.groups * wide(s.filters, s.itemsize) * s.channels * s.taps * s.itemsize
    bands = _forward_bands(s)
    return Scratch(packed, _copy_bytes(s, bands.extents, s.side_by_side * s.groups * s.channels) if bands.copies else 0)


def data_scratch(s: Sizes) -> Scratch:
    """The weight as panels of channels, and a band of an output gradient."""
    packed = s.groups * wide(s.channels, s.itemsize) * s.filters * s.taps * s.itemsize
    bands = _data_bands(s)
    return Scratch(packed, _copy_bytes(s, bands.extents, s.side_by_side * s.groups * s.filters) if bands.copies else 0)


def weight_scratch(s: Sizes) -> Scratch:
    """Output gradients of one chunk as panels, and the padded images of a chunk."""
    together = s.together
    pixels = together * s.pixels if together > 1 else min(s.pixels, s.chunk_rows * s.grid[2])
    packed = wide(s.filters, s.itemsize) * pixels * s.itemsize
    return Scratch(packed, _copy_bytes(s, s.padded, together * s.groups * s.channels) if s.pads else 0)


def _copy_bytes(s: Sizes, extents: Triple, planes: int) -> int:
    return planes * math.prod(extents) * s.itemsize + PANEL_BYTES


@dataclass(slots=True)
class Plan:
    """Words of one pass, with what they point to."""

    names: Sequence[str]
    words: Words
    tables: list[Words] = field(default_factory=list)

    def filled(self, **values: int) -> Words:
        """The words of one call: these set, the others as planned."""
        words = self.words.copy()
        for name, value in values.items():
            words[self.names.index(name)] = value
        return words


def _words(names: Sequence[str], values: dict[str, int]) -> Words:
    return np.array([values.get(name, 0) for name in names], dtype=np.int64)


def _address(array: Words) -> int:
    return int(array.ctypes.data)


def _pairs(pairs: Iterable[tuple[int, int]], scale: int, other: int) -> Words:
    """A table of (first times ``scale``, second times ``other``) bytes, never empty."""
    rows = [(first * scale, second * other) for first, second in pairs]
    return np.array(rows or [(0, 0)], dtype=np.int64)


def _steps(extents: Triple) -> Triple:
    return extents[1] * extents[2], extents[2], 1


def _divisor(count: int, most: int) -> int:
    """The largest divisor of ``count`` that is at most ``most`` (at least 1)."""
    return max(n for n in range(1, max(1, min(count, most)) + 1) if count % n == 0)


def _pad_words(s: Sizes, from_: Triple, to: Triple, lead: Triple) -> Words:
    values = {"planes_step": math.prod(from_) * s.itemsize}
    for name, given in (("", from_), ("to_", to)):
        values |= dict(zip((f"{name}depth", f"{name}height", f"{name}width"), given, strict=True))
    values |= {"lead_depth": lead[0], "lead_width": lead[2]}
    return _words(PAD, values)


def _tap_offsets(s: Sizes, steps: Triple) -> list[int]:
    """Where each tap lies in the source, against the first."""
    moves = [d * step for d, step in zip(s.dilate, steps, strict=True)]
    return [sum(i * move for i, move in zip(tap, moves, strict=True)) for tap in every(*map(range, s.kernel))]


@functools.lru_cache(maxsize=1024)
def forward(s: Sizes, lanes: int) -> Plan:
    """Output pixels from channels and taps."""
    size, taps, panel = s.itemsize, s.taps, lanes * s.itemsize
    bands = _forward_bands(s)
    steps, plane = _steps(bands.extents), math.prod(bands.extents)
    reduced = s.channels * taps
    one, whole = s.groups * s.channels * plane, s.groups * s.filters * s.pixels
    columns = [(w * s.stride[2], w) for w in range(s.grid[2])]
    products, held = [], []
    every_tap = tuple((i, i * s.dilate[1] - s.pad[1]) for i in range(s.kernel[1]))
    left = s.grid[1] - (bands.count - 1) * bands.rows
    if bands.count == 1:  # rows that only some taps reach are not worth all of them
        runs = 2 * _runs((0, left, every_tap), 1, s.stride[1], s.image[1])
    else:
        runs = [(0, bands.rows, every_tap), (0, left, every_tap)]
    for first, count, reached in runs:
        used = [
            (sum(i * d * step for i, d, step in zip(tap, s.dilate, steps, strict=True)),
             (tap[0] * s.kernel[1] + tap[1]) * s.kernel[2] + tap[2])
            for tap in every(range(s.kernel[0]), [i for i, _ in reached], range(s.kernel[2]))
        ]  # fmt: skip
        some = _divisor(s.channels, INNER // max(1, len(used)))
        inner = [(c * plane + offset, c * taps + t) for c in range(some) for offset, t in used]
        outer = [(c * plane, c * taps) for c in range(0, s.channels, some)]
        places = [
            (n * one + d * s.stride[0] * steps[0] + h * s.stride[1] * steps[1],
             n * whole + (d * s.grid[1] + h) * s.grid[2])
            for n, d, h in every(range(s.side_by_side), range(s.grid[0]), range(first, first + count))
        ]  # fmt: skip
        words, made = _product(s, outer, inner, places, columns, panel, reduced * panel, s.filters, s.pixels)
        products.append(words)
        held += made
    pack = _words(PACK, {"rows": s.filters, "row_step": reduced * size, "length": reduced, "transposes": 1,
                         "panel_step": reduced * panel})  # fmt: skip
    words, made = _gather(s, bands, products, pack, s.image, {
        "x_image": s.groups * s.channels * math.prod(s.image) * size,
        "y_image": whole * size, "x_group": s.channels * plane * size,
        "w_group": s.filters * reduced * size, "packed_group": -(-s.filters // lanes) * reduced * panel,
        "y_group": s.filters * s.pixels * size, "bias_group": s.filters * size,
        "planes": s.groups * s.channels, "outer": 1, "y_step": bands.rows * s.grid[2] * size,
    })  # fmt: skip
    return Plan(GATHER, words, [*held, *made])


def _gather(
    s: Sizes, bands: Bands, products: list[Words], pack: Words, source: Triple, values: dict[str, int]
) -> tuple[Words, list[Words]]:
    """Words of :data:`GATHER`: what both directions share, and ``values``; ``products`` those of a band, then of the
    last one."""
    pad = _pad_words(s, source, bands.extents, bands.lead)
    for words in products:  # the tables have the rows of several images
        words[PRODUCT.index("rows")] //= s.side_by_side
    table = np.array([_address(words) for words in products], dtype=np.int64)
    words = _words(GATHER, {
        "last": s.batch, "groups": s.groups, "copies": int(bands.copies), "pad": _address(pad),
        "pack": _address(pack), "phases": len(products) // 2, "phase_table": _address(table),
        "together": s.side_by_side, "bands": bands.count, "lead": bands.lead[1], "lead_step": bands.step, **values,
    })  # fmt: skip
    return words, [*products, pack, pad, table]


def _product(
    s: Sizes, outer: list[tuple[int, int]], inner: list[tuple[int, int]], rows: list[tuple[int, int]],
    columns: list[tuple[int, int]], panel: int, panel_step: int, channels: int, channel_step: int,
) -> tuple[Words, list[Words]]:  # fmt: skip
    """Words of one product; offsets in elements of x and y, and in positions of w."""
    size = s.itemsize
    held = [_pairs(outer, size, panel), _pairs(inner, size, panel), _pairs(rows, size, size),
            _pairs(columns, size, size)]  # fmt: skip
    tables = dict(zip(("outer_table", "inner_table", "row_table", "column_table"), map(_address, held), strict=True))
    words = _words(PRODUCT, {
        "panel_step": panel_step, "channels": channels, "channel_step": channel_step * size, "inner": len(inner),
        "rows": len(rows), "columns": len(columns), "outer": len(outer), **tables,
    })  # fmt: skip
    return words, held


Phase = tuple[int, int, tuple[tuple[int, int], ...]]
"""Positions along an axis that are read by the same taps: (the first, their number, (tap, what it reads for the first)
for each tap)."""


def _runs(phase: Phase, apart: int, step: int, extent: int) -> list[Phase]:
    """A phase cut into runs of positions for which the same taps read the source, 0…``extent``, and not padding.

    Args:
        apart: from one position to the next.
        step: how much further along the source the next position reads.
    """
    first, count, taps = phase
    found: list[Phase] = []
    start = 0
    mine: tuple[tuple[int, int], ...] = ()
    for position in range(count + 1):
        inside = tuple(tap for tap in taps if 0 <= tap[1] + position * step < extent)
        if position and (position == count or inside != mine):
            moved = tuple((tap, read + start * step) for tap, read in mine)
            found.append((first + start * apart, position - start, moved))
            start = position
        mine = inside
    return found


@dataclass(frozen=True, slots=True)
class _Reach:
    """Which output positions the data gradient reads along each axis."""

    lead: Triple
    extents: Triple
    pads: bool
    phases: tuple[tuple[Phase, ...], ...]
    """Of each axis."""


@functools.lru_cache(maxsize=1024)
def _reach(s: Sizes) -> _Reach:
    """Position h of an image is read by window (h + pad - tap · dilate) / stride where that is whole: positions of one
    *phase*, which are a stride apart, are read by the same taps."""
    phases, leads, extents, pads = [], [], [], False
    for image, grid, kernel, stride, dilate, pad in zip(
        s.image, s.grid, s.kernel, s.stride, s.dilate, s.pad, strict=True
    ):
        axis = []
        low, high = 0, grid - 1
        lows, highs = [], []
        for first in range(min(stride, image)):
            count = -(-(image - first) // stride)
            taps = tuple(
                (tap, (first + pad - tap * dilate) // stride)
                for tap in range(kernel)
                if (first + pad - tap * dilate) % stride == 0
            )
            axis.append((first, count, taps))
            lows += [moved for _, moved in taps]
            highs += [moved + count - 1 for _, moved in taps]
        low, high = min(lows, default=0), max(highs, default=0)
        pads = pads or low < 0 or high >= grid
        phases.append(tuple(axis))
        leads.append(-low)
        extents.append(high - low + 1)
    if not pads:
        leads, extents = [0, 0, 0], list(s.grid)
    return _Reach((leads[0], leads[1], leads[2]), (extents[0], extents[1], extents[2]), pads, tuple(phases))


@functools.lru_cache(maxsize=1024)
def data(s: Sizes, lanes: int) -> Plan:
    """The gradient of the image from filters and taps, one product for each phase of the strides."""
    size, taps, panel = s.itemsize, s.taps, lanes * s.itemsize
    reach, bands = _reach(s), _data_bands(s)
    steps, plane = _steps(bands.extents), math.prod(bands.extents)
    reduced = s.filters * taps
    image = math.prod(s.image)
    image_steps = _steps(s.image)
    one, whole = s.groups * s.filters * plane, s.groups * s.channels * image
    clears = False
    products: tuple[list[Words], list[Words]] = ([], [])
    held: list[Words] = []
    split = list(reach.phases)
    if bands.count == 1:  # rows that only some taps reach are not worth all of them
        split[1] = tuple(run for phase in split[1] for run in _runs(phase, s.stride[1], 1, s.grid[1]))
    for axes in every(*split):
        (first0, count0, _), (first1, count1, _), (first2, count2, _) = axes
        used: list[tuple[int, int]] = []
        for chosen in every(*(axis[2] for axis in axes)):
            tap = (chosen[0][0] * s.kernel[1] + chosen[1][0]) * s.kernel[2] + chosen[2][0]
            place = sum((e + lead) * step for (_, e), lead, step in zip(chosen, bands.lead, steps, strict=True))
            used.append((place, tap))
        if not used:  # nothing is read there, and the image has been cleared
            clears = True
            continue
        some = _divisor(s.filters, INNER // len(used))
        inner = [(k * plane + offset, k * taps + tap) for k in range(some) for offset, tap in used]
        outer = [(k * plane, k * taps) for k in range(0, s.filters, some)]
        columns = [(c, first2 + c * s.stride[2]) for c in range(count2)]
        left = max(0, count1 - (bands.count - 1) * bands.rows)
        for listed, rows in zip(products, (min(count1, bands.rows), left), strict=True):
            places = [
                (n * one + a * steps[0] + b * steps[1],
                 n * whole + (first0 + a * s.stride[0]) * image_steps[0] + (first1 + b * s.stride[1]) * image_steps[1])
                for n, a, b in every(range(s.side_by_side), range(count0), range(rows))
            ]  # fmt: skip
            words, made = _product(s, outer, inner, places, columns, panel, reduced * panel, s.channels, image)
            listed.append(words)
            held += made
    pack = _words(PACK, {"rows": s.channels, "row_step": taps * size, "step": s.channels * taps * size,
                         "length": taps, "transposes": int(taps > 1), "panel_step": reduced * panel})  # fmt: skip
    words, made = _gather(s, bands, [*products[0], *products[1]], pack, s.grid, {
        "x_image": s.groups * s.filters * s.pixels * size, "y_image": whole * size,
        "x_group": s.filters * plane * size, "w_group": s.filters * s.channels * taps * size,
        "packed_group": -(-s.channels // lanes) * reduced * panel, "y_group": s.channels * image * size,
        "planes": s.groups * s.filters, "outer": s.filters, "clears": int(clears),
        "y_step": bands.rows * s.stride[1] * image_steps[1] * size,
    })  # fmt: skip
    return Plan(GATHER, words, [*held, *made])


@functools.lru_cache(maxsize=1024)
def weight(s: Sizes, lanes: int) -> Plan:
    """The gradient of the weight from pixels."""
    size, taps, panel = s.itemsize, s.taps, lanes * s.itemsize
    steps, plane = _steps(s.source), math.prod(s.source)
    together = s.together
    image = math.prod(s.image)
    depth, height, width = s.grid

    def pixel(d: int, h: int, w: int) -> int:
        return d * s.stride[0] * steps[0] + h * s.stride[1] * steps[1] + w * s.stride[2] * steps[2]

    rows = _divisor(height, min(INNER, CHUNK) // width) if width <= INNER else 1
    inner = [(pixel(0, h, w), h * width + w) for h in range(rows) for w in range(width)]
    per_image = [(pixel(d, h, 0), (d * height + h) * width) for d in range(depth) for h in range(0, height, rows)]
    step = s.groups * s.channels * (plane if s.pads else image)
    outer = [(n * step + x, n * s.pixels + w) for n in range(together) for x, w in per_image]
    chunk = max(1, s.chunk_rows // rows)
    pixels = together * s.pixels if together > 1 else min(s.pixels, chunk * len(inner))
    places = [(c * plane, c * taps) for c in range(s.channels)]
    columns = [(offset, t) for t, offset in enumerate(_tap_offsets(s, steps))]
    product, held = _product(s, outer, inner, places, columns, panel, pixels * panel, s.filters, s.channels * taps)
    pack = _words(PACK, {"rows": s.filters, "row_step": s.pixels * size,
                         "step": s.groups * s.filters * s.pixels * size, "transposes": 1,
                         "panel_step": pixels * panel})  # fmt: skip
    pad = _pad_words(s, s.image, s.padded, s.pad)
    words = _words(WEIGHTS, {
        "images": s.batch, "together": together, "x_image": s.groups * s.channels * image * size,
        "dy_image": s.groups * s.filters * s.pixels * size, "groups": s.groups, "x_group": s.channels * plane * size,
        "dy_group": s.filters * s.pixels * size, "dw_group": s.filters * s.channels * taps * size,
        "copies": int(s.pads), "pad": _address(pad), "planes": s.groups * s.channels, "lead": s.pad[1],
        "pack": _address(pack), "product": _address(product), "outer": len(per_image), "chunk": chunk,
    })  # fmt: skip
    return Plan(WEIGHTS, words, [*held, product, pack, pad])


def address(array: Any) -> int:
    """Where an array's bytes begin."""
    found: int = array.__array_interface__["data"][0]
    return found
