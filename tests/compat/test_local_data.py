"""Data sets of test_utils: existing files are used, a missing file is named, and nothing is downloaded."""

from __future__ import annotations

import gzip
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError


def idx(values: np.ndarray) -> bytes:
    """Return the bytes of an MNIST file with these values."""
    return struct.pack(f">{values.ndim + 1}I", 0x800 | values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return the four files of a small MNIST by name; the working directory is an empty folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    by_name = {}
    for begins, count in (("train", 20), ("t10k", 10)):
        by_name[f"{begins}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (count, 28, 28)))
        by_name[f"{begins}-labels-idx1-ubyte"] = idx(np.arange(count) % 10)
    return by_name


@pytest.mark.parametrize(("folder", "packed"), [(".", True), (".", False), ("data", True), ("data", False)])
def test_mnist_as_arrays(folder: str, packed: bool, files: dict[str, bytes]):
    """get_mnist reads the files, compressed or not, from the working directory or from data/."""
    with pytest.raises(MXNetError, match=r"fetches nothing: put train-images-idx3-ubyte.gz.* or data/"):
        mx.test_utils.get_mnist()
    Path(folder).mkdir(exist_ok=True)
    for name, content in files.items():
        Path(folder, f"{name}.gz" if packed else name).write_bytes(gzip.compress(content) if packed else content)
    mnist = mx.test_utils.get_mnist()
    assert (mnist["train_data"].shape, mnist["test_data"].shape) == ((20, 1, 28, 28), (10, 1, 28, 28))
    assert mnist["train_data"].dtype == np.float32
    assert 0.9 < mnist["train_data"].max() <= 1
    assert mnist["test_label"].tolist() == list(range(10))


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_as_iterators(zipped: bool, files: dict[str, bytes]):
    """get_mnist_iterator reads the files in data/ or in data/mnist.zip; it gives flat data, images, or one part."""
    with pytest.raises(
        MXNetError, match=r"data/train-images-idx3-ubyte is not there; put .* or mnist.zip at data/mnist"
    ):
        mx.test_utils.get_mnist_iterator(5, (784,))
    Path("data").mkdir()
    if zipped:
        with zipfile.ZipFile("data/mnist.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        for name, content in files.items():
            Path("data", name).write_bytes(content)
    train, validation = mx.test_utils.get_mnist_iterator(5, (784,))
    assert (len(list(train)), len(list(validation))) == (4, 2)
    assert train.provide_data[0].shape == (5, 784)
    parts = [mx.test_utils.get_mnist_iterator(5, (1, 28, 28), 2, k) for k in range(2)]
    assert [len(list(part)) for part, _ in parts] == [2, 2]
    assert parts[0][0].provide_data[0].shape == (5, 1, 28, 28)
    labels = [batch.label[0].asnumpy() for _, part in parts for batch in part]
    assert sorted(np.concatenate(labels).tolist()) == list(range(10))
    with pytest.raises(ParameterError, match="part_index must be from 0 to 1, got 2"):
        mx.test_utils.get_mnist_iterator(5, (784,), 2, 2)


def test_archives(files: dict[str, bytes]):
    """Archives are unpacked in their folder; a missing file raises an error that names it."""
    with pytest.raises(MXNetError, match=r"cifar10\.zip at data/cifar10\.zip"):
        mx.test_utils.get_cifar10()
    Path("data").mkdir()
    with zipfile.ZipFile("data/cifar10.zip", "w") as archive:
        for name in ("train.rec", "test.rec", "train.lst", "test.lst"):
            archive.writestr(f"cifar/{name}", b"x")
    mx.test_utils.get_cifar10()
    assert Path("data/cifar/train.lst").read_bytes() == b"x"
    with pytest.raises(MXNetError, match=r"no file at ml/ml.zip; fetch https?://a.b/ml.zip"):
        mx.test_utils.get_zip_data("ml", "http://a.b/ml.zip", "ml.zip")
    Path("ml").mkdir()
    with zipfile.ZipFile("ml/ml.zip", "w") as archive:
        archive.writestr("ratings.csv", b"1,2")
    mx.test_utils.get_zip_data("ml", "http://a.b/ml.zip", "ml.zip")
    assert Path("ml/ratings.csv").read_bytes() == b"1,2"
    assert mx.test_utils.download("http://a.b/ratings.csv", dirname="ml") == "ml/ratings.csv"
    with pytest.raises(MXNetError, match="overwrite=True asks for a new file"):
        mx.test_utils.download("http://a.b/ratings.csv", dirname="ml", overwrite=True)
