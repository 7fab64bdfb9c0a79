"""Batch layout: names, shapes and dtypes of a sample's parts, and copying samples into rows.

The process that owns the iterator derives the layout from the first sample. Workers receive a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan.errors import DataError, DTypeError, ParameterError, listed
from weftplan.support.array_types import DType, DTypeLike

Host = np.ndarray[Any, DType]
Names = str | Sequence[str] | Mapping[str, str]
ALIGNMENT = 64


class DoesNotFit(Exception):
    """A readable sample that does not fit the layout; the message describes the mismatch."""


@dataclass(frozen=True, slots=True)
class SamplePart:
    """One array of a sample.

    Attributes:
        name: name of the network's input.
        key: index (sequence) or key (mapping) of the part in a sample; None if the sample itself is the array.
        shape: shape of a single sample.
        dtype: dtype in a batch.
        label: whether the part is a label.
    """

    name: str
    key: int | str | None
    shape: tuple[int, ...]
    dtype: DType
    label: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Parts of every sample, and the number of samples per batch.

    Attributes:
        batched: whether the source yields batches, with samples along the first axis.
    """

    parts: tuple[SamplePart, ...]
    rows: int
    batched: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a batch, each part aligned."""
        return sum(_aligned(self.rows * part.row_bytes) for part in self.parts)

    def views(self, memory: memoryview | bytearray) -> list[Host]:
        """Return the parts of a batch as views of ``memory`` (:attr:`nbytes` writable bytes), which they keep alive."""
        # np.ndarray(…, buffer=memory) would not prevent the mapping from being closed while views exist.
        block = np.frombuffer(memory, np.uint8)
        views, start = [], 0
        for part in self.parts:
            nbytes = self.rows * part.row_bytes
            views.append(block[start : start + nbytes].view(part.dtype).reshape(self.rows, *part.shape))
            start += _aligned(nbytes)
        return views

    def pick(self, sample: Any) -> list[Host]:
        """Return the parts of a sample as arrays.

        Raises:
            DoesNotFit: the sample lacks a part.
        """
        parts = self.parts
        head_key = parts[0].key
        if head_key is None:
            return [to_host(sample)]
        try:
            if head_key.__class__ is int and len(sample) != len(parts):
                raise DoesNotFit(f"it has {len(sample)} parts, the first sample had {len(parts)}")
            values = [sample[part.key] for part in parts]
        except (KeyError, TypeError, IndexError):
            raise DoesNotFit(
                f"{_described(sample)} has not the parts of the first sample: {[part.key for part in parts]}"
            ) from None
        return [to_host(value) for value in values]

    def store(self, arrays: Sequence[Host], views: Sequence[Host], row: int) -> int:
        """Copy the parts of a sample into row ``row`` of a batch, or a whole batch into the rows from ``row`` on;
        returns the number of rows written.

        Raises:
            DoesNotFit: an array has another shape than that of the first sample, or holds no numbers.
        """
        batched, count = self.batched, 1
        if batched:
            count = len(arrays[0]) if arrays[0].ndim else 0
            if not 1 <= count <= self.rows - row:
                raise DoesNotFit(f"it has {count} samples, the first batch had {self.rows}")
        for part, array, view in zip(self.parts, arrays, views, strict=True):
            expected = (count, *part.shape) if batched else part.shape
            if array.shape != expected:
                raise DoesNotFit(
                    f"{part.name!r} has shape {array.shape}, expected {expected} as in the first; let transform give "
                    f"all samples one shape"
                )
            if array.dtype.kind not in "biuf":
                raise DoesNotFit(f"{part.name!r} has dtype {array.dtype}, expected numbers")
            if batched:
                view[row : row + count] = array
            else:
                view[row] = array
        return count


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def to_host(value: object) -> Host:
    """Convert a dataset's value to a NumPy array: an array, a tensor of any library with DLPack, numbers, lists or an
    image. The memory is shared if possible, without a copy.

    >>> to_host([1, 2]).tolist(), to_host(3.5).shape
    ([1, 2], ())
    """
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, (int, float, np.generic)) and hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError):  # of another device, or part of a graph of gradients
            for step in ("detach", "cpu", "get"):
                value = getattr(value, step)() if hasattr(value, step) else value
    return np.asarray(value)


def layout_of(
    sample: Any,
    data_names: Names,
    label_names: Names,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None,
    batch_size: int | None,
) -> BatchLayout:
    """Derive the layout from the first sample; without a batch size the sample is a batch.

    Raises:
        ParameterError: the names are not those of the sample.
        DTypeError: a part holds no numbers.
        DataError: a batch whose parts differ in number of samples.
    """
    names = [(*pair, False) for pair in _pairs(data_names, "data_names")]
    labels = [(*pair, True) for pair in _pairs(label_names, "label_names")]
    chosen = _chosen(sample, names, labels)
    parts, counts = [], {}
    for name, key, label in chosen:
        array = to_host(sample if key is None else sample[key])
        if array.dtype.kind not in "biuf":
            raise DTypeError(f"{name!r} of the first sample: expected numbers, got {_described(array)}")
        if batch_size is None:
            counts[name] = len(array) if array.ndim else 0
        shape = array.shape if batch_size is not None else array.shape[1:]
        parts.append(SamplePart(name, key, shape, _dtype_of(name, array.dtype, dtype), label))
    if batch_size is None and (len({*counts.values()}) != 1 or 0 in counts.values()):
        raise DataError(f"the first batch has parts of {counts} samples; they must have equally many, at least one")
    rows = batch_size if batch_size is not None else next(iter(counts.values()))
    return BatchLayout(tuple(parts), rows, batch_size is None)


def _pairs(names: Names, what: str) -> list[tuple[str, str]]:
    """[(name of the input, key of the sample)]."""
    if isinstance(names, Mapping):
        pairs = [(name, key) for key, name in names.items()]
    elif isinstance(names, (str, Sequence)):
        pairs = [(name, name) for name in ([names] if isinstance(names, str) else names)]
    else:
        pairs = [(names, names)]
    if any(not isinstance(part, str) for pair in pairs for part in pair):
        raise ParameterError(f"{what} must be names, or a dictionary from keys of samples to names, got {names!r}")
    return pairs


def _chosen(sample: Any, names: list[Any], labels: list[Any]) -> list[tuple[str, int | str | None, bool]]:
    """Return (name, key, whether it is a label) of each part."""
    if isinstance(sample, Mapping):
        lost = [key for _, key, _ in (*names, *labels) if key not in sample]
        if lost:
            raise ParameterError(
                f"samples have no parts {lost}; they have {listed(sample)}: give data_names and label_names from them, "
                f"such as data_names={{'image': 'data'}}, label_names={{'label': 'softmax_label'}}, label_names=()"
            )
        return [*names, *labels]
    numbers = isinstance(sample, list) and all(isinstance(part, (int, float)) for part in sample)
    if isinstance(sample, (tuple, list)) and not numbers:
        parts = [*names, *labels]
        if len(sample) != len(parts):
            raise ParameterError(
                f"samples have {len(sample)} parts, but there are names for {len(parts)}: data_names "
                f"{[name for name, _, _ in names]}, label_names {[name for name, _, _ in labels]}"
            )
        return [(name, index, label) for index, (name, _, label) in enumerate(parts)]
    if len(names) != 1:
        raise ParameterError(f"samples are single arrays, but data_names has {[name for name, _, _ in names]}")
    return [(names[0][0], None, False)]


def _dtype_of(name: str, stored: DType, requested: DTypeLike | Mapping[str, DTypeLike] | None) -> DType:
    """Return the dtype in a batch: the requested one, else float32 for float64 and integers, as in NDArrayIter."""
    choice: Any = requested.get(name) if isinstance(requested, Mapping) else requested
    if choice is not None:
        chosen: DType = np.dtype(choice)
        return chosen
    return np.dtype(np.float32) if stored == np.float64 or stored.kind in "biu" else stored


def _described(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return f"{type(value).__name__} of dtype {dtype}" if dtype is not None else f"{type(value).__name__} {value!r:.60}"
