"""``weftplan scale``: what a training step would take with more workers than there are here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from weftplan.cli.columns import Column, output_width, paragraph, table
from weftplan.cli.doctor.devices import parse_devices
from weftplan.cli.options import json_option, model_option, number, positive, shape_option
from weftplan.cli.plan.inputs import load_network, parse_shapes
from weftplan.device.context import cpu
from weftplan.errors import KVStoreError
from weftplan.kvstore.compression import Compression
from weftplan.kvstore.factory import create as create_store
from weftplan.kvstore.scaling import Gradient, Step, best_step, measure, parse_topology, slowest
from weftplan.ndarray import waitall
from weftplan.planner.symbolic.cost import node_seconds
from weftplan.planner.symbolic.estimate import parameters_only
from weftplan.planner.symbolic.pipeline import size_symbol

MOST = 1 << 20
_MEASURED = "measured"
_BAR = 40


def _counts(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    """``1..4096`` is every power of two between the two, and both; ``1,3,24`` is a list."""
    found = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", value)
    try:
        if found is None:
            counts = [int(part) for part in value.split(",")]
        else:
            first, last = map(int, found.groups())
            counts = [first, *(1 << power for power in range(21) if first < 1 << power < last), last]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > MOST or counts != sorted(counts):
        raise click.BadParameter(f"expected 1..4096 or a rising list such as 1,8,64, up to {MOST:,}; got {value!r}")
    return list(dict.fromkeys(counts))


def _topology(context: click.Context, parameter: click.Parameter, value: str) -> Any:
    if value == _MEASURED:
        return value
    try:
        return parse_topology(value)
    except KVStoreError as error:
        raise click.BadParameter(str(error)) from None


@click.command("scale", short_help="Predict a training step of many workers.")
@model_option("The network: a built-in one, a symbol file or an ONNX file.")
@number("--batch", help="The batch size of each worker. The default of built-in networks is 32.")
@shape_option()
@click.option(
    "--workers",
    "-n",
    default="1..4096",
    show_default=True,
    callback=_counts,
    help="Predict for powers of two from 1 to 4096, or for a list such as 1,8,24.",
)
@click.option(
    "--topology",
    "-t",
    default="8xnvlink4+100gbe",
    show_default=True,
    callback=_topology,
    help="The link of every worker, such as 100gbe or (20us,1.1GB/s), or NxINNER+OUTER with N workers per machine; "
    "or 'measured', in a job that weftplan launch starts.",
)
@click.option("--device", default="gpu0", show_default=True, help="The device for which the computation is modelled.")
@positive("--step-ms", help="The milliseconds that you have measured for forward and backward.")
@click.option(
    "--measure-step",
    is_flag=True,
    help="In a job that weftplan launch starts: measure forward and backward on the CPU while all processes compute.",
)
@click.option(
    "--compression", type=click.Choice(["1bit", "2bit"]), help="Compress gradients to one or two bits per element."
)
@json_option("Print JSON.")
def command(
    model: str,
    batch: int | None,
    shape_texts: tuple[str, ...],
    workers: list[int],
    topology: Any,
    device: str,
    step_ms: float | None,
    measure_step: bool,
    compression: str | None,
    as_json: bool,
) -> None:
    """Predict the time of a training step of MODEL with many workers, each with its own batch.

    Nothing runs and nothing is sent: the links are those that you name, exchanges are closed forms, and the computation
    is modelled unless --step-ms says what you have measured. For each number of workers the algorithm and the size of
    the buckets are those with the shortest step.

    \b
        weftplan scale -m resnet50 -n 1..4096 -t 8xnvlink4+100gbe
        weftplan scale -m vgg16 -n 1,8,64 -t "(20us,1.1GB/s)" --step-ms 180
        weftplan launch -n 4 weftplan scale -m mlp -n 4 -t measured --measure-step
    """
    links, how = "given", "modelled" if step_ms is None else "measured by you, spread over the layers as modelled"
    if measure_step and (topology != _MEASURED or step_ms is not None):
        raise click.UsageError("--measure-step belongs to --topology measured, and is given instead of --step-ms")
    if topology == _MEASURED:
        try:
            store = create_store("dist_sync")
            topology, links = measure(store), f"measured between {store.num_workers} processes"
            if measure_step:
                step_ms = 1e3 * slowest(_training(model, batch, shape_texts), store)
                how = f"measured in {store.num_workers} processes at once, spread over the layers as modelled"
        except KVStoreError as error:
            raise click.ClickException(str(error)) from error
        if store.rank:
            return
    gradients, computation = _gradients(model, batch, shape_texts, device, step_ms)
    chosen = None if compression is None else Compression(kind=compression)
    steps = [best_step(gradients, computation, count, topology, compression=chosen) for count in workers]
    if as_json:
        rows = [{**asdict(found), "efficiency": found.efficiency} for found in steps]
        click.echo(
            json.dumps(
                {
                    "model": model,
                    "topology": topology.name,
                    "links": {
                        **asdict(topology.outer),
                        "fixed": topology.fixed,
                        "per_key": topology.per_key,
                        "per_byte": topology.per_byte,
                        "how": links,
                    },
                    "computation_s": computation,
                    "computation": how,
                    "exchange": "modelled",
                    "gradients": len(gradients),
                    "gradient_bytes": sum(gradient.nbytes for gradient in gradients),
                    "steps": rows,
                },
                indent=2,
            )
        )
        return
    width = output_width()
    total = sum(gradient.nbytes for gradient in gradients)
    said = (
        f"{model} on {topology.name}: {total / 1e6:,.1f} MB in {len(gradients)} gradients, computation "
        f"{computation * 1e3:,.2f} ms ({how}); exchanges and steps are modelled"
    )
    if links != "given":
        said += (
            f" with links {links}: {topology.outer.latency * 1e6:,.0f} us, {topology.outer.bandwidth / 1e9:.3f} GB/s, "
            f"{topology.fixed * 1e6:,.0f} us for an exchange without data, {topology.per_key * 1e6:,.0f} us for a key, "
            f"{topology.per_byte * 1e9:,.2f} ns for a byte beside its link"
        )
    click.echo("\n".join([*paragraph(said, width), "", *_rows(steps, width), "", *_curve(steps)]))


def _training(model: str, batch: int | None, shapes: tuple[str, ...]) -> Callable[[], None]:
    """Forward and backward of the network on this process's CPU, waited for; all its inputs are small numbers."""
    network = load_network(model)
    known = network.shapes(parse_shapes(shapes), batch)
    sizes: dict[str, Any] = dict(known)
    bound = network.symbol.simple_bind(cpu(), grad_req=parameters_only(network.symbol, known), **sizes)
    for array in bound.arg_dict.values():
        array[:] = 0.01

    def step() -> None:
        bound.forward(is_train=True)
        bound.backward()
        waitall()

    return step


def _gradients(
    model: str, batch: int | None, shapes: tuple[str, ...], device: str, step_ms: float | None
) -> tuple[list[Gradient], float]:
    """(gradients of parameters in the order in which backward ends with them, seconds of forward and backward)."""
    network = load_network(model)
    known = network.shapes(parse_shapes(shapes), batch)
    try:
        contexts = parse_devices(device)
    except click.BadParameter as error:
        error.param_hint = "--device"
        raise
    wanted = parameters_only(network.symbol, known)
    sized = size_symbol(network.symbol, known, grad_req=wanted, context=contexts[0])
    program = sized.program
    costs, clock, ended = node_seconds(program), 0.0, {}
    for nid in program.order:
        clock += costs[nid]
        for entry in range(program.graph.row[nid], program.graph.row[nid + 1]):
            ended[entry] = clock
    scale = 1.0 if step_ms is None else step_ms * 1e-3 / clock
    entries = [int(e) for e in program.graph.outputs[len(network.symbol.list_outputs()) :]]
    found = [Gradient(program.nbytes[e], ended[e] * scale) for e in entries if program.nbytes[e]]
    return sorted(found, key=lambda gradient: gradient.ready), clock * scale


def _rows(steps: list[Step], width: int | None) -> list[str]:
    return table(
        [
            Column("workers", [f"{found.workers:,}" for found in steps], right=True),
            Column("step ms", [f"{found.seconds * 1e3:,.2f}" for found in steps], right=True),
            Column("exchange ms", [f"{found.exchanging * 1e3:,.2f}" for found in steps], right=True, leave=2),
            Column("exposed ms", [f"{found.exposed * 1e3:,.2f}" for found in steps], right=True),
            Column("efficiency", [f"{100 * found.efficiency:.1f} %" for found in steps], right=True),
            Column("buckets", [str(found.buckets) for found in steps], right=True, leave=1),
            Column("algorithm", [found.algorithm for found in steps]),
        ],
        width,
    )


def _curve(steps: list[Step]) -> list[str]:
    """Efficiency as bars."""
    return [
        f"{found.workers:>9,} {'█' * round(_BAR * found.efficiency):<{_BAR}} {100 * found.efficiency:.0f} %"
        for found in steps
    ]
