"""Sizes of a compiled convolution: extents along three axes, bands of rows, and the positions that strides reach.

All sizes follow from shapes alone, so a plan is valid on every machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weftplan.ops.nn.conv_geometry import Geometry

Triple = tuple[int, int, int]

MIN_POSITIONS = 64
"""Minimum output positions per product: smaller images are batched, because a partial tile costs as much as a full
tile."""
CUT_IMAGES = 4
"""Images per product if columns are cut into runs (:func:`cuts_columns`): some runs are single columns, and a tile
needs several positions. The data gradient of LeNet's second layer takes 4.71 ms with 2 images, 3.84 with 4, 4.39 with
8, 4.86 with 16, and 5.70 uncut."""
WORTH_CUTTING = 1.25
"""A data gradient's columns are cut into runs that the same taps reach if computing all taps everywhere, also on
padding, takes more than this number of times the multiplications of the runs. For LeNet's second layer, 5x5 on 12x12
pixels, the ratio is 1.5 along each axis."""
CUT_BYTES = 64 << 10
"""Maximum bytes of the output gradients of :data:`CUT_IMAGES` images if columns are cut into runs: they must stay in
a cache while all positions are computed."""
BAND_BYTES = 96 << 10
"""Maximum bytes of a band, which is a range of image rows copied to contiguous memory. The band stays in the
second-level cache while all panels of the weight are applied."""
BAND_POSITIONS = 48
"""Minimum output positions of a band; with fewer, reading the weight's panels for each band costs too much."""
CHUNK = 512
"""Pixels in one chain of additions of a weight's gradient. It determines the result's bits, so it is a constant."""
PANEL_BYTES = 64
"""Bytes of the widest vector of any machine. Scratch is sized for it, so that a plan is the same on every machine."""


def _triple(values: Sequence[int], fill: int) -> Triple:
    a, b, c = (*(fill,) * (3 - len(values)), *values)
    return a, b, c


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """Sizes of a convolution with three spatial axes."""

    batch: int
    groups: int
    channels: int
    """Channels of the image in one group."""
    filters: int
    """Filters of one group."""
    image: Triple
    grid: Triple
    """Number of windows along each axis."""
    kernel: Triple
    stride: Triple
    dilate: Triple
    pad: Triple
    itemsize: int
    all_channels: int = 0
    """Channels of the whole result if these are the sizes of a slice of its channels; 0: no slice."""
    halves: bool = False
    """Whether arrays are float16; computation is then in float32, and ``itemsize`` is that of float32."""

    @property
    def stored(self) -> int:
        """Bytes of an element in the caller's arrays."""
        return self.itemsize // 2 if self.halves else self.itemsize

    @property
    def copied(self) -> bool:
        """Whether a weight gradient reads padded copies of the images instead of the images."""
        return self.pads or self.halves

    @property
    def taps(self) -> int:
        """Number of kernel elements."""
        return math.prod(self.kernel)

    @property
    def pixels(self) -> int:
        """Number of windows of an image."""
        return math.prod(self.grid)

    @property
    def padded(self) -> Triple:
        """Extents of the range that all windows together read, padding included."""
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
        """Whether the convolution is a plain matrix product, with the image as its right operand."""
        return self.taps == 1 and self.image == self.grid and not self.pads

    @property
    def source(self) -> Triple:
        """Extents of the array that windows read: the image or its padded copy."""
        return self.padded if self.copied else self.image

    @property
    def images_per_chain(self) -> int:
        """Number of images whose pixels a weight's gradient sums in one chain."""
        return max(1, min(self.batch, CHUNK // self.pixels))

    @property
    def side_by_side(self) -> int:
        """Number of images per product: enough to give it at least :data:`MIN_POSITIONS` output positions."""
        return min(self.batch, -(-MIN_POSITIONS // self.pixels))

    @property
    def data_side_by_side(self) -> int:
        """Number of images per product of a data gradient."""
        return min(self.batch, CUT_IMAGES) if cuts_columns(self) else self.side_by_side

    @property
    def chunk_rows(self) -> int:
        """Number of rows of windows in one chain of a weight gradient, if an image has more than one chain."""
        return max(1, CHUNK // self.grid[2])


@functools.lru_cache(maxsize=1024)
def sizes(geo: Geometry) -> ConvSizes:
    """Return the sizes of a convolution; missing leading axes get extent 1 and no padding."""
    return ConvSizes(
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
        itemsize=geo.acc.itemsize,
        halves=geo.dtype == np.float16,
    )


@dataclass(frozen=True, slots=True)
class Bands:
    """The bands of rows in which a product's source is copied with padding, or a single band that is read in place."""

    copies: bool
    """Whether bands are copied."""
    rows: int
    """Rows of windows in a band; the last band may have fewer."""
    count: int
    """Number of bands."""
    extents: Triple
    """Extents of a plane of the copy, or of the source if it is read in place."""
    lead: Triple
    """Number of zeros before the source along each axis, in the first band."""
    step: int
    """Number of source rows between the starts of adjacent bands."""


def _bands(
    planes: int, source: Triple, reach: Triple, lead: Triple, rows: int, row_windows: int, step: int, *, halo: int,
    pads: bool, s: ConvSizes,
) -> Bands:  # fmt: skip
    """Return bands for ``rows`` rows of windows, each of ``row_windows`` windows.

    Args:
        planes: number of source planes that are copied together.
        source: extents of a source plane.
        reach: extents of the range that all windows read, padding included.
        step: number of source rows between adjacent rows of windows.
        halo: number of source rows that a row of windows may read; several phases count from their common first row.
        pads: whether windows read padding.
    """
    if not pads and not s.halves and planes * math.prod(source) * s.itemsize <= BAND_BYTES:
        return Bands(False, rows, 1, source, (0, 0, 0), 0)
    row_bytes = planes * reach[0] * reach[2] * s.itemsize
    max_rows = (BAND_BYTES // row_bytes - halo) // step + 1
    band_rows = min(rows, max(max_rows, -(-BAND_POSITIONS // row_windows), 1))
    count = -(-rows // band_rows)
    band_rows = -(-rows // count)
    height = min(reach[1], (band_rows - 1) * step + halo)
    return Bands(True, band_rows, -(-rows // band_rows), (reach[0], height, reach[2]), lead, band_rows * step)


@functools.lru_cache(maxsize=1024)
def forward_bands(s: ConvSizes) -> Bands:
    """Return the bands of the images that a forward pass reads."""
    planes = s.side_by_side * s.groups * s.channels
    halo = (s.kernel[1] - 1) * s.dilate[1] + 1
    return _bands(planes, s.image, s.padded, s.pad, s.grid[1], s.grid[0] * s.grid[2], s.stride[1], halo=halo,
                  pads=s.pads, s=s)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def cuts_columns(s: ConvSizes) -> bool:
    """Return whether a data gradient cuts its columns into runs that the same taps reach, so it needs no padding."""
    if s.halves or CUT_IMAGES * s.groups * s.filters * s.pixels * s.itemsize > CUT_BYTES:
        return False
    phases = reach_of(s).phases[2]
    computed = sum(count * len(taps) for _, count, taps in phases)
    runs = [run for phase in phases for run in runs_of(phase, s.stride[2], 1, s.grid[2])]
    return computed > WORTH_CUTTING * sum(count * len(taps) for _, count, taps in runs)


@functools.lru_cache(maxsize=1024)
def data_bands(s: ConvSizes) -> Bands:
    """Return the bands of the output gradients that a data gradient reads."""
    reach = reach_of(s)
    if cuts_columns(s):
        return Bands(False, max(count for _, count, _ in reach.phases[1]), 1, s.grid, (0, 0, 0), 0)
    planes = s.data_side_by_side * s.groups * s.filters
    rows, depth, width = (max(count for _, count, _ in reach.phases[axis]) for axis in (1, 0, 2))
    # A phase with fewer rows may read further per row than the phase with the most rows.
    halo = reach.lead[1] + max((read for _, _, taps in reach.phases[1] for _, read in taps), default=0) + 1
    return _bands(planes, s.grid, reach.extents, reach.lead, rows, depth * width, 1, halo=halo, pads=reach.pads,
                  s=s)  # fmt: skip


Phase = tuple[int, int, tuple[tuple[int, int], ...]]
"""Positions along an axis that the same taps compute: (first position, number of positions, a pair for each tap). The
pair is (tap, source position that the tap reads for the first position)."""


def runs_of(phase: Phase, spacing: int, step: int, extent: int) -> list[Phase]:
    """Cut a phase into runs of positions; in a run, the same taps read the source, and all other taps read padding.

    Args:
        spacing: distance between the positions of the phase.
        step: distance in the source between the reads of adjacent positions.
        extent: extent of the source; positions outside 0 to ``extent`` are padding.
    """
    first_position, count, taps = phase
    runs: list[Phase] = []
    start = 0
    mine: tuple[tuple[int, int], ...] = ()
    for position in range(count + 1):
        inside = tuple(tap for tap in taps if 0 <= tap[1] + position * step < extent)
        if position and (position == count or inside != mine):
            moved = tuple((tap, read + start * step) for tap, read in mine)
            runs.append((first_position + start * spacing, position - start, moved))
            start = position
        mine = inside
    return runs


@dataclass(frozen=True, slots=True)
class Reach:
    """The output positions that a data gradient reads along each axis."""

    lead: Triple
    """Number of positions before the first output position."""
    extents: Triple
    """Extents of the range that is read, padding included."""
    pads: bool
    """Whether positions outside the output are read."""
    phases: tuple[tuple[Phase, ...], ...]
    """The phases of each axis."""


@functools.lru_cache(maxsize=1024)
def reach_of(s: ConvSizes) -> Reach:
    """Return the output positions that a data gradient reads, and its phases.

    Through ``tap``, image position h belongs to window (h + pad - tap · dilate) / stride if that is an integer. So
    positions that are a stride apart have the same taps; they form a *phase*.
    """
    phases, leads, extents, pads = [], [], [], False
    for image, grid, kernel, stride, dilate, pad in zip(
        s.image, s.grid, s.kernel, s.stride, s.dilate, s.pad, strict=True
    ):
        axis = []
        low, high = 0, grid - 1
        lows, highs = [], []
        for first_position in range(min(stride, image)):
            count = -(-(image - first_position) // stride)
            taps = tuple(
                (tap, (first_position + pad - tap * dilate) // stride)
                for tap in range(kernel)
                if (first_position + pad - tap * dilate) % stride == 0
            )
            axis.append((first_position, count, taps))
            lows += [moved for _, moved in taps]
            highs += [moved + count - 1 for _, moved in taps]
        low, high = min(lows, default=0), max(highs, default=0)
        pads = pads or low < 0 or high >= grid
        phases.append(tuple(axis))
        leads.append(-low)
        extents.append(high - low + 1)
    if not pads:
        leads, extents = [0, 0, 0], list(s.grid)
    return Reach((leads[0], leads[1], leads[2]), (extents[0], extents[1], extents[2]), pads, tuple(phases))
