"""1x1 convolutions as matrix products: eligibility, partition of passes, scratch.

The kernel is that of ``kernels.py``. It computes the forward pass and, with the weight's axes exchanged, the gradient
of the data. Parts are ranges of pixels, or of filters if there are few pixels. Parts and scratch follow from shapes
alone and are the same on every machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from weftplan.kernels.compiled import scratch
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments, Scaling, scaling_words
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.pointwise.kernels import NEAR, POINTWISE, pointwise
from weftplan.kernels.compiled.replay import Call, holding
from weftplan.kernels.compiled.size_table import PANEL_BYTES, ConvSizes
from weftplan.kernels.compiled.target import Target, host
from weftplan.kernels.compiled.winograd.kernels import VECTORS
from weftplan.ops.core.products import MOST
from weftplan.ops.core.schema import DType, aligned
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

LEAST_PIXELS = 8
"""Minimum pixels of an image at which this kernel is as fast as a BLAS product; fewer do not fill a vector."""
PACKED_BYTES = 48 << 10
"""Maximum bytes of packed pixels, which must stay in the first-level cache. With more channels at a time, weights are
read in longer runs."""
GATHERED_BYTES = 512 << 10
"""Maximum bytes of weights that a data gradient gathers at a time, because the weights of a filter are not contiguous.
Gathered weights stay in the second-level cache while all pixels are processed."""
AS_THEY_LIE = 32 << 10
"""Maximum bytes of strided weights that are read in place: all of them fit the first-level cache."""
UNIT = 48
"""Ranges of pixels start at multiples of this: whole register blocks on every machine."""
ROWS = 8
"""Ranges of filters start at multiples of this: whole register blocks on every machine."""
LEAST_FILTERS = 32
"""Minimum filters of a range; fewer do not pay for packing the pixels again in each range."""
ALIKE = 3
"""Ranges of pixels count as equal if their number times the longest range exceeds all pixels by at most 1 / ALIKE.

Unequal ranges are slow: for a gradient of 1,120 rows of 200 columns, two cores reach 149 GFLOP/s if one computes 144
of the columns, and 190 GFLOP/s with 560 rows each."""
MAX_SPANNED_PIXELS = 256
"""The pixels of smaller images are processed as one row: partly filled vectors cost more than scattered results."""
SHARE = 64
"""Maximum scratch of more than two parts: 1 / SHARE of the bytes of images and results."""


@dataclass(frozen=True, slots=True)
class PlanePass:
    """A 1x1 convolution, or its data gradient: ``channels`` planes of each image become ``filters`` planes."""

    batch: int
    channels: int
    """Channels of the source, which are summed over."""
    filters: int
    pixels: int
    itemsize: int
    is_gradient: bool
    """Whether this is a data gradient, so that the weight has a row per channel instead of a row per filter."""
    max_gathered: int = GATHERED_BYTES
    """Maximum bytes of weights that a part gathers at a time."""
    little: bool = False
    """Whether parts may be so small that only helpers that are awake take them."""

    @property
    def work(self) -> int:
        """Number of multiplications."""
        return self.batch * self.channels * self.filters * self.pixels

    @property
    def least_filters(self) -> int:
        """Minimum filters of a range."""
        return LEAST_FILTERS // 2 if self.little else LEAST_FILTERS

    @property
    def spans(self) -> bool:
        """Whether the pixels of all images form one row, because those of one image would not fill vectors."""
        return self.batch > 1 and self.pixels < MAX_SPANNED_PIXELS and self.pixels % UNIT > 0

    @property
    def units(self) -> int:
        """Number of units of :data:`UNIT` pixels in an image, or in the row that all images form."""
        return -(-self.pixels * (self.batch if self.spans else 1) // UNIT)

    @property
    def all_units(self) -> int:
        """Number of units in all images."""
        return self.units if self.spans else self.batch * self.units

    @property
    def parts(self) -> int:
        """Number of ranges for idle cores."""
        images = self.batch * (self.channels + self.filters) * self.pixels * self.itemsize
        max_parts = min(MOST, max(2, images // SHARE // self.part_bytes)) if self.part_bytes else MOST
        parts = scratch.parts_of(self.work, max_parts, little=self.little)
        return parts if self.by_pixels(parts) else count(parts, 1, self.filters // self.least_filters)

    def by_pixels(self, parts: int) -> bool:
        """Return whether ``parts`` parts are ranges of pixels instead of filters.

        Ranges of pixels need at least two units each, unless there are few filters, and about equal sizes. A data
        gradient with enough filters is cut by filters, because then each weight is gathered only once.
        """
        if self.filters >= parts * self.least_filters:
            if self.is_gradient:
                return False
            longest = -(-self.all_units // parts) * UNIT
            if longest * parts * ALIKE > (ALIKE + 1) * self.pixels * self.batch:
                return False
        return self.all_units >= 2 * parts or self.filters < 2 * LEAST_FILTERS

    @property
    def near(self) -> int:
        """Scratch bytes of one part's packed pixels; 0 if the channels are so few that their pixels fit the stack."""
        behind = VECTORS * PANEL_BYTES if self.spans else 0  # room for the last channel's excess
        return (
            0 if self.channels <= NEAR else aligned(min(PACKED_BYTES, self.channels * VECTORS * PANEL_BYTES) + behind)
        )

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered before they are read."""
        return self.is_gradient and self.channels * self.filters * self.itemsize > AS_THEY_LIE

    @property
    def part_bytes(self) -> int:
        """Scratch bytes of one part: packed pixels and gathered weights."""
        if not self.gathers:
            return self.near
        return self.near + aligned(
            min(self.max_gathered, -(-self.filters // ROWS) * ROWS * self.channels * self.itemsize)
        )

    @property
    def nbytes(self) -> int:
        """Scratch bytes of all parts."""
        return self.parts * self.part_bytes


def forward_pass(s: ConvSizes) -> PlanePass | None:
    """Return the pass that computes the output from the image; None if it is not eligible."""
    return _pass(s, s.channels, s.filters, is_gradient=False)


def data_pass(s: ConvSizes) -> PlanePass | None:
    """Return the pass that computes the image's gradient from the output's; None if it is not eligible."""
    return _pass(s, s.filters, s.channels, is_gradient=True)


def _pass(s: ConvSizes, channels: int, filters: int, *, is_gradient: bool) -> PlanePass | None:
    if not s.pointwise or s.groups > 1 or s.halves or s.pixels < LEAST_PIXELS:
        return None
    return PlanePass(s.batch, channels, filters, s.pixels, s.itemsize, is_gradient)


def entry(dtype: DType, target: Target | None = None) -> Entry:
    """Return the compiled function ``pointwise`` for elements of ``dtype``."""
    scalar = "float" if dtype.itemsize == 4 else "double"
    return library(f"pointwise-{scalar}", lambda machine: [pointwise(scalar, machine)], ("pointwise",), target)[
        "pointwise"
    ]


@functools.lru_cache(maxsize=1024)
def _arguments(p: PlanePass, bits: int) -> KernelArguments:
    """Return the argument words of a pass for vectors of ``bits`` bits, without the addresses of its arrays."""
    plane = p.pixels * p.itemsize
    row, step = (p.itemsize, p.filters * p.itemsize) if p.is_gradient else (p.channels * p.itemsize, p.itemsize)
    group, pixels = PACKED_BYTES // (VECTORS * bits // 8), p.pixels * (p.batch if p.spans else 1)
    block = p.filters
    if p.gathers:
        block = max(ROWS, p.max_gathered // (min(group, p.channels) * p.itemsize) // ROWS * ROWS)
    values = {
        "last": p.all_units, "last_out": p.filters, "units": p.units, "unit": UNIT, "pixels": pixels, "plane": p.pixels,
        "channels": p.channels, "some": group, "block": block, "x_image": p.channels * plane,
        "x_plane": plane, "y_image": p.filters * plane, "y_plane": plane, "w_out": row, "w_in": step,
    }  # fmt: skip
    return KernelArguments(POINTWISE, np.array([values.get(name, 0) for name in POINTWISE], dtype=np.int64))


def call(
    p: PlanePass, x: RawArray, weight: RawArray, bias: RawArray | None, y: RawArray, buffer: RawArray,
    target: Target | None = None, *,
    scaling: Scaling | None = None, relu: bool = False,
) -> Call:  # fmt: skip
    """Return a call that computes ``y`` from ``x`` in ``buffer``, scratch of :attr:`PlanePass.nbytes` bytes.

    The call then adds ``bias`` and applies the scale and shift ``scaling``, each unless None, and a relu if ``relu``.
    """
    machine = host() if target is None else target
    assert isinstance(machine, Target)
    words = _arguments(p, machine.bits).filled(
        x=address(x), w=address(weight), y=address(y), bias=0 if bias is None else address(bias), relu=int(relu),
        room=address(buffer) if p.near else 0, w_room=address(buffer) + p.near if p.gathers else 0,
        **scaling_words(scaling),
    )  # fmt: skip
    parts, function = p.parts, entry(x.dtype, machine)
    moves = {name: p.part_bytes for name in ("room", "w_room") if words[name]}  # null stays null
    light = scratch.light(p.work, parts)
    if p.by_pixels(parts):
        work = in_parts(function, words, p.all_units, parts, moves=moves, light=light)
    else:
        work = in_parts(function, words, p.filters, parts, unit=ROWS, moves=moves, kind="_out", light=light)
    return holding(work, x, weight, bias, y, buffer, scaling)
