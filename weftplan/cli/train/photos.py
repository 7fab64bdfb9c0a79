"""The task of ``weftplan train --data FOLDER``: a network trained, or trained further, on a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from weftplan import models
from weftplan.cli.model_files import load_model
from weftplan.cli.train.tasks import TrainingTask
from weftplan.convert import with_classes
from weftplan.data.data_iter import DataIter
from weftplan.data.image_files import decode
from weftplan.data.images.folder import ImageFolder, image_files
from weftplan.data.worker_share import PartOfBatchIter
from weftplan.device.amounts import counted
from weftplan.errors import FormatError, MXNetError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.ops.core.rules import is_known
from weftplan.report.input_forms import form_of, is_label, usual_shape
from weftplan.report.inspection import input_names
from weftplan.support.atomic_files import open_to_read
from weftplan.support.progress import Progress
from weftplan.symbol import Symbol, topological_order
from weftplan.training.module.module import Module

Params = dict[str, NDArray]
Size = tuple[int, ...]
VALIDATION = ("val", "valid", "validation", "test")
"""Names of the sub-folder of images that are not trained on, next to ``train``."""
HELD_OUT = 0.2
"""Share of each class that is not trained on, if the folder has no sub-folders for training and validation."""
BATCH = 32
"""Default batch size, if there are as many images."""
MAX_NAMED = 10
"""Number of unreadable images that a message names."""
MARGIN = 256 / 224
"""Shorter side of an image before it is cropped, as a multiple of the side that the network takes."""


def photos(
    folder: Path,
    network: str,
    start: tuple[str, str] | None,
    batch_size: int | None,
    *,
    seed: int,
    rank: int,
    workers: int,
    lr: float | None,
    mean: list[float] | None,
    std: list[float] | None,
    resize: tuple[int, int] | None,
    freeze: bool,
    settings: dict[str, Any],
) -> TrainingTask:
    """Return the task of a network on a folder of images.

    Args:
        network: the built-in network to train from the beginning if ``start`` is None.
        start: prefix and epoch, or model and parameter files, of the network to train further.
        freeze: train only parameters that ``start`` has no values for.

    Raises:
        FormatError: the folder has too few classes or images.
        MXNetError: the network is not one for classification of images.
    """
    training, testing = _folders(folder)
    scanned = ImageFolder(training, batch_size=1, preprocess_threads=1)
    classes = scanned.classes
    if len(classes) < 2:
        raise FormatError(f"{training}: training needs two classes or more, there is only {classes[0]!r}")
    symbol, args, aux, shape, name = _network(network, start, len(classes), resize)
    pixels: dict[str, Any] = {
        "seed": seed,
        "resize": round(MARGIN * max(shape[1:])),
        "label_name": _label(symbol),
        **_normalization(mean, std),
    }
    if testing is None:
        training_files, held_out = _split(scanned, seed)
    else:
        training_files, held_out = scanned.files, None
    batch_size = batch_size or min(BATCH, len(training_files))
    if len(training_files) < batch_size:
        raise FormatError(f"{training}: {len(training_files)} images are fewer than a batch of {batch_size}")
    train: DataIter = ImageFolder(
        training, shape, batch_size, shuffle=True, files=training_files, rand_crop=True, rand_mirror=True, **pixels
    )
    if workers > 1:
        train = PartOfBatchIter(train, rank=rank, num_workers=workers)
    test = ImageFolder(
        testing or training, shape, max(batch_size // workers, 1), classes=classes, files=held_out, **pixels
    )
    trained = set(symbol.list_arguments()) - {"data", _label(symbol)}
    fixed = sorted(trained & args.keys()) if freeze else []
    if freeze and len(fixed) == len(trained):
        raise click.UsageError("--freeze leaves nothing to train: the network's last layer fits the classes already")
    new = sorted(trained - args.keys())
    how = f"{name}, all layers new" if start is None else f"{name}, new: {', '.join(new) or 'none'}"
    return TrainingTask(
        module=Module(symbol, label_names=(_label(symbol),), fixed_param_names=fixed, **settings),
        train=train,
        test=test,
        batches=-(-len(training_files) // batch_size),
        metric=["acc", "ce"],
        epochs=10,
        optimizer="sgd",
        optimizer_params={
            "learning_rate": (0.05 if start is None else 0.01) if lr is None else lr, "momentum": 0.9, "wd": 1e-4,
        },
        described=f"{len(training_files):,} training and {len(test.files):,} test images of {len(classes)} classes, "
        f"{shape[1]}x{shape[2]} pixels; {how}",
        unit="images",
        prefix=f"photos-{network if start is None else Path(name).name.removesuffix('-symbol.json')}",
        facts={"classes": classes},
        usage=f"--resize {shape[1]}x{shape[2]} {_typed(mean, std)}",
        values=(args, aux),
    )  # fmt: skip


def _folders(folder: Path) -> tuple[Path, Path | None]:
    """Return the folders of images for training and, if there is one, for validation."""
    testing = [folder / name for name in VALIDATION if (folder / name).is_dir()]
    return (folder / "train", testing[0]) if (folder / "train").is_dir() and testing else (folder, None)


def _network(
    network: str, start: tuple[str, str] | None, classes: int, resize: tuple[int, int] | None
) -> tuple[Symbol, dict[str, NDArray], dict[str, NDArray], tuple[int, int, int], str]:
    """Return the network for the classes, the values of its parameters, the shape of an image, and words for it."""
    if start is None:
        usual = models.input_shapes(network, 1)["data"]
        shape = (usual[1], *(resize or usual[2:])) if len(usual) == 4 else ()
        if len(shape) != 3:
            raise click.UsageError(f"--network {network} does not take images; resnet18 does, for example")
        return models.get(network, classes, shape), {}, {}, shape, network
    loaded = load_model(*start)
    assert loaded.args is not None
    assert loaded.aux is not None
    nodes = topological_order(loaded.symbol.entries)
    inputs = [name for name in input_names(loaded.symbol, loaded.args) if not is_label(nodes, name)]
    if inputs != ["data"]:
        raise MXNetError(f"{loaded.name}: --data needs a network whose only input is data, got {', '.join(inputs)}")
    form = form_of(nodes, "data", loaded.stored_shapes)
    usual = usual_shape(nodes, "data", form, loaded.stored_shapes)
    if (form.axes and form.axes != ("N", "C", "H", "W")) or len(usual) != 4:
        raise MXNetError(f"{loaded.name}: the network does not take images (N, C, H, W)")
    shape = (usual[1], *(resize or usual[2:]))
    symbol = with_classes(loaded.symbol, classes)
    if resize not in (None, usual[2:]):
        _check_size(symbol, loaded.args, shape, usual, loaded.name)
    names = {*symbol.list_arguments(), *symbol.list_auxiliary_states()}
    args, aux = ({key: value for key, value in table.items() if key in names} for table in (loaded.args, loaded.aux))
    return symbol, args, aux, shape, loaded.name


def _check_size(symbol: Symbol, args: Params, shape: Size, usual: Size, name: str) -> None:
    """Raise MXNetError if the checkpoint does not fit images of this size."""
    message = f"{name}: --resize {shape[1]}x{shape[2]} does not fit; the checkpoint takes {usual[2]}x{usual[3]} pixels"
    try:
        inferred = symbol.infer_shape_partial(data=(1, *shape))[0]
    except ShapeError as error:
        raise MXNetError(f"{message}: {error}") from None
    for key, needed in zip(symbol.list_arguments(), inferred, strict=True):
        if key in args and is_known(needed) and needed != args[key].shape:
            raise MXNetError(f"{message}: {key} has shape {args[key].shape} and would need {needed}")


def explain_images(folder: Path) -> str:
    """Return a message with the errors of the images of a folder that cannot be read; empty if all can be read.

    Training ends at the first such image. This decodes every image, so that one message names them all.
    """
    errors: list[str] = []
    paths = [part / file for part in dict.fromkeys(_folders(folder)) if part is not None for file in image_files(part)]
    with Progress("checking the images", len(paths), unit="images") as progress:
        for path in paths:
            try:
                with open_to_read(path) as file:
                    decode(file.read(), 1, str(path))
            except (FormatError, OSError) as error:
                errors.append(str(error))
            progress.step()
    if not errors:
        return ""
    shown = [*errors[:MAX_NAMED], *([f"and {len(errors) - MAX_NAMED:,} more"] if len(errors) > MAX_NAMED else [])]
    return f"{counted(len(errors), 'image')} cannot be read; remove or replace before training: {'; '.join(shown)}"


def _label(symbol: Symbol) -> str:
    """Return the name of the label."""
    nodes = topological_order(symbol.entries)
    return next(name for name in reversed(symbol.list_arguments()) if is_label(nodes, name))


def _normalization(mean: Sequence[float] | None, std: Sequence[float] | None) -> dict[str, float]:
    """Return the numbers of ``--mean`` and ``--std`` as settings of the iterator; by default pixels end in [-1, 1]."""
    rows = (("mean", mean or [127.5]), ("std", std or [127.5]))
    return {f"{word}_{c}": numbers[k % len(numbers)] for word, numbers in rows for k, c in enumerate("rgb")}


def _typed(mean: Sequence[float] | None, std: Sequence[float] | None) -> str:
    """Return the options of ``weftplan run`` that change pixels as training did."""
    rows = (("--mean", mean or [127.5]), ("--std", std or [127.5]))
    return " ".join(f"{option} {','.join(f'{number:g}' for number in numbers)}" for option, numbers in rows)


def _split(images: ImageFolder, seed: int) -> tuple[list[str], list[str]]:
    """Return the images to train on and the others, of each class the same share, chosen by the seed."""
    random = np.random.RandomState(seed)
    held_out: set[int] = set()
    for label in range(len(images.classes)):
        rows = random.permutation(np.flatnonzero(images.labels == label))
        if len(rows) < 2:
            raise FormatError(f"{images.path}: the class {images.classes[label]!r} needs two images or more")
        held_out.update(rows[: max(1, round(len(rows) * HELD_OUT))].tolist())
    training_files = [file for k, file in enumerate(images.files) if k not in held_out]
    return training_files, [images.files[k] for k in sorted(held_out)]
