"""``mx.image.ImageDetIter``: batches of images with bounding boxes, decoded and augmented on read.

A label is a flat row of numbers, as ``im2rec`` packs it: the length of the header, the length of a box, the rest of the
header, then the boxes. A box is (class, left, top, right, bottom, …); coordinates are fractions of the image size. The
iterator belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan.data import recordio
from weftplan.data.batch import DataDesc, Host
from weftplan.data.images.detection_augmenters import CreateDetAugmenter, DetAugmenter
from weftplan.data.images.iterators import File, ImageIter
from weftplan.errors import FormatError, ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.support.package_log import log

_NUMBERS = 5
"""Minimum length of a box: its class and four coordinates."""


def _valid(boxes: Host) -> Host:
    """Return the boxes with a positive area."""
    valid: Host = boxes[(boxes[:, 3] > boxes[:, 1]) & (boxes[:, 4] > boxes[:, 2])]
    return valid


class ImageDetIter(ImageIter):
    """Batches of images and boxes; labels are (batch, most boxes per image, numbers per box), padded with -1.

    An image without boxes after augmentation is skipped.

    Args:
        batch_size, data_shape: as for :class:`ImageIter`, and so are the files, ``shuffle``, ``part_index``,
            ``num_parts`` and ``last_batch_handle``.
        aug_list: :class:`DetAugmenter` objects; by default those of :func:`CreateDetAugmenter`, to which other keywords
            go.

    Raises:
        FormatError: a label is not a list of boxes; the message names the image. The constructor reads all labels.
    """

    def __init__(
        self,
        batch_size: int,
        data_shape: Sequence[int],
        path_imgrec: File | None = None,
        path_imglist: File | None = None,
        path_root: File | None = None,
        path_imgidx: File | None = None,
        shuffle: bool = False,
        part_index: int = 0,
        num_parts: int = 1,
        aug_list: Sequence[DetAugmenter] | None = None,
        imglist: Sequence[Any] | None = None,
        data_name: str = "data",
        label_name: str = "label",
        last_batch_handle: str = "pad",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            batch_size,
            data_shape,
            path_imgrec=path_imgrec,
            path_imglist=path_imglist,
            path_root=path_root,
            path_imgidx=path_imgidx,
            shuffle=shuffle,
            part_index=part_index,
            num_parts=num_parts,
            aug_list=[],
            imglist=imglist,
            data_name=data_name,
            label_name=label_name,
            last_batch_handle=last_batch_handle,
        )
        self.auglist: list[Any] = list(CreateDetAugmenter(data_shape, **kwargs) if aug_list is None else aug_list)
        shapes = [self._parsed(self._label_of(key), key).shape for key in self.seq]
        widths = sorted({shape[1] for shape in shapes})
        if len(widths) > 1:
            raise FormatError(f"ImageDetIter: boxes of all images must have as many numbers, got {widths}")
        self._set_label_shape((max((shape[0] for shape in shapes), default=0), widths[0] if widths else _NUMBERS))

    def _label_of(self, key: Hashable) -> ArrayLike:
        """Read the label of an image, without its pixels if they are in a separate file."""
        if self.imglist is not None and (self._records is None or key in self.imglist):
            label: ArrayLike = self.imglist[key][0]
            return label
        assert self._records is not None
        label = recordio.unpack(self._records.read(key))[0].label
        return label

    def _set_label_shape(self, shape: tuple[int, int]) -> None:
        self.label_shape = shape
        self.provide_label = [DataDesc(self.provide_label[0].name, (self.batch_size, *shape))]

    def _parsed(self, label: ArrayLike, key: Hashable) -> Host:
        """Parse a label into its boxes with a positive area, (boxes, numbers per box)."""
        raw = np.asarray(label.asnumpy() if isinstance(label, NDArray) else label, np.float32).ravel()
        source = f"image {self.imglist[key][1]}" if self.imglist and key in self.imglist else f"image of record {key}"
        head, width = (int(raw[0]), int(raw[1])) if raw.size > 1 and np.isfinite(raw[:2]).all() else (0, 0)
        if head < 2 or width < _NUMBERS or raw.size <= head or (raw.size - head) % width:
            raise FormatError(
                f"{source}: a label of boxes begins with how many numbers its head has (at least 2) and each box has "
                f"(at least {_NUMBERS}), and whole boxes follow the head; got {raw.size} numbers, {raw[:8].tolist()}"
            )
        boxes = _valid(raw[head:].reshape(-1, width))
        if not len(boxes):
            raise FormatError(f"{source}: no box of its label has an area")
        return boxes

    def _row(self, label: ArrayLike, content: bytes) -> tuple[Host, Host] | None:
        image = self.imdecode(content)
        try:
            self.check_valid_image([image])
        except RuntimeError:
            return None
        boxes = self._parsed(label, self.seq[self.cur - 1])
        image, boxes = self.augmentation_transform(image, boxes)
        boxes = _valid(boxes)
        boxes = boxes[boxes[:, 0] >= 0]
        return (self._value(image), boxes) if len(boxes) else None

    def _labels(self, rows: Sequence[Host]) -> Host:
        labels = np.full((len(rows), *self.label_shape), -1, np.float32)
        for index, boxes in zip(labels, rows, strict=True):
            index[: len(boxes)] = boxes
        return labels

    def augmentation_transform(self, data: NDArray, label: Host) -> tuple[NDArray, Host]:  # type: ignore[override]
        """Apply all augmenters to an image and its boxes."""
        for augmenter in self.auglist:
            data, label = augmenter(data, label)
        return data, label

    def check_label_shape(self, label_shape: Sequence[int]) -> None:
        """Raise ShapeError if the boxes do not fit the shape."""
        count, width = self.label_shape
        if len(label_shape) != 2 or label_shape[0] < count or label_shape[1] != width:
            raise ShapeError(
                f"ImageDetIter: label_shape must be (at least {count}, {width}): so many boxes an image has, and so "
                f"many numbers a box; got {tuple(label_shape)}"
            )

    def reshape(self, data_shape: Sequence[int] | None = None, label_shape: Sequence[int] | None = None) -> None:
        """Change the shape of images or labels from the next batch on; the augmenters do not change."""
        if data_shape is not None:
            self.check_data_shape(data_shape)
        if label_shape is not None:
            self.check_label_shape(label_shape)
            self._set_label_shape((int(label_shape[0]), int(label_shape[1])))
        if data_shape is not None:
            self.data_shape = tuple(data_shape)
            self.provide_data = [DataDesc(self.provide_data[0].name, (self.batch_size, *data_shape))]

    def sync_label_shape(self, it: ImageDetIter, verbose: bool = False) -> ImageDetIter:
        """Set the label shapes of this iterator and ``it`` to the larger of both; returns ``it``."""
        if not isinstance(it, ImageDetIter):
            raise ParameterError(f"sync_label_shape expects an ImageDetIter, got {type(it).__name__}")
        if it.label_shape[1] != self.label_shape[1]:
            raise ShapeError(f"boxes have {self.label_shape[1]} numbers here and {it.label_shape[1]} there")
        count = max(self.label_shape[0], it.label_shape[0])
        for iterator in (self, it):
            iterator.reshape(label_shape=(count, iterator.label_shape[1]))
        if verbose:
            log.info("label_shape is %s", it.label_shape)
        return it
