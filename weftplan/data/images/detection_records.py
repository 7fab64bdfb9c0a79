"""``mx.io.ImageDetRecordIter``: images with boxes from a record file, decoded and augmented by threads.

A row of the label is (channels, height, width, n), then the n numbers of the packed label, then padding. The packed
label is as ``im2rec`` makes it: the length of its header, the length of a box, the rest of the header, the boxes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.data import recordio
from weftplan.data.batch import Host
from weftplan.data.images.detection_record_augment import DetAugmentation, augment_boxes
from weftplan.data.images.iterators import image_list
from weftplan.data.images.record_augment import normalized
from weftplan.data.images.threaded_images import File, ThreadedImageIter
from weftplan.errors import FormatError, ParameterError
from weftplan.support.array_types import DTypeLike
from weftplan.support.progress import Progress

_SIZES = 4
"""Number of values before the packed label in a row: the shape of the image and the length of the label."""
_LEAST_BOX = 5
"""Minimum length of a box: its class and four coordinates."""


class ImageDetRecordIter(ThreadedImageIter):
    """Batches of (channels, height, width) as float32, with their boxes as rows of numbers.

    Args:
        path_imgrec: the file of records; ``path_imgidx`` is its index, without which it is read through once.
        data_shape: (channels, height, width). An image that ``resize_mode`` leaves smaller lies in the upper left
            corner of a black one.
        path_imglist: a text file with other labels, ``key<tab>label…<tab>path``; keys are the records' ``id``.
        label_width: numbers of a packed label, if all have as many; -1: any number.
        label_pad_width: numbers of a label with its padding; by default those of the longest label.
        label_pad_value: the padding.
        shuffle, seed, seed_aug, num_parts, part_index, round_batch: as for ImageRecordIter.
        preprocess_threads, prefetch_buffer, mean_img, dtype: as for ImageRecordIter.
        augmentation: fields of
            :class:`~weftplan.data.images.detection_record_augment.DetAugmentation`.

    Raises:
        FormatError: the file of records is damaged, or a label is not a list of boxes; the constructor reads all
            labels. When its batch is read, an image; the error names the record.
        ParameterError: ``label_pad_width`` is less than the longest label needs.
    """

    _settings = DetAugmentation

    def __init__(
        self,
        path_imgrec: File,
        data_shape: Sequence[int],
        batch_size: int,
        path_imglist: File | None = None,
        path_imgidx: File | None = None,
        label_width: int = -1,
        label_pad_width: int = 0,
        label_pad_value: float = -1.0,
        shuffle: bool = False,
        seed: int = 0,
        seed_aug: int | None = None,
        num_parts: int = 1,
        part_index: int = 0,
        round_batch: bool = True,
        preprocess_threads: int = 4,
        prefetch_buffer: int = 4,
        mean_img: File | None = None,
        dtype: DTypeLike = np.float32,
        data_name: str = "data",
        label_name: str = "softmax_label",
        **augmentation: Any,
    ) -> None:
        self._records = recordio.RecordReader(path_imgrec, path_imgidx or None)
        self._path = os.fspath(path_imgrec)
        self._lists = image_list(path_imglist or None, None, np.float32)
        self._label_numbers, self._pad_value = label_width, label_pad_value
        keys = Progress(f"reading labels of {self._path}", len(self._records.keys), unit="records").each(
            self._records.keys
        )
        sizes = [len(self._label(key, recordio.unpack(self._records.read(key))[0])) for key in keys]
        longest = max(sizes, default=0)
        if 0 < label_pad_width < longest:
            raise ParameterError(
                f"{self._path}: label_pad_width={label_pad_width} is less than the {longest} numbers of the longest "
                f"label"
            )
        super().__init__(
            self._records.keys,
            self._path,
            data_shape,
            batch_size,
            label_shape=(_SIZES + max(label_pad_width, longest),),
            shuffle=shuffle,
            seed=seed,
            seed_aug=seed_aug,
            num_parts=num_parts,
            part_index=part_index,
            round_batch=round_batch,
            preprocess_threads=preprocess_threads,
            prefetch_buffer=prefetch_buffer,
            mean_img=mean_img or None,
            dtype=dtype,
            data_name=data_name,
            label_name=label_name,
            augmentation=augmentation,
        )

    def _label(self, key: int, header: recordio.IRHeader) -> Host:
        """Return a packed label, checked."""
        label = header.label
        if self._lists is not None:
            if header.id not in self._lists:
                raise FormatError(f"{self._path}: record {key}: path_imglist has no label for its id {header.id}")
            label = self._lists[header.id][0]
        numbers = np.atleast_1d(np.asarray(label, np.float32)).ravel()
        head, width = (
            (int(numbers[0]), int(numbers[1])) if numbers.size > 1 and np.isfinite(numbers[:2]).all() else (0, 0)
        )
        if head < 2 or width < _LEAST_BOX or numbers.size < head or (numbers.size - head) % width:
            raise FormatError(
                f"{self._path}: record {key}: a label of boxes begins with how many numbers its head has (at least 2) "
                f"and each box has (at least {_LEAST_BOX}), and whole boxes follow the head; got {numbers.size} "
                f"numbers, {numbers[:8].tolist()}"
            )
        if self._label_numbers > 0 and numbers.size != self._label_numbers:
            raise FormatError(
                f"{self._path}: record {key}: a label of {numbers.size} numbers, label_width is {self._label_numbers}"
            )
        return numbers

    def _fetch(self, key: int) -> tuple[str, bytes, Host, int]:
        header, content = recordio.unpack(self._records.read(key))
        return f"{self._path}: record {key}", content, self._label(key, header), header.id

    def _prepare(self, pixels: Host, label: Host, what: str, draw: np.random.Generator) -> tuple[Host, Host]:
        head, width = int(label[0]), int(label[1])
        boxes = label[head:].reshape(-1, width)
        pixels, boxes = augment_boxes(pixels, boxes, self._augmentation, self._shape, draw)
        row = np.full(self.provide_label[0].shape[1], self._pad_value, np.float32)
        packed = np.concatenate([label[:head], boxes.ravel()])
        row[:_SIZES] = (*pixels.shape, len(packed))
        row[_SIZES : _SIZES + len(packed)] = packed
        return pixels, row

    def _values(self, pixels: Host, draw: np.random.Generator) -> Host:
        augmented = pixels
        if pixels.shape != self._shape:  # zeros are normalized, too, as in MXNet
            augmented = np.zeros(self._shape, pixels.dtype)
            augmented[:, : pixels.shape[1], : pixels.shape[2]] = pixels
        return normalized(augmented, self._augmentation.plain, self._mean, draw)
