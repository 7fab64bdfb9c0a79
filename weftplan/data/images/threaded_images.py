"""Base of iterators that decode and augment images on threads, ahead of the batch that is read.

One thread uses an iterator. Its thread pool prepares the next batches and shuts down with the iterator. A sample's
augmentation depends only on the seed, the epoch and the sample, never on thread scheduling.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan import ndarray as nd
from weftplan.data.batch import DataBatch, DataDesc, Host
from weftplan.data.data_iter import HoldingIter
from weftplan.data.image_files import decode
from weftplan.data.images.record_augment import Augmentation, augment, normalized, signed_bytes
from weftplan.data.random_draws import generator
from weftplan.data.resumable_position import State, checked_integer, make_state, read_state
from weftplan.errors import FormatError, ParameterError, ShapeError, did_you_mean
from weftplan.ndarray import NDArray
from weftplan.support.array_types import DTypeLike

File = str | os.PathLike[str]
_WITHOUT_EFFECT = frozenset(
    "aug_seq verbose device_id ctx shuffle_chunk_size shuffle_chunk_seed data_name label_name mean_img".split()  # noqa: SIM905
)
"""Settings of MXNet's own threads and files; accepted and ignored."""


class ThreadedImageIter(HoldingIter):
    """Base of iterators over encoded images. A subclass says where the images are: :meth:`_fetch`.

    Args:
        keys: arguments of :meth:`_fetch`, one for each image; ``num_parts`` and ``part_index`` select a part.
        label: the source of the images, for errors.
        data_shape: (channels, height, width); 1 channel is grey.
        label_shape: of one sample; ``()`` for one number.
        shuffle: a random order from ``seed``, another in each epoch.
        seed_aug: of the augmentations; by default ``seed``.
        round_batch: whether the next epoch skips the first samples that pad the last batch.
        preprocess_threads: decoding threads; prefetch_buffer: batches to prefetch.
        mean_img: a file with the mean of each pixel; if missing, it is computed from all images and written.
        dtype: of the data.
        augmentation: fields of the class's ``_settings``.
    """

    _settings: type[Any] = Augmentation
    """The class of augmentation settings."""

    def __init__(
        self,
        keys: Sequence[Any],
        label: str,
        data_shape: Sequence[int],
        batch_size: int,
        *,
        label_shape: tuple[int, ...],
        shuffle: bool,
        seed: int,
        seed_aug: int | None,
        num_parts: int,
        part_index: int,
        round_batch: bool,
        preprocess_threads: int,
        prefetch_buffer: int,
        mean_img: File | None,
        dtype: DTypeLike | None,
        data_name: str,
        label_name: str,
        augmentation: Mapping[str, Any],
    ) -> None:
        super().__init__(batch_size)
        mine = type(self).__name__
        if batch_size < 1 or preprocess_threads < 1:
            raise ParameterError(f"{mine}: batch_size and preprocess_threads must be at least 1")
        if not 0 <= part_index < num_parts:
            raise ParameterError(f"part_index must be in [0, {num_parts}), got {part_index}")
        if len(data_shape) != 3 or data_shape[0] not in (1, 3, 4):
            raise ShapeError(f"data_shape must be (1, 3 or 4 channels, height, width), got {tuple(data_shape)}")
        fields = frozenset(field.name for field in dataclasses.fields(self._settings))
        for name in augmentation.keys() - fields - _WITHOUT_EFFECT:
            hint = did_you_mean(name, sorted(fields))
            warnings.warn(f"{mine}: {name!r} is no setting; {hint}", stacklevel=3)
        self._augmentation = self._settings(**{k: v for k, v in augmentation.items() if k in fields})
        self._name = label
        self._keys = keys[len(keys) * part_index // num_parts : len(keys) * (part_index + 1) // num_parts]
        if not self._keys:
            raise FormatError(f"{label}: there are no images in this part, {part_index} of {num_parts}")
        self._shape = tuple(data_shape)
        self._shuffle, self._seed, self._seed_aug = shuffle, seed, seed if seed_aug is None else seed_aug
        self.round_batch = round_batch
        self.provide_data = [DataDesc(data_name, (batch_size, *self._shape), np.dtype(dtype))]
        self.provide_label = [DataDesc(label_name, (batch_size, *label_shape))]
        self._threads = ThreadPoolExecutor(preprocess_threads, thread_name_prefix="weftplan-images")
        self._ahead = max(1, prefetch_buffer)
        self._epoch = 0
        self._facts = {
            "samples": len(self._keys),
            "batch_size": batch_size,
            "shape": list(self._shape),
            "shuffle": bool(shuffle),
            "round_batch": bool(round_batch),
            "seed": [seed, self._seed_aug],
            "part": [part_index, num_parts],
        }
        self._coming: deque[tuple[list[Future[tuple[Host, Host, int]]], int]] = deque()
        self._mean = None if mean_img is None else self._mean_of(Path(mean_img))
        self._begin(0, 0)

    @abstractmethod
    def _fetch(self, key: Any) -> tuple[str, bytes, Any, int | None]:
        """Return the words that name an image in errors, its encoded bytes, label, and id (None: its position)."""

    def _prepare(self, pixels: Host, label: Any, what: str, draw: np.random.Generator) -> tuple[Host, Host]:
        """Return the augmented pixels, (channels, height, width), and the label as numbers."""
        return augment(pixels, self._augmentation, self._shape, draw), self._numbers(label, what)

    def _numbers(self, label: ArrayLike, what: str) -> Host:
        """Return a label as numbers."""
        numbers = np.atleast_1d(np.asarray(label, np.float32))
        width = self.provide_label[0].shape[1] if len(self.provide_label[0].shape) > 1 else 1
        if numbers.size != width:
            raise ShapeError(f"{what}: a label of {numbers.size} numbers, label_width is {width}")
        return numbers

    def _mean_of(self, path: Path) -> Host:
        """Return the mean of each pixel, from a file, or computed and written."""
        if path.exists():
            held = nd.load(os.fspath(path))
            mean: Host = (held["mean_img"] if isinstance(held, dict) else held[0]).asnumpy()
        else:
            mean = np.zeros(self._shape, np.float64)
            for position in range(len(self._keys)):
                mean += self._pixels(position, 0)[0]
            mean = (mean / len(self._keys)).astype(np.float32)
            nd.save(os.fspath(path), {"mean_img": nd.array(mean)})
        if mean.shape != self._shape:
            raise ShapeError(f"{path}: the mean has shape {mean.shape}, data_shape is {self._shape}")
        return mean

    def _begin(self, epoch: int, cursor: int) -> None:
        """Go to a sample of an epoch."""
        for futures, _ in self._coming:
            for future in futures:
                future.cancel()
        self._coming.clear()
        self._order = np.arange(len(self._keys))
        if self._shuffle:
            generator((self._seed, epoch)).shuffle(self._order)
        self._epoch, self._cursor, self.current_batch = epoch, cursor, None

    def _next_sample(self) -> int:
        """Return the position in this epoch of the next batch's first sample."""
        return self._cursor - self.batch_size * len(self._coming)

    def reset(self) -> None:
        used = max(0, self._next_sample() - len(self._keys)) if self.round_batch else 0
        self._begin(self._epoch + 1, used % len(self._keys))

    def state(self) -> State:
        return make_state(self, self._facts, epoch=self._epoch, cursor=self._next_sample())

    def set_state(self, state: Mapping[str, object]) -> None:
        epoch, cursor = read_state(self, state, self._facts, "epoch", "cursor")
        epoch = checked_integer(self, "epoch", epoch, 1 << 40)
        self._begin(epoch, checked_integer(self, "cursor", cursor, len(self._keys) + self.batch_size))

    def _pixels(self, position: int, epoch: int) -> tuple[Host, Host, np.random.Generator, int]:
        """Return (augmented pixels, label, generator, id) of a sample."""
        draw = generator((self._seed_aug, epoch << 40 | position))
        what, content, label, number = self._fetch(self._keys[position])
        pixels = decode(content, {1: 0, 3: 1, 4: -1}[self._shape[0]], what)
        if pixels.shape[2] != self._shape[0]:
            raise ShapeError(f"{what}: an image of {pixels.shape[2]} channels, data_shape is {self._shape}")
        try:
            return *self._prepare(pixels, label, what, draw), draw, position if number is None else number
        except ShapeError as error:
            raise ShapeError(f"{what}: {str(error).removeprefix(f'{what}: ')}") from None

    def _sample(self, position: int, epoch: int) -> tuple[Host, Host, int]:
        """Return (data, label, id) of a sample, made by a thread of the pool."""
        pixels, label, draw, number = self._pixels(position, epoch)
        dtype = np.dtype(self.provide_data[0].dtype)
        if dtype == np.int8:
            return signed_bytes(pixels, self._augmentation, self._mean), label, number
        if dtype.kind in "iu":
            return pixels, label, number
        return self._values(pixels, draw), label, number

    def _values(self, pixels: Host, draw: np.random.Generator) -> Host:
        """Return the normalized pixels."""
        return normalized(pixels, self._augmentation, self._mean, draw)

    def _ask(self) -> None:
        """Submit the next batches of this epoch to the threads."""
        count = len(self._keys)
        while len(self._coming) < self._ahead and self._cursor < count:
            stop = self._cursor + self.batch_size
            positions = self._order[np.arange(self._cursor, stop) % count]
            pad = max(0, stop - count)
            self._cursor = stop
            futures = [self._threads.submit(self._sample, int(position), self._epoch) for position in positions]
            self._coming.append((futures, pad))

    def iter_next(self) -> bool:
        self._ask()
        if not self._coming:
            return False
        futures, pad = self._coming.popleft()
        rows = []
        while futures:  # a future that stayed in this frame would hold the frame by its error, and so the threads
            rows.append(futures.pop(0).result())
        desc = self.provide_data[0]
        data = np.stack([pixels for pixels, _, _ in rows]).astype(desc.dtype, copy=False)
        labels = np.stack([label for _, label, _ in rows]).reshape(self.provide_label[0].shape)
        self.current_batch = DataBatch(
            [nd.array(data, dtype=data.dtype)],
            [nd.array(labels)],
            pad=pad,
            index=np.array([number for _, _, number in rows]),
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )
        self._ask()
        return True

    def getdata(self) -> NDArray:  # type: ignore[override]
        """Return the data array of the current batch."""
        return self._current().data[0]

    def getlabel(self) -> NDArray:  # type: ignore[override]
        """Return the label array of the current batch."""
        return self._current().label[0]

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=False, cancel_futures=True)
