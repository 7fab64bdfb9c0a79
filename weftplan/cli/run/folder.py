"""Inference on all images of a folder, in batches; images that cannot be read are reported and left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from weftplan.cli.model_files import ModelFiles
from weftplan.cli.run.inputs import Pixels, image
from weftplan.cli.run.prediction import bind, outputs_of
from weftplan.data.images.folder import image_files
from weftplan.errors import FormatError, MXNetError
from weftplan.executor import Executor
from weftplan.report.input_forms import form_of, is_label, usual_shape
from weftplan.report.inspection import input_names
from weftplan.support.array_types import RawArray
from weftplan.support.progress import Progress
from weftplan.symbol import topological_order


def predict_folder(
    model: ModelFiles, folder: Path, batch: int, pixels: Pixels
) -> tuple[list[str], dict[str, RawArray], list[str]]:
    """Return the names of the images, the outputs by name with a row for each image, and errors of broken images.

    Raises:
        FormatError: the folder has no image, or none that can be read.
    """
    files = image_files(folder)
    if not files:
        raise FormatError(f"{folder}: no image is in this folder; expected .jpg, .png or another format of Pillow")
    name = _data_name(model)
    pixels = replace(pixels.for_input(model, name), size=pixels.size or image_size(model, name))
    names: list[str] = []
    parts: list[dict[str, Any]] = []
    errors: list[str] = []
    executors: dict[int, Executor] = {}
    with Progress(f"running {model.name}", len(files), unit="images") as progress:
        for start in range(0, len(files), batch):
            rows = _read(folder, files[start : start + batch], pixels, names, errors)
            progress.step(min(batch, len(files) - start))
            if not rows:
                continue
            fed = {name: np.concatenate(rows)}
            if len(rows) not in executors:
                executors[len(rows)] = bind(model, fed)
            parts.append(outputs_of(model, executors[len(rows)], fed))
    if not parts:
        raise FormatError(f"{folder}: none of its {len(files)} images can be read; {errors[0]}")
    results = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return names, results, errors


def image_size(model: ModelFiles, name: str) -> tuple[int, int]:
    """Return (height, width) of the images that a network usually takes, and print it.

    Raises:
        click.UsageError: the network does not read images.
    """
    nodes = topological_order(model.symbol.entries)
    form = form_of(nodes, name, model.stored_shapes)
    usual = usual_shape(nodes, name, form, model.stored_shapes)
    if (form.axes and form.axes[-2:] != ("H", "W")) or len(usual) != 4:
        raise click.UsageError(f"the size of the images that {model.name} takes is unknown; give --resize SIDE")
    click.echo(f"images are resized to {usual[2]}x{usual[3]} pixels; --resize changes that", err=True)
    return usual[2], usual[3]


def _data_name(model: ModelFiles) -> str:
    assert model.args is not None
    nodes = topological_order(model.symbol.entries)
    names = [name for name in input_names(model.symbol, model.args) if not is_label(nodes, name)]
    if len(names) != 1:
        raise click.UsageError(
            f"a folder of images is for a network with one input, {model.name} has {', '.join(names) or 'none'}"
        )
    return names[0]


def _read(
    folder: Path,
    files: Sequence[str],
    pixels: Pixels,
    names: list[str],
    errors: list[str],
) -> list[RawArray]:
    """Return the pixels of the images; append their names to ``names``, and errors of broken images to ``errors``."""
    rows = []
    for file in files:
        try:
            rows.append(image(folder / file, pixels))
        except (MXNetError, OSError) as error:
            errors.append(str(error))
        else:
            names.append(file)
    return rows
