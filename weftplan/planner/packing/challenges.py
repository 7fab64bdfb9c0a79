"""Generated packing problems like the hard public ones: a few hundred buffers whose optimum is the lower bound.

All are cut from a full rectangle of 1024 x 1024 cells, from which buffers are then taken away; those that live at one
chosen moment stay, so that the rectangle's height remains both the lower bound and the optimum. What differs is how the
rectangle is cut and how much is taken. The MiniMalloc challenge problems fall into the same kinds: sizes from a
thousandth to most of the memory, the larger the shorter-lived, and hardly any hole (B, E, K); or hundreds of boxes of
nearly one shape with a third of the area empty (G, H).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.packing.instances import Buffers, planted
from weftplan.planner.packing.problem import Int64

SIDE = 1024
"""Cells of the rectangle in each direction, and bytes and time units of a cell."""

FAMILIES = ("cut", "cut, holes", "slices", "slices, holes", "spirals", "spirals, holes", "boxes", "shaved")

Rectangles = list[tuple[int, int, int, int]]
"""(begin, end, low, high) each."""


def challenge(family: str, n: int, seed: int = 0) -> Buffers:
    """About ``n`` buffers of a family; lower, upper and size as int64 arrays.

    * ``cut``: cut from edge to edge again and again; ``cut, holes``: a tenth of the area taken away.
    * ``slices``: the same, but any piece on any side, so that many are long and thin or short and tall, as in the
      public problems; ``slices, holes``: a tenth taken away.
    * ``spirals``: pieces are also cut into five, four around a middle, which no cut from edge to edge does;
      ``spirals, holes``: a tenth taken away.
    * ``boxes``: cut into nearly equal boxes, a third taken away.
    * ``shaved``: cut, then every third buffer is made up to a tenth smaller and shorter, as rounding and padding do.

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
    """(name, buffers) of every family, size and seed."""
    for family in FAMILIES:
        for n in counts:
            for seed in range(seeds):
                yield f"{family} {n} #{seed}", challenge(family, n, seed)


def _table(pieces: Rectangles) -> Int64:
    return np.array([(begin, end, high - low) for begin, end, low, high in pieces], np.int64)


def _spirals(n: int, rng: np.random.Generator) -> Rectangles:
    """Split pieces until there are ``n``: half of those that are large enough into five, the others into two."""
    pieces: Rectangles = [(0, SIDE, 0, SIDE)]
    while len(pieces) < n:
        areas = np.array([(b - a) * (d - c) for a, b, c, d in pieces], np.float64)
        # The largest often, any other sometimes: sizes spread over decades.
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
    """Split pieces until there are ``n``, on either side, anywhere but at the very ends."""
    pieces: Rectangles = [(0, SIDE, 0, SIDE)]
    while len(pieces) < n:
        areas = np.array([(b - a) * (d - c) for a, b, c, d in pieces], np.float64)
        at = int(rng.choice(len(pieces), p=areas / areas.sum()))
        pieces[at : at + 1] = _halves(pieces[at], rng, 0.05, taller=float(rng.choice([1 / SIDE, SIDE])))
    return pieces


def _boxes(n: int, rng: np.random.Generator) -> Rectangles:
    """Split the largest piece near its middle until there are ``n``; pieces are twice as tall as long."""
    pieces: Rectangles = [(0, SIDE, 0, SIDE)]
    while len(pieces) < n:
        at = max(range(len(pieces)), key=lambda k: (pieces[k][1] - pieces[k][0]) * (pieces[k][3] - pieces[k][2]))
        pieces[at : at + 1] = _halves(pieces[at], rng, 0.4, taller=2.0)
    return pieces


def _halves(
    piece: tuple[int, int, int, int], rng: np.random.Generator, least: float, taller: float = 1.0
) -> Rectangles:
    """Cut the relatively longer side, not nearer to its ends than ``least`` of it."""
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
    """Which buffers live at a random moment, and so must stay as they are."""
    moment = int(rng.integers(table[:, 1].max()))
    return (table[:, 0] <= moment) & (table[:, 1] > moment)


def _thinned(table: Int64, part: float, rng: np.random.Generator) -> Int64:
    """Without random buffers that have ``part`` of the area."""
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
    """Every third buffer up to a tenth shorter and smaller, by at least a cell where it has two."""
    kept = _kept(table, rng)
    shaved = table.copy()
    for k in range(0, len(table), 3):
        if not kept[k]:
            lower, upper, size = table[k].tolist()
            life = upper - lower
            shaved[k, 1] -= min(max(int(life * rng.uniform(0, 0.1)), 1), life - 1)
            shaved[k, 2] -= min(max(int(size * rng.uniform(0, 0.1)), 1), size - 1)
    return shaved
