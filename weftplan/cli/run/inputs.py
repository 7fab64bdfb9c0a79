"""Inputs of ``weftplan run``: arrays, arrays by name, and images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from weftplan.cli.model_files import ModelFiles
from weftplan.data.image_files import decode, image_suffixes, pillow
from weftplan.errors import FormatError, did_you_mean
from weftplan.report.input_forms import form_of, is_label
from weftplan.report.inspection import input_names
from weftplan.support.array_types import RawArray
from weftplan.support.atomic_files import check_zip, open_to_read, other_kind
from weftplan.symbol import topological_order

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pixels:
    """How images become numbers.

    Attributes:
        mean, std: numbers for all channels or for each, subtracted and divided by.
        size: (height, width) of the result; None: as in the file.
        channels: 1 for grey, or 3.
    """

    mean: list[float] | None = None
    std: list[float] | None = None
    size: tuple[int, int] | None = None
    channels: int = 3

    def for_input(self, model: ModelFiles, name: str) -> Pixels:
        """Return these settings with the channels that an input of a network has.

        Raises:
            click.UsageError: there are numbers for other channels.
        """
        form = form_of(topological_order(model.symbol.entries), name, model.stored_shapes)
        known_channels = form.shape[form.axes.index("C")] if form.shape is not None and "C" in form.axes else 0
        channels = 1 if known_channels == 1 else 3
        for option, numbers in (("--mean", self.mean), ("--std", self.std)):
            if numbers is not None and len(numbers) not in (1, channels):
                raise click.UsageError(f"{option} has {len(numbers)} numbers, images of {model.name} have 1 channel")
        return replace(self, channels=channels)


def feeds(model: ModelFiles, texts: tuple[str, ...], pixels: Pixels) -> Arrays:
    """Return the inputs by name."""
    assert model.args is not None
    names = input_names(model.symbol, model.args)
    nodes = topological_order(model.symbol.entries)
    data = [name for name in names if not is_label(nodes, name)]
    fed: Arrays = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).is_file():
            name, path = "", text
        elif name not in names:
            raise click.BadParameter(_no_input(name, names), param_hint="--input")
        if Path(path).is_dir():
            raise click.BadParameter(
                f"{path} is a folder of images, which has to be the only input", param_hint="--input"
            )
        if not Path(path).is_file():
            raise click.BadParameter(
                f"there is no file {path!r}; the inputs are {', '.join(names)}", param_hint="--input"
            )
        target = name or (data[0] if data else "")
        value = read(Path(path), pixels.for_input(model, target))
        arrays = value if isinstance(value, dict) else {target: value}
        for key in arrays:
            if key not in names:
                raise click.BadParameter(_no_input(key, names), param_hint="--input")
        fed.update(arrays)
    return fed


def _no_input(name: str, names: list[str]) -> str:
    return f"the network has no input {name!r}; {did_you_mean(name, names)}the inputs are {', '.join(names)}"


def read(path: Path, pixels: Pixels = Pixels()) -> Arrays | RawArray:
    """Read an array, arrays by name, or an image as one sample of (1, channels, height, width)."""
    with open_to_read(path) as file:
        start = file.read(64)
        if start.startswith(b"PK"):
            check_zip(file, str(path))
    if not start.startswith((b"\x93NUMPY", b"PK\x03\x04")):
        if path.suffix.lower() not in (".npy", ".npz") and path.suffix.lower() in image_suffixes():
            return image(path, pixels)
        if path.suffix.lower() == ".csv":
            return table(path)
        what = other_kind(start) or "neither an array (.npy, .npz), a table (.csv) nor an image by name and first bytes"
        raise FormatError(f"{path}: {what}")
    try:
        # Mapped first, because mapping checks the shape against the file's size before memory is allocated for it.
        value = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        reason = (
            "it holds objects of Python, which are not read, since that could run any code"
            if "pickle" in str(error) or "Python objects" in str(error)
            else error
        )
        raise FormatError(f"{path}: no array that can be read: {reason}") from error
    held = {key: value[key] for key in value.files} if hasattr(value, "files") else {"": value}
    for key, array in held.items():
        if array.dtype.kind not in "biuf":
            raise FormatError(f"{path}: {key or 'the array'} holds no numbers but {array.dtype}")
    return held if hasattr(value, "files") else _plain(value)


def table(path: Path) -> RawArray:
    """Return a table of numbers with commas between as float32, a row for each sample; a first row of words is skipped.

    Raises:
        FormatError: it is no such table.
    """
    try:
        with open_to_read(path) as file:
            lines = [line for line in file.read().decode("utf-8-sig").splitlines() if line.strip()]
        if lines and not _is_row(lines[0]):
            del lines[0]
        if not lines:
            raise FormatError(f"{path}: the table has no row of numbers")
        return np.loadtxt(lines, delimiter=",", ndmin=2, dtype=np.float32)
    except ValueError as error:
        raise FormatError(f"{path}: no table of numbers with commas between: {error}") from error


def _is_row(line: str) -> bool:
    """Return whether a line of a table holds numbers."""
    try:
        np.loadtxt([line], delimiter=",")
    except ValueError:
        return False
    return True


def doubts(model: ModelFiles, fed: Arrays) -> list[str]:
    """Return warnings about input values that the network accepts although they are probably mistakes."""
    nodes = topological_order(model.symbol.entries)
    warnings = []
    for name, value in fed.items():
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            warnings.append(f"{name} holds NaN or infinity")
            continue
        limit = form_of(nodes, name, model.stored_shapes).indices
        if limit is not None and value.size and not (value.min() >= 0 and value.max() < limit):
            warnings.append(
                f"{name} holds indices from {value.min():g} to {value.max():g}, and the network has {limit}; as in "
                f"MXNet, indices outside are replaced by the nearest one"
            )
    return warnings


def _plain(value: RawArray) -> RawArray:
    """Return a copy in memory; arrays of Python's and NumPy's default float become float32."""
    return np.array(value, np.float32 if value.dtype == np.float64 else value.dtype)


def image(path: Path, settings: Pixels) -> RawArray:
    """Read an image, resized and normalized by ``settings``, as float32 (1, channels, height, width), red first.

    Raises:
        FormatError: Pillow cannot read it.
        MXNetError: Pillow is not installed.
    """
    with open_to_read(path) as file:
        pixels = decode(file.read(), 0 if settings.channels == 1 else 1, str(path))
    if settings.size is not None:
        height, width = settings.size
        picture = pillow().fromarray(pixels if settings.channels == 3 else pixels[:, :, 0])
        pixels = np.asarray(picture.resize((width, height), pillow().Resampling.BILINEAR)).reshape(height, width, -1)
    pixels = pixels.astype(np.float32)
    for numbers, work in ((settings.mean, np.subtract), (settings.std, np.divide)):
        if numbers is not None:
            pixels = work(pixels, np.array(numbers, np.float32))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]
