"""``weftplan run``: the command. The command runs on the main thread; an executor runs the forward pass."""

from __future__ import annotations

from pathlib import Path

import click

from weftplan.cli.model_files import class_names, epochs, load_model, only_parameters
from weftplan.cli.options import FILE, model_argument, number, pixel_options
from weftplan.cli.run import results as run_results
from weftplan.cli.run.folder import predict_folder
from weftplan.cli.run.inputs import Pixels, doubts, feeds
from weftplan.cli.run.prediction import predict
from weftplan.support.progress import watching


@click.command("run", context_settings={"help_option_names": ["-h", "--help"]})
@model_argument()
@click.argument("params", required=False)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="[NAME=]FILE",
    help="An array (.npy), arrays by name (.npz), a table of numbers (.csv), an image, or a folder of images. Repeat "
    "it for other inputs.",
)
@pixel_options("Resize the image to this size. The images of a folder are resized in any case.")
@number("--batch", default=32, help="The number of images of a folder in one run.")
@number("--top", default=5, help="The number of classes to print for each sample.")
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the names of the classes, one on each line. The default is MODEL-classes.txt, if it is there.",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="Write all outputs into this file (.npz), or the largest values of each sample (.csv, .json).",
)
def command(
    model: str,
    params: str | None,
    inputs: tuple[str, ...],
    mean: list[float] | None,
    std: list[float] | None,
    resize: tuple[int, int] | None,
    batch: int,
    top: int,
    labels: Path | None,
    output: Path | None,
) -> None:
    """Run MODEL, a symbol file or a checkpoint's prefix, with the parameters PARAMS, a file or an epoch, on inputs.
    PARAMS may be left out if there is only one parameter file next to the model.

    A table (.csv) has a row of numbers for each sample; a first row of words is skipped. An output with one row for
    each sample is printed as its largest values, others as their shape and range. With a folder, an image that cannot
    be read is reported and left out, and the exit code is 1.
    """
    loaded = load_model(model, only_parameters(model) if params is None else params)
    if loaded.args is None:
        beside = ", ".join(path.name for path in epochs(Path(model)))
        hint = f"; next to the model there are {beside}" if beside else ""
        raise click.UsageError(f"give the parameters after the model: a file, or the number of an epoch{hint}")
    names = class_names(model, labels)
    errors: list[str] = []
    pixels = Pixels(mean, std, resize)
    if len(inputs) == 1 and Path(inputs[0]).is_dir():
        samples, results, errors = predict_folder(loaded, Path(inputs[0]), batch, pixels)
    else:
        fed = feeds(loaded, inputs, pixels)
        for text in doubts(loaded, fed):
            click.echo(f"warning: {text}", err=True)
        with watching(f"running {loaded.name}"):
            results = predict(loaded, fed)
        samples = [str(k) for k in range(max((len(value) for value in results.values() if value.ndim), default=0))]
    for name, value in results.items():
        run_results.show(name, value, top, names, samples)
    if output is not None:
        run_results.write(output, results, top, names, samples)
        click.echo(f"wrote {output}")
    for text in errors:
        click.echo(f"left out: {text}", err=True)
    if errors:
        raise click.exceptions.Exit(1)
