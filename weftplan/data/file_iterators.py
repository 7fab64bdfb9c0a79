"""File iterators CSVIter and MNISTIter, and ResizeIter, an adapter with a fixed epoch length.

One thread uses an iterator.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np

from weftplan.data.batch import DataBatch, DataDesc, Host
from weftplan.data.data_iter import DataIter, HoldingIter
from weftplan.data.random_draws import generator
from weftplan.data.resumable_position import State, checked_integer, make_state, read_state, state_or_none
from weftplan.errors import FormatError, ParameterError, ShapeError
from weftplan.ndarray import array
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.atomic_files import open_to_read, unpack_gzip

File = str | os.PathLike[str]


class Samples(Protocol):
    """Samples along the first axis: an array, or rows that become one when they are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of samples, then the shape of a sample."""
        ...

    @property
    def dtype(self) -> DType:
        """Dtype of the samples' elements."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


class Rows(HoldingIter):
    """Base of iterators over rows in memory; :meth:`getdata` returns a single array, as in MXNet's file iterators."""

    def __init__(self, data: Samples, label: Samples, batch_size: int, data_name: str, label_name: str) -> None:
        super().__init__(batch_size)
        if batch_size < 1:
            raise ParameterError(f"{type(self).__name__}: batch_size must be at least 1, got {batch_size}")
        if len(data) != len(label):
            raise ShapeError(f"{type(self).__name__}: {len(data)} samples, but {len(label)} labels")
        self._data, self._label = data, label
        self.provide_data = [DataDesc(data_name, (batch_size, *data.shape[1:]), data.dtype)]
        self.provide_label = [DataDesc(label_name, (batch_size, *label.shape[1:]), label.dtype)]
        self._order = np.arange(len(data))
        self._cursor = 0
        self._facts: dict[str, Any] = {
            "samples": len(data), "batch_size": batch_size, "shapes": [list(data.shape[1:]), list(label.shape[1:])],
        }  # fmt: skip

    def state(self) -> State:
        return make_state(self, self._facts, cursor=self._cursor)

    def set_state(self, state: Mapping[str, object]) -> None:
        (cursor,) = read_state(self, state, self._facts, "cursor")
        self._cursor = checked_integer(self, "cursor", cursor, len(self._data) + self.batch_size)
        self.current_batch = None

    def _take(self, rows: Host, pad: int) -> None:
        self.current_batch = DataBatch(
            [array(self._data[rows], dtype=self._data.dtype)],
            [array(self._label[rows], dtype=self._label.dtype)],
            pad=pad,
            index=rows,
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )

    def getdata(self) -> Any:
        """Return the data array of the current batch."""
        return self._current().data[0]

    def getlabel(self) -> Any:
        """Return the label array of the current batch."""
        return self._current().label[0]


class RoundedRows(Rows):
    """Base of iterators that pad the last batch of an epoch with the first samples.

    Args:
        round_batch: whether the next epoch skips the samples used as padding. ``pad`` of the batch counts them.
        part: rows to read; None: all.
    """

    def __init__(
        self,
        data: Samples,
        label: Samples,
        batch_size: int,
        data_name: str,
        label_name: str,
        *,
        round_batch: bool,
        part: range | None = None,
    ) -> None:
        super().__init__(data, label, batch_size, data_name, label_name)
        self.round_batch = round_batch
        self._facts["round_batch"] = bool(round_batch)
        if part is not None and len(part) < len(self._order):
            self._order = np.asarray(part)
            self._facts["part"] = [part.start, part.stop]
        self._used = 0
        """Samples of the next epoch that padded the last batch of the current epoch."""

    def reset(self) -> None:
        self._cursor = self._used
        self._used = 0

    def state(self) -> State:
        return {**super().state(), "used": self._used}

    def set_state(self, state: Mapping[str, object]) -> None:
        (used,) = read_state(self, state, self._facts, "used")
        checked_integer(self, "used", used, len(self._order))
        super().set_state(state)
        self._used = used

    def iter_next(self) -> bool:
        count, start = len(self._order), self._cursor
        if start >= count:
            return False
        stop = start + self.batch_size
        pad = max(0, stop - count)
        self._take(self._order[np.arange(start, stop) % count], pad)
        self._cursor = stop  # after the batch is made, so that a batch that cannot be made is not lost
        self._used = pad % count if self.round_batch else 0
        return True


class CSVIter(RoundedRows):
    """Rows of numbers in text files, with commas between.

    Args:
        data_csv, label_csv: paths; without labels they are 0.
        data_shape, label_shape: shapes of one sample; a label of shape (1,) has no axis of its own.
        round_batch: whether the next epoch skips the first samples, which pad the last batch. ``pad`` of the batch
            counts them.

    Raises:
        FormatError: a file is no table of numbers, or rows do not have as many as the shape.
    """

    def __init__(
        self,
        data_csv: File,
        data_shape: Sequence[int],
        label_csv: File | None = None,
        label_shape: Sequence[int] = (1,),
        batch_size: int = 1,
        round_batch: bool = True,
        dtype: DTypeLike = "float32",
        data_name: str = "data",
        label_name: str = "softmax_label",
        **ignored: object,
    ) -> None:
        data = _table(data_csv, tuple(data_shape), np.dtype(dtype))
        shape = () if tuple(label_shape) == (1,) else tuple(label_shape)
        label = np.zeros((len(data), *shape), np.dtype(dtype))
        if label_csv is not None:
            label = _table(label_csv, shape, np.dtype(dtype))
        super().__init__(data, label, batch_size, data_name, label_name, round_batch=round_batch)


def _unpacked(file: io.BufferedReader, path: File) -> BinaryIO:
    """Return the file itself, or its decompressed content if it is a gzip file."""
    return io.BytesIO(unpack_gzip(file.read(), os.fspath(path))) if file.peek(2).startswith(b"\x1f\x8b") else file


def _table(path: File, shape: tuple[int, ...], dtype: DTypeLike) -> Host:
    """Return the rows of a text file, each of ``shape``."""
    try:
        # Open the file here: given a name, NumPy would download URLs and decompress any known format.
        with open_to_read(path) as file, io.TextIOWrapper(_unpacked(file, path), encoding="utf-8") as text:
            rows = np.loadtxt(text, delimiter=",", ndmin=2, dtype=dtype)
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{os.fspath(path)}: no table of numbers with commas between: {error}") from error
    if rows.shape[1] != math.prod(shape) or not len(rows):
        raise FormatError(
            f"{os.fspath(path)}: {rows.shape[0]} rows of {rows.shape[1]} numbers, shape {shape} needs "
            f"{math.prod(shape)}"
        )
    return rows.reshape(len(rows), *shape)


class MNISTIter(Rows):
    """Images and labels from MNIST files, gzipped or not; pixels from 0 to 255/256.

    Args:
        flat: images as rows of pixels, else (1, rows, columns).
        shuffle: samples in a random order, from ``seed``; the same in each epoch, as in MXNet.
        silent: accepted.
        num_parts, part_index: split the samples into ``num_parts`` equal parts and read only part ``part_index``.

    An incomplete last batch is discarded.

    Raises:
        FormatError: a file is truncated, or no file of MNIST.
    """

    def __init__(
        self,
        image: File = "./train-images-idx3-ubyte",
        label: File = "./train-labels-idx1-ubyte",
        batch_size: int = 128,
        shuffle: bool = True,
        flat: bool = False,
        seed: int = 0,
        silent: bool = False,
        data_name: str = "data",
        label_name: str = "softmax_label",
        num_parts: int = 1,
        part_index: int = 0,
        **ignored: object,
    ) -> None:
        if not 0 <= part_index < num_parts:
            raise ParameterError(f"MNISTIter: part_index must be from 0 to {num_parts - 1}, got {part_index}")
        pixels, labels = read_idx(image, 3), read_idx(label, 1)
        if len(pixels) != len(labels):
            raise ShapeError(f"MNISTIter: {len(pixels)} samples, but {len(labels)} labels")
        count = len(pixels) // num_parts
        part = slice(part_index * count, (part_index + 1) * count)
        images = pixels[part].astype(np.float32) / 256
        images = images.reshape(len(images), -1) if flat else images[:, None]
        super().__init__(images, labels[part].astype(np.float32), batch_size, data_name, label_name)
        if shuffle:
            generator((seed, 0)).shuffle(self._order)
        self._facts["seed"] = int(seed) if shuffle else None

    def reset(self) -> None:
        self._cursor = 0

    def iter_next(self) -> bool:
        rows = self._order[self._cursor : self._cursor + self.batch_size]
        if len(rows) < self.batch_size:
            return False
        self._take(rows, 0)
        self._cursor += self.batch_size  # after the batch is made, as above
        return True


def read_idx(path: File, ndim: int) -> Host:
    """Return the bytes of an MNIST file, gzipped or not, as an array.

    Raises:
        FormatError: it is truncated, or no such file.
    """
    path_name = os.fspath(path)
    with open_to_read(path) as file:
        content = unpack_gzip(file.read(), path_name)
    if len(content) < 4 + 4 * ndim or content[:4] != struct.pack(">I", 0x800 | ndim):
        raise FormatError(
            f"{path_name}: expected a file of MNIST with {ndim} dimensions, it begins with {content[:4]!r}"
        )
    shape = struct.unpack_from(f">{ndim}I", content, 4)
    body = content[4 + 4 * ndim :]
    if len(body) != math.prod(shape):
        raise FormatError(
            f"{path_name}: truncated or damaged: shape {shape} needs {math.prod(shape):,} bytes, {len(body):,} follow"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


class ResizeIter(HoldingIter):
    """Adapter that changes the number of batches per epoch: the inner iterator is restarted or cut off as needed.

    Args:
        data_iter: the inner iterator.
        size: batches of an epoch.
        reset_internal: whether :meth:`reset` also resets the inner iterator.
    """

    def __init__(self, data_iter: DataIter, size: int, reset_internal: bool = True) -> None:
        super().__init__(data_iter.batch_size)
        self.data_iter = data_iter
        self.size = size
        self.reset_internal = reset_internal
        self.cur = 0
        self.provide_data, self.provide_label = data_iter.provide_data, data_iter.provide_label
        if hasattr(data_iter, "default_bucket_key"):
            self.default_bucket_key = data_iter.default_bucket_key

    def reset(self) -> None:
        self.cur = 0
        if self.reset_internal:
            self.data_iter.reset()

    def state(self) -> State:
        return make_state(self, {"size": self.size}, cur=self.cur, of_inner=self.data_iter.state())

    def set_state(self, state: Mapping[str, object]) -> None:
        cur, inner = read_state(self, state, {"size": self.size}, "cur", "of_inner")
        checked_integer(self, "cur", cur, self.size)
        self.data_iter.set_state(inner)
        self.cur, self.current_batch = cur, None

    def iter_next(self) -> bool:
        if self.cur == self.size:
            return False
        try:
            self.current_batch = self.data_iter.next()
        except StopIteration:
            end = state_or_none(self.data_iter)
            self.data_iter.reset()
            try:
                self.current_batch = self.data_iter.next()
            except BaseException:
                if end is not None:
                    self.data_iter.set_state(end)
                raise
        self.cur += 1
        return True
