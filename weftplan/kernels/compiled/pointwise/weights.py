"""Weight gradients of 1x1 convolutions: sizes and calls of the kernels in ``weight_kernels.py``.

Sizes and parts follow from shapes alone and are the same on every machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from weftplan.kernels.compiled import scratch
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.parts import in_parts
from weftplan.kernels.compiled.pointwise.weight_kernels import CHUNK, WEIGHTS, weights
from weftplan.kernels.compiled.replay import Call, holding
from weftplan.kernels.compiled.size_table import ConvSizes
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core.products import MOST
from weftplan.ops.core.schema import DType
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

LEAST_CHANNELS = 16
"""Minimum channels of the image for these kernels; fewer do not fill the vectors."""
LEAST_FILTERS = 8
"""Minimum filters for these kernels; fewer do not pay for the transposition of the pixels."""
UNIT = 48
"""Ranges of channels start at multiples of this: whole register blocks on every machine."""
ROWS = 8
"""Ranges of filters start at multiples of this: whole register blocks on every machine."""


@dataclass(frozen=True, slots=True)
class ProductPass:
    """A weight gradient of ``filters`` times ``channels`` elements, from ``batch`` images of ``pixels`` pixels."""

    batch: int
    channels: int
    filters: int
    pixels: int
    itemsize: int
    little: bool = False
    """Whether parts may be so small that only helpers that are awake take them."""

    @property
    def work(self) -> int:
        """Number of multiplications."""
        return self.batch * self.channels * self.filters * self.pixels

    @property
    def images_per_chain(self) -> int:
        """Number of images that are summed in one chain."""
        return max(1, min(self.batch, CHUNK // self.pixels))

    @property
    def chunk(self) -> int:
        """Number of an image's pixels that are summed in one chain.

        Chains are about equally long, and all except the last are multiples of 16 pixels.
        """
        chain = -(-self.pixels // -(-self.pixels // CHUNK))
        return -(-chain // 16) * 16 if chain < self.pixels else self.pixels

    @property
    def parts(self) -> int:
        """Number of ranges for idle cores."""
        max_parts = max(self.channels // UNIT, self.filters // (4 * ROWS))
        return scratch.parts_of(self.work, min(MOST, max_parts), little=self.little)


def weight_pass(s: ConvSizes) -> ProductPass | None:
    """Return the pass that computes the gradient of the weight; None if it is not eligible."""
    if not s.pointwise or s.groups > 1 or s.halves or s.channels < LEAST_CHANNELS or s.filters < LEAST_FILTERS:
        return None
    return ProductPass(s.batch, s.channels, s.filters, s.pixels, s.itemsize)


def entry(dtype: DType, target: Target | None = None) -> Entry:
    """Return the compiled function ``pointwise_weights`` for elements of ``dtype``."""
    scalar = "float" if dtype.itemsize == 4 else "double"
    name = "pointwise_weights"
    return library(f"{name}-{scalar}", lambda machine: [weights(scalar, machine)], (name,), target)[name]


@functools.lru_cache(maxsize=1024)
def _arguments(p: ProductPass) -> KernelArguments:
    """Return the argument words of a pass, without the addresses of its arrays."""
    plane = p.pixels * p.itemsize
    values = {
        "last": p.channels, "last_out": p.filters, "images": p.batch, "together": p.images_per_chain,
        "pixels": p.pixels, "chunk": p.chunk,
        "x_image": p.channels * plane, "x_plane": plane, "dy_image": p.filters * plane,
        "dy_plane": plane, "dw_row": p.channels * p.itemsize,
    }  # fmt: skip
    return KernelArguments(WEIGHTS, np.array([values.get(name, 0) for name in WEIGHTS], dtype=np.int64))


def call(
    p: ProductPass, x: RawArray, dy: RawArray, dw: RawArray, target: Target | None = None, *,
    bias: RawArray | None = None,
) -> Call:  # fmt: skip
    """Return a call that computes ``dw`` from images ``x`` and output gradients ``dy``.

    For a single image these are matrices: ``dw`` is ``dy`` times the transpose of ``x``; ``bias`` is added to each row.
    """
    machine = host() if target is None else target
    assert isinstance(machine, Target)
    words = _arguments(p).filled(
        x=address(x), dy=address(dy), dw=address(dw), bias=0 if bias is None else address(bias)
    )
    function, parts = entry(x.dtype, machine), p.parts
    light = scratch.light(p.work, parts)
    if p.channels >= parts * UNIT:
        work = in_parts(function, words, p.channels, parts, unit=UNIT, light=light)
    else:
        work = in_parts(function, words, p.filters, parts, unit=ROWS, kind="_out", light=light)
    return holding(work, x, dy, dw, bias)
