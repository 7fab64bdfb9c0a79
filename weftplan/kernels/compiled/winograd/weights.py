"""Weight gradients of Winograd 3x3 convolutions: partition and scratch.

The kernels are those of ``weight_kernels.py``. Idle cores take ranges of channels, each with its own scratch. Sizes of
scratch follow from shapes alone and are the same on every machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from weftplan.kernels.compiled import scratch
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.replay import Call, holding
from weftplan.kernels.compiled.target import Target, host
from weftplan.kernels.compiled.winograd import weight_kernels as winograd_weight_kernels
from weftplan.kernels.compiled.winograd.implementation import LANES, MAX_SCRATCH_BYTES, POSITION_GAP, TilePass
from weftplan.kernels.compiled.winograd.kernels import POSITIONS
from weftplan.kernels.compiled.winograd.weight_kernels import ROWS_OF, WEIGHTS
from weftplan.ops.core.products import MOST
from weftplan.ops.core.schema import aligned
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

BLOCK = 64
"""Number of tiles in one chain of additions. It determines the result's bits, so it is a constant."""
GROUP_CHANNELS = 64
"""Maximum channels whose m is computed at a time, so that it stays in a cache."""
GROUP_FILTERS = 128
"""Maximum filters whose m is computed at a time."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Layout of each part's scratch, and the number of parts."""

    group_channels: int
    """Number of channels whose m is computed at a time."""
    group_filters: int
    """Number of filters whose m is computed at a time."""
    row: int
    """Bytes between adjacent tiles of v, and between adjacent filters of m."""
    e_row: int
    """Bytes between adjacent tiles of e."""
    v_step: int
    """Bytes between adjacent positions of v."""
    e_step: int
    """Bytes between adjacent positions of e."""
    m_step: int
    """Bytes between adjacent positions of m."""
    columns: int
    """Number of places of a line, which is a copied image row with its padding."""
    lines: int
    """Number of rows that are copied at a time."""
    parts: int

    @property
    def line(self) -> int:
        """Bytes of the copied rows."""
        return self.lines * self.columns * LANES * 4

    @property
    def part_bytes(self) -> int:
        """Scratch bytes of a part."""
        return aligned(self.line) + aligned(POSITIONS * (self.v_step + self.e_step + self.m_step))

    @property
    def nbytes(self) -> int:
        """Scratch bytes of all parts."""
        return self.parts * self.part_bytes


def _row(elements: int) -> int:
    """Return the bytes of a row of ``elements``: an odd number of cache lines, so that rows use all cache sets."""
    lines = -(-elements // LANES)
    return (lines + 1 - lines % 2) * 64


def layout(p: TilePass) -> PartLayout:
    """Return the scratch layout of a pass and its number of parts; ``p`` is the forward pass."""
    single = _cut(p, 1)
    max_parts = min(MOST, max(2, MAX_SCRATCH_BYTES // single.part_bytes), -(-p.channels // (2 * LANES)))
    return _cut(p, count(p.work, scratch.FEW, max_parts))


def _cut(p: TilePass, parts: int) -> PartLayout:
    """Return the layout for ``parts`` parts."""
    group_channels, group_filters = (-(-size // LANES) * LANES for size in (-(-p.channels // parts), p.filters))
    group_channels, group_filters = min(GROUP_CHANNELS, group_channels), min(GROUP_FILTERS, group_filters)
    block = min(BLOCK, p.all_tiles)
    row, e_row = _row(group_channels), _row(group_filters)
    v, e, m = (aligned(size) + POSITION_GAP for size in (block * row, block * e_row, group_filters * row))
    return PartLayout(
        group_channels=group_channels, group_filters=group_filters, row=row, e_row=e_row, v_step=v, e_step=e, m_step=m,
        columns=max(2 * p.columns + 2, p.pad[1] + -(-max(p.source[1], p.result[1]) // LANES) * LANES),
        lines=2 * min(p.rows, (block - 1) // p.columns + 2) + 2, parts=parts,
    )  # fmt: skip


def functions(target: Target) -> dict[str, Entry]:
    """Return the compiled function ``weights``, by name."""
    return library("winograd-weights-float", winograd_weight_kernels.functions, ("weights",), target)


@functools.lru_cache(maxsize=1024)
def _arguments(p: TilePass, at: PartLayout) -> KernelArguments:
    """Return the argument words of a pass, without the addresses of its arrays."""

    def rows(planes: int, extents: tuple[int, int], lead: int) -> RawArray:
        plane = extents[0] * extents[1] * 4
        values = {"image": planes * plane, "plane": plane, "height": extents[0], "width": extents[1], "lead": lead,
                  "line": at.columns * LANES * 4}  # fmt: skip
        return np.array([values[name] for name in ROWS_OF], dtype=np.int64)

    images, outputs = rows(p.channels, p.source, p.pad[1]), rows(p.filters, p.result, 0)
    values = {
        "lines_bytes": at.line, "last": p.channels, "some_in": at.group_channels, "some_out": at.group_filters,
        "channels": p.channels, "filters": p.filters, "all_tiles": p.all_tiles, "block": BLOCK,
        "tiles": p.rows * p.columns, "columns": p.columns, "lead": p.pad[0], "images": address(images),
        "outputs": address(outputs), "row": at.row, "place": at.v_step, "e_row": at.e_row, "e_place": at.e_step,
        "m_place": at.m_step,
    }  # fmt: skip
    words = np.array([values.get(name, 0) for name in WEIGHTS], dtype=np.int64)
    return KernelArguments(WEIGHTS, words, [images, outputs])


def call(p: TilePass, x: RawArray, dy: RawArray, dw: RawArray, buffer: RawArray, target: Target | None = None) -> Call:
    """Return a call that computes ``dw`` from images ``x`` and output gradients ``dy``.

    ``p`` is the forward pass, ``buffer`` scratch of :attr:`PartLayout.nbytes` bytes.
    """
    machine = host() if target is None else target
    assert isinstance(machine, Target)
    at = layout(p)
    line = address(buffer)
    v = line + aligned(at.line)
    e = v + POSITIONS * at.v_step
    words = _arguments(p, at).filled(
        x=address(x), dy=address(dy), dw=address(dw), line=line, v=v, e=e, m=e + POSITIONS * at.e_step
    )
    moves = dict.fromkeys(("line", "v", "e", "m"), at.part_bytes)
    parts = in_parts(functions(machine)["weights"], words, p.channels, at.parts, unit=LANES, moves=moves)
    return holding(parts, x, dy, dw, buffer)
