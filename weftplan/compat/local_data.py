"""Data sets of ``mx.test_utils``, read from local files in MXNet's locations, never downloaded.

An existing file is used as in MXNet; a missing file is an error that names the expected path.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftplan.data.file_iterators import MNISTIter, read_idx
from weftplan.errors import MXNetError
from weftplan.support.array_types import RawArray
from weftplan.support.atomic_files import check_zip, open_to_read

_MNIST = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CIFAR = ("train.rec", "test.rec", "train.lst", "test.lst")
_DATA = Path("data")


def download(
    url: str,
    fname: str | os.PathLike[str] | None = None,
    dirname: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    retries: int = 5,
) -> str:
    """Return the path at which MXNet would store ``url``; the file must exist.

    Raises:
        MXNetError: the file is missing, or ``overwrite`` asks for a new file.
    """
    path = Path(url.rpartition("/")[2] if fname is None else fname)
    path = path if dirname is None else Path(dirname, path)
    if overwrite or not path.is_file():
        what = "overwrite=True asks for a new file" if overwrite else "there is no file"
        raise MXNetError(
            f"mx.test_utils.download fetches nothing: {what} at {path}; fetch {url} yourself and put it there"
        )
    return os.fspath(path)


def _extracted(archive: Path, folder: Path, names: Sequence[str], within: Path) -> None:
    """Unpack an existing archive into a folder, unless the folder contains all of these files."""
    missing = [name for name in names if not (within / name).is_file()]
    if not missing:
        return
    if not archive.is_file():
        raise MXNetError(
            f"nothing is fetched: {within / missing[0]} is not there; put {', '.join(names)} into {within}, or "
            f"{archive.name} at {archive}"
        )
    with open_to_read(archive) as file:
        check_zip(file, os.fspath(archive))
        with zipfile.ZipFile(file) as packed:
            packed.extractall(folder)


def get_mnist() -> dict[str, RawArray]:
    """Return MNIST: ``train_data``, ``train_label``, ``test_data``, ``test_label``; images from 0 to 1 of shape
    (samples, 1, 28, 28). The four files, optionally compressed by gzip, are in the working directory or in ``data``.

    Raises:
        MXNetError: a file is missing.
        FormatError: a file is damaged.
    """
    arrays = {}
    for part, begins in (("train", "train"), ("test", "t10k")):
        pixels = read_idx(_mnist_file(f"{begins}-images-idx3-ubyte"), 3)
        arrays[f"{part}_data"] = pixels[:, None].astype(np.float32) / 255
        arrays[f"{part}_label"] = read_idx(_mnist_file(f"{begins}-labels-idx1-ubyte"), 1).astype(np.int8)
    return arrays


def _mnist_file(name: str) -> Path:
    for folder in (Path(), _DATA):
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return path
    raise MXNetError(
        f"mx.test_utils.get_mnist fetches nothing: put {name}.gz, as MNIST is published, into {Path.cwd()} or data/"
    )


def get_mnist_ubyte() -> None:
    """Check that the files of MNIST are in ``data``; unpack ``data/mnist.zip`` if only the archive exists.

    Raises:
        MXNetError: both are missing.
    """
    _extracted(_DATA / "mnist.zip", _DATA, _MNIST, _DATA)


def get_mnist_iterator(
    batch_size: int, input_shape: Sequence[int], num_parts: int = 1, part_index: int = 0
) -> tuple[MNISTIter, MNISTIter]:
    """Return (training, validation) batches of MNIST, flat unless ``input_shape`` has three dimensions; raise as
    :func:`get_mnist_ubyte`."""
    get_mnist_ubyte()
    images, labels, test_images, test_labels = (_DATA / name for name in _MNIST)
    common: dict[str, Any] = {"batch_size": batch_size, "flat": len(input_shape) != 3,
                              "num_parts": num_parts, "part_index": part_index}  # fmt: skip
    return (
        MNISTIter(image=images, label=labels, shuffle=True, **common),
        MNISTIter(image=test_images, label=test_labels, **common),
    )


def get_cifar10() -> None:
    """Check that the records of CIFAR-10 are in ``data/cifar``; unpack ``data/cifar10.zip`` if only the archive exists.

    Raises:
        MXNetError: both are missing.
    """
    _extracted(_DATA / "cifar10.zip", _DATA, _CIFAR, _DATA / "cifar")


def get_zip_data(data_dir: str | os.PathLike[str], url: str, data_origin_name: str) -> None:
    """Check that an archive is in a folder, and unpack it there unless it has been unpacked.

    Raises:
        MXNetError: the archive is missing; the message names its path.
    """
    archive = Path(download(url, data_origin_name, data_dir))
    with open_to_read(archive) as file:
        check_zip(file, os.fspath(archive))
        with zipfile.ZipFile(file) as packed:
            if not all(Path(data_dir, name).exists() for name in packed.namelist()):
                packed.extractall(data_dir)
