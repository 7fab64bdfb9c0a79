"""``weftplan plan``: how many bytes a network needs, what fills them, and how to fit a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from weftplan.cli.batch import largest_batch
from weftplan.cli.plan_inputs import Network, load_network, parse_dtypes, parse_shapes
from weftplan.cli.plan_output import as_json, compare_table, kernel_table, show
from weftplan.errors import BudgetError, PlanError
from weftplan.planner import MemoryPlan, plan
from weftplan.planner.options import RECOMPUTE, STRATEGIES
from weftplan.planner.recompute import parse_bytes
from weftplan.training import optimizer as optimizers

Make = Callable[..., MemoryPlan]
"""Plans the network; keywords are those of :func:`weftplan.planner.plan`, ``batch`` changes the batch size."""
WIDTH = 160
"""Columns of the output when it is not a terminal."""


def _budget(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The budget in bytes; a malformed one is a usage error."""
    try:
        return None if value is None else parse_bytes(value)
    except PlanError as error:
        raise click.BadParameter(str(error)) from error


@click.command("plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option("--shape", "shape_texts", multiple=True, metavar="NAME=DIMS", help="Shape of an input; repeat for more.")
@click.option("--batch", type=click.IntRange(min=1), help="Batch size, put into the shapes (built-in: 32).")
@click.option("--train", is_flag=True, help="With the backward part.")
@click.option("--input-grads", is_flag=True, help="Gradients of the inputs too, as simple_bind has by default.")
@click.option("--optimizer", metavar="NAME", help="Count what this optimizer keeps: sgd, momentum, adam, …")
@click.option("--dtype", "dtype_texts", multiple=True, metavar="[NAME=]DTYPE", help="Of one input or of all.")
@click.option("--budget", callback=_budget, metavar="BYTES", help="Fit everything into so much: 2GB, 512MiB.")
@click.option("--batch-max", is_flag=True, help="Find the largest batch that fits the budget.")
@click.option("--order", type=click.Choice(["given", "best"]), help="May the planner choose the execution order?")
@click.option("--strategy", type=click.Choice(STRATEGIES), help="How buffers share memory.")
@click.option(
    "--recompute",
    type=click.Choice([*RECOMPUTE, "budget"]),
    help="What backward computes again instead of keeping it; budget (the default with --budget): as little as fits.",
)
@click.option(
    "--no-workspaces", is_flag=True, help="Leave out the scratch memory of operators, as MXNet's figure does."
)
@click.option("--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a page to explore.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the plan: .svg, .png or .pdf.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the whole plan as JSON.")
@click.option("--json", "want_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--kernels", "want_kernels", is_flag=True, help="Print which kernel computes each node, and why.")
@click.option("--compare", is_flag=True, help="Print a table of strategies and recompute policies.")
def command(
    model: str,
    shape_texts: tuple[str, ...],
    batch: int | None,
    train: bool,
    input_grads: bool,
    optimizer: str | None,
    dtype_texts: tuple[str, ...],
    budget: int | None,
    batch_max: bool,
    order: str | None,
    strategy: str | None,
    recompute: str | None,
    no_workspaces: bool,
    html_path: Path | None,
    picture: Path | None,
    save: Path | None,
    want_json: bool,
    want_kernels: bool,
    compare: bool,
) -> None:
    """Plan the memory of MODEL, an MXNet symbol file (.json) or a built-in network, without running it.

    Nothing is allocated. The exit code is 1 when the network cannot be planned or does not fit the budget; the message
    then names the smallest budget that works.
    """
    if recompute == "budget" and budget is None:
        raise click.UsageError("--recompute budget needs --budget BYTES")
    if batch_max and budget is None:
        raise click.UsageError("--batch-max needs --budget BYTES to fit into")
    if batch_max and batch is not None:
        raise click.UsageError("--batch-max looks for the batch size; do not give --batch")
    if (input_grads or optimizer is not None) and not train:
        raise click.UsageError("gradients and optimizer states need --train")
    network = load_network(model)
    shapes = parse_shapes(shape_texts)
    maker = _maker(network, shapes, batch, train, input_grads, dtype_texts, optimizer)
    chosen: dict[str, Any] = {"order": order, "strategy": strategy, "workspaces": not no_workspaces}
    if recompute not in (None, "budget"):
        chosen["recompute"] = recompute
    as_needed = budget is not None and recompute in (None, "budget") and train
    facts: dict[str, Any] = {"model": network.name, "train": train}
    if batch_max:
        assert budget is not None
        found, chosen_plan = _largest(maker, chosen, budget, as_needed=recompute == "budget" and train)
        facts["batch_max"] = found
    else:
        chosen_plan = _fitting(maker, chosen, budget, as_needed=as_needed)
    # stdout is the figures alone when they are to be read by a program.
    console = Console(stderr=want_json, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH  # a file or a pipe has no width of its own; names should not be cut
    title = f"{network.name}, {'training' if train else 'inference'}"
    if "batch_max" in facts:
        title += f", batch {facts['batch_max']}: the largest that fits {budget:,} bytes"
    if want_json:
        click.echo(json.dumps({**facts, **as_json(chosen_plan)}, indent=1))
    else:
        show(chosen_plan, console, title)
    if want_kernels:
        console.print(kernel_table(chosen_plan))
    if compare:
        console.print(compare_table(lambda **named: maker(**{**chosen, **named}, batch=facts.get("batch_max")), train))
    _write(chosen_plan, title, html_path, picture, save, console)


def _maker(
    network: Network,
    given: dict[str, tuple[int, ...]],
    batch: int | None,
    train: bool,
    input_grads: bool,
    dtype_texts: tuple[str, ...],
    optimizer: str | None,
) -> Make:
    """The function that plans this network."""
    kept = None if optimizer is None else _optimizer(optimizer)

    def make(**named: Any) -> MemoryPlan:
        size = named.pop("batch", None)
        shapes = network.shapes(given, batch if size is None else size)
        return plan(
            network.symbol,
            shapes,
            train=train,
            grad_req=network.requests(shapes, input_grads=input_grads),
            dtypes=parse_dtypes(dtype_texts, shapes, network.symbol.list_inputs()),
            optimizer_states=kept,
            **named,
        )

    return make


def _optimizer(name: str) -> optimizers.Optimizer:
    """An optimizer by name; ``momentum`` is SGD with momentum."""
    return optimizers.create("sgd", momentum=0.9) if name.lower() == "momentum" else optimizers.create(name)


def _fitting(make: Make, chosen: dict[str, Any], budget: int | None, *, as_needed: bool) -> MemoryPlan:
    """The plan; with a budget one that fits, by recomputation as needed or under the named policy.

    Raises:
        BudgetError: it does not fit; names the smallest budget that works.
    """
    if as_needed:
        return make(**chosen, budget=budget)
    found = make(**chosen)
    if budget is not None and found.total > budget:
        raise BudgetError(
            f"the network needs {found.total:,} bytes, more than the budget of {budget:,}; the smallest budget that "
            f"works is {found.total}",
            smallest=found.total,
        )
    return found


def _largest(make: Make, chosen: dict[str, Any], budget: int, *, as_needed: bool) -> tuple[int, MemoryPlan]:
    """The largest batch that fits, and its plan.

    Raises:
        BudgetError: not even one sample fits.
    """

    def smallest(batch: int) -> int:
        """Bytes that a batch needs at least."""
        if not as_needed:
            return make(**chosen, batch=batch).total
        try:
            return make(**chosen, batch=batch, budget=1).total
        except BudgetError as error:
            if error.smallest is None:
                raise
            return error.smallest

    batch, _ = largest_batch(smallest, budget)
    return batch, make(**chosen, batch=batch, **({"budget": budget} if as_needed else {}))


def _write(
    found: MemoryPlan, title: str, html_path: Path | None, picture: Path | None, save: Path | None, console: Console
) -> None:
    """Write the files that were asked for."""
    writers: tuple[tuple[Path | None, Callable[[Path], object]], ...] = (
        (html_path, lambda path: path.write_text(found.to_html(title=title), encoding="utf-8")),
        (picture, lambda path: found.plot(path, title=title)),
        (save, lambda path: path.write_text(found.to_json(), encoding="utf-8")),
    )
    for path, write in writers:
        if path is None:
            continue
        try:
            write(path)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
        console.print(f"wrote {path} ({path.stat().st_size:,} bytes)", highlight=False, markup=False)
