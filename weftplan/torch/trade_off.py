"""The trade-off between budget and time of a training step, as text, picture and page."""

from __future__ import annotations

import html
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from weftplan.device.amounts import amount, counted
from weftplan.support.atomic_files import write_text
from weftplan.torch.choice import Choices, Plan
from weftplan.torch.fit import Budgeted, Partition, Planned, plain_errors
from weftplan.torch.private import tensors_in
from weftplan.torch.trade_off_picture import trade_off_picture

ROUNDS, MEASURED, ROWS = 5, 6, 24
"""Rounds of a measurement, number of measured choices of a curve, and unmeasured choices in a table."""
Row = TypeVar("Row")


@dataclass(frozen=True)
class Point:
    """One choice of a curve."""

    budget: int
    """The smallest budget that allows this choice: its peak in bytes on the device."""
    time: float
    """Modelled time of a step, relative to a step without recomputation."""
    repeated: int
    """Number of nodes that run twice."""
    measured: float | None = None
    """Measured time of a step, relative to a step without a budget; None: not measured."""


@dataclass(frozen=True)
class Curve:
    """The choices of one step, from no recomputation to the smallest budget; budgets fall strictly, times rise."""

    name: str
    points: list[Point]
    plan: Plan

    def __str__(self) -> str:
        """Return a table of :data:`ROWS` evenly spaced choices and all measured choices, with bars of their times."""
        most = max(point.time for point in self.points) - 1.0
        lines = [f"{self.name}", f"{'budget':>12}  {'bytes':>16}  {'time':>7}  {'twice':>6}"]
        for point in thinned(self.points):
            bar = "#" * round(30 * (point.time - 1.0) / most) if most else ""
            real = "" if point.measured is None else f"  measured {point.measured:.3f}"
            lines.append(
                f"{amount(point.budget):>12}  {point.budget:>16,}  {point.time:>7.3f}  {point.repeated:>6}{real}  {bar}"
            )
        return "\n".join(lines)

    def picture(self, title: str | None = None) -> str:
        """Return an SVG drawing of the time of a step (upwards) over the budget (to the right).

        ``title`` replaces the name of the step.
        """
        return trade_off_picture(
            self.name if title is None else title, [(point.budget, point.time, point.measured) for point in self.points]
        )

    def page(self) -> str:
        """Return a self-contained HTML page: the picture, and a table of the choices that the text shows."""
        from weftplan.report.page import filled  # here, because the room of reports loads operators

        shown, end = thinned(self.points), self.points[-1]
        columns = ["budget", "bytes", "modelled time", "nodes run twice"]
        rows = [[amount(p.budget), f"{p.budget:,}", f"{p.time:.3f}", f"{p.repeated:,}"] for p in shown]
        if any(point.measured is not None for point in shown):
            columns.append("measured time")
            for row, point in zip(rows, shown, strict=True):
                row.append("" if point.measured is None else f"{point.measured:.3f}")
        story = (
            f"Without recomputation a step needs {amount(self.points[0].budget)}. It fits {amount(end.budget)} if it "
            f"takes {100 * (end.time - 1):.1f} % more modelled time."
        )
        marks = {
            "TITLE": html.escape(self.name),
            "STORY": html.escape(story),
            "PICTURE": self.picture(""),
            "SHOWN": f"{len(shown)} of {counted(len(self.points), 'choice')} are shown.",
            "COLUMNS": "".join(f"<th class=n>{column}</th>" for column in columns),
            "ROWS": "".join(f"<tr>{''.join(f'<td class=n>{cell}</td>' for cell in row)}</tr>" for row in rows),
            "PLAN": html.escape(str(self.plan)),
        }

        return filled("curve_page.html", {}, marks)

    def save(self, path: str | Path) -> None:
        """Write the picture (``.svg``), the page (``.html``) or the table (any other name)."""
        target = Path(path)
        text = {".svg": self.picture, ".html": self.page}.get(target.suffix, self.__str__)()
        write_text(target, text)


def thinned(points: Sequence[Row]) -> list[Row]:
    """Return :data:`ROWS` evenly spaced points of a curve, its ends included, and all measured points."""
    if len(points) <= ROWS:
        return list(points)
    some = {round(k * (len(points) - 1) / (ROWS - 1)) for k in range(ROWS)}
    return [p for k, p in enumerate(points) if k in some or getattr(p, "measured", None) is not None]


def planned(
    function: Callable[..., Any], args: Any, *, budget: int | str | None = None, **options: Any
) -> tuple[Choices, Plan]:
    """Trace a step with ``args`` without running it; return its choices and the plan within ``budget``.

    Raises:
        PlanError: the step cannot be traced as one graph.
        BudgetError: no choice fits the budget.
    """
    part = Partition(budget, **options)
    part.only_plan = True
    torch.compiler.reset()
    try:
        with plain_errors():
            Budgeted(function, part, fullgraph=True)(*args)
    except Planned:
        pass
    finally:
        torch.compiler.reset()
    return part.choices[-1], part.plans[-1]


def curve(function: Callable[..., Any], *args: Any, measure: bool = False, **options: Any) -> Curve:
    """Return the time of a training step for each budget, as a curve of choices.

    Args:
        function: a module or a function of tensors, as for :func:`weftplan.torch.budget`.
        args: its arguments; without ``measure`` the function is traced, not run.
        measure: whether to run the step to measure :data:`MEASURED` of the choices.
        options: as for :func:`weftplan.torch.budget`.
    """
    choices, plan = planned(function, args, **options)
    step, resident = choices.step_seconds, plan.resident.total
    points = [
        Point(choice.peak + resident, 1.0 + (choice.seconds / step if step else 0.0), len(choice.price.twins))
        for choice in choices.points
    ]
    if measure:
        some = {round(k * (len(points) - 1) / (MEASURED - 1)) for k in range(MEASURED)}
        points = [
            replace(point, measured=_ratio(function, args, point.budget, options)) if k in some else point
            for k, point in enumerate(points)
        ]
    return Curve(plan.name, points, plan)


def _ratio(function: Callable[..., Any], args: Any, budget: int, options: dict[str, Any]) -> float:
    """Return the median ratio of the step's time within ``budget`` to its time without a budget, timed alternately."""
    torch.compiler.reset()
    both = [Budgeted(function, Partition(most, **options), fullgraph=True) for most in (budget, None)]
    [_seconds(step, args) for step in both]  # compile
    return statistics.median(_seconds(both[0], args) / _seconds(both[1], args) for _ in range(ROUNDS))


def _seconds(step: Budgeted, args: Any) -> float:
    """Return the seconds of a forward and a backward pass, which leaves ``grad`` attributes unchanged."""
    began = time.perf_counter()
    out = [t for t in tensors_in(step(*args)) if t.requires_grad]
    torch.autograd.grad([t.sum() for t in out], _leaves(out), allow_unused=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _leaves(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaf tensors to which a backward pass from ``results`` would add gradients."""
    stack, seen, leaves = [t.grad_fn for t in results], set(), []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack += [source for source, _ in node.next_functions]
    return leaves
