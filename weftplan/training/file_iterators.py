"""Iterators over files, and around other iterators: CSVIter, MNISTIter, ResizeIter, PrefetchingIter.

An iterator is used by one thread. ``PrefetchingIter`` owns threads of its own, which read one batch ahead and end
with the iterator.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from weftplan.errors import FormatError, ParameterError, ShapeError
from weftplan.ndarray import array
from weftplan.training.io import DataBatch, DataDesc, DataIter, Host

File = str | os.PathLike[str]


class _Rows(DataIter):
    """Base: batches of rows that lie in memory; :meth:`getdata` gives one array, as MXNet's iterators over files do."""

    def __init__(self, data: Host, label: Host, batch_size: int, data_name: str, label_name: str) -> None:
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
        self._batch: DataBatch | None = None

    def _take(self, rows: Host, pad: int) -> None:
        self._batch = DataBatch(
            [array(self._data[rows], dtype=self._data.dtype)],
            [array(self._label[rows], dtype=self._label.dtype)],
            pad=pad,
            index=rows,
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )

    def next(self) -> DataBatch:
        if not self.iter_next():
            raise StopIteration
        assert self._batch is not None
        return self._batch

    def getdata(self) -> Any:
        """The data array of the current batch."""
        return self._current().data[0]

    def getlabel(self) -> Any:
        """The label array of the current batch."""
        return self._current().label[0]

    def getpad(self) -> int:
        return self._current().pad or 0

    def getindex(self) -> Host | None:
        return self._current().index

    def _current(self) -> DataBatch:
        if self._batch is None:
            raise ParameterError(f"{type(self).__name__}: there is no batch yet; call next() first")
        return self._batch


class CSVIter(_Rows):
    """Rows of numbers in text files, with commas between.

    Args:
        data_csv, label_csv: paths; without labels they are 0.
        data_shape, label_shape: of one sample; a label of shape (1,) has no axis of its own.
        round_batch: the last batch is filled up with the first samples, which the next epoch then leaves out; else that
            starts over. ``pad`` of the batch says how many.

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
        dtype: Any = "float32",
        data_name: str = "data",
        label_name: str = "softmax_label",
        **ignored: Any,
    ) -> None:
        data = _table(data_csv, tuple(data_shape), np.dtype(dtype))
        shape = () if tuple(label_shape) == (1,) else tuple(label_shape)
        label = np.zeros((len(data), *shape), np.dtype(dtype))
        if label_csv is not None:
            label = _table(label_csv, shape, np.dtype(dtype))
        super().__init__(data, label, batch_size, data_name, label_name)
        self.round_batch = round_batch
        self._used = 0
        """Samples of this epoch that filled up the last batch of the one before."""

    def reset(self) -> None:
        self._cursor = self._used
        self._used = 0

    def iter_next(self) -> bool:
        count, start = len(self._data), self._cursor
        if start >= count:
            return False
        stop = start + self.batch_size
        self._cursor = stop
        pad = max(0, stop - count)
        self._used = pad % count if self.round_batch else 0
        self._take(np.arange(start, stop) % count, pad)
        return True


def _table(path: File, shape: tuple[int, ...], dtype: Any) -> Host:
    """The rows of a text file, each of ``shape``."""
    try:
        rows = np.loadtxt(path, delimiter=",", ndmin=2, dtype=dtype, encoding="utf-8")
    except ValueError as error:
        raise FormatError(f"{os.fspath(path)}: no table of numbers with commas between: {error}") from error
    if rows.shape[1] != math.prod(shape) or not len(rows):
        raise FormatError(
            f"{os.fspath(path)}: {rows.shape[0]} rows of {rows.shape[1]} numbers, shape {shape} needs "
            f"{math.prod(shape)}"
        )
    return rows.reshape(len(rows), *shape)


class MNISTIter(_Rows):
    """Images and labels in the files of MNIST, packed with gzip or not; pixels from 0 to 255/256.

    Args:
        flat: images as rows of pixels, else (1, rows, columns).
        shuffle: samples in a random order, from ``seed``; the same in each epoch, as in MXNet.
        silent: accepted.

    What is left over behind the last whole batch is left out.

    Raises:
        FormatError: a file is truncated, or no file of MNIST.
    """

    def __init__(
        self,
        image: File,
        label: File,
        batch_size: int = 128,
        shuffle: bool = True,
        flat: bool = False,
        seed: int = 0,
        silent: bool = False,
        data_name: str = "data",
        label_name: str = "softmax_label",
        **ignored: Any,
    ) -> None:
        images = _idx(image, 3).astype(np.float32) / 256
        images = images.reshape(len(images), -1) if flat else images[:, None]
        super().__init__(images, _idx(label, 1).astype(np.float32), batch_size, data_name, label_name)
        if shuffle:
            np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), 0])).shuffle(self._order)

    def reset(self) -> None:
        self._cursor = 0

    def iter_next(self) -> bool:
        rows = self._order[self._cursor : self._cursor + self.batch_size]
        if len(rows) < self.batch_size:
            return False
        self._cursor += self.batch_size
        self._take(rows, 0)
        return True


def _idx(path: File, ndim: int) -> Host:
    """The bytes of a file of MNIST as an array."""
    content = Path(path).read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    where = os.fspath(path)
    if len(content) < 4 + 4 * ndim or content[:4] != struct.pack(">I", 0x800 | ndim):
        raise FormatError(f"{where}: expected a file of MNIST with {ndim} dimensions, it begins with {content[:4]!r}")
    shape = struct.unpack_from(f">{ndim}I", content, 4)
    body = content[4 + 4 * ndim :]
    if len(body) != math.prod(shape):
        raise FormatError(
            f"{where}: truncated or damaged: shape {shape} needs {math.prod(shape):,} bytes, {len(body):,} follow"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


class ResizeIter(DataIter):
    """Another iterator with another number of batches in an epoch: started over, or left in the middle.

    Args:
        data_iter: the other one.
        size: batches of an epoch.
        reset_internal: whether :meth:`reset` starts the other one over.
    """

    def __init__(self, data_iter: DataIter, size: int, reset_internal: bool = True) -> None:
        super().__init__(data_iter.batch_size)
        self.data_iter = data_iter
        self.size = size
        self.reset_internal = reset_internal
        self.cur = 0
        self.current_batch: DataBatch | None = None
        self.provide_data, self.provide_label = data_iter.provide_data, data_iter.provide_label
        if hasattr(data_iter, "default_bucket_key"):
            self.default_bucket_key = data_iter.default_bucket_key

    def reset(self) -> None:
        self.cur = 0
        if self.reset_internal:
            self.data_iter.reset()

    def iter_next(self) -> bool:
        if self.cur == self.size:
            return False
        try:
            self.current_batch = self.data_iter.next()
        except StopIteration:
            self.data_iter.reset()
            self.current_batch = self.data_iter.next()
        self.cur += 1
        return True

    def next(self) -> DataBatch:
        if not self.iter_next():
            raise StopIteration
        assert self.current_batch is not None
        return self.current_batch


class PrefetchingIter(DataIter):
    """One or several iterators whose next batches are made by threads while this one is used.

    Args:
        iters: iterators; their data and labels stand behind each other in a batch.
        rename_data, rename_label: for each iterator other names: a dictionary from old to new.
    """

    def __init__(
        self,
        iters: DataIter | Sequence[DataIter],
        rename_data: Sequence[Mapping[str, str]] | None = None,
        rename_label: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self.iters = [iters] if isinstance(iters, DataIter) else list(iters)
        if not self.iters:
            raise ParameterError("PrefetchingIter needs at least one iterator")
        super().__init__(self.iters[0].batch_size)
        self.provide_data = self._descs(lambda it: it.provide_data, rename_data)
        self.provide_label = self._descs(lambda it: it.provide_label, rename_label)
        self._threads = ThreadPoolExecutor(len(self.iters), thread_name_prefix="weftplan-prefetch")
        self.current_batch: DataBatch | None = None
        self._coming: list[Future[DataBatch | None]] = []
        self._ask()

    def _descs(self, of: Callable[[DataIter], Any], names: Sequence[Mapping[str, str]] | None) -> list[DataDesc]:
        renamed = names or [{}] * len(self.iters)
        return [
            DataDesc(
                new.get(desc[0], desc[0]), desc[1], *((desc.dtype, desc.layout) if isinstance(desc, DataDesc) else ())
            )
            for it, new in zip(self.iters, renamed, strict=True)
            for desc in of(it)
        ]

    def _ask(self) -> None:
        self._coming = [self._threads.submit(_next_or_none, it) for it in self.iters]

    def reset(self) -> None:
        for future in self._coming:
            future.result()
        for it in self.iters:
            it.reset()
        self._ask()

    def iter_next(self) -> bool:
        batches = [future.result() for future in self._coming]
        found = [batch for batch in batches if batch is not None]
        if len(found) < len(batches):
            if found:
                raise ShapeError("PrefetchingIter: the iterators have different numbers of batches")
            return False
        self.current_batch = DataBatch(
            [a for batch in found for a in batch.data],
            [a for batch in found for a in batch.label],
            found[0].pad,
            found[0].index,
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )
        self._ask()
        return True

    def next(self) -> DataBatch:
        if not self.iter_next():
            raise StopIteration
        assert self.current_batch is not None
        return self.current_batch

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=False, cancel_futures=True)


def _next_or_none(iterator: DataIter) -> DataBatch | None:
    try:
        return iterator.next()
    except StopIteration:
        return None
