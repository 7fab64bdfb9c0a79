"""Generated packing problems: challenges that resemble hard public problems, planted optima, traces, and any number of
buffers of eight kinds.

A challenge has a few hundred buffers, and its optimum is its lower bound. Its buffers are cut from a full rectangle of
1024 x 1024 cells, and some are then removed. All buffers that live at one chosen moment stay, so the rectangle's height
remains both the lower bound and the optimum. The families differ in how the rectangle is cut and how much is removed.
The MiniMalloc challenge problems are of the same two kinds: sizes from a thousandth to most of the memory, with shorter
lives for larger buffers and almost no holes (B, E, K); or hundreds of boxes of nearly one shape with a third of the
area empty (G, H).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Buffers = tuple[Int64, Int64, Int64]

SIDE = 1024
"""Cells of the rectangle in each direction; also the bytes, and the time units, of one cell."""

FAMILIES = ("cut", "cut, holes", "slices", "slices, holes", "spirals", "spirals, holes", "boxes", "shaved")

Rectangles = list[tuple[int, int, int, int]]
"""Rectangles as (begin, end, low, high): an interval of time and one of memory."""


def challenge(family: str, n: int, seed: int = 0) -> Buffers:
    """Return about ``n`` buffers of a family as int64 arrays: lower, upper, size.

    * ``cut``: cut from edge to edge repeatedly; ``cut, holes``: a tenth of the area removed.
    * ``slices``: cut from edge to edge on either side of any piece, so that many buffers are long and thin or short and
      tall, as in the public problems; ``slices, holes``: a tenth removed.
    * ``spirals``: some pieces are cut into five, four around a middle, which no cut from edge to edge produces;
      ``spirals, holes``: a tenth removed.
    * ``boxes``: cut into nearly equal boxes, 35 % removed.
    * ``shaved``: as ``cut``, then every third buffer is made up to a tenth smaller and shorter, as by rounding and
      padding, unless it lives at the chosen moment.

    Raises:
        ValueError: no such family.
    """
    if family not in FAMILIES:
        raise ValueError(f"expected one of {', '.join(FAMILIES)}, got {family!r}")
    rng = np.random.default_rng((FAMILIES.index(family), n, seed))
    count = int(n / (0.9 if family.endswith("holes") else 0.65 if family == "boxes" else 1))
    if family.startswith("spirals"):
        table = _table(_spirals(count, rng))
    elif family.startswith("slices"):
        table = _table(_slices(count, rng))
    elif family == "boxes":
        table = _table(_boxes(count, rng))
    else:
        table = np.stack(planted(count, seed, duration=SIDE, memory=SIDE), 1)
    if family.endswith("holes"):
        table = _thinned(table, 0.1, rng)
    elif family == "boxes":
        table = _thinned(table, 0.35, rng)
    elif family == "shaved":
        table = _shaved(table, rng)
    table = table[rng.permutation(len(table))] * SIDE
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def challenges(seeds: int, counts: tuple[int, ...] = (150, 250, 350, 450)) -> Iterator[tuple[str, Buffers]]:
    """Yield (name, buffers) of every family, size and seed."""
    for family in FAMILIES:
        for n in counts:
            for seed in range(seeds):
                yield f"{family} {n} #{seed}", challenge(family, n, seed)


def _table(pieces: Rectangles) -> Int64:
    return np.array([(begin, end, high - low) for begin, end, low, high in pieces], np.int64)


def _spirals(n: int, rng: np.random.Generator) -> Rectangles:
    """Split pieces until there are ``n``: half of the large enough pieces into five, all others into two."""
    pieces: Rectangles = [(0, SIDE, 0, SIDE)]
    while len(pieces) < n:
        areas = np.array([(b - a) * (d - c) for a, b, c, d in pieces], np.float64)
        # Usually the largest piece is split, sometimes a random piece, so that sizes span decades.
        at = int(areas.argmax()) if rng.random() < 0.6 else int(rng.choice(len(pieces), p=areas / areas.sum()))
        begin, end, low, high = pieces[at]
        if min(end - begin, high - low) >= 8 and rng.random() < 0.5:
            t1, t2 = sorted(rng.choice(np.arange(begin + 1, end), 2, replace=False).tolist())
            m1, m2 = sorted(rng.choice(np.arange(low + 1, high), 2, replace=False).tolist())
            pieces[at : at + 1] = [
                (begin, t1, low, m2),
                (begin, t2, m2, high),
                (t2, end, m1, high),
                (t1, end, low, m1),
                (t1, t2, m1, m2),
            ]
        elif max(end - begin, high - low) >= 2:
            pieces[at : at + 1] = _halves(pieces[at], rng, 0.2)
    return pieces


def _slices(n: int, rng: np.random.Generator) -> Rectangles:
    """Split random pieces, across time or across memory, until there are ``n``; cuts keep 5 % away from the edges."""
    pieces: Rectangles = [(0, SIDE, 0, SIDE)]
    while len(pieces) < n:
        areas = np.array([(b - a) * (d - c) for a, b, c, d in pieces], np.float64)
        at = int(rng.choice(len(pieces), p=areas / areas.sum()))
        pieces[at : at + 1] = _halves(pieces[at], rng, 0.05, taller=float(rng.choice([1 / SIDE, SIDE])))
    return pieces


def _boxes(n: int, rng: np.random.Generator) -> Rectangles:
    """Split the largest piece near its middle until there are ``n``; boxes are about twice as tall as long."""
    pieces: Rectangles = [(0, SIDE, 0, SIDE)]
    while len(pieces) < n:
        at = max(range(len(pieces)), key=lambda k: (pieces[k][1] - pieces[k][0]) * (pieces[k][3] - pieces[k][2]))
        pieces[at : at + 1] = _halves(pieces[at], rng, 0.4, taller=2.0)
    return pieces


def _halves(
    piece: tuple[int, int, int, int], rng: np.random.Generator, least: float, taller: float = 1.0
) -> Rectangles:
    """Cut a piece in two across its longer side, at least the share ``least`` of that side away from both ends.

    ``taller`` multiplies the length in time before it is compared with the height. A piece of one cell stays whole.
    """
    begin, end, low, high = piece
    share = rng.uniform(least, 1 - least)
    if (end - begin) * taller >= high - low and end - begin >= 2:
        cut = begin + min(max(round((end - begin) * share), 1), end - begin - 1)
        return [(begin, cut, low, high), (cut, end, low, high)]
    if high - low < 2:
        return [piece]
    cut = low + min(max(round((high - low) * share), 1), high - low - 1)
    return [(begin, end, low, cut), (begin, end, cut, high)]


def _kept(table: Int64, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return a mask of the buffers that live at a random moment; these must not change."""
    moment = int(rng.integers(table[:, 1].max()))
    return (table[:, 0] <= moment) & (table[:, 1] > moment)


def _thinned(table: Int64, part: float, rng: np.random.Generator) -> Int64:
    """Return the table without some random buffers, which together have at most ``part`` of the area."""
    kept = _kept(table, rng)
    area = (table[:, 1] - table[:, 0]) * table[:, 2]
    left = part * float(area.sum())
    stays = np.ones(len(table), bool)
    for k in rng.permutation(len(table)).tolist():
        if not kept[k] and area[k] <= left:
            stays[k] = False
            left -= float(area[k])
    return table[stays]


def _shaved(table: Int64, rng: np.random.Generator) -> Int64:
    """Return the table with every third buffer up to 10 % shorter and smaller, except those alive at a random moment.

    A lifetime or size of two units or more loses at least one unit.
    """
    kept = _kept(table, rng)
    shaved = table.copy()
    for k in range(0, len(table), 3):
        if not kept[k]:
            lower, upper, size = table[k].tolist()
            life = upper - lower
            shaved[k, 1] -= min(max(int(life * rng.uniform(0, 0.1)), 1), life - 1)
            shaved[k, 2] -= min(max(int(size * rng.uniform(0, 0.1)), 1), size - 1)
    return shaved


def planted(n: int, seed: int = 0, *, duration: int = 1 << 30, memory: int = 1 << 30) -> Buffers:
    """Return ``n`` buffers that tile a ``duration x memory`` rectangle, so that the optimum is exactly ``memory``.

    The rectangle is repeatedly cut in two, across time or across memory, always from edge to edge of a piece.

    Raises:
        ValueError: the rectangle is too small for ``n`` pieces.
    """
    rng = np.random.default_rng(seed)
    draws = rng.random((4 * n + 16, 3))
    out = np.zeros((n, 3), np.int64)
    count = used = 0
    stack = [(0, duration, memory, n)]
    while stack:
        begin, end, size, pieces = stack.pop()
        life = end - begin
        if pieces == 1:
            out[count] = begin, end, size
            count += 1
            continue
        which, where, share = draws[used % len(draws)].tolist()
        used += 1
        # The relatively longer side is cut more often; a side too short for its pieces is not cut.
        across_time = which * (life / duration + size / memory) < life / duration
        if (life if across_time else size) < 2 * pieces:
            across_time = not across_time
        length = life if across_time else size
        if length < pieces:
            raise ValueError(f"cannot cut {duration} x {memory} into {n} pieces; enlarge duration or memory")
        fraction = 0.2 + 0.6 * where
        left = min(max(round(pieces * (fraction + 0.2 * (share - 0.5))), 1), pieces - 1)
        cut = min(max(int(length * fraction), min(left, length - 1)), length - min(pieces - left, length - 1))
        if across_time:
            stack += [(begin, begin + cut, size, left), (begin + cut, end, size, pieces - left)]
        else:
            stack += [(begin, end, cut, left), (begin, end, size - cut, pieces - left)]
    order = rng.permutation(n)
    lower, upper, size_column = out[order].T
    return lower.copy(), upper.copy(), size_column.copy()


def training_trace(layers: int, ops: int, seed: int = 0) -> Buffers:
    """Return the buffers of a deep network's training run, one step per operation: about ``3.2 * layers * ops``.

    Each of ``layers`` equal layers runs ``ops`` operations forward and backward. Some outputs are kept for backward,
    most die within a few steps, and gradients of parameters live from their operation to the end. Sizes span seven
    decades, as in recorded traces: few large buffers determine the peak, among thousands of tiny buffers.
    """
    rng = np.random.default_rng(seed)
    steps = 2 * layers * ops + 1
    big = np.int64(1) << rng.integers(18, 27, ops)
    small = 512 * rng.integers(1, 9, ops)
    result = np.where(rng.random(ops) < 0.35, big, small)
    kept = rng.random(ops) < 0.45
    short = rng.integers(1, 6, ops)
    weight = np.where(rng.random(ops) < 0.25, np.int64(1) << rng.integers(12, 24, ops), 0)
    scratch = np.where(rng.random(ops) < 0.4, np.int64(1) << rng.integers(10, 27, ops), 0)
    rows: list[tuple[int, int, int]] = []
    for layer in range(layers):
        for k in range(ops):
            at = layer * ops + k
            back = steps - 1 - at
            scale = 1.0 + 0.1 * rng.standard_normal() if rng.random() < 0.1 else 1.0
            nbytes = max(int(result[k] * abs(scale)) // 512 * 512, 512)
            rows.append((at, back + 1 if kept[k] else at + 1 + int(short[k]), nbytes))
            rows.append((back, min(back + 1 + int(short[k]), steps), nbytes))
            if scratch[k]:
                rows.append((at, at + 1, int(scratch[k])))
                rows.append((back, back + 1, int(scratch[k])))
            if weight[k]:
                rows.append((back, steps, int(weight[k])))
            if not kept[k] and rng.random() < 0.6:
                rows.append((at, back + 1, 512))  # masks, statistics
    table = np.array(rows, np.int64)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def skewed_trace(n: int, seed: int = 0) -> Buffers:
    """Return ``n`` buffers with Pareto sizes and lifetimes: most small and short, a few huge, a few very long-lived."""
    rng = np.random.default_rng(seed)
    steps = max(n // 2, 2)
    size = np.minimum(rng.pareto(0.7, n) * 4096 + 256, 1 << 32).astype(np.int64) // 256 * 256
    life = np.minimum(rng.pareto(0.6, n) * 3 + 1, steps).astype(np.int64)
    lower = rng.integers(0, steps, n)
    return lower, np.minimum(lower + life, steps + 1), size


def rectangles(n: int, seed: int = 0) -> Buffers:
    """Return ``n`` buffers that tile a square of 2**40 cells a side, cut from edge to edge of the largest piece.

    Half of the cuts go across time, the others across memory, at 10 to 90 % of the side.
    """
    rng = np.random.default_rng(seed)
    draws = rng.random((n, 2)).tolist()
    side = 1 << 40
    pieces = [(-1.0, 0, side, side)]  # (minus the area, begin, end, size)
    for where, way in draws[1:]:
        _, begin, end, size = heapq.heappop(pieces)
        share = 0.1 + 0.8 * where
        if way < 0.5:
            cut = begin + int((end - begin) * share)
            halves = ((begin, cut, size), (cut, end, size))
        else:
            part = int(size * share)
            halves = ((begin, end, part), (begin, end, size - part))
        for low, high, height in halves:
            heapq.heappush(pieces, (-((high - low) / side) * (height / side), low, high, height))
    table = np.array([piece[1:] for piece in pieces], np.int64)[rng.permutation(n)]
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def _holed(n: int, seed: int) -> Buffers:
    lower, upper, size = rectangles(n * 20 // 17, seed)
    kept = np.sort(np.random.default_rng(seed).permutation(len(lower))[:n])
    return lower[kept], upper[kept], size[kept]


def _trimmed(n: int, seed: int) -> Buffers:
    lower, upper, size = rectangles(n, seed)
    rng = np.random.default_rng(seed)
    return lower, upper - ((upper - lower) * rng.uniform(0, 0.2, n)).astype(np.int64), size - size // 10


def _ring(n: int, seed: int) -> Buffers:
    """Return buffers of similar sizes and random lives, thousands of which are alive together."""
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, 4 * n, n)
    return lower, lower + rng.integers(1, max(n // 5, 2), n), rng.integers(900, 1100, n)


def _powers(n: int, seed: int) -> Buffers:
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, 4 * n, n)
    return lower, lower + (1 << rng.integers(0, 14, n)), 256 << rng.integers(0, 16, n)


def _comb(n: int, seed: int) -> Buffers:
    """Return pairs of a buffer that lives for half of the time and one that dies immediately."""
    step = np.arange(n // 2)
    size = np.full(n // 2, 1024)
    return np.r_[step, step], np.r_[step + 1 + n // 2, step + 1], np.r_[size, size + (step + seed) % 7 * 64]


def _serving(n: int, seed: int) -> Buffers:
    """Return requests with Pareto lives and sizes, as of a server."""
    rng = np.random.default_rng(seed)
    lower = np.cumsum(rng.integers(0, 3, n))
    life = np.minimum(rng.pareto(1.1, n) * 50 + 1, n).astype(np.int64)
    return lower, lower + life, (np.minimum(rng.pareto(0.9, n), 1e4) * 4096 + 512).astype(np.int64)


KINDS: dict[str, Callable[[int, int], Buffers]] = {
    "rectangles": rectangles,
    "rectangles, 15 % removed": _holed,
    "rectangles, trimmed": _trimmed,
    "ring": _ring,
    "powers of two": _powers,
    "comb": _comb,
    "training": lambda n, seed: training_trace(max(n // 1000, 1), 312, seed),
    "serving": _serving,
}
"""Generators of any number of buffers: each takes the number and a seed."""
