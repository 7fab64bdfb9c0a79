"""``weftplan plan``: the memory that a network needs, its largest buffers, and ways to fit a budget."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import click

from weftplan import models
from weftplan.cli.columns import output_width, paragraph
from weftplan.cli.doctor.devices import parse_devices
from weftplan.cli.file_errors import cause
from weftplan.cli.options import (
    FILE,
    OutputFile,
    WholeNumber,
    budget_option,
    json_option,
    model_argument,
    number,
    shape_option,
    starting,
)
from weftplan.cli.plan import output as plan_output
from weftplan.cli.plan.batches import Make, largest, micro_batches, what_to_type
from weftplan.cli.plan.compare import Row, compare, curve
from weftplan.cli.plan.fits_answer import answer_for_card
from weftplan.cli.plan.inputs import PlannedNetwork, load_network, parse_dtypes, parse_shapes, shape_advice
from weftplan.cli.plan.torch_step import plan_step
from weftplan.convert.onnx_in import OnnxFile
from weftplan.convert.onnx_plan import plan_onnx
from weftplan.device.amounts import bytes_of, pasteable
from weftplan.device.cards import CARDS, card_budget
from weftplan.device.context import Context
from weftplan.errors import BudgetError, PlanError, UnknownOperatorError
from weftplan.planner import MemoryPlan, plan
from weftplan.planner.batch import batch_size
from weftplan.planner.options import RECOMPUTE, STRATEGIES
from weftplan.planner.stop_request import asked, stop, stoppable
from weftplan.planner.symbolic.estimate import parameters_only
from weftplan.report.plan_html import plan_html
from weftplan.support.atomic_files import write_text
from weftplan.support.command_start import INTERRUPTED
from weftplan.support.progress import Progress
from weftplan.support.tensor_types import Shape
from weftplan.training.optimizers import sgd_adam as optimizers

DTYPES = ("float32", "float16", "bfloat16", "float64")


def _optimizers() -> list[str]:
    return sorted({"momentum", *optimizers.Optimizer.opt_registry} - {"test"})


def _contexts(context: click.Context, parameter: click.Parameter, value: str | None) -> list[Context]:
    return [Context("cpu", 0)] if value is None else parse_devices(value)


@click.command(
    "plan",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Built-in networks: {', '.join(models.names())}.",
)
@model_argument()
@shape_option()
@number("--batch", help="The batch size. The default of built-in networks is 32.")
@click.option(
    "--train/--inference",
    default=True,
    help="Plan training (the default), or the forward part alone.",
    show_default=False,
)
@click.option("--input-grads", is_flag=True, help="Plan gradients of the inputs too, as simple_bind does by default.")
@click.option(
    "--optimizer",
    metavar="NAME",
    shell_complete=starting(_optimizers),
    help="Count the states that this optimizer keeps: sgd, momentum, adam, …",
)
@click.option(
    "--dtype",
    "dtype_texts",
    multiple=True,
    metavar="[NAME=]DTYPE",
    shell_complete=starting(lambda: list(DTYPES)),
    help="The dtype of all inputs, or of one.",
)
@click.option(
    "--device",
    "contexts",
    metavar="DEVICES",
    callback=_contexts,
    help="The device: gpu0, sim0, or several such as gpu0,gpu1, over which the batch is split.",
)
@click.option(
    "--kvstore",
    type=click.Choice(("local", "device", "dist_sync", "dist_device_sync", "dist_async")),
    default="local",
    help="How several devices, or with --workers several processes, exchange gradients.",
)
@click.option(
    "--workers",
    type=WholeNumber(1, 1 << 16),
    help="How many processes on one host share a distributed kvstore; the plan is that of one of them.",
)
@budget_option("Fit everything into this much: 2GB, 512MiB, or 80% of the memory of the device.")
@click.option(
    "--card",
    metavar="CARD",
    shell_complete=starting(lambda: list(CARDS)),
    help='Fit everything into a GPU such as "RTX 4070" or 8GB, less what the CUDA context and libraries take.',
)
@click.option(
    "--batch-max",
    is_flag=True,
    help="Find the largest batch that fits the budget; with --batch, in how many micro-batches that one is trained.",
)
@click.option(
    "--order", type=click.Choice(["given", "best"]), help="Whether the planner may choose the execution order."
)
@click.option("--strategy", type=click.Choice(tuple(STRATEGIES)), help="How buffers share memory.")
@click.option(
    "--recompute",
    type=click.Choice([*RECOMPUTE, "budget"]),
    help="What the backward part computes again instead of keeping it. With --budget the default is budget, which "
    "computes again only what it must to make everything fit.",
)
@click.option(
    "--no-workspaces", is_flag=True, help="Leave out the scratch memory of operators, as MXNet's own figure does."
)
@click.option(
    "--html",
    "html_path",
    type=FILE,
    help="Write a page to explore in a browser; with --curve or --compare, it has their tables.",
)
@click.option(
    "--picture", type=OutputFile(".svg", ".png", ".pdf"), help="Draw the plan into a .svg, .png or .pdf file."
)
@click.option("--save", type=FILE, help="Write the whole plan as JSON.")
@json_option("Print the figures as JSON.")
@click.option(
    "--kernels",
    "want_kernels",
    is_flag=True,
    help="Print which kernel computes each node, why it was chosen, and the passes over the graph that ran.",
)
@click.option("--compare", "want_compare", is_flag=True, help="Print strategies, policies and budgets side by side.")
@click.option(
    "--torch",
    "torch_step",
    is_flag=True,
    help="MODEL is package.module:function or FILE.py:function, which returns (loss, arguments[, optimizer]) of a step "
    "of PyTorch.",
)
@click.option(
    "--curve", "want_curve", is_flag=True, help="Draw how much memory the plan needs when a step may take longer."
)
def command(
    model: str,
    shape_texts: tuple[str, ...],
    batch: int | None,
    train: bool,
    input_grads: bool,
    optimizer: str | None,
    dtype_texts: tuple[str, ...],
    contexts: list[Context],
    kvstore: str,
    workers: int | None,
    budget: str | None,
    card: str | None,
    batch_max: bool,
    order: str | None,
    strategy: str | None,
    recompute: str | None,
    no_workspaces: bool,
    html_path: Path | None,
    picture: Path | None,
    save: Path | None,
    as_json: bool,
    want_kernels: bool,
    want_compare: bool,
    want_curve: bool,
    torch_step: bool,
) -> None:
    """Plan the memory of MODEL without running it: a built-in network, an MXNet symbol file or its prefix, an
    ONNX file, or a symbol of a program: FILE.py:NAME or package.module:NAME.

    Nothing is allocated. The exit code is 1 when the network cannot be planned or does not fit the budget; the message
    then names the smallest budget that works. After Ctrl-C it is 130.
    """
    if torch_step:
        if card is not None:
            _refuse_options(frozenset({"model", "torch_step", "card", "as_json"}), "--torch and --card")
            answer_for_card(model, card, None, as_json=as_json)
            return
        _refuse_options(_WITH_TORCH, "--torch: the function decides it, as it makes the step")
        laid_out, tables = plan_step(model, budget=budget, as_json=as_json, want_curve=want_curve)
        _write(laid_out, model, html_path, picture, save, to_stderr=as_json, tables=tables)
        return
    budget, card_text = _of_card(card, budget, len(contexts))
    if recompute == "budget" and budget is None:
        raise click.UsageError("--recompute budget needs --budget BYTES")
    if batch_max and budget is None:
        raise click.UsageError("--batch-max needs --budget BYTES to fit into")
    if batch_max and batch is not None and not train:
        raise click.UsageError("--batch-max with --batch looks for micro-batches of training; leave out --inference")
    if (input_grads or optimizer is not None) and not train:
        raise click.UsageError("gradients and optimizer states belong to training; leave out --inference")
    if want_curve and not train:
        raise click.UsageError("--curve trades time for memory in training; leave out --inference")
    distributed = kvstore.startswith("dist")
    if distributed and (workers is None or not train):
        raise click.UsageError(f"--kvstore {kvstore} needs --workers N, and belongs to training")
    if workers is not None and not distributed:
        raise click.UsageError("--workers N belongs to --kvstore dist_sync, dist_device_sync or dist_async")
    try:
        network = load_network(model)
    except UnknownOperatorError as error:
        if not model.endswith(".onnx"):
            raise
        if train:
            raise UnknownOperatorError(f"{error}; --inference plans the file by sizes alone") from error
        _refuse_options(_BY_SIZES, f"a file that is planned by sizes alone: {error}")
        _write(_by_sizes(model, shape_texts, as_json), model, html_path, picture, save, to_stderr=as_json)
        return
    explicit = parse_shapes(shape_texts)
    shapes = network.shapes(explicit, batch)
    limit = _limit(budget, contexts)
    dtypes = parse_dtypes(dtype_texts, shapes, network.symbol)
    chosen: dict[str, Any] = {
        "train": train,
        "grad_req": parameters_only(network.symbol, shapes, inputs=input_grads),
        "dtype": dtypes,
        "optimizer": optimizer,
        "context": contexts[0] if len(contexts) == 1 and not distributed else contexts,
        "kvstore": kvstore,
        "workers": workers,
        "order": order,
        "strategy": strategy,
        "workspaces": not no_workspaces,
    }
    if recompute not in (None, "budget"):
        chosen["recompute"] = recompute
    make: Make = partial(plan, network.symbol, shapes, **chosen)
    as_needed = budget is not None and recompute in (None, "budget") and train
    facts: dict[str, Any] = {"model": network.name, "train": train, **({"card": card_text} if card_text else {})}
    width = output_width()
    doing = f"fitting {network.name} (Ctrl-C: the best so far)" if as_needed else f"planning {network.name}"
    advice = _advice(
        network,
        shapes,
        None if batch_max else budget,
        limit,
        lambda: _outside(plan(network.symbol, network.shapes(explicit, 1), **chosen)),
    )
    with Progress(doing, watch=True) as progress, advice, _best_so_far(as_needed) as stopped:
        if batch_max:
            assert limit is not None
            again_fits = recompute == "budget" and train
            if batch is None:
                facts["batch_max"], chosen_plan = largest(make, limit, progress, recompute=again_fits)
            else:
                pieces, chosen_plan = micro_batches(
                    make,
                    chosen["grad_req"],
                    batch,
                    limit,
                    progress,
                    recompute=again_fits,
                    devices=len(contexts),
                )
                facts["micro_batches"], facts["micro_batch"] = pieces, batch // pieces
        else:
            chosen_plan = _fitting(make, limit, as_needed=as_needed)
    described = _described(network, shapes, dtypes, facts.get("batch_max", facts.get("micro_batch")), contexts)
    what = f"{'training' if train else 'inference'} {described}"
    lines = paragraph(plan_output.answer(chosen_plan, what, train=train), width)
    lines += paragraph(card_text, width) if card_text else []
    if limit is not None:
        lines += paragraph(plan_output.verdict(chosen_plan, limit), width)
    if "batch_max" in facts:
        hint = "; give --batch, too, to learn in how many micro-batches a larger one is trained" if train else ""
        how = " without recomputation (--recompute budget allows it)" if train and recompute != "budget" else ""
        lines += paragraph(f"batch {facts['batch_max']} is the largest that fits {limit:,} bytes{how}{hint}", width)
    if "micro_batches" in facts:
        assert batch is not None
        assert budget is not None
        lines += paragraph(what_to_type(batch, facts["micro_batches"], budget), width)
    lines += ["", *plan_output.figures(chosen_plan, width), "", *plan_output.peak(chosen_plan, width)]
    if want_kernels:
        lines += ["", *plan_output.kernels(chosen_plan, width)]
    lines += ["", *paragraph(chosen_plan.left_out, width)]
    if not as_json:
        click.echo("\n".join(lines))
    repeat = partial(
        plan,
        network.symbol,
        network.shapes(explicit, facts.get("batch_max", facts.get("micro_batch", batch))),
        **chosen,
    )
    several: dict[str, list[Row]] = {}
    tables = []
    interrupted = stopped()
    for name, enabled, rows, shown in (
        ("compare", want_compare, partial(compare, repeat, train=train), plan_output.compared),
        ("curve", want_curve, partial(curve, repeat), plan_output.drawn),
    ):
        if enabled and not interrupted:
            several[name], interrupted = _collect(rows(), f"{name} of {network.name}")
            tables.append("\n".join(shown(several[name], None)))
            if not as_json:
                click.echo("\n".join(["", *shown(several[name], width)]))
    if as_json:
        click.echo(json.dumps({**facts, **plan_output.as_json(chosen_plan, kernels=want_kernels), **several}, indent=1))
    _write(chosen_plan, what, html_path, picture, save, to_stderr=as_json, tables=tables)
    if interrupted:
        click.echo("interrupted: what was found until then is printed above", err=True)
        raise click.exceptions.Exit(INTERRUPTED)


_WITH_TORCH = frozenset({"model", "torch_step", "budget", "as_json", "want_curve", "html_path", "picture", "save"})
"""Parameters of the command that a step of PyTorch takes, too."""
_BY_SIZES = frozenset({"model", "shape_texts", "train", "as_json", "html_path", "picture", "save"})
"""Parameters that a file with unsupported operators takes."""


def _by_sizes(model: str, shape_texts: tuple[str, ...], as_json: bool) -> MemoryPlan:
    """Print and return the plan of an ONNX file with unsupported operators."""
    sized, width = plan_onnx(OnnxFile(model), parse_shapes(shape_texts)), output_width()
    if as_json:
        click.echo(json.dumps({"model": model, **plan_output.as_json(sized, kernels=False)}, indent=1))
        return sized
    lines = [f"{model}: inference by sizes alone", "", *plan_output.figures(sized, width)]
    lines += ["", *plan_output.peak(sized, width), "", *paragraph("; ".join(sized.notes), width)]
    click.echo("\n".join(lines))
    return sized


@contextmanager
def _best_so_far(can_stop: bool) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end a search with its best result, if ``can_stop``; the second Ctrl-C is an interrupt.

    Yield a function that returns, after the block, whether the search was stopped.
    """
    previous = signal.getsignal(signal.SIGINT)
    if not can_stop or previous in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    reported = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop()
        signal.signal(signal.SIGINT, previous)

    with stoppable():
        signal.signal(signal.SIGINT, on_signal)
        try:
            yield lambda: reported
        except BudgetError as error:
            if not asked():
                raise
            click.echo(
                f"interrupted: no plan that fits was found until then: {error}; a longer search may find less", err=True
            )
            raise click.exceptions.Exit(INTERRUPTED) from None
        except KeyboardInterrupt:
            click.echo("interrupted: the search ended at once, so no plan is printed", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        finally:
            signal.signal(signal.SIGINT, previous)
            reported = asked()


@contextmanager
def _advice(
    network: PlannedNetwork,
    shapes: Mapping[str, Shape],
    budget: str | None,
    limit: int | None,
    outside: Callable[[], int],
) -> Iterator[None]:
    """Return advice on the command to type if a shape is missing or the budget is too small.

    Args:
        limit: the bytes of ``budget``.
        outside: returns the bytes outside the planned peak that every batch needs.
    """
    try:
        with shape_advice(network, shapes):
            yield
    except BudgetError as error:
        if error.smallest is None or budget is None or limit is None:
            raise
        text, other = str(error), f", or --budget {budget} --batch-max, which finds the largest batch that fits"
        if outside() >= limit:
            text = text.replace(", or use a smaller batch", "")
            other = "; no batch fits, because arguments, gradients and states alone take more with batch 1"
        raise BudgetError(f"{text} (type --budget {error.smallest}{other})", smallest=error.smallest) from None


def _outside(plan: MemoryPlan) -> int:
    """Return the bytes of a plan outside its planned peak that a budget counts."""
    return plan.counted - plan.peak


def _refuse_options(allowed: frozenset[str], what: str) -> None:
    """Raise click.UsageError if the command line has an option outside ``allowed``, which cannot go with ``what``."""
    context = click.get_current_context()
    refused = [
        option.opts[-1]
        for option in context.command.params
        if option.expose_value
        and option.name not in allowed
        and context.get_parameter_source(str(option.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    if refused:
        raise click.UsageError(f"{refused[0]} does not go with {what}")


def _of_card(card: str | None, budget: str | None, devices: int) -> tuple[str | None, str]:
    """Return (budget, explanation): for a card, its bytes as digits and how they are computed; else no explanation."""
    if card is None:
        return budget, ""
    if budget is not None:
        raise click.UsageError("--card gives the budget: leave out one of --card and --budget")
    try:
        nbytes, text = card_budget(card, devices)
    except PlanError as error:
        raise click.BadParameter(str(error), param_hint="--card") from error
    return str(nbytes), text


def _limit(budget: str | None, contexts: list[Context]) -> int | None:
    """Return the budget in bytes; a malformed budget is a usage error."""
    try:
        return None if budget is None else bytes_of(budget, contexts[0])
    except PlanError as error:
        raise click.BadParameter(str(error), param_hint="--budget") from error


def _described(
    network: PlannedNetwork,
    shapes: Mapping[str, Shape],
    dtypes: dict[str, str],
    batch: int | None,
    contexts: list[Context],
) -> str:
    """Return the network, its batch and its dtype, in words."""
    names = set(dtypes.values())
    dtype = (
        "float32" if not names else names.pop() if len(names) == 1 and set(shapes) == set(dtypes) else "mixed dtypes"
    )
    try:
        size = f", batch {batch_size(shapes) if batch is None else batch}"
    except PlanError:
        size = ""
    location = "" if contexts == [Context("cpu", 0)] else f" on {', '.join(map(str, contexts))}"
    return f"{network.name}{location}{size}, {dtype}"


def _fitting(make: Make, budget: int | None, *, as_needed: bool) -> MemoryPlan:
    """Return the plan; with a budget a plan that fits, by recomputation as needed or under the named policy.

    Raises:
        BudgetError: no plan fits; the message names the smallest budget that works.
    """
    if as_needed:
        return make(budget=budget)
    plan = make()
    if budget is not None and plan.counted > budget:
        raise BudgetError(
            f"the network needs {plan.counted:,} bytes, more than the budget of {budget:,}; the smallest budget that "
            f"works is {pasteable(plan.counted)}",
            smallest=plan.counted,
        )
    return plan


def _collect(rows: Iterator[Row], what: str) -> tuple[list[Row], bool]:
    """Return all rows, or the rows before Ctrl-C, and whether it occurred."""
    collected: list[Row] = []
    with Progress(what, watch=True) as progress:
        try:
            for row in rows:
                collected.append(row)
                progress.say(f"{what}: {len(collected)} plans made, the last {row['plan']}")
        except KeyboardInterrupt:
            return collected, True
    return collected, False


def _write(
    plan: MemoryPlan,
    title: str,
    html_path: Path | None,
    picture: Path | None,
    save: Path | None,
    *,
    to_stderr: bool,
    tables: Sequence[str] = (),
) -> None:
    """Write the requested files; the page with ``tables``."""
    writers: tuple[tuple[Path | None, Callable[[Path], object]], ...] = (
        (html_path, lambda path: write_text(path, plan_html(plan, title=title, tables=tables))),
        (picture, lambda path: plan.plot(path, title=title)),
        (save, lambda path: write_text(path, plan.to_json())),
    )
    for path, write in writers:
        if path is None:
            continue
        try:
            write(path)
        except (OSError, ValueError) as error:
            why = cause(error, path) if isinstance(error, OSError) else error
            raise click.ClickException(f"cannot write {path}: {why}") from error
        click.echo(f"wrote {path} ({path.stat().st_size:,} bytes)", err=to_stderr)
