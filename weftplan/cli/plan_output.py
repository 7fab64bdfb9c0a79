"""What ``weftplan plan`` prints: figures, the buffers that fill the peak, a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weftplan.errors import MXNetError
from weftplan.planner import MemoryPlan
from weftplan.planner.explain import reuse
from weftplan.report.plan_html import facts
from weftplan.training.callbacks import format_bytes

ROWS = 12
"""Buffers at the peak that are listed."""


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """The figures of a plan, for programs. Bytes are integers."""
    return {
        "peak": plan.peak,
        "lower_bound": plan.lower_bound,
        "unshared": plan.unshared_bytes,
        "total": plan.total,
        "external": dict(plan.external_bytes),
        "per_device": {str(context): nbytes for context, nbytes in plan.peak_by_device.items()},
        "strategy": plan.strategy,
        "workspaces": plan.options.workspaces,
        "reuse_edges": plan.num_reuse_edges,
        "added_waits": plan.num_added_waits,
        "steps": len(plan.labels.steps),
        "alive_at_peak": [
            {
                "name": item.name,
                "nbytes": item.nbytes,
                "shape": list(item.shape),
                "dtype": None if item.dtype is None else str(item.dtype),
                "op": item.op,
                "first": item.first,
                "last": item.last,
                "last_reader": item.last_reader,
            }
            for item in plan.alive_at_peak(ROWS)
        ],
        "notes": list(plan.notes),
        "kernels": dict(plan.kernels),
        "left_out": plan.left_out,
    }


def show(plan: MemoryPlan, console: Console, title: str) -> None:
    """Print a plan for people."""
    figures = Table(title=escape(title), title_justify="left", show_header=False, box=None)
    figures.add_column()
    figures.add_column(justify="right")
    figures.add_column(justify="right")
    for name, nbytes in facts(plan):
        figures.add_row(name, format_bytes(nbytes), f"{nbytes:,}")
    console.print(figures)
    ratio = plan.peak / plan.lower_bound if plan.lower_bound else 1.0
    console.print(
        f"strategy {plan.strategy}: {ratio:.4f} times the lower bound, {len(plan.labels.steps)} steps, "
        f"{plan.num_slabs} allocation(s), {reuse(plan)}",
        highlight=False,
    )
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    alive = plan.alive_at_peak()
    table = Table(title=f"alive at the peak: {len(alive)} buffers, the largest first", title_justify="left", box=None)
    for name, justify in (
        ("bytes", "right"),
        ("buffer", "left"),
        ("shape", "left"),
        ("operator", "left"),
        ("steps", "left"),
        ("last read by", "left"),
    ):
        # Names may be cut where a terminal is narrow, numbers never.
        number = name in ("bytes", "steps")
        table.add_column(name, justify=justify, no_wrap=True, min_width=13 if number else None)  # type: ignore[arg-type]
    for item in alive[:ROWS]:
        kind = "scratch" if item.dtype is None else f"{item.dtype} {item.shape}"
        table.add_row(
            f"{item.nbytes:,}", escape(item.name), kind, item.op, f"{item.first}-{item.last}", escape(item.last_reader)
        )
    console.print(table)
    console.print(plan.left_out, highlight=False, markup=False)


def kernel_table(plan: MemoryPlan) -> Table:
    """Nodes that could be computed in several ways, equal ones together: operator, kernel, number, scratch."""
    table = Table(title="kernels (nodes for which there are several)", title_justify="left")
    for column in ("operator", "kernel"):
        table.add_column(column)
    for column in ("nodes", "largest scratch"):
        table.add_column(column, justify="right")
    labels = plan.labels
    rows: dict[tuple[str, str], list[int]] = {}
    for nid in labels.steps:
        text = plan.kernels.get(labels.node_name(nid))
        if text is not None:
            rows.setdefault((labels.node_op(nid), text), []).append(int(plan.workspace_nbytes[nid]))
    for (op, text), scratch in sorted(rows.items()):
        table.add_row(op, escape(text), str(len(scratch)), format_bytes(max(scratch)))
    return table


def compare_table(make: Callable[..., MemoryPlan], train: bool) -> Table:
    """Strategies side by side and, for training, recompute policies; every row is a plan made now."""
    table = Table(title="strategies and policies", title_justify="left", box=None)
    table.add_column("plan", no_wrap=True, min_width=20)
    for name in ("peak", "/ lower bound", "total", "/ first row", "order edges", "planned in"):
        table.add_column(name, justify="right", no_wrap=True)
    first = 0
    for name, named in _variants(train):
        start = time.perf_counter()
        try:
            plan = make(**named)
        except MXNetError as error:  # one that cannot be made must not hide the others
            table.add_row(name, escape(str(error)))
            continue
        seconds = time.perf_counter() - start
        first = first or plan.total
        table.add_row(
            name,
            f"{plan.peak:,}",
            f"{plan.peak / plan.lower_bound:.4f}" if plan.lower_bound else "",
            f"{plan.total:,}",
            f"{plan.total / first:.3f}" if first else "",
            f"{plan.num_reuse_edges:,}",
            f"{seconds:.2f} s",
        )
    return table


def _variants(train: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared, with the options that name it."""
    off = {"recompute": "off"}
    for strategy in ("none", "match_range", "arena", "auto"):
        yield f"strategy {strategy}", {"strategy": strategy, "order": "given", **off}
    yield "auto, best order", {"strategy": "auto", "order": "best", **off}
    if train:
        for policy in ("mxnet", "echo", "sqrt", "cheap"):
            yield f"recompute {policy}", {"strategy": "auto", "recompute": policy}
