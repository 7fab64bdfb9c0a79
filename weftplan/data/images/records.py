"""``mx.io.ImageRecordIter``: image batches from a record file, decoded and augmented by threads."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan.data import recordio
from weftplan.data.images.iterators import image_list
from weftplan.data.images.threaded_images import File, ThreadedImageIter
from weftplan.errors import FormatError
from weftplan.support.array_types import DTypeLike


class ImageRecordIter(ThreadedImageIter):
    """Batches of (channels, height, width) as float32, with their labels.

    Args:
        path_imgrec: the file of records; ``path_imgidx`` is its index, without which it is read through once.
        data_shape: (channels, height, width); 1 channel is grey.
        path_imglist: a text file with other labels, ``key<tab>label…<tab>path``; keys are the records' ``id``.
        label_width: numbers of one label.
        shuffle: a random order from ``seed``, another in each epoch.
        seed_aug: seed of the augmentations; by default ``seed``.
        num_parts, part_index: this iterator has that part of the records.
        round_batch: whether the next epoch skips the first samples that pad the last batch. ``pad`` of the batch counts
            them.
        preprocess_threads: decoding threads; prefetch_buffer: batches to prefetch.
        mean_img: a file with the mean of each pixel; if missing, it is computed from all images and written.
        dtype: of the data. int8 takes the pixels minus the rounded mean, limited to -128 and 127; other integers
            take the pixels as they are.
        augmentation: fields of :class:`~weftplan.data.images.record_augment.Augmentation`. An
            unknown setting causes a warning and is ignored, as in MXNet.

    Raises:
        FormatError: the file of records is damaged, or, when its batch is read, an image; the error names the record.
        ShapeError: an image is smaller than ``data_shape``, or a label has other than ``label_width`` numbers.
    """

    _dtype: Any = np.float32

    def __init__(
        self,
        path_imgrec: File,
        data_shape: Sequence[int],
        batch_size: int,
        path_imglist: File | None = None,
        path_imgidx: File | None = None,
        label_width: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        seed_aug: int | None = None,
        num_parts: int = 1,
        part_index: int = 0,
        round_batch: bool = True,
        preprocess_threads: int = 4,
        prefetch_buffer: int = 4,
        mean_img: File | None = None,
        dtype: DTypeLike | None = None,
        data_name: str = "data",
        label_name: str = "softmax_label",
        **augmentation: Any,
    ) -> None:
        self._records = recordio.RecordReader(path_imgrec, path_imgidx or None)
        self._labels = image_list(path_imglist or None, None, np.float32)
        super().__init__(
            self._records.keys,
            os.fspath(path_imgrec),
            data_shape,
            batch_size,
            label_shape=() if label_width == 1 else (label_width,),
            shuffle=shuffle,
            seed=seed,
            seed_aug=seed_aug,
            num_parts=num_parts,
            part_index=part_index,
            round_batch=round_batch,
            preprocess_threads=preprocess_threads,
            prefetch_buffer=prefetch_buffer,
            mean_img=mean_img or None,
            dtype=self._dtype if dtype is None else dtype,
            data_name=data_name,
            label_name=label_name,
            augmentation=augmentation,
        )

    def _fetch(self, key: Hashable) -> tuple[str, bytes, ArrayLike, int]:
        what = f"{self._name}: record {key}"
        header, content = recordio.unpack(self._records.read(key))
        if self._labels is None:
            return what, content, header.label, header.id
        if header.id not in self._labels:
            raise FormatError(f"{what}: path_imglist has no label for its id {header.id}")
        return what, content, self._labels[header.id][0], header.id


class ImageRecordUInt8Iter(ImageRecordIter):
    """ImageRecordIter without mean, scale and standard deviation: pixels as uint8."""

    _dtype = np.uint8


class ImageRecordInt8Iter(ImageRecordIter):
    """ImageRecordIter with the pixels minus the rounded mean as int8, limited to -128 and 127."""

    _dtype = np.int8
