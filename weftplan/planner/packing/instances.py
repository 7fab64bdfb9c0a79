"""Packing problems: read from CSV, or generated with a known optimum or with the shape of real traces."""

from __future__ import annotations

import csv
from os import PathLike
from pathlib import Path

import numpy as np

from weftplan.errors import FormatError
from weftplan.planner.packing.problem import Int64

Buffers = tuple[Int64, Int64, Int64]

COLUMNS = ("id", "lower", "upper", "size")


def read_csv(path: str | PathLike[str]) -> tuple[list[str], Int64, Int64, Int64]:
    """Read ``id,lower,upper,size`` rows; columns may come in any order, others are ignored.

    Returns:
        Names, then lower, upper and size as int64 arrays; lifetimes are half-open.

    Raises:
        FormatError: a column is missing, or a value is no 64-bit integer; names the line.
        OSError: the file cannot be read.
    """
    names: list[str] = []
    values: list[tuple[int, int, int]] = []
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, skipinitialspace=True)
        header = [cell.strip().lower() for cell in next(rows, [])]
        missing = [c for c in COLUMNS[1:] if c not in header]
        if missing:
            raise FormatError(
                f"{path}: expected the columns id,lower,upper,size in the first line, "
                f"got {','.join(header) or 'an empty file'}; missing: {', '.join(missing)}"
            )
        where = [header.index(c) for c in COLUMNS[1:]]
        name_at = header.index("id") if "id" in header else None
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            try:
                lower, upper, size = (int(row[k]) for k in where)
            except (ValueError, IndexError):
                raise FormatError(
                    f"{path}, line {rows.line_num}: expected integers lower,upper,size, got {','.join(row)!r}"
                ) from None
            if max(abs(lower), abs(upper), abs(size)) >= 1 << 63:
                raise FormatError(f"{path}, line {rows.line_num}: a value does not fit 64 bits: {','.join(row)!r}")
            names.append(str(len(names)) if name_at is None else row[name_at].strip())
            values.append((lower, upper, size))
    table = np.array(values, np.int64).reshape(len(values), 3)
    return names, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def planted(n: int, seed: int = 0, *, duration: int = 1 << 30, memory: int = 1 << 30) -> Buffers:
    """``n`` buffers that tile a full ``duration x memory`` rectangle, so that the optimum is exactly ``memory``.

    The rectangle is cut in two again and again, across time or across memory, always from edge to edge of the piece.
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
        # Cut the relatively longer side more often; a side that could not hold its pieces is not cut.
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
    """A training run of a deep network, one step per operation: about ``3.2 * layers * ops`` buffers.

    Each of ``layers`` equal layers runs ``ops`` operations forward and backward. Some outputs are kept for backward,
    most die within a few steps, gradients of parameters live from their operation to the end, and the sizes span seven
    decades as in recorded traces: few large ones carry the peak, thousands of tiny ones surround them.
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
    """``n`` buffers with Pareto sizes and lifetimes: most small and short, a few huge, a few very long-lived."""
    rng = np.random.default_rng(seed)
    steps = max(n // 2, 2)
    size = np.minimum(rng.pareto(0.7, n) * 4096 + 256, 1 << 32).astype(np.int64) // 256 * 256
    life = np.minimum(rng.pareto(0.6, n) * 3 + 1, steps).astype(np.int64)
    lower = rng.integers(0, steps, n)
    return lower, np.minimum(lower + life, steps + 1), size
