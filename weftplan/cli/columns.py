"""Tables for a terminal of any width: columns without room are dropped, numbers are never cut."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from weftplan.support.progress import width_of

GAP = 2
"""Blanks between two columns."""
NARROW = 30
"""Fewest columns for a text next to its label."""
SHORTEST = 12
"""Fewest characters of a shortened name."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: the heading.
        cells: the texts, one per row.
        right: whether texts are right-aligned, as numbers are.
        leave: the column with the highest number is dropped first; 0: never dropped.
        name_like: whether a text may be cut in its middle.
    """

    name: str
    cells: Sequence[str]
    right: bool = False
    leave: int = 0
    name_like: bool = False

    @property
    def width(self) -> int:
        """Return the number of characters of the longest text, including the heading."""
        return max(map(len, (self.name, *self.cells)))


def table(columns: Iterable[Column], width: int | None) -> list[str]:
    """Return the lines of a table that is at most ``width`` characters wide (None: without a limit).

    >>> sizes = Column("bytes", ["1,024", "7"], right=True)
    >>> names = Column("name", ["convolution0_output", "x"], name_like=True)
    >>> shapes = Column("shape", ["(16, 16)", "(7,)"], leave=1)
    >>> for line in table([sizes, names, shapes], 40):
    ...     print(line)
    bytes  name                 shape
    1,024  convolution0_output  (16, 16)
        7  x                    (7,)
    >>> for line in table([sizes, names, shapes], 20):
    ...     print(line)
    bytes  name
    1,024  convol…output
        7  x
    """
    visible = list(columns)
    if width is not None:
        while _width(visible) > width:
            going = max(visible, key=lambda column: column.leave)
            if not going.leave:
                break
            visible.remove(going)
        visible = _shortened(visible, width)
    widths = [column.width for column in visible]
    rows = zip(*((column.name, *column.cells) for column in visible), strict=True)
    return [
        (" " * GAP)
        .join(
            cell.rjust(size) if column.right else cell.ljust(size)
            for cell, size, column in zip(row, widths, visible, strict=True)
        )
        .rstrip()
        for row in rows
    ]


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + GAP * (len(columns) - 1)


def _shortened(columns: list[Column], width: int) -> list[Column]:
    """Return the columns with names cut in their middle, if the table is still too wide."""
    over = _width(columns) - width
    result = []
    for column in columns:
        available = max(SHORTEST, column.width - over)
        if over > 0 and column.name_like and available < column.width:
            over -= column.width - available
            cells = [_cut(cell, available) for cell in column.cells]
            column = Column(column.name, cells, column.right, column.leave, True)
        result.append(column)
    return result


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def paragraph(text: str, width: int | None, *, indent: str = "") -> list[str]:
    """Return the lines of a sentence; words are never cut, and without a width there is one line."""
    if width is None:
        return [text]
    return wrap(text, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def labelled(rows: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """Return lines of labels with their texts next to them, or after them on a narrow terminal.

    >>> labelled([("peak", "1 KiB in all"), ("lower bound", "1 KiB")], 60)
    ['peak         1 KiB in all', 'lower bound  1 KiB']
    >>> labelled([("peak", "1 KiB in all"), ("lower bound", "1 KiB")], 20)
    ['peak: 1 KiB in all', 'lower bound: 1 KiB']
    """
    labels = max((len(name) for name, _ in rows), default=0) + GAP
    lines: list[str] = []
    for name, text in rows:
        if width is None or width >= labels + NARROW:
            line, *more = paragraph(text, None if width is None else width - labels)
            lines += [name.ljust(labels) + line, *(" " * labels + line for line in more)]
        else:
            lines += paragraph(f"{name.strip()}: {text}", width, indent="  ")
    return lines


def output_width(*, stderr: bool = False) -> int | None:
    """Return the width of the terminal at stdout (or stderr); None for a pipe or a file, which have no width."""
    return width_of(sys.stderr if stderr else sys.stdout)
