"""``weftplan convert``: model conversion to another format, with a check before the file is written.

The module owns the comparison of an ONNX model with its original; ``convert`` handles the formats. The file is written
atomically. The command runs on the main thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from weftplan.cli.model_files import ModelFiles, load_model
from weftplan.cli.options import FILE, model_argument, shape_option
from weftplan.cli.plan.inputs import check_names, parse_shapes, shape_advice
from weftplan.cli.run.prediction import check_complete, predict
from weftplan.convert import save_safetensors
from weftplan.errors import MXNetError, ShapeError, listed
from weftplan.report.input_forms import is_label
from weftplan.report.inspection import input_names
from weftplan.support.atomic_files import replacing
from weftplan.support.progress import watching
from weftplan.symbol import topological_order
from weftplan.training.fit.parameter_files import write_params

TOLERANCE = 1e-4
"""Largest accepted difference of an exported model's outputs, as a share of their largest value."""


@click.command("convert", context_settings={"help_option_names": ["-h", "--help"]})
@model_argument()
@click.argument("params")
@click.argument("target", type=FILE)
@shape_option("The shape of an input, which ONNX needs.")
@click.option("--free-batch", is_flag=True, help="Leave the batch, axis 0 of each input, open in an ONNX model.")
@click.option("--no-check", is_flag=True, help="Write an ONNX model without running it first.")
def command(
    model: str, params: str, target: Path, shape_texts: tuple[str, ...], free_batch: bool, no_check: bool
) -> None:
    """Write the model MODEL with the parameters PARAMS to TARGET, whose name says the format.

    \b
    x.onnx           the model as ONNX, for inputs of the given shapes
    x.safetensors    the parameters alone
    x.params         the parameters, as MXNet stores them
    x-symbol.json    the network alone, as MXNet 1.9.1 writes it

    An ONNX model is written when onnxruntime has computed the same from random inputs. MODEL may be an ONNX file, too;
    PARAMS is a dash then.
    """
    loaded = load_model(model, params)
    assert loaded.args is not None
    assert loaded.aux is not None
    if target.suffix == ".onnx":
        _to_onnx(loaded, parse_shapes(shape_texts), target, check=not no_check, free_batch=free_batch)
    elif target.suffix == ".safetensors":
        save_safetensors(target, loaded.args, loaded.aux)
    elif target.suffix == ".params":
        write_params(target, loaded.args, loaded.aux)
    elif target.suffix == ".json":
        loaded.symbol.save(target)
    else:
        raise click.BadParameter(
            f"expected a name that ends in .onnx, .safetensors, .params or .json, got {target.name!r}",
            param_hint="TARGET",
        )
    click.echo(f"wrote {target} ({target.stat().st_size:,} bytes)")


def _to_onnx(
    model: ModelFiles, shapes: Mapping[str, tuple[int, ...]], target: Path, *, check: bool, free_batch: bool
) -> None:
    from weftplan.convert.onnx_out.free_sizes import export_open

    assert model.args is not None
    assert model.aux is not None
    fed, nodes = input_names(model.symbol, model.args), topological_order(model.symbol.entries)
    inputs = [name for name in fed if not is_label(nodes, name)]
    check_complete(model, fed)
    unknown = [name for name in inputs if name not in shapes]
    check_names(shapes, model.symbol, "--shape")
    with shape_advice(model.network, shapes, model.stored_shapes):
        if unknown:
            raise ShapeError(f"{model.name}: an export needs the shape of {listed(unknown)}")
        with watching(f"converting {model.name}"):
            open_shapes = {name: (None, *shape[1:]) if free_batch else shape for name, shape in shapes.items()}
            content = export_open(model.symbol, model.args, model.aux, open_shapes, name=model.name)
    if check:
        with watching("checking with onnxruntime"):
            gap = difference(model, content, {name: shapes[name] for name in inputs})
        click.echo(gap)
    with replacing(target) as file:
        file.write(content)


def difference(model: ModelFiles, content: bytes, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Run the exported model and ours on the same random inputs; return the largest difference in words.

    Raises:
        MXNetError: they differ, or onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MXNetError(
            "an export is checked with onnxruntime: pip install 'weftplan[convert]', or give --no-check"
        ) from error
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(0)
    fed: dict[str, Any] = {}
    limits = _limits(model)
    for name, shape in shapes.items():
        values = random.integers(0, limits[name], shape) if name in limits else random.uniform(-1, 1, shape)
        fed[name] = values.astype(np.float32)
    names = [argument.name for argument in session.get_inputs()]
    theirs = session.run(None, {name: fed[name] for name in names})
    ours = list(predict(model, fed).values())
    worst = 0.0
    for name, left, right in zip(model.symbol.list_outputs(), ours, theirs, strict=True):
        if left.shape != right.shape:
            raise MXNetError(f"{model.name}: output {name} has shape {right.shape} in ONNX, {left.shape} here")
        deviation = float(np.abs(left - right).max()) / max(float(np.abs(left).max()), 1e-30)
        if not deviation <= TOLERANCE:
            raise MXNetError(
                f"{model.name}: output {name} differs from onnxruntime's by {deviation:.3g} of its largest value"
            )
        worst = max(worst, deviation)
    return f"checked with onnxruntime {onnxruntime.__version__}: outputs differ by {worst:.3g} of their largest value"


def _limits(model: ModelFiles) -> dict[str, int]:
    """Return the inputs that are indices, with their upper limits."""
    limits = {}
    for entry in model.symbol.get_internals().entries:
        node = entry.node
        if node.op is not None and node.op.name == "Embedding" and node.inputs[0].node.op is None:
            limits[node.inputs[0].node.name] = int(node.params["input_dim"])
    return limits
