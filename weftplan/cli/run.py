"""``weftplan run``: a model's outputs on arrays from files, or on an image.

The module owns the conversion of files to inputs and the display of outputs; an executor runs the forward pass. The
command runs on the main thread.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from weftplan import ndarray as nd
from weftplan.cli.columns import output_width, paragraph
from weftplan.cli.model_files import Model, load_model
from weftplan.cli.options import FILE, model_argument, number
from weftplan.device.context import cpu
from weftplan.errors import BindError, DTypeError, FormatError, ShapeError, did_you_mean, listed
from weftplan.ops.core.rules import is_known
from weftplan.report.input_forms import form_of, is_label, usual_shape
from weftplan.report.inspection import input_names
from weftplan.support.atomic_files import check_zip, open_to_read, other_kind, replacing
from weftplan.support.progress import watching
from weftplan.symbol import Symbol, topological_order
from weftplan.training.data.image_files import decode, pillow

Arrays = dict[str, Any]
_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    """Parse numbers separated by commas: one for each channel, or one for all."""
    if value is None:
        return None
    try:
        return [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between, got {value!r}") from None


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse (height, width) from ``224`` or ``224x320``."""
    if value is None:
        return None
    parts = value.split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected a side or HEIGHTxWIDTH in pixels, got {value!r}")
    return int(parts[0]), int(parts[-1])


@click.command("run", context_settings={"help_option_names": ["-h", "--help"]})
@model_argument()
@click.argument("params", required=False)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="[NAME=]FILE",
    help="An array (.npy), arrays by name (.npz) or an image. Repeat it for other inputs.",
)
@click.option(
    "--mean",
    callback=_numbers,
    metavar="NUMBERS",
    help="Subtract these numbers from the pixels, which go from 0 to 255.",
)
@click.option(
    "--std",
    callback=_numbers,
    metavar="NUMBERS",
    help="Divide the pixels by these numbers, after the mean is subtracted.",
)
@click.option("--resize", callback=_size, metavar="SIDE|HxW", help="Resize the image to this size for the network.")
@number("--top", default=5, help="The number of classes to print for each sample.")
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the names of the classes, one on each line.",
)
@click.option("-o", "--output", type=FILE, help="Write all outputs into this file (.npz).")
def command(
    model: str,
    params: str | None,
    inputs: tuple[str, ...],
    mean: list[float] | None,
    std: list[float] | None,
    resize: tuple[int, int] | None,
    top: int,
    labels: Path | None,
    output: Path | None,
) -> None:
    """Run MODEL, a symbol file or a checkpoint's prefix, with the parameters PARAMS, a file or an epoch, on inputs.

    An output with one row for each sample is printed as its largest values, others as their shape and range.
    """
    loaded = load_model(model, params)
    if loaded.args is None:
        raise click.UsageError("give the parameters behind the model: a file, or the number of an epoch")
    fed = _feeds(loaded, inputs, mean, std, resize)
    with watching(f"running {loaded.name}"):
        results = predict(loaded, fed)
    names = None if labels is None else labels.read_text(encoding="utf-8").splitlines()
    for name, value in results.items():
        _print(name, value, top, names)
    if output is not None:
        held = io.BytesIO()
        np.savez(held, **results)
        with replacing(output) as file:
            file.write(held.getvalue())
        click.echo(f"wrote {output}")


def predict(model: Model, fed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs by name of one run outside training; labels are optional.

    Raises:
        BindError: an input or a parameter is missing; lists all.
        ShapeError: a parameter's or an input's shape contradicts the network's; lists all.
    """
    assert model.args is not None
    assert model.aux is not None
    symbol = model.symbol
    arguments, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    inputs, nodes = input_names(symbol, model.args), topological_order(symbol.entries)
    check_complete(model, inputs)
    unfed = [name for name in inputs if name not in fed and not is_label(nodes, name)]
    if unfed:
        raise BindError(f"{model.name}: give {listed(unfed)} with --input NAME=FILE")
    empty = [f"{name} has shape {tuple(value.shape)}" for name, value in fed.items() if 0 in value.shape]
    if empty:
        raise ShapeError(f"{model.name}: {'; '.join(empty)}: there is nothing to compute; give one sample or more")
    shapes: dict[str, Any] = {name: tuple(value.shape) for name, value in fed.items()}
    stored = {**model.args, **model.aux}
    try:
        found, _, of_states = symbol.infer_shape_partial(**shapes)
    except ShapeError as error:
        reason = str(error).removeprefix("Error in ")
        raise ShapeError(f"{model.name}: {reason}{_expected(model, shapes)}") from None
    pairs = [*zip(arguments, found, strict=True), *zip(states, of_states, strict=True)]
    unknown = [name for name, shape in pairs if not is_known(shape)]
    if unknown:
        raise ShapeError(f"{model.name}: the inputs do not tell the shapes of {listed(unknown)}")
    wrong = [
        f"{name} has shape {tuple(stored[name].shape)}, the inputs ask for {shape}"
        for name, shape in pairs
        if name in stored and shape != tuple(stored[name].shape)
    ]
    if wrong:
        raise ShapeError(f"{model.name}: {'; '.join(wrong)}{_expected(model, shapes)}")
    kinds = _dtypes(symbol, stored, fed)
    executor = symbol.simple_bind(cpu(), grad_req="null", type_dict=kinds, **shapes)
    executor.copy_params_from(model.args, model.aux, allow_extra_params=True, allow_missing=True)
    outputs = executor.forward(
        is_train=False, **{name: nd.array(value, dtype=value.dtype) for name, value in fed.items()}
    )
    return {name: value.asnumpy() for name, value in zip(symbol.list_outputs(), outputs, strict=True)}


def _dtypes(symbol: Symbol, stored: Mapping[str, Any], fed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dtypes of arguments and states: those of the inputs if the network accepts them, as for indices.

    Other inputs, such as pixels in bytes, are omitted: the executor casts them to the inferred dtype.
    """
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    own = {name: value.dtype for name, value in stored.items() if name in names}
    both = own | {name: value.dtype for name, value in fed.items() if name in names}
    try:
        symbol.infer_type_partial(**both)
    except DTypeError:
        return own
    return both


def check_complete(model: Model, inputs: Sequence[str]) -> None:
    """Raise BindError if parameters are missing; list all."""
    assert model.args is not None
    assert model.aux is not None
    arguments = model.symbol.list_arguments()
    missing = [name for name in arguments if name not in model.args and name not in inputs]
    missing += [name for name in model.symbol.list_auxiliary_states() if name not in model.aux]
    if missing:
        have = sum(name in model.args for name in arguments)
        raise BindError(f"{model.name}: the parameters lack {listed(missing)}; {have} of the others' names match")


def _expected(model: Model, given: Mapping[str, Any]) -> str:
    """Return the shape of the first input that the stored parameters imply, if the input's shape differs."""
    nodes = topological_order(model.symbol.entries)
    for name, shape in given.items():
        form = form_of(nodes, name, model.stored_shapes)
        usual = usual_shape(nodes, name, form, model.stored_shapes)
        if form.axes and shape != usual and (usual or len(shape) != len(form.axes)):
            example = f", such as {usual}" if usual else ""
            return f"; {name} was given shape {shape}, the network takes ({', '.join(form.axes)}){example}"
    return ""


def _feeds(
    model: Model,
    texts: tuple[str, ...],
    mean: list[float] | None,
    std: list[float] | None,
    resize: tuple[int, int] | None,
) -> Arrays:
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
            raise click.BadParameter(f"{path} is a folder; give one file: an array or an image", param_hint="--input")
        if not Path(path).is_file():
            raise click.BadParameter(
                f"there is no file {path!r}; the inputs are {', '.join(names)}", param_hint="--input"
            )
        value = _read(Path(path), mean, std, resize)
        given = value if isinstance(value, dict) else {name or (data[0] if data else ""): value}
        for key in given:
            if key not in names:
                raise click.BadParameter(_no_input(key, names), param_hint="--input")
        fed.update(given)
    return fed


def _no_input(name: str, names: list[str]) -> str:
    return f"the network has no input {name!r}; {did_you_mean(name, names)}the inputs are {', '.join(names)}"


def _read(
    path: Path, mean: list[float] | None, std: list[float] | None, resize: tuple[int, int] | None
) -> Arrays | Any:
    """Read an array, arrays by name, or an image as one sample of (1, 3, height, width)."""
    if path.suffix.lower() in _IMAGES:
        return image(path, mean, std, resize)
    with open_to_read(path) as file:
        start = file.read(64)
        if start.startswith(b"PK"):
            check_zip(file, str(path))
    if not start.startswith((b"\x93NUMPY", b"PK\x03\x04")):
        what = other_kind(start) or "neither an array (.npy, .npz) nor an image by its name and its first bytes"
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


def _plain(value: Any) -> Any:
    """Return a copy in memory; arrays of Python's and NumPy's default float become float32."""
    return np.array(value, np.float32 if value.dtype == np.float64 else value.dtype)


def image(
    path: Path, mean: list[float] | None = None, std: list[float] | None = None, resize: tuple[int, int] | None = None
) -> Any:
    """Return an image as float32 of shape (1, 3, height, width), red first.

    Raises:
        FormatError: Pillow cannot read it.
        MXNetError: Pillow is not installed.
    """
    with open_to_read(path) as file:
        pixels = decode(file.read(), what=str(path))
    if resize is not None:
        picture = pillow().fromarray(pixels)
        pixels = np.asarray(picture.resize((resize[1], resize[0]), pillow().Resampling.BILINEAR))
    pixels = pixels.astype(np.float32)
    for numbers, work, what in ((mean, np.subtract, "mean"), (std, np.divide, "std")):
        if numbers is not None:
            if len(numbers) not in (1, 3):
                raise click.BadParameter(f"--{what} takes 1 or 3 numbers, got {len(numbers)}")
            pixels = work(pixels, np.array(numbers, np.float32))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]


def _print(name: str, value: Any, top: int, labels: list[str] | None) -> None:
    said = f"{name}: {value.dtype} {value.shape}, from {value.min():.6g} to {value.max():.6g}"
    click.echo("\n".join(paragraph(said, output_width(), indent="  ")))
    if value.ndim != 2 or value.shape[1] < 2:
        return
    for row, sample in enumerate(value):
        order = np.argsort(-sample, kind="stable")[:top]
        for place in order:
            word = labels[place] if labels is not None and place < len(labels) else ""
            click.echo(f"  {row}: {sample[place]:10.6f}  {place:5} {word}".rstrip())
