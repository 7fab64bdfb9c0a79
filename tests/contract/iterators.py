"""All data iterators of the package, each newly created, for the contract of iterators."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import weftplan as mx
from weftplan.data.image_files import encode
from weftplan.data.worker_share import PartOfBatchIter

ROWS = np.arange(22, dtype="float32").reshape(11, 2)
LABELS = np.arange(11, dtype="float32")


def arrays(**settings: Any) -> mx.io.DataIter:
    """Return an iterator over eleven rows in batches of four."""
    return mx.io.NDArrayIter(ROWS, LABELS, batch_size=4, **settings)


def table(folder: Path, **settings: Any) -> mx.io.DataIter:
    """Return an iterator over the rows in a CSV file."""
    path = folder / "rows.csv"
    np.savetxt(path, ROWS, delimiter=",")
    return mx.io.CSVIter(path, (2,), batch_size=4, **settings)


def few_features(folder: Path, **settings: Any) -> mx.io.DataIter:
    """Return an iterator over the rows in a file of LIBSVM format."""
    path = folder / "rows.t"
    path.write_text("".join(f"{k} 0:{a} 1:{b}\n" for k, (a, b) in enumerate(ROWS)))
    return mx.io.LibSVMIter(path, (2,), batch_size=4, **settings)


def images(folder: Path) -> mx.io.DataIter:
    """Return an iterator over eleven images of 2x2 pixels in MNIST's format, in a fixed random order."""
    pixels, labels = np.arange(44, dtype="u1").reshape(11, 2, 2), np.arange(11, dtype="u1")
    for name, values in (("im", pixels), ("lb", labels)):
        head = struct.pack(f">I{values.ndim}I", 0x800 | values.ndim, *values.shape)
        (folder / name).write_bytes(head + values.tobytes())
    return mx.io.MNISTIter(folder / "im", folder / "lb", batch_size=4, seed=3)


def records(folder: Path, **settings: Any) -> mx.io.DataIter:
    """Return an iterator over a record file of eleven images of 6x6 pixels, randomly cropped and mirrored."""
    path = folder / "images.rec"
    file = mx.recordio.MXRecordIO(path, "w")
    for number in range(11):
        pixels = np.random.RandomState(number).randint(0, 256, (6, 6, 3)).astype("u1")
        file.write(mx.recordio.pack_img((0, float(number), number, 0), pixels, 6, ".png"))
    file.close()
    return mx.io.ImageRecordIter(path, (3, 4, 4), 4, rand_crop=True, rand_mirror=True, **settings)


def photos(folder: Path, **settings: Any) -> mx.io.DataIter:
    """Return an iterator over folders of eleven images in three classes, randomly cropped and mirrored."""
    for number in range(11):
        pixels = np.random.RandomState(number).randint(0, 256, (6, 6, 3)).astype("u1")
        path = folder / "photos" / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(pixels, 6, ".png"))
    return mx.io.ImageFolder(folder / "photos", (3, 4, 4), 4, rand_crop=True, rand_mirror=True, **settings)


def boxes(folder: Path, **settings: Any) -> mx.io.DataIter:
    """Return an iterator over a record file of eleven images with one to three boxes, randomly padded and cropped."""
    path = folder / "boxes.rec"
    file = mx.recordio.MXRecordIO(path, "w")
    for number in range(11):
        pixels = np.random.RandomState(number).randint(0, 256, (6, 6, 3)).astype("u1")
        label = [2, 5, *([number, 0.1, 0.2, 0.7, 0.9] * (1 + number % 3))]
        file.write(mx.recordio.pack_img((0, np.array(label, "f"), number, 0), pixels, 6, ".png"))
    file.close()
    return mx.io.ImageDetRecordIter(path, (3, 4, 4), 4, rand_crop_prob=0.5, rand_pad_prob=0.5, max_pad_scale=2.0,
                                    min_crop_scales=0.5, **settings)  # fmt: skip


def sentences(folder: Path) -> mx.io.DataIter:
    """Return an iterator over sentences of two lengths."""
    return mx.rnn.BucketSentenceIter([[i] * (2 + i % 2) for i in range(12)], 2)


def dataset(folder: Path, **settings: Any) -> mx.io.DataIter:
    """Return an iterator over a list of rows, with noise that depends on each sample's seed."""
    return mx.io.DatasetIter(list(zip(ROWS, LABELS, strict=True)), 4, transform=shaken, **settings)


def shaken(sample: Any) -> Any:
    """Return a sample with noise from each of the three generators that are seeded for it."""
    noise = np.random.random() + random.random() + mx.io.sample_rng().random()  # noqa: NPY002
    return sample[0] + np.float32(noise), sample[1]


def stream(folder: Path, **settings: Any) -> mx.io.DataIter:
    """Return an iterator over the rows as a stream without random access."""
    return mx.io.DatasetIter(dict(enumerate(ROWS)).values(), 4, label_names=(), **settings)


def batches(folder: Path) -> mx.io.DataIter:
    """Return an iterator over ready-made batches; the last batch is shorter."""
    return mx.io.DatasetIter(
        [{"a": ROWS[k : k + 4], "b": LABELS[k : k + 4]} for k in (0, 4, 8)],
        None,
        data_names={"a": "data"},
        label_names=["b"],
    )


def sides(folder: Path) -> mx.io.DataIter:
    """Return an iterator that combines two iterators, one of them in random order."""
    second = mx.io.NDArrayIter({"more": ROWS}, {"more_label": LABELS}, batch_size=4, shuffle=True)
    return mx.io.PrefetchingIter([arrays(), second], depth=2)


ITERATORS: dict[str, Callable[[Path], mx.io.DataIter]] = {
    "arrays": lambda folder: arrays(),
    "arrays shuffled": lambda folder: arrays(shuffle=True),
    "arrays discard": lambda folder: arrays(shuffle=True, last_batch_handle="discard"),
    "arrays roll over": lambda folder: arrays(shuffle=True, last_batch_handle="roll_over"),
    "table": table,
    "table starting over": lambda folder: table(folder, round_batch=False),
    "few features": few_features,
    "few features of a part": lambda folder: few_features(folder, num_parts=2, part_index=1),
    "images": images,
    "records": records,
    "records shuffled": lambda folder: records(folder, shuffle=True, round_batch=False, prefetch_buffer=1),
    "photos": photos,
    "photos shuffled": lambda folder: photos(folder, shuffle=True, round_batch=False, prefetch_buffer=1),
    "boxes": boxes,
    "boxes shuffled": lambda folder: boxes(folder, shuffle=True, round_batch=False),
    "sentences": sentences,
    "resized": lambda folder: mx.io.ResizeIter(arrays(), 5),
    "resized going on": lambda folder: mx.io.ResizeIter(arrays(), 2, reset_internal=False),
    "part": lambda folder: PartOfBatchIter(arrays(shuffle=True), rank=1, num_workers=2),
    "ahead": lambda folder: mx.io.PrefetchingIter(arrays(shuffle=True)),
    "ahead by three": lambda folder: mx.io.PrefetchingIter(
        arrays(shuffle=True, last_batch_handle="roll_over"), depth=3
    ),
    "ahead of sentences": lambda folder: mx.io.PrefetchingIter(sentences(folder), depth=2),
    "side by side": sides,
    "dataset": lambda folder: dataset(folder, shuffle=True),
    "dataset discard": lambda folder: dataset(folder, last_batch_handle="discard"),
    "dataset by workers": lambda folder: dataset(folder, shuffle=True, num_workers=2),
    "dataset ahead": lambda folder: mx.io.PrefetchingIter(dataset(folder, shuffle=True, num_workers=1), depth=2),
    "stream": stream,
    "stream discard": lambda folder: stream(folder, last_batch_handle="discard"),
    "batches": batches,
}
