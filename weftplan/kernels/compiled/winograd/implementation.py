"""Winograd 3x3 convolutions: eligibility, partition of passes, scratch.

The kernels are those of ``kernels.py``. From the weight, a pass computes *u*, from the image *v*, and from both their
products *m*, one block of tiles after another. If u is small, it is computed once, and idle cores take ranges of tiles,
each with its own v and m. Otherwise u would take up to 16 MB, and v would not stay in a cache. The cores then share a
block's m of all filters and its v of some channels, and each core computes u of some filters at a time.

Layouts and parts follow from shapes alone and are the same on every machine.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from weftplan.kernels.compiled import scratch
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments, Scaling, scaling_words
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.replay import Call, holding, in_sequence
from weftplan.kernels.compiled.size_table import ConvSizes
from weftplan.kernels.compiled.target import Target, host
from weftplan.kernels.compiled.winograd import kernels as winograd_kernels
from weftplan.kernels.compiled.winograd.kernels import POSITIONS, WINOGRAD
from weftplan.ops.core.products import MOST
from weftplan.ops.core.schema import aligned
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

LEAST_CHANNELS = 32
"""Minimum channels and filters at which this algorithm is faster: with fewer, computing v and y costs more than it
saves. If rows have at least :data:`FULL_ROW_TILES` tiles, half of this number suffices."""
FULL_ROW_TILES = 8
"""Minimum tiles of a row at which it fills vectors well."""
LEAST_TILES = 32
"""Minimum tiles of a batch at which this algorithm is faster: with fewer, computing u costs more than it saves."""
MAX_STORED_BYTES = 5 << 18
"""Maximum bytes of u at which the whole u is computed once and stored."""
CHANNELS = 256
"""Maximum channels at which the whole u is computed once and stored."""
CHUNK = 128
"""Channels that are summed at a time if u is not stored: their v stays in the second-level cache for all filters."""
MAX_SCRATCH_BYTES = 3 << 20
"""Maximum scratch bytes of more than two parts. Their scratch is also limited to a quarter of the bytes of images and
results."""
STORED_GROUP = 32
"""Filters that are multiplied at a time if the whole u is stored; they share each read of v."""
TURNED_GROUP = 16
"""Filters that are multiplied at a time if u is not stored. Each part stores the u of these filters; twice the number
takes twice the scratch and no less time."""
WIDE = 64
"""Maximum tiles of a block: their v stays in a cache for all filters."""
LANES = 16
"""Elements of a vector on the widest machine."""
POSITION_GAP = 192
"""Padding bytes between positions of u, v and m. Without it, positions would be multiples of a page apart and share
cache sets."""


@functools.lru_cache(maxsize=1024)
def refusal(s: ConvSizes) -> str:
    """Return the reason why this algorithm does not compute a convolution; empty if it does."""
    if s.kernel != (1, 3, 3) or s.stride != (1, 1, 1) or s.dilate != (1, 1, 1) or s.groups > 1 or s.image[0] > 1:
        return "not 3x3 with strides of 1 in one group"
    if s.itemsize != 4 or s.halves:
        return "not float32"
    if any(not 0 <= p <= 2 or g != i + 2 * p - 2 for p, g, i in zip(s.pad[1:], s.grid[1:], s.image[1:], strict=True)):
        return "padded by more than a window reaches"
    passes = forward_pass(s), data_pass(s)
    least = LEAST_CHANNELS // 2 if all(p.columns >= FULL_ROW_TILES for p in passes) else LEAST_CHANNELS
    if min(s.channels, s.filters) < least:
        return f"fewer than {least} channels or filters"
    if any(p.all_tiles < LEAST_TILES for p in passes):
        return f"fewer than {LEAST_TILES} tiles of 2x2 pixels"
    return ""


@dataclass(frozen=True, slots=True)
class TilePass:
    """A 3x3 convolution, or its data gradient: images of ``source`` extents become images of ``result`` extents."""

    batch: int
    channels: int
    """Channels of the source, which are summed over."""
    filters: int
    """Channels of the result."""
    source: tuple[int, int]
    result: tuple[int, int]
    pad: tuple[int, int]
    is_gradient: bool
    """Whether this is a data gradient: the weight is rotated by half a turn, and its first two axes are exchanged."""

    @property
    def columns(self) -> int:
        """Number of tiles in a row."""
        return -(-self.result[1] // 2)

    @property
    def rows(self) -> int:
        """Number of rows of tiles in an image."""
        return -(-self.result[0] // 2)

    @property
    def all_tiles(self) -> int:
        """Number of tiles of all images."""
        return self.batch * self.rows * self.columns

    @property
    def work(self) -> int:
        """Number of multiplications of the matrix products."""
        return POSITIONS * self.all_tiles * self.channels * self.filters


@functools.lru_cache(maxsize=1024)
def forward_pass(s: ConvSizes) -> TilePass:
    """Return the pass that computes the output from the image."""
    (_, *image), (_, *grid), (_, *pad) = s.image, s.grid, s.pad
    return TilePass(s.batch, s.channels, s.filters, (image[0], image[1]), (grid[0], grid[1]), (pad[0], pad[1]), False)


@functools.lru_cache(maxsize=1024)
def data_pass(s: ConvSizes) -> TilePass:
    """Return the pass that computes the gradient of the image from the gradient of the output."""
    (_, *image), (_, *grid), (_, *pad) = s.image, s.grid, s.pad
    turned = 2 - pad[0], 2 - pad[1]
    return TilePass(s.batch, s.filters, s.channels, (grid[0], grid[1]), (image[0], image[1]), turned, True)


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """Layout of a pass's scratch, and the number of parts."""

    stores_u: bool
    """Whether the whole u is computed once and stored."""
    chunk: int
    """Number of channels that are summed at a time."""
    group: int
    """Number of filters that are multiplied at a time."""
    row: int
    """Capacity of a channel's row in v, in tiles."""
    m_row: int
    """Capacity of a filter's row in m, in tiles."""
    half: int
    """Elements of a line's even columns, or of its odd columns."""
    lines: int
    """Number of rows that are copied at a time."""
    u: int
    """Bytes between adjacent positions of u."""
    v: int
    """Bytes between adjacent positions of v."""
    m: int
    """Bytes between adjacent positions of m."""
    parts: int
    """Number of parts for idle cores."""

    @property
    def line(self) -> int:
        """Bytes of the copied rows."""
        return aligned(self.lines * 2 * self.half * 4)

    @property
    def shared(self) -> int:
        """Bytes that all parts share."""
        return (
            aligned(POSITIONS * self.u) if self.stores_u else aligned(POSITIONS * self.v) + aligned(POSITIONS * self.m)
        )

    @property
    def part_bytes(self) -> int:
        """Bytes of each part's own scratch."""
        buffers = (
            aligned(POSITIONS * self.v) + aligned(POSITIONS * self.m) if self.stores_u else aligned(POSITIONS * self.u)
        )
        return self.line + buffers

    @property
    def nbytes(self) -> int:
        """Bytes of the whole scratch."""
        return self.shared + self.parts * self.part_bytes


def _lines(number: int) -> int:
    """Return ``number`` rounded up to whole vectors of the widest machine."""
    return -(-number // LANES) * LANES


def layout(p: TilePass) -> ScratchLayout:
    """Return the scratch layout of a pass and its number of parts."""
    filters = _lines(p.filters)
    stores_u = POSITIONS * p.channels * filters * 4 <= MAX_STORED_BYTES and p.channels <= CHANNELS
    chunk = p.channels if stores_u else min(CHUNK, p.channels)
    group = min(filters, STORED_GROUP if stores_u else TURNED_GROUP)
    m_row = _lines(min(WIDE, p.all_tiles))
    # A vector may begin at the last tile. Rows an odd number of lines apart spread over the whole first-level cache.
    row = m_row + LANES * (1 + m_row // LANES % 2)
    of_u, of_m = (filters, group) if stores_u else (group, filters)
    u, v, m = (elements * 4 + POSITION_GAP for elements in (chunk * of_u, chunk * row, of_m * m_row + LANES))
    half = _lines(max(p.columns, -(-p.source[1] // 2))) + 3 * LANES
    lines = 2 * min(p.rows, (m_row - 1) // p.columns + 2) + 2
    single = ScratchLayout(stores_u, chunk, group, row, m_row, half, lines, u, v, m, 1)
    limit = min(MAX_SCRATCH_BYTES, p.batch * (p.channels * math.prod(p.source) + p.filters * math.prod(p.result)))
    max_parts = min(MOST, max(2, (limit - single.shared) // single.part_bytes))
    units = -(-p.all_tiles // WIDE) if stores_u else -(-filters // group)
    return replace(single, parts=count(p.work, scratch.FEW, min(max_parts, units)))


def functions(target: Target) -> dict[str, Entry]:
    """Return the compiled functions ``turned`` and ``winograd``, by name."""
    return library(
        "winograd-float", lambda machine: winograd_kernels.functions("float", machine), ("turned", "winograd"), target
    )


@functools.lru_cache(maxsize=1024)
def _arguments(p: TilePass, at: ScratchLayout) -> KernelArguments:
    """Return the argument words of a pass, without the addresses of its arrays."""
    (height, width), (y_height, y_width) = p.source, p.result
    blocks = -(-p.all_tiles // WIDE)
    block = -(-p.all_tiles // (8 * blocks)) * 8
    same = [0, 1, 2, 3]
    turned = [3, 1, 2, 0]  # half a turn of a filter changes the first and the last of its four rows and columns
    across = turned if p.is_gradient else same
    order = np.array([(4 * i + j) * at.u for i in across for j in across], dtype=np.int64)
    # Image column c is column c + pad of the padded row. ``even_to`` and ``odd_to``: offsets of the first image columns
    # with even and odd c within a line; with a padding of two, both come one place later.
    lead = p.pad[1]
    even_to, odd_to = (0, at.half * 4) if lead == 0 else (at.half * 4, 4) if lead == 1 else (4, at.half * 4 + 4)
    weights = (36, 36 * p.filters) if p.is_gradient else (36 * p.channels, 36)
    values = {
        "last": p.all_tiles, "block": block, "last_in": p.channels, "last_out": p.filters, "some": at.group,
        "turns": int(not at.stores_u), "channels": at.chunk, "filters": p.filters, "height": height, "width": width,
        "x_image": p.channels * height * width * 4, "x_plane": height * width * 4, "lead": p.pad[0],
        "line_bytes": 2 * at.half * 4, "lines_bytes": at.line, "odd": at.half * 4, "even_to": even_to,
        "odd_to": odd_to, "tiles": p.rows * p.columns, "columns": p.columns,
        "y_image": p.filters * y_height * y_width * 4, "y_plane": y_height * y_width * 4, "y_height": y_height,
        "y_width": y_width, "w_out": weights[0], "w_in": weights[1], "order": address(order), "u_place": at.u,
        "v_row": at.row * 4, "v_place": at.v, "m_row": at.m_row * 4, "m_place": at.m,
        "m_out": 0 if at.stores_u else at.m_row * 4, "ends": 1,
    }  # fmt: skip
    return KernelArguments(WINOGRAD, np.array([values.get(name, 0) for name in WINOGRAD], dtype=np.int64), [order])


def call(
    p: TilePass, x: RawArray, weight: RawArray, bias: RawArray | None, y: RawArray, buffer: RawArray,
    target: Target | None = None, *,
    scaling: Scaling | None = None, relu: bool = False,
) -> Call:  # fmt: skip
    """Return a call that computes ``y`` from ``x`` in ``buffer``, scratch of :attr:`ScratchLayout.nbytes` bytes.

    The call then adds ``bias`` and applies the scale and shift ``scaling``, each unless None, and a relu if ``relu``.
    """
    machine = host() if target is None else target
    assert isinstance(machine, Target)
    entry = functions(machine)
    at = layout(p)
    begin = address(buffer)
    line = begin + at.shared
    behind = line + at.line
    u, v = (begin, behind) if at.stores_u else (behind, begin)
    m = v + aligned(POSITIONS * at.v)
    words = _arguments(p, at).filled(
        x=address(x), w=address(weight), y=address(y), bias=0 if bias is None else address(bias), relu=int(relu),
        u=u, v=v, m=m, line=line, **scaling_words(scaling),
    )  # fmt: skip
    calls = _by_tiles(p, at, words, entry) if at.stores_u else _by_filters(p, at, words, entry)
    return holding(in_sequence(*calls), x, weight, bias, y, buffer, scaling)


def _by_tiles(p: TilePass, at: ScratchLayout, words: KernelArguments, entry: dict[str, Entry]) -> list[Call]:
    """Return two calls: the first computes u of all filters, the second computes ranges of tiles in parallel."""
    moves = dict.fromkeys(("v", "m", "line"), at.part_bytes)
    ranges = in_parts(entry["winograd"], words, p.all_tiles, at.parts, unit=words["block"], moves=moves)
    return [words.ready(entry["turned"]), ranges]


def _by_filters(p: TilePass, at: ScratchLayout, common: KernelArguments, entry: dict[str, Entry]) -> list[Call]:
    """Return two calls for each block of tiles and chunk of channels.

    The first computes v in parallel ranges of channels, the second u, m and results in parallel ranges of filters.
    """
    calls: list[Call] = []
    block = common["block"]

    def ranges(words: KernelArguments, size: int, unit: int, kind: str, *moved: str) -> Call:
        moves = dict.fromkeys(moved, at.part_bytes)
        return in_parts(entry["winograd"], words, size, at.parts, unit=unit, moves=moves, kind=kind)

    for begin_tile in range(0, p.all_tiles, block):
        for begin in range(0, p.channels, at.chunk):
            channels = min(at.chunk, p.channels - begin)
            words = common.filled(
                first=begin_tile, last=min(begin_tile + block, p.all_tiles), channels=channels, last_in=channels,
                adds=int(begin > 0), ends=int(begin + channels == p.channels),
                x=common["x"] + begin * common["x_plane"],
                w=common["w"] + begin * common["w_in"],
            )  # fmt: skip
            calls.append(ranges(words.filled(last_out=0), channels, 1, "_in", "line"))
            calls.append(ranges(words.filled(last_in=0), p.filters, at.group, "_out", "u", "line"))
    return calls
