"""Argument words and offset tables of the kernels in :mod:`weftplan.kernels.compiled.product`, computed from sizes
alone.

All sizes have three spatial axes; missing leading axes have extent 1. The arguments of a geometry are computed once,
without addresses; each call fills the addresses of its arrays into a copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product as every
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftplan.kernels.compiled.copies import PACK, PAD
from weftplan.kernels.compiled.product import GATHER, NARROW, PRODUCT, WEIGHTS
from weftplan.kernels.compiled.size_table import (
    CHUNK,
    Bands,
    ConvSizes,
    Triple,
    cuts_columns,
    data_bands,
    forward_bands,
    reach_of,
    runs_of,
)
from weftplan.support.addresses import address

Words = NDArray[np.int64]

INNER = 64
"""Maximum positions of the inner sum, so that its table stays in the first-level cache."""


@dataclass(slots=True)
class KernelArguments:
    """Argument words of one pass or call, and the tables that they point to.

    Threads that request the same tables concurrently may each build them; one copy is cached.
    """

    names: Sequence[str]
    words: Words
    tables: list[Words] = field(default_factory=list)

    def filled(self, **values: int) -> KernelArguments:
        """Return a copy in which the words called like the keywords have the given values."""
        words = self.words.copy()
        for name, value in values.items():
            words[self.names.index(name)] = value
        return KernelArguments(self.names, words, self.tables)

    def __getitem__(self, name: str) -> int:
        """Return the word called ``name``."""
        return int(self.words[self.names.index(name)])

    @property
    def rows_packed(self) -> int:
        """Number of rows of the weight that a call of ``gather`` packs."""
        return int(self._pack[PACK.index("rows")])

    @property
    def _pack(self) -> Words:
        return next(table for table in self.tables if address(table) == self["pack"])

    def call(self, entry: Callable[[int], None]) -> None:
        """Run a compiled function on these words; they and their tables live until it returns."""
        self.ready(entry)()

    def ready(self, entry: Callable[[int], None]) -> Callable[[], None]:
        """Return a repeatable call of a compiled function on these words; it keeps them and their tables alive."""
        words_at = address(self.words)

        def call(keeps: KernelArguments = self) -> None:
            entry(words_at)

        return call


def packing(of: KernelArguments, first_row: int, rows: int, *, row_bytes: int, lanes: int) -> KernelArguments:
    """Return the arguments of a ``gather`` that only packs ``rows`` rows of the weight.

    Args:
        of: the arguments of the call that uses the packed rows.
        first_row: the first row, a multiple of ``lanes``.
        row_bytes: bytes between adjacent rows of the weight.
        lanes: number of lanes of a vector, and so of rows in a panel.
    """
    pack = of._pack.copy()
    pack[PACK.index("rows")] = rows
    moved = first_row // lanes * int(pack[PACK.index("panel_step")])
    part = of.filled(w=of["w"] + first_row * row_bytes, packed=of["packed"] + moved, pack=address(pack), last=0)
    return KernelArguments(part.names, part.words, [*part.tables, pack])


def _words(names: Sequence[str], values: dict[str, int]) -> Words:
    return np.array([values.get(name, 0) for name in names], dtype=np.int64)


def _pairs(pairs: Iterable[tuple[int, int]], scale: int, other: int) -> Words:
    """Return a table of ``pairs`` with its columns times ``scale`` and ``other``; a row of zeros if there are none."""
    rows = [(x_offset * scale, y_offset * other) for x_offset, y_offset in pairs]
    return np.array(rows or [(0, 0)], dtype=np.int64)


def _steps(extents: Triple) -> Triple:
    return extents[1] * extents[2], extents[2], 1


def _divisor(count: int, limit: int) -> int:
    """Return the largest divisor of ``count`` that is at most ``limit`` (at least 1)."""
    return max(n for n in range(1, max(1, min(count, limit)) + 1) if count % n == 0)


def _pad_words(s: ConvSizes, from_: Triple, to: Triple, lead: Triple) -> Words:
    values = {"planes_step": math.prod(from_) * s.stored}
    for name, extents in (("", from_), ("to_", to)):
        values |= dict(zip((f"{name}depth", f"{name}height", f"{name}width"), extents, strict=True))
    values |= {"lead_depth": lead[0], "lead_width": lead[2]}
    return _words(PAD, values)


def _tap_offsets(s: ConvSizes, steps: Triple) -> list[int]:
    """Return each tap's offset from the first tap in the source, in elements."""
    moves = [d * step for d, step in zip(s.dilate, steps, strict=True)]
    return [sum(i * move for i, move in zip(tap, moves, strict=True)) for tap in every(*map(range, s.kernel))]


@functools.lru_cache(maxsize=1024)
def forward(s: ConvSizes, lanes: int) -> KernelArguments:
    """Return the arguments of a forward pass, whose products sum over channels and taps."""
    size, taps, panel, stored = s.itemsize, s.taps, lanes * s.itemsize, s.stored
    bands = forward_bands(s)
    steps, plane = _steps(bands.extents), math.prod(bands.extents)
    reduced = s.channels * taps
    image_step, result_step = s.groups * s.channels * plane, (s.all_channels or s.groups * s.filters) * s.pixels
    columns = [(w * s.stride[2], w) for w in range(s.grid[2])]
    products, held = [], []
    every_tap = tuple((i, i * s.dilate[1] - s.pad[1]) for i in range(s.kernel[1]))
    last_rows = s.grid[1] - (bands.count - 1) * bands.rows
    if bands.count == 1:  # rows that only some taps reach skip the other taps
        runs = 2 * runs_of((0, last_rows, every_tap), 1, s.stride[1], s.image[1])
    else:
        runs = [(0, bands.rows, every_tap), (0, last_rows, every_tap)]
    for first_row, count, reached in runs:
        used = [
            (sum(i * d * step for i, d, step in zip(tap, s.dilate, steps, strict=True)),
             (tap[0] * s.kernel[1] + tap[1]) * s.kernel[2] + tap[2])
            for tap in every(range(s.kernel[0]), [i for i, _ in reached], range(s.kernel[2]))
        ]  # fmt: skip
        inner_channels = _divisor(s.channels, INNER // max(1, len(used)))
        inner = [(c * plane + offset, c * taps + t) for c in range(inner_channels) for offset, t in used]
        outer = [(c * plane, c * taps) for c in range(0, s.channels, inner_channels)]
        positions = [
            (n * image_step + d * s.stride[0] * steps[0] + h * s.stride[1] * steps[1],
             n * result_step + (d * s.grid[1] + h) * s.grid[2])
            for n, d, h in every(range(s.side_by_side), range(s.grid[0]), range(first_row, first_row + count))
        ]  # fmt: skip
        words, tables = _product(
            s, outer, inner, positions, columns, panel, reduced * panel, s.filters, s.pixels, stored
        )
        products.append(words)
        held += tables
    pack = _words(PACK, {"rows": s.filters, "row_step": reduced * stored, "length": reduced, "transposes": 1,
                         "panel_step": reduced * panel})  # fmt: skip
    words, tables = _gather(s, bands, s.side_by_side, products, pack, s.image, {
        "x_image": s.groups * s.channels * math.prod(s.image) * stored,
        "y_image": result_step * stored, "x_group": s.channels * plane * size,
        "w_group": s.filters * reduced * stored, "packed_group": -(-s.filters // lanes) * reduced * panel,
        "y_group": s.filters * s.pixels * stored, "bias_group": s.filters * size,
        "planes": s.groups * s.channels, "outer": 1, "y_step": bands.rows * s.grid[2] * stored,
    })  # fmt: skip
    return KernelArguments(GATHER, words, [*held, *tables])


def _gather(
    s: ConvSizes,
    bands: Bands,
    images_per_product: int,
    products: list[Words],
    pack: Words,
    source: Triple,
    values: dict[str, int],
) -> tuple[Words, list[Words]]:
    """Return (words of :data:`GATHER`, their tables) from ``values`` and words common to forward and data gradient.

    Args:
        images_per_product: number of images that the tables of ``products`` cover.
        products: words of the products of each band but the last, then those of the last band.
        source: extents of the planes that are copied or read.
    """
    pad = _pad_words(s, source, bands.extents, bands.lead)
    for words in products:  # the tables have the rows of several images
        words[PRODUCT.index("rows")] //= images_per_product
    table = np.array([address(words) for words in products], dtype=np.int64)
    words = _words(GATHER, {
        "last": s.batch, "groups": s.groups, "packs": s.groups, "copies": int(bands.copies), "pad": address(pad),
        "pack": address(pack), "phases": len(products) // 2, "phase_table": address(table),
        "together": images_per_product, "bands": bands.count, "lead": bands.lead[1], "lead_step": bands.step, **values,
    })  # fmt: skip
    return words, [*products, pack, pad, table]


def _product(
    s: ConvSizes, outer: list[tuple[int, int]], inner: list[tuple[int, int]], rows: list[tuple[int, int]],
    columns: list[tuple[int, int]], panel: int, panel_step: int, channels: int, channel_step: int,
    out: int,
) -> tuple[Words, list[Words]]:  # fmt: skip
    """Return (words of one product, their tables).

    Offsets are in elements of x and y, and in positions of w. An element of y has ``out`` bytes, a position of w
    ``panel`` bytes.
    """
    size = s.itemsize
    held = [_pairs(outer, size, panel), _pairs(inner, size, panel), _pairs(rows, size, out),
            _pairs(columns, size, out)]  # fmt: skip
    tables = dict(zip(("outer_table", "inner_table", "row_table", "column_table"), map(address, held), strict=True))
    words = _words(PRODUCT, {
        "panel_step": panel_step, "channels": channels, "channel_step": channel_step * out, "inner": len(inner),
        "rows": len(rows), "columns": len(columns), "outer": len(outer), **tables,
    })  # fmt: skip
    return words, held


@functools.lru_cache(maxsize=1024)
def data(s: ConvSizes, lanes: int) -> KernelArguments:
    """Return the arguments of the image gradient, with one product over filters and taps per phase of the strides."""
    size, taps, panel, stored = s.itemsize, s.taps, lanes * s.itemsize, s.stored
    reach, bands, images_per_product = reach_of(s), data_bands(s), s.data_side_by_side
    steps, plane = _steps(bands.extents), math.prod(bands.extents)
    reduced = s.filters * taps
    image = math.prod(s.image)
    image_steps = _steps(s.image)
    image_step, result_step = s.groups * s.filters * plane, (s.all_channels or s.groups * s.channels) * image
    clears = False
    products: tuple[list[Words], list[Words]] = ([], [])
    held: list[Words] = []
    split = list(reach.phases)
    # Rows, and sometimes columns, that only some taps reach skip the other taps.
    for axis in range(3) if cuts_columns(s) else (1,) if bands.count == 1 else ():
        split[axis] = tuple(run for phase in split[axis] for run in runs_of(phase, s.stride[axis], 1, s.grid[axis]))
    for axes in every(*split):
        (first0, count0, _), (first1, count1, _), (first2, count2, _) = axes
        used: list[tuple[int, int]] = []
        for chosen in every(*(axis[2] for axis in axes)):
            tap = (chosen[0][0] * s.kernel[1] + chosen[1][0]) * s.kernel[2] + chosen[2][0]
            offset = sum((e + lead) * step for (_, e), lead, step in zip(chosen, bands.lead, steps, strict=True))
            used.append((offset, tap))
        if not used:  # no window reads these positions, so ``gather`` has to clear them
            clears = True
            continue
        inner_filters = _divisor(s.filters, INNER // len(used))
        inner = [(k * plane + offset, k * taps + tap) for k in range(inner_filters) for offset, tap in used]
        outer = [(k * plane, k * taps) for k in range(0, s.filters, inner_filters)]
        columns = [(c, first2 + c * s.stride[2]) for c in range(count2)]
        last_rows = max(0, count1 - (bands.count - 1) * bands.rows)
        for listed, rows in zip(products, (min(count1, bands.rows), last_rows), strict=True):
            positions = [
                (n * image_step + a * steps[0] + b * steps[1],
                 n * result_step + (first0 + a * s.stride[0]) * image_steps[0]
                 + (first1 + b * s.stride[1]) * image_steps[1])
                for n, a, b in every(range(images_per_product), range(count0), range(rows))
            ]  # fmt: skip
            words, tables = _product(
                s, outer, inner, positions, columns, panel, reduced * panel, s.channels, image, stored
            )
            listed.append(words)
            held += tables
    pack = _words(PACK, {"rows": s.channels, "row_step": taps * stored,
                         "step": (s.all_channels or s.channels) * taps * stored, "length": taps,
                         "transposes": int(taps > 1), "panel_step": reduced * panel})  # fmt: skip
    words, tables = _gather(s, bands, images_per_product, [*products[0], *products[1]], pack, s.grid, {
        "x_image": s.groups * s.filters * s.pixels * stored, "y_image": result_step * stored,
        "x_group": s.filters * plane * size, "w_group": s.filters * s.channels * taps * stored,
        "packed_group": -(-s.channels // lanes) * reduced * panel, "y_group": s.channels * image * stored,
        "planes": s.groups * s.filters, "outer": s.filters, "clears": int(clears),
        "y_step": bands.rows * s.stride[1] * image_steps[1] * stored,
    })  # fmt: skip
    return KernelArguments(GATHER, words, [*held, *tables])


@functools.lru_cache(maxsize=1024)
def weight(s: ConvSizes, lanes: int) -> KernelArguments:
    """Return the arguments of the weight gradient, whose products sum over pixels."""
    size, taps, panel, stored = s.itemsize, s.taps, lanes * s.itemsize, s.stored
    steps, plane = _steps(s.source), math.prod(s.source)
    images_per_product = s.images_per_chain
    image = math.prod(s.image)
    depth, height, width = s.grid

    def pixel(d: int, h: int, w: int) -> int:
        return d * s.stride[0] * steps[0] + h * s.stride[1] * steps[1] + w * s.stride[2] * steps[2]

    rows = _divisor(height, min(INNER, CHUNK) // width) if width <= INNER else 1
    inner = [(pixel(0, h, w), h * width + w) for h in range(rows) for w in range(width)]
    per_image = [(pixel(d, h, 0), (d * height + h) * width) for d in range(depth) for h in range(0, height, rows)]
    step = s.groups * s.channels * (plane if s.copied else image)
    outer = [(n * step + x, n * s.pixels + w) for n in range(images_per_product) for x, w in per_image]
    chunk = max(1, s.chunk_rows // rows)
    pixels = images_per_product * s.pixels if images_per_product > 1 else min(s.pixels, chunk * len(inner))
    image_filters = s.all_channels or s.groups * s.filters
    positions = [(c * plane, c * taps) for c in range(s.channels)]
    columns = [(offset, t) for t, offset in enumerate(_tap_offsets(s, steps))]
    product, held = _product(
        s, outer, inner, positions, columns, panel, pixels * panel, s.filters, s.channels * taps, size
    )
    pack = _words(PACK, {"rows": s.filters, "row_step": s.pixels * stored,
                         "step": image_filters * s.pixels * stored, "transposes": 1,
                         "panel_step": pixels * panel})  # fmt: skip
    pad = _pad_words(s, s.image, s.padded, s.pad)
    words = _words(WEIGHTS, {
        "images": s.batch, "together": images_per_product, "x_image": s.groups * s.channels * image * stored,
        "dy_image": image_filters * s.pixels * stored, "groups": s.groups, "x_group": s.channels * plane * size,
        "dy_group": s.filters * s.pixels * stored, "dw_group": s.filters * s.channels * taps * size,
        "copies": int(s.copied), "pad": address(pad), "planes": s.groups * s.channels, "lead": s.pad[1],
        "pack": address(pack), "product": address(product), "outer": len(per_image), "chunk": chunk,
    })  # fmt: skip
    return KernelArguments(WEIGHTS, words, [*held, product, pack, pad])


def narrow(x: int, y: int, count: int) -> KernelArguments:
    """Return the arguments of a call that rounds ``count`` float32 numbers at ``x`` to float16 at ``y``."""
    return KernelArguments(NARROW, _words(NARROW, {"x": x, "y": y, "count": count}))


Scaling = tuple[Any, Any]
"""(scale, shift): each channel of a result is multiplied by its scale, then its shift is added."""


def scaling_words(scaling: Scaling | None) -> dict[str, int]:
    """Return the words ``scale`` and ``shift`` of a call: the addresses of the two arrays, or 0 for None."""
    scale, shift = (0, 0) if scaling is None else map(address, scaling)
    return {"scale": scale, "shift": shift}
