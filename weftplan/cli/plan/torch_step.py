"""``weftplan plan --torch package.module:step``: plans of a PyTorch training step, within a budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from weftplan.cli.plan.python_names import call, is_python_name, load_object
from weftplan.device.amounts import amount
from weftplan.planner import MemoryPlan
from weftplan.planner.strategies import plan_graph

if TYPE_CHECKING:
    from weftplan.torch.card_forecast import Forecast
    from weftplan.torch.choice import Choices, Plan


def plan_step(name: str, *, budget: str | None, as_json: bool, want_curve: bool) -> tuple[MemoryPlan, list[str]]:
    """Print the plan of the step that ``name`` creates; return the plan, laid out for pages and files, and tables.

    ``name`` is ``package.module:function``; the function takes no arguments and returns ``(loss, arguments)`` or
    ``(loss, arguments, optimizer)``, where ``loss(*arguments)`` is differentiated. Nothing of the step is run.
    """
    function, args, optimizer = make_step(name)
    with _needs_torch():
        from weftplan.torch import trade_off
        from weftplan.torch.private import check_version
    check_version()
    choices, plan = trade_off.planned(function, args, budget=budget, optimizer=optimizer)
    rows = [(p.peak + plan.resident.total, p.seconds / (choices.step_seconds or 1.0)) for p in choices.points]
    curve = [
        f"{total:>18,} bytes  {100 * more:6.1f} % more modelled time"
        for total, more in (trade_off.thinned(rows) if want_curve else ())
    ]
    if as_json:
        facts = {"step": name, "peak": plan.peak, "plain": plan.plain, "smallest": plan.smallest}
        facts |= {"more_time": plan.more_time, "repeated": plan.repeated, "unseen": plan.unseen, "curve": rows}
        click.echo(json.dumps(facts, indent=1))
    else:
        click.echo(str(plan))
        click.echo("  alive at the peak:")
        for maker, nbytes in plan.at_peak:
            click.echo(f"    {amount(nbytes):>12}  {maker}")
        for line in curve:
            click.echo(line)
    return laid_out(choices, plan), ["\n".join(curve)] if curve else []


def forecast(name: str, card: str, conf: str | None) -> Forecast:
    """Return the forecast for a card of the step that the function ``name`` makes."""
    with _needs_torch():
        from weftplan.torch import fits
    function, args, optimizer = make_step(name)
    return fits(function, *args, card=card, optimizer=optimizer, conf=conf)


@contextmanager
def _needs_torch() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error}: a step of PyTorch needs it, pip install 'weftplan[torch]'") from error


def laid_out(choices: Choices, plan: Plan) -> MemoryPlan:
    """Return the chosen plan laid out in one arena, for the reports of other plans: pages, files, pictures."""
    from weftplan.torch.choice import OPTIONS

    point = next(p for p in choices.points if p.peak + plan.resident.total == plan.peak)
    program, _ = choices.planned(point)
    memory = plan_graph(program, OPTIONS).memory
    resident = plan.resident
    outside = {"arguments": resident.inputs, "optimizer_states": resident.optimizer, "gradients": resident.gradients}
    notes = (
        f"the command's peak of {plan.peak:,} bytes is the lower bound and the resident bytes, {resident.total:,}",
        "offsets are those of one arena; PyTorch's allocator needs the lower bound, and its own rounding",
    )
    return replace(memory, external_bytes=outside, notes=(*memory.notes, *notes), more_time=plan.more_time)


def make_step(name: str) -> tuple[Any, tuple[Any, ...], Any]:
    """Return the function, its arguments and the optimizer or None, created by the named function."""
    if not is_python_name(name):
        raise click.BadParameter(
            f"expected package.module:function or FILE.py:function, got {name!r}", param_hint="MODEL"
        )
    value = call(load_object(name), name)
    if not isinstance(value, tuple) or len(value) not in (2, 3) or not callable(value[0]):
        raise click.BadParameter(
            f"{name} must return (loss, arguments) or (loss, arguments, optimizer), got {type(value).__name__}",
            param_hint="MODEL",
        )
    args = value[1] if isinstance(value[1], tuple) else (value[1],)
    return value[0], args, value[2] if len(value) == 3 else None
