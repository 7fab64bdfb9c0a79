"""``mx.image.ImageIter``: batches of augmented images from an image list or a record file.

One thread uses the iterator and decodes the images.
:class:`~weftplan.data.images.records.ImageRecordIter` decodes on several threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan import ndarray as nd
from weftplan.data import recordio
from weftplan.data.batch import DataBatch, DataDesc, Host
from weftplan.data.data_iter import DataIter
from weftplan.data.images.augmenters import Augmenter, CreateAugmenter
from weftplan.data.images.image import imdecode
from weftplan.data.random_draws import generator, order_key
from weftplan.errors import FormatError, ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.support.atomic_files import open_to_read

File = str | os.PathLike[str]


class ImageIter(DataIter):
    """Batches of (channels, height, width).

    Args:
        data_shape: (3, height, width) of one sample.
        label_width: numbers of one label.
        path_imgrec: a file of records; ``path_imgidx`` is its index, without which it is read through once.
        path_imglist: a text file with a line ``key<tab>label…<tab>path`` for each image; ``imglist``: the same as a
            list of ``[label…, path]``. With ``path_imgrec`` they give the labels alone.
        path_root: the folder of the paths.
        shuffle: use a new random order in each epoch. It depends on the seed of ``np.random`` if the program has set
            that seed, else on the seed of ``mx.random``.
        part_index, num_parts: this iterator has that part of the images.
        aug_list: augmenters; by default those of :func:`CreateAugmenter`, to which other keywords go.
        dtype: dtype of the labels.
        last_batch_handle: ``pad``, ``discard`` or ``roll_over``, as in
            :class:`weftplan.data.ndarray_iter.NDArrayIter`.

    Raises:
        FormatError: a list or a file of records is damaged; an image is, when its batch is read: the error names it.
    """

    def __init__(
        self,
        batch_size: int,
        data_shape: Sequence[int],
        label_width: int = 1,
        path_imgrec: File | None = None,
        path_imglist: File | None = None,
        path_root: File | None = None,
        path_imgidx: File | None = None,
        shuffle: bool = False,
        part_index: int = 0,
        num_parts: int = 1,
        aug_list: Sequence[Augmenter] | None = None,
        imglist: Sequence[Any] | None = None,
        data_name: str = "data",
        label_name: str = "softmax_label",
        dtype: str = "float32",
        last_batch_handle: str = "pad",
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size)
        if last_batch_handle not in ("pad", "discard", "roll_over"):
            raise ParameterError(
                f"last_batch_handle must be 'pad', 'discard' or 'roll_over', got {last_batch_handle!r}"
            )
        path_imgrec, path_imglist, path_imgidx = path_imgrec or None, path_imglist or None, path_imgidx or None
        if path_imgrec is None and path_imglist is None and imglist is None:
            raise ParameterError("ImageIter needs path_imgrec, path_imglist or imglist")
        if not 0 <= part_index < num_parts:
            raise ParameterError(f"part_index must be in [0, {num_parts}), got {part_index}")
        self.check_data_shape(data_shape)
        self.data_shape = tuple(data_shape)
        self.label_width = label_width
        self.path_root = "" if path_root is None else os.fspath(path_root)
        self.shuffle = shuffle
        self.last_batch_handle = last_batch_handle
        self.imglist = image_list(path_imglist, imglist, np.dtype(dtype))
        self._records = None if path_imgrec is None else recordio.RecordReader(path_imgrec, path_imgidx)
        keys: list[Any] = list(self.imglist or ()) if self._records is None else list(self._records.keys)
        share = len(keys) // num_parts
        self.seq = keys[part_index * share : (part_index + 1) * share] if num_parts > 1 else keys
        self.num_image = len(self.seq)
        self.auglist = list(CreateAugmenter(data_shape, **kwargs) if aug_list is None else aug_list)
        self.provide_data = [DataDesc(data_name, (batch_size, *data_shape))]
        wide = (batch_size,) if label_width == 1 else (batch_size, label_width)
        self.provide_label = [DataDesc(label_name, wide, np.dtype(dtype))]
        self.cur = 0
        self._ended = False
        self._carried: list[tuple[Host, Any]] = []
        self.reset()

    def reset(self) -> None:
        if self.shuffle:
            self.seq = [self.seq[k] for k in generator(order_key()).permutation(len(self.seq))]
        self.cur = 0
        self._ended = False

    def hard_reset(self) -> None:
        """Reset like :meth:`reset`, and discard the samples rolled over to the next epoch."""
        self._carried = []
        self.reset()

    def next_sample(self) -> tuple[ArrayLike, bytes]:
        """Return (label, bytes) of the next image; raises StopIteration at the end."""
        if self.cur >= self.num_image:
            raise StopIteration
        key = self.seq[self.cur]
        self.cur += 1
        if self._records is None:
            assert self.imglist is not None
            label, name = self.imglist[key]
            return label, self.read_image(name)
        header, content = recordio.unpack(self._records.read(key))
        return (header.label if self.imglist is None else self.imglist[key][0]), content

    def next(self) -> DataBatch:
        if self._ended:
            raise StopIteration
        before = self.cur, self._carried
        try:
            return self._batch()
        except StopIteration:
            raise
        except BaseException:  # so that the next call makes the same batch
            (self.cur, self._carried), self._ended = before, False
            raise

    def _batch(self) -> DataBatch:
        rows, self._carried = [*self._carried], []
        pad = 0
        while len(rows) < self.batch_size:
            try:
                label, content = self.next_sample()
            except StopIteration:
                self._ended = True
                if self.last_batch_handle == "roll_over":
                    self._carried = rows
                if not rows or self.last_batch_handle != "pad":
                    raise
                pad = pad or self.batch_size - len(rows)
                self.cur = 0
                continue
            row = self._row(label, content)
            if row is not None:
                rows.append(row)
        data = np.stack([value for value, _ in rows]).astype(np.float32, copy=False)
        labels = self._labels([label for _, label in rows])
        return DataBatch(
            [nd.array(data)],
            [nd.array(labels, dtype=labels.dtype)],
            pad=pad,
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )

    def _row(self, label: ArrayLike, content: bytes) -> tuple[Host, Any] | None:
        """Return (values, label) of a sample; None if the sample is skipped."""
        image = self.imdecode(content)
        try:
            self.check_valid_image([image])
        except RuntimeError:
            return None
        return self._value(self.augmentation_transform(image)), label

    def _value(self, image: NDArray) -> Host:
        """Convert an image to its form in a batch."""
        value: Host = self.postprocess_data(image).asnumpy()
        if value.shape != self.data_shape:
            raise ShapeError(
                f"{self._image_name()}: the augmenters gave {value.shape}, data_shape is {self.data_shape}"
            )
        return value

    def _labels(self, rows: Sequence[Any]) -> Host:
        """Return the labels of a batch."""
        desc = self.provide_label[0]
        return np.array([np.asarray(label, desc.dtype).reshape(desc.shape[1:]) for label in rows], desc.dtype)

    # -- what a subclass may replace ----------------------------------------------------------------------------------

    def check_data_shape(self, data_shape: Sequence[int]) -> None:
        """Raise ShapeError unless a sample is (3, height, width)."""
        if len(data_shape) != 3 or data_shape[0] != 3:
            raise ShapeError(f"ImageIter: data_shape must be (3, height, width), got {tuple(data_shape)}")

    def check_valid_image(self, data: Sequence[NDArray]) -> None:
        """Raise RuntimeError for an image to be skipped."""
        if len(data[0].shape) == 0:
            raise RuntimeError("the image has no pixels")

    def imdecode(self, s: bytes) -> NDArray:
        """Decode an image; raises a FormatError that names it."""
        try:
            return imdecode(s)
        except FormatError as error:
            raise FormatError(f"{self._image_name()}: {error}") from None

    def _image_name(self) -> str:
        key = self.seq[(self.cur or self.num_image) - 1]
        return f"image {self.imglist[key][1]}" if self.imglist and key in self.imglist else f"image of record {key}"

    def read_image(self, fname: str) -> bytes:
        """Read an image file's bytes."""
        with open_to_read(Path(self.path_root, fname)) as file:
            return file.read()

    def augmentation_transform(self, data: NDArray) -> NDArray:
        """Apply all augmenters to an image."""
        for augmenter in self.auglist:
            data = augmenter(data)
        return data

    def postprocess_data(self, datum: NDArray) -> NDArray:
        """Return (channels, height, width) of an image."""
        return datum.transpose((2, 0, 1))


def image_list(
    path: File | None, entries_in_memory: Sequence[Sequence[Any]] | None, dtype: Any
) -> dict[Any, tuple[Host, str]] | None:
    """Read {key: (label, path)} from a list in a file or in memory; raises FormatError for a malformed line."""
    if path is not None:
        entries: dict[Any, tuple[Host, str]] = {}
        with open_to_read(path) as file:
            lines = file.read().decode().splitlines()
        for number, line in enumerate(lines, 1):
            parts = line.strip().split("\t")
            try:
                if len(parts) < 3:
                    raise ValueError
                entries[int(parts[0])] = np.array([float(part) for part in parts[1:-1]], dtype), parts[-1]
            except ValueError:
                raise FormatError(
                    f"{os.fspath(path)}: line {number} must be a key, labels and a path with tabs between, got "
                    f"{line[:60]!r}"
                ) from None
        return entries
    if entries_in_memory is None:
        return None
    labels = [item[0] if len(item) == 2 else item[:-1] for item in entries_in_memory]
    return {
        str(k): (np.atleast_1d(np.asarray(label, dtype)), os.fspath(item[-1]))
        for k, (label, item) in enumerate(zip(labels, entries_in_memory, strict=True), 1)
    }
