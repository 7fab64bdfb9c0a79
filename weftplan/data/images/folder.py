"""``mx.io.ImageFolder``: image batches from a folder that has a sub-folder for each class."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftplan.data.image_files import image_suffixes
from weftplan.data.images.threaded_images import File, ThreadedImageIter
from weftplan.errors import FormatError, ParameterError, listed
from weftplan.support.array_types import DTypeLike
from weftplan.support.atomic_files import open_to_read
from weftplan.support.progress import watching


class ImageFolder(ThreadedImageIter):
    """Batches of (channels, height, width) as float32; the label is the number of the image's class.

    Each sub-folder of ``path`` is a class, and classes are numbered in the order of their names. All files whose names
    have a suffix that Pillow reads belong to the class, also those in deeper folders; hidden files do not.
    Without ``shuffle`` the images come in the order of their classes and names.

    Args:
        path: the folder.
        data_shape: (channels, height, width); 1 channel is grey.
        shuffle: a random order from ``seed``, another in each epoch.
        classes: names of the classes in the order of their labels; a class may have no images then. Pass the
            ``classes`` of the training data to the iterator of the validation data.
        seed_aug: seed of the augmentations; by default ``seed``.
        num_parts, part_index: this iterator has that part of the images.
        round_batch: whether the next epoch skips the first images that pad the last batch. ``pad`` of the batch counts
            them.
        preprocess_threads: decoding threads; prefetch_buffer: batches to prefetch.
        files: the paths of the images to read, relative to ``path``, such as a share of another iterator's ``files``.
        augmentation: fields of :class:`~weftplan.data.images.record_augment.Augmentation`. By default
            ``resize`` gives the shorter side of an image the longer side of ``data_shape``.

    Attributes:
        classes: names of the classes.
        files: paths of the images relative to the folder; ``index`` of a batch counts in this list.
        labels: the class of each file, as an array.

    Raises:
        FormatError: there is no such folder, or it has no classes, or a class has no images; or, when its batch is
            read, an image is damaged; the message names it.
    """

    def __init__(
        self,
        path: File,
        data_shape: Sequence[int] = (3, 224, 224),
        batch_size: int = 32,
        shuffle: bool = False,
        seed: int = 0,
        classes: Sequence[str] | None = None,
        seed_aug: int | None = None,
        num_parts: int = 1,
        part_index: int = 0,
        round_batch: bool = True,
        preprocess_threads: int = 4,
        prefetch_buffer: int = 4,
        files: Sequence[str] | None = None,
        dtype: DTypeLike = np.float32,
        data_name: str = "data",
        label_name: str = "softmax_label",
        **augmentation: Any,
    ) -> None:
        self.path = Path(path)
        with watching(f"scanning {self.path}"):
            by_class = class_files(self.path)
        self.classes = list(by_class) if classes is None else list(classes)
        unknown = [name for name in by_class if name not in self.classes]
        if unknown:
            raise FormatError(f"{self.path}: {listed(unknown)} is not among the classes {listed(self.classes)}")
        if classes is None and (empty := [name for name, images in by_class.items() if not images]):
            raise FormatError(f"{self.path}: no image is in the folder of {listed(empty)}; {_expected()}")
        number = {name: k for k, name in enumerate(self.classes)}
        labels = {file: number[name] for name, images in by_class.items() for file in images}
        absent = [file for file in files or () if file not in labels]
        if absent:
            raise ParameterError(f"files: {self.path} has no image {listed(absent)}")
        labels = {file: labels[file] for file in (labels if files is None else files)}
        super().__init__(
            list(labels.items()),
            str(self.path),
            data_shape,
            batch_size,
            label_shape=(),
            shuffle=shuffle,
            seed=seed,
            seed_aug=seed_aug,
            num_parts=num_parts,
            part_index=part_index,
            round_batch=round_batch,
            preprocess_threads=preprocess_threads,
            prefetch_buffer=prefetch_buffer,
            mean_img=None,
            dtype=dtype,
            data_name=data_name,
            label_name=label_name,
            augmentation={"resize": max(data_shape[1:], default=0), **augmentation},
        )
        self.files = [file for file, _ in self._keys]
        self.labels = np.array([label for _, label in self._keys], np.int64)

    def _fetch(self, key: Any) -> tuple[str, bytes, Any, int | None]:
        name, label = key
        file = self.path / name
        with open_to_read(file) as opened:
            return str(file), opened.read(), label, None


def class_files(path: Path) -> dict[str, list[str]]:
    """Return the images of each class as paths relative to the folder, all in the order of their names.

    Raises:
        FormatError: no folder, or a folder without sub-folders.
    """
    if not path.is_dir():
        reason = "is a file" if path.exists() else "does not exist"
        raise FormatError(f"{path}: expected a folder with a sub-folder of images for each class, but it {reason}")
    classes = sorted(
        (folder.name for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")), key=_order
    )
    if not classes:
        raise FormatError(
            f"{path}: expected a sub-folder of images for each class, such as {path / 'cats'}, but there is no "
            f"sub-folder; move the images of each class into a folder of its own"
        )
    return {name: [f"{name}/{file}" for file in image_files(path / name)] for name in classes}


def image_files(folder: Path) -> list[str]:
    """Return the image files below a folder, as relative paths with ``/``, in the order of their names."""
    suffixes, files = image_suffixes(), []
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = Path(top).relative_to(folder)
        for name in names:
            if not name.startswith(".") and Path(name).suffix.lower() in suffixes:
                files.append((inner / name).as_posix())
    return sorted(files, key=_order)


def _order(name: str) -> tuple[str, str]:
    """Sort names equally on file systems that compose characters and on those that decompose them."""
    return unicodedata.normalize("NFC", name), name


def _expected() -> str:
    """Return words for the names of image files."""
    return "expected files such as .jpg, .png, .webp or another format that Pillow reads"
