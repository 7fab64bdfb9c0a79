"""``weftplan inspect``: contents and requirements of a model file, and whether it can be run."""

from __future__ import annotations

import html
import json
from pathlib import Path

import click

from weftplan.cli.columns import Column, labelled, output_width, paragraph, table
from weftplan.cli.model_files import epochs, load_model, only_parameters
from weftplan.cli.options import FILE, json_option, model_argument, shape_option
from weftplan.cli.plan import output as plan_output
from weftplan.cli.plan.inputs import check_names, parse_shapes, shape_advice
from weftplan.errors import listed
from weftplan.ops.core.rules import is_known
from weftplan.report.inspection import Inspection, Layer, inspect
from weftplan.report.network_svg import draw
from weftplan.support.atomic_files import write_text

COLUMNS = ("layer", "operator", "output", "parameters", "operations", "bytes")


@click.command("inspect", context_settings={"help_option_names": ["-h", "--help"]})
@model_argument()
@click.argument("params", required=False)
@shape_option()
@click.option("--html", "html_path", type=FILE, help="Write a page to read in a browser.")
@json_option("Print what was found as JSON.")
@click.option(
    "--kernels",
    "want_kernels",
    is_flag=True,
    help="Print who computes each node of inference, and the passes that ran.",
)
def command(
    model: str,
    params: str | None,
    shape_texts: tuple[str, ...],
    html_path: Path | None,
    as_json: bool,
    want_kernels: bool,
) -> None:
    """Look into MODEL, a symbol file or a checkpoint's prefix, and its parameters PARAMS, a file or an epoch.

    A built-in network, such as lenet, is shown with its usual shapes for one sample, an ONNX file with those that it
    says. Nothing is run. The exit code is
    1 when a file cannot be read.
    """
    beside = epochs(Path(model)) if params is None else []
    loaded = load_model(model, only_parameters(model) if params is None else params)
    shapes = parse_shapes(shape_texts)
    check_names(shapes, loaded.symbol, "--shape")
    shapes = loaded.network.shapes(shapes, 1 if loaded.network.built_in and not shapes else None)
    with shape_advice(loaded.network, shapes, loaded.stored_shapes):
        inspection = inspect(
            loaded.symbol, name=loaded.name, version=loaded.version, args=loaded.args, aux=loaded.aux, shapes=shapes
        )
    if as_json:
        click.echo(json.dumps(inspection.as_dict(), indent=1))
    else:
        _show(inspection)
        if want_kernels:
            lines = ["kernels and passes: the shapes of inputs are not known; add --shape"]
            if inspection.plan is not None:
                lines = plan_output.kernels(inspection.plan, output_width())
            click.echo("\n" + "\n".join(lines))
        if beside:
            names = ", ".join(path.name for path in beside)
            text = f"parameters of {names}, the only file" if len(beside) == 1 else f"parameters beside it: {names}"
            for line in paragraph(text, output_width()):
                click.echo(line)
    if html_path is not None:
        write_text(html_path, page(inspection, draw(loaded.symbol, _input_shapes(inspection)).svg))
        click.echo(f"wrote {html_path}", err=as_json)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else " x ".join(str(dim) if dim else "?" for dim in shape) or "scalar"


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    """Return everything except the layers, as pairs of words."""
    rows = [("written by", inspection.version)]
    for argument in inspection.inputs:
        note = f" ({argument.known})" if argument.known else ""
        rows.append(("input", f"{argument.name}: {_shape(argument.shape) or 'shape unknown'}{note}"))
    rows += [("outputs", ", ".join(inspection.outputs)), ("layers", f"{len(inspection.layers):,}")]
    rows.append(("operators", ", ".join(f"{name} {count}" for name, count in inspection.operators.items())))
    if inspection.missing_operators:
        rows.append(("not supported", ", ".join(inspection.missing_operators)))
    if inspection.parameters:
        rows.append(("elements of parameters", f"{inspection.parameters:,}"))
    if inspection.matched or inspection.missing:
        text = f"{len(inspection.matched)} matched, {len(inspection.missing)} missing, {len(inspection.unused)} unused"
        rows.append(("parameters", text))
        rows += [
            (f"  {word}", listed(names))
            for word, names in (("missing", inspection.missing), ("unused", inspection.unused))
            if names
        ]
        rows += [("  another shape", text) for text in inspection.wrong]
    if inspection.flops is not None:
        rows.append(("operations of a forward run", f"{inspection.flops:,}"))
    if inspection.inference_bytes is not None:
        free = inspection.scratch_free_bytes
        rows.append(
            ("bytes, inference", f"{inspection.inference_bytes:,}" + (f" ({free:,} without scratch)" if free else ""))
        )
    if inspection.training_bytes is not None:
        rows.append(("bytes, training", f"{inspection.training_bytes:,}"))
    return rows + [("warning", text) for text in inspection.warnings]


def _show(inspection: Inspection) -> None:
    """Print the layers, then the facts; on a narrow terminal columns are left out, and numbers are never cut."""
    width = output_width()
    cells = list(zip(*map(_cells, inspection.layers), strict=True)) or [()] * len(COLUMNS)
    columns = [
        Column(name, texts, right=index > 2, leave=leave, name_like=not leave)
        for index, (name, leave, texts) in enumerate(zip(COLUMNS, (0, 3, 1, 2, 5, 4), cells, strict=True))
        if any(texts)  # without shapes no sizes are known
    ]
    lines = [inspection.name, *table(columns, width), "", *labelled(_facts(inspection), width), ""]
    click.echo("\n".join([*lines, *paragraph(inspection.verdict, width)]))


def _cells(layer: Layer) -> list[str]:
    counts = ("" if value is None else f"{value:,}" for value in (layer.parameters or None, layer.flops, layer.nbytes))
    return [layer.name, layer.op + ("" if layer.supported else " (not supported)"), _shape(layer.shape), *counts]


def _input_shapes(inspection: Inspection) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs whose sizes are all known."""
    return {
        argument.name: argument.shape
        for argument in inspection.inputs
        if argument.shape is not None and is_known(argument.shape)
    }


def page(inspection: Inspection, picture: str) -> str:
    """Return an HTML page without scripts or external links; ``picture`` is SVG."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(layer)) + "</tr>\n"
        for layer in inspection.layers
    )
    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>\n" for name, text in _facts(inspection))
    head = "".join(f"<th>{word}</th>" for word in COLUMNS)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(inspection.name)}</title>\n"
        "<style>:root{color-scheme:light dark}"
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222}"
        "table{border-collapse:collapse;width:100%}.layers{overflow-x:auto}"
        "td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;white-space:nowrap;"
        "text-align:left}td:nth-child(n+4),th:nth-child(n+4){text-align:right;font-variant-numeric:tabular-nums}"
        "dt{font-weight:600}dd{margin:0 0 .4rem 1.5rem;overflow-wrap:anywhere}"
        ".verdict{background:#eef4fb;padding:.8rem 1rem}"
        "@media(prefers-color-scheme:dark){body{color:#e6eaf0;background:#12161c}.verdict{background:#1b212a}"
        "td,th{border-color:#343d4a}}</style>\n"
        f"<h1>{html.escape(inspection.name)}</h1>\n<p class=verdict>{html.escape(inspection.verdict)}</p>\n"
        f"<dl>\n{facts}</dl>\n<div class=layers><table><thead><tr>{head}</tr></thead><tbody>\n{rows}"
        f"</tbody></table></div>\n<h2>The network</h2>\n"
        "<p>The names and shapes of a box appear when the pointer rests on it.</p>\n"
        f"<div class=layers>{picture}</div>\n</html>\n"
    )
