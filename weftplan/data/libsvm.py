"""LibSVMIter: sparse samples from text files in LIBSVM format, as dense batches.

A line is ``label index:value index:value …``; a ``#`` starts a comment. Rows are stored sparse in memory. Batches are
dense arrays, because the package has no sparse arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftplan.data.batch import Host
from weftplan.data.file_iterators import File, RoundedRows
from weftplan.errors import FormatError, ParameterError, ShapeError
from weftplan.support.array_types import DTypeLike, RawArray
from weftplan.support.progress import Progress

_MAX_COLUMN = 1 << 53
"""First integer from which float64 cannot represent every integer."""


class SparseRows:
    """Sparse rows in compressed form; indexing makes dense rows on demand.

    Args:
        ends: offsets of the rows in ``columns`` and ``values``, starting with 0.
        columns, values: column and value of each stored number. If a column repeats within a row, the last value wins.
        width: length of a row.
    """

    def __init__(self, ends: Host, columns: Host, values: Host, width: int) -> None:
        self._ends, self._columns, self._values = ends, columns, values
        self.shape = (len(ends) - 1, width)
        self.dtype = values.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Sequence[int] | RawArray) -> Host:
        """Return these rows as a dense array."""
        rows = np.arange(len(self))[rows]
        dense = np.zeros((len(rows), self.shape[1]), self.dtype)
        for k, row in enumerate(rows):
            part = slice(self._ends[row], self._ends[row + 1])
            dense[k, self._columns[part]] = self._values[part]
        return dense


class LibSVMIter(RoundedRows):
    """Rows of text files in the format of LIBSVM, as dense batches.

    Features count from 0, as in MXNet; for a file whose first feature is 1 make ``data_shape`` one larger. MXNet gives
    arrays of storage type ``csr`` with the same values.

    Args:
        data_libsvm: a file, or a folder whose files are read in the order of their names.
        data_shape: ``(features,)``.
        label_libsvm: a file (or folder) of labels in the same format, for labels of several numbers; None or ``NULL``:
            the number that begins a line of ``data_libsvm``.
        label_shape: with ``label_libsvm``: ``(numbers of a label,)``.
        num_parts, part_index: split the rows into ``num_parts`` equal parts and read only part ``part_index``.
        round_batch: whether the next epoch skips the first samples that pad the last batch. ``pad`` of the batch counts
            them.

    Raises:
        FormatError: a line does not have this format; the message names it.
        ShapeError: a feature lies outside the shape, or the numbers of labels and rows differ.
    """

    def __init__(
        self,
        data_libsvm: File,
        data_shape: Sequence[int],
        label_libsvm: File | None = None,
        label_shape: Sequence[int] = (1,),
        num_parts: int = 1,
        part_index: int = 0,
        batch_size: int = 1,
        round_batch: bool = True,
        dtype: DTypeLike | None = "float32",
        data_name: str = "data",
        label_name: str = "softmax_label",
        **ignored: object,
    ) -> None:
        if not 0 <= part_index < num_parts:
            raise ParameterError(f"LibSVMIter: part_index {part_index} of num_parts {num_parts}: 0 is the first")
        kind = np.dtype("float32" if dtype is None else dtype)
        labels, data = _read(data_libsvm, _width(data_shape, "data_shape"), kind)
        label: Any = labels
        if label_libsvm is not None and os.fspath(label_libsvm) != "NULL":
            label = _read(label_libsvm, _width(label_shape, "label_shape"), kind)[1]
            if len(label) != len(data):
                raise ShapeError(
                    f"LibSVMIter: {os.fspath(data_libsvm)} has {len(data)} rows, {os.fspath(label_libsvm)} {len(label)}"
                )
        count = len(data)
        part = range(count * part_index // num_parts, count * (part_index + 1) // num_parts)
        if not part:
            raise ParameterError(f"LibSVMIter: {count} rows are too few for num_parts={num_parts}")
        super().__init__(data, label, batch_size, data_name, label_name, round_batch=round_batch, part=part)


def _width(shape: Sequence[int], what: str) -> int:
    if len(tuple(shape)) != 1 or shape[0] < 1:
        raise ShapeError(f"LibSVMIter: {what} must be (number,), got {tuple(shape)}")
    return int(shape[0])


def _read(path: File, width: int, dtype: DTypeLike) -> tuple[Host, SparseRows]:
    """Return (labels, rows) of a file, or of all files in a folder."""
    files = sorted(entry for entry in Path(path).iterdir() if entry.is_file()) if os.path.isdir(path) else [Path(path)]
    labels: list[str] = []
    counts: list[int] = []
    pairs: list[str] = []
    lines: list[tuple[Path, int]] = []
    for file in files:
        for number, fields in Progress(f"reading {file.name}", unit="lines").each(_lines(file)):
            labels.append(fields[0].partition(":")[0])  # a weight may follow; MXNet ignores it, too
            pairs_text = fields[2:] if len(fields) > 1 and fields[1].startswith("qid:") else fields[1:]
            counts.append(len(pairs_text))
            pairs += pairs_text
            lines.append((file, number))
    if not labels:
        raise FormatError(f"{os.fspath(path)}: there is no line in it")
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    numbers = _numbers(pairs)
    targets = None if numbers is None else _floats(labels)
    if numbers is None or targets is None:
        raise _first_mistake(labels, counts, pairs, lines)
    columns, values = numbers
    beyond = np.flatnonzero((columns < 0) | (columns >= width))
    if len(beyond):
        file, number = lines[int(np.searchsorted(ends, beyond[0], "right")) - 1]
        raise ShapeError(
            f"{file}: line {number} has feature {int(columns[beyond[0]])}, expected 0 to {width - 1} for the shape "
            f"({width},); features count from 0, so a file that counts from 1 needs ({width + 1},)"
        )
    return targets.astype(dtype), SparseRows(ends, columns, values.astype(dtype), width)


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields) of the lines that are not empty."""
    try:
        with file.open(encoding="utf-8") as opened:
            for number, line in enumerate(opened, 1):
                fields = line.partition("#")[0].split()
                if fields:
                    yield number, fields
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}: no text, so no file in the format of LIBSVM: {error}") from error


def _numbers(pairs: Sequence[str]) -> tuple[Host, Host] | None:
    """Return (columns, values) of ``column:value`` texts; None if any text is malformed."""
    halves = [pair.partition(":") for pair in pairs]
    columns = _floats([half[0] for half in halves])
    values = _floats([half[2] for half in halves])
    if columns is None or values is None:
        return None
    if not ((np.abs(columns) < _MAX_COLUMN) & (columns == np.rint(columns))).all():  # false for NaN, too
        return None
    return columns.astype(np.int64), values


def _floats(texts: Sequence[str]) -> Host | None:
    try:
        return np.array(list(map(float, texts)), np.float64)
    except ValueError:
        return None


def _first_mistake(
    labels: Sequence[str], counts: Sequence[int], pairs: Sequence[str], lines: Sequence[tuple[Path, int]]
) -> FormatError:
    start = 0
    for label, count, (file, number) in zip(labels, counts, lines, strict=True):
        line_name = f"{file}: line {number}"
        if _floats([label]) is None:
            return FormatError(f"{line_name} begins with {label!r}, expected a label that is a number")
        for pair in pairs[start : start + count]:
            if _numbers([pair]) is None:
                return FormatError(f"{line_name} has {pair!r}, expected feature:value, such as 3:0.5")
        start += count
    raise AssertionError("every line is one of the format")
