"""Packing problems read from CSV files.

Each line is a buffer, with the columns ``id``, ``lower``, ``upper`` and ``size``. Files are only read; any thread may
call this module.
"""

from __future__ import annotations

import csv
from os import PathLike
from pathlib import Path

import numpy as np

from weftplan.errors import FormatError
from weftplan.planner.packing.problem import Int64

COLUMNS = ("id", "lower", "upper", "size")


def read_csv(path: str | PathLike[str]) -> tuple[list[str], Int64, Int64, Int64]:
    """Read ``id,lower,upper,size`` rows; columns may come in any order, other columns are ignored.

    Returns:
        Names, then lower, upper and size as int64 arrays; lifetimes are half-open.

    Raises:
        FormatError: a column is missing, a value is no 64-bit integer, or a buffer is empty; names the line.
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
        indices = [header.index(c) for c in COLUMNS[1:]]
        name_at = header.index("id") if "id" in header else None
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            try:
                lower, upper, size = (int(row[k]) for k in indices)
                name = str(len(names)) if name_at is None else row[name_at].strip()
            except (ValueError, IndexError):
                raise FormatError(
                    f"{path}, line {rows.line_num}: expected integers lower,upper,size in a row of {','.join(header)}, "
                    f"got {','.join(row)!r}"
                ) from None
            if max(abs(lower), abs(upper), abs(size)) >= 1 << 63:
                raise FormatError(f"{path}, line {rows.line_num}: a value does not fit 64 bits: {','.join(row)!r}")
            if lower >= upper or size <= 0:
                raise FormatError(
                    f"{path}, line {rows.line_num}: expected lower < upper and size > 0, got {','.join(row)!r}; leave "
                    f"empty buffers out"
                )
            names.append(name)
            values.append((lower, upper, size))
    table = np.array(values, np.int64).reshape(len(values), 3)
    return names, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()
