"""Partition of a dense convolution's passes, and their scratch memory.

A part is a range of images, or of channels of the result, with its own scratch for packed weights and copied images.
Parts and scratch follow from shapes alone, so a plan is valid on every machine. Every element is computed by the same
chain of additions in any part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weftplan.kernels.compiled.parts import count
from weftplan.kernels.compiled.size_table import PANEL_BYTES, ConvSizes, Triple, data_bands, forward_bands
from weftplan.ops.core.products import MOST
from weftplan.ops.core.schema import aligned

SLICE_BYTES = 384 << 10
"""Maximum bytes of packed weights per image of a batch; more weights are packed in slices of filters. Packed whole, the
weights of the last layers need more than everything else in a network that runs on one image."""
MAX_PACKED_BYTES = 9 << 18
"""Maximum bytes of packed weights, for any batch. More would dominate the scratch of a small network's training step,
while reading the images again for each slice costs only 1 to 2 % of the pass."""
NEAR_BYTES = 32 << 10
"""Maximum bytes of images and results that together stay in the first-level cache, so that reading them for each panel
is cheap. Packed filters are then limited to the same bytes, or one panel: more would dominate the network's scratch."""
HEAVY = 4
"""Number of weight elements whose packing on one thread costs as much as reading one image element in every part."""
COPIES_BYTES = SLICE_BYTES // 4
"""Bytes per image of a batch that padded copies of images may take in all parts, if there are more than two parts."""
FEW = 1 << 23
"""Minimum multiplications of a part, a fifth of a millisecond; waking a core for less costs much of the time saved."""
LITTLE = 1 << 21
"""Minimum multiplications of a part for a helper that is awake: a fiftieth of a millisecond. Handing over a part,
including the interpreter's work, takes about half of that."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes of each buffer of a pass, for all its parts."""

    packed: int
    padded: int
    widened: int = 0
    """Float32 copies of float16 arrays: the bias, or the gradient of the weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, one after another, each aligned."""
        return aligned(self.packed) + aligned(self.padded) + aligned(self.widened)


@dataclass(frozen=True, slots=True)
class Cut:
    """Number of parts of a pass, as ranges of images and as ranges of the result's channels; one of the two is 1."""

    images: int
    channels: int


def parts_of(work: int, units: int, *, little: bool) -> int:
    """Return the number of parts for ``work`` multiplications, at most ``units``; ``little``: parts may be light."""
    return count(work, min(FEW, LITTLE) if little else FEW, units)


def light(work: int, parts: int) -> bool:
    """Return whether each of ``parts`` parts of ``work`` multiplications is too small to wake a helper for."""
    return work // parts < FEW


def wide(rows: int, itemsize: int) -> int:
    """Return ``rows`` rounded up to whole panels of the widest machine."""
    lanes = PANEL_BYTES // itemsize
    return -(-rows // lanes) * lanes


def tile(s: ConvSizes) -> int:
    """Return the number of channels in a tile on the widest machine; a part with fewer would not fill its registers."""
    return 2 * PANEL_BYTES // s.itemsize


def _work(s: ConvSizes) -> int:
    return s.batch * s.groups * s.filters * s.channels * s.taps * s.pixels


def _packed_at_once(s: ConvSizes, rows: int, reduced: int) -> int:
    """Return how many of ``rows`` rows of the weight, of ``reduced`` elements each, are packed at a time.

    The number is ``rows``, or fills whole tiles, or whole panels if images and results fit :data:`NEAR_BYTES`.
    """
    if s.groups > 1:
        return rows
    unit, limit = tile(s), min(SLICE_BYTES * s.batch, MAX_PACKED_BYTES)
    images = s.batch * (s.channels * math.prod(s.image) + s.filters * s.pixels) * s.itemsize
    if images <= NEAR_BYTES:
        unit, limit = unit // 2, images
    return min(rows, max(limit // (reduced * s.itemsize) // unit * unit, unit))


def _cut(s: ConvSizes, rows: int, reduced: int, image: int, copies: int, images_per_read: int) -> Cut:
    """Return the numbers of parts of a product of ``rows`` times ``reduced`` weights and images of ``image`` elements.

    A part reads ``images_per_read`` images at a time, and has ``copies`` bytes for padded copies. There are at most two
    parts, or as many as :data:`COPIES_BYTES` allows.

    Ranges of images share the weights, which are packed before. A part that is a range of channels packs its own
    weights, and copies and reads all images.
    """
    parts = count(_work(s), FEW, _max_parts(s, copies))
    images = min(parts, -(-s.batch // images_per_read))
    at_once = _packed_at_once(s, rows, reduced)
    least = tile(s) if at_once == rows else 2 * tile(s)  # each slice reads all images again
    channels = min(parts, at_once // least) if s.groups == 1 else 1
    if channels > images or (channels == images and rows * reduced > HEAVY * s.batch * image):
        return Cut(1, channels)
    return Cut(images, 1)


def forward_cut(s: ConvSizes) -> Cut:
    """Return the numbers of parts of the forward pass."""
    image = s.groups * s.channels * math.prod(s.image)
    return _cut(s, s.filters, s.channels * s.taps, image, _forward_copy(s), s.side_by_side)


def data_cut(s: ConvSizes) -> Cut:
    """Return the numbers of parts of the gradient of the data."""
    image = s.groups * s.filters * s.pixels
    return _cut(s, s.channels, s.filters * s.taps, image, _data_copy(s), s.data_side_by_side)


def _at_once(s: ConvSizes, rows: int, reduced: int, cut: Cut) -> int:
    every = _packed_at_once(s, rows, reduced)
    return every if cut.channels == 1 else every // cut.channels // tile(s) * tile(s)


def filters_at_once(s: ConvSizes, cut: Cut | None = None) -> int:
    """Return the number of filters per call of the forward pass; ``cut``: :func:`forward_cut`, if already computed."""
    return _at_once(s, s.filters, s.channels * s.taps, forward_cut(s) if cut is None else cut)


def channels_at_once(s: ConvSizes, cut: Cut | None = None) -> int:
    """Return the number of channels per call of the data gradient; ``cut``: :func:`data_cut`, if already computed."""
    return _at_once(s, s.channels, s.filters * s.taps, data_cut(s) if cut is None else cut)


def forward_scratch(s: ConvSizes) -> Scratch:
    """Return the scratch of a forward pass: filters as panels, and a band of an image."""
    cut = forward_cut(s)
    packed = s.groups * wide(filters_at_once(s, cut), s.itemsize) * s.channels * s.taps * s.itemsize
    bias = s.groups * s.filters * s.itemsize if s.halves else 0
    return Scratch(packed * cut.channels, _forward_copy(s) * cut.channels * cut.images, bias)


def data_scratch(s: ConvSizes) -> Scratch:
    """Return the scratch of a data gradient: the weight as panels of channels, and a band of an output gradient."""
    cut = data_cut(s)
    packed = s.groups * wide(channels_at_once(s, cut), s.itemsize) * s.filters * s.taps * s.itemsize
    return Scratch(packed * cut.channels, _data_copy(s) * cut.channels * cut.images)


def _forward_copy(s: ConvSizes) -> int:
    """Return the bytes of a band of an image with padding; 0 if it is not copied."""
    bands = forward_bands(s)
    return _copy_bytes(s, bands.extents, s.side_by_side * s.groups * s.channels) if bands.copies else 0


def _data_copy(s: ConvSizes) -> int:
    """Return the bytes of a band of an output gradient with padding; 0 if it is not copied."""
    bands = data_bands(s)
    return _copy_bytes(s, bands.extents, s.data_side_by_side * s.groups * s.filters) if bands.copies else 0


def _max_parts(s: ConvSizes, copies: int) -> int:
    """Return the maximum number of parts if each has ``copies`` bytes for copies of images."""
    return MOST if not copies else min(MOST, max(2, COPIES_BYTES * s.batch // copies))


def weight_rows(s: ConvSizes) -> int:
    """Return the number of filters whose gradient one part computes: whole tiles, or all filters.

    Every part reads all images. If each part copies them, there are at most two parts if strides make the images large
    compared with the output; otherwise :data:`COPIES_BYTES` limits the number of parts.
    """
    max_parts = MOST if copied_once(s) else 2 if math.prod(s.stride) > 1 else _max_parts(s, image_copy(s))
    parts = count(_work(s), FEW, max_parts) if s.groups == 1 else 1
    return min(s.filters, -(-s.filters // (parts * tile(s))) * tile(s))


def copied_once(s: ConvSizes) -> bool:
    """Return whether all parts of a weight's gradient read one copy of all images."""
    return s.copied and s.groups == 1 and s.batch <= s.images_per_chain


def image_copy(s: ConvSizes) -> int:
    """Return the bytes of the padded images that a weight's gradient reads at a time; 0 if they are not copied."""
    return _copy_bytes(s, s.padded, s.images_per_chain * s.groups * s.channels) if s.copied else 0


def weight_scratch(s: ConvSizes) -> Scratch:
    """Return the scratch of a weight gradient: one chunk of output gradients as panels, and of padded images."""
    rows = weight_rows(s)
    slices = -(-s.filters // rows)
    pixels = s.images_per_chain * s.pixels if s.images_per_chain > 1 else min(s.pixels, s.chunk_rows * s.grid[2])
    return Scratch(
        slices * wide(rows, s.itemsize) * pixels * s.itemsize,
        (1 if copied_once(s) else slices) * image_copy(s),
        s.groups * s.filters * s.channels * s.taps * s.itemsize if s.halves else 0,
    )


def _copy_bytes(s: ConvSizes, extents: Triple, planes: int) -> int:
    """Return the bytes of ``planes`` planes rounded up to whole vectors, plus one vector for excess writes."""
    return -(-planes * math.prod(extents) * s.itemsize // PANEL_BYTES) * PANEL_BYTES + PANEL_BYTES
