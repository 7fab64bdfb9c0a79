"""Output of ``weftplan plan``: a summary line, figures, the buffers at the peak, comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weftplan.cli.columns import Column, paragraph, table
from weftplan.device.amounts import amount, counted, unit_of
from weftplan.planner import MemoryPlan
from weftplan.planner.memory_plan import PassReport
from weftplan.report.plan_figures import facts, milliseconds, parts
from weftplan.report.plan_text import reuse

ROWS = 12
"""Number of listed buffers at the peak."""


def as_json(plan: MemoryPlan, *, kernels: bool) -> dict[str, object]:
    """Return a plan's figures for programs, with or without each node's implementation. Bytes are integers."""
    return {
        "peak": plan.peak,
        "lower_bound": plan.lower_bound,
        "unshared": plan.unshared_bytes,
        "total": plan.total,
        "external": dict(plan.external_bytes),
        "inputs": plan.input_bytes,
        "per_device": {str(context): nbytes for context, nbytes in plan.peak_by_device.items()},
        "strategy": plan.strategy,
        "workspaces": plan.options.workspaces,
        "reuse_edges": plan.num_reuse_edges,
        "added_waits": plan.num_added_waits,
        "more_time": plan.more_time,
        "steps": len(plan.labels.steps),
        "alive_at_peak": [
            {
                "name": item.name,
                "nbytes": item.nbytes,
                "shape": list(item.shape),
                "dtype": None if item.use == "scratch" else item.dtype,
                "op": item.op,
                "first": item.first,
                "last": item.last,
                "last_reader": item.last_reader,
            }
            for item in plan.alive_at_peak(ROWS)
        ],
        "notes": list(plan.notes),
        "passes": [step._asdict() for step in plan.passes],
        **({"kernels": dict(plan.kernels)} if kernels else {}),
        "left_out": plan.left_out,
    }


def answer(plan: MemoryPlan, what: str, *, train: bool) -> str:
    """Return one line: the total, and its parts.

    Args:
        what: the network, its batch and its dtype.
        train: whether the backward part is planned; an optimizer that is not counted is then named.
    """
    scale = unit_of(plan.total)[0]

    def shown(nbytes: int) -> str:
        return f"{nbytes / scale:.2f}" if nbytes >= 0.005 * scale else "below 0.01"

    composition = ", ".join(f"{name} {shown(nbytes)}" for name, nbytes in parts(plan).items())
    missing = (
        "; optimizer not counted: --optimizer adam" if train and "optimizer_states" not in plan.external_bytes else ""
    )
    return f"{what}: {amount(plan.total)} in all ({composition}{missing})"


def verdict(plan: MemoryPlan, limit: int) -> str:
    """Return one line: the plan fits, how much is left if one device has the budget, and the price."""
    spare = f": {amount(limit - plan.counted)} to spare" if len(plan.peak_by_device) == 1 else ""
    price = f", at {100 * plan.more_time:.1f} % more modelled time" if plan.more_time else ""
    return f"fits the budget of {amount(limit)} ({limit:,} bytes){spare}{price}"


def figures(plan: MemoryPlan, width: int | None) -> list[str]:
    """Return the figures, the properties of the plan, and its notes."""
    rows = facts(plan)
    lines = table(
        [
            Column("", [name for name, _ in rows]),
            Column("", [amount(nbytes) for _, nbytes in rows], right=True),
            Column("bytes", [f"{nbytes:,}" for _, nbytes in rows], right=True, leave=1),
        ],
        width,
    )
    ratio = plan.peak / plan.lower_bound if plan.lower_bound else 1.0
    text = (
        f"strategy {plan.strategy}: {ratio:.4f} times the lower bound, {len(plan.labels.steps)} steps, "
        f"{counted(plan.num_slabs, 'allocation')}, {reuse(plan)}"
    )
    lines += paragraph(text, width)
    for note in plan.notes:
        lines += paragraph(f"note: {note}", width, indent="      ")
    return lines


def peak(plan: MemoryPlan, width: int | None) -> list[str]:
    """Return a table of the largest buffers that are alive at the peak."""
    alive = plan.alive_at_peak()
    shown = alive[:ROWS]
    columns = [
        Column("bytes", [f"{item.nbytes:,}" for item in shown], right=True),
        Column("buffer", [item.name for item in shown], name_like=True),
        Column("shape", ["scratch" if i.use == "scratch" else f"{i.dtype} {i.shape}" for i in shown], leave=2),
        Column("operator", [item.op for item in shown], leave=1),
        Column("steps", [f"{item.first}-{item.last}" for item in shown], leave=3),
        Column("last read by", [item.last_reader for item in shown], leave=4),
    ]
    return [f"alive at the peak: {len(alive)} buffers, the largest first", *table(columns, width)]


def kernels(plan: MemoryPlan, width: int | None) -> list[str]:
    """Return nodes with several implementations, grouped, and the passes that created them."""
    labels = plan.labels
    by_kernel: dict[tuple[str, str], list[int]] = {}
    for nid in labels.steps:
        text = plan.kernels.get(labels.node_names[nid])
        if text is not None:
            by_kernel.setdefault((labels.node_op(nid), text), []).append(int(plan.workspace_nbytes[nid]))
    rows = sorted(by_kernel.items())
    columns = [
        Column("operator", [op for (op, _), _ in rows]),
        Column("nodes", [str(len(scratch)) for _, scratch in rows], right=True),
        Column("largest scratch", [amount(max(scratch)) for _, scratch in rows], right=True, leave=1),
        Column("kernel", [text for (_, text), _ in rows], name_like=True),
    ]
    lines = ["kernels (nodes for which there are several)", *table(columns, width)]
    columns = [
        Column("pass", [step.name for step in plan.passes]),
        Column("what it changed", [step.changed or "nothing" for step in plan.passes]),
        Column("time", [milliseconds(plan.pass_seconds.get(step.name)) for step in plan.passes], right=True, leave=2),
        Column("what switches it off", [switched_off(step) for step in plan.passes], leave=1, name_like=True),
    ]
    lines += ["", "passes that ran, the first one first", *table(columns, width)]
    untimed = plan.pass_seconds.keys() - {step.name for step in plan.passes}
    if untimed:
        listed = ", ".join(
            f"{name} {milliseconds(plan.pass_seconds[name])}" for name in plan.pass_seconds if name in untimed
        )
        lines += paragraph(f"steps of every plan: {listed}", width)
    return lines


def switched_off(step: PassReport) -> str:
    """Return the setting that disables a pass."""
    return f"{step.switch}=0" if step.switch.isupper() else f"no call of {step.switch}"


def compared(rows: Sequence[Mapping[str, Any]], width: int | None) -> list[str]:
    """Return a table of plans; each row comes from :func:`weftplan.cli.plan.compare.compare`."""
    planned = [row for row in rows if "total" in row]
    scale, unit = unit_of(max((row["total"] for row in planned), default=0))
    base = next((row["total"] for row in planned), 0)

    def cell(row: Mapping[str, Any], text: str) -> str:
        return text if "total" in row else ""

    columns = [
        Column("plan", [row["plan"] for row in rows]),
        Column(f"total, {unit}", [cell(r, f"{r.get('total', 0) / scale:.3f}") for r in rows], right=True),
        Column("/ first", [cell(r, f"{r.get('total', 0) / max(base, 1):.3f}") for r in rows], right=True, leave=1),
        Column(f"peak, {unit}", [cell(r, f"{r.get('peak', 0) / scale:.3f}") for r in rows], right=True, leave=3),
        Column("time", [cell(r, f"+{100 * r.get('more_time', 0):.1f} %") for r in rows], right=True),
        Column("/ lower bound", [cell(r, f"{r.get('over_bound', 1):.4f}") for r in rows], right=True, leave=4),
        Column("order edges", [cell(r, f"{r.get('reuse_edges', 0):,}") for r in rows], right=True, leave=5),
        Column("planned in", [cell(r, f"{r.get('planned_in_s', 0):.1f} s") for r in rows], right=True, leave=2),
    ]
    lines = ["plans side by side; time is modelled, as what a step takes longer", *table(columns, width)]
    for row in rows:
        if "error" in row:
            lines += paragraph(f"{row['plan']}: {row['error']}", width, indent="  ")
    return lines


def drawn(points: Sequence[Mapping[str, Any]], width: int | None) -> list[str]:
    """Return a bar chart of memory against time, the fastest plan first."""
    scale, unit = unit_of(max((point["total"] for point in points), default=0))
    totals = [f"{point['total'] / scale:.3f}" for point in points]
    times = [f"+{100 * point['more_time']:.1f} %" for point in points]
    columns = [Column(f"total, {unit}", totals, right=True), Column("time", times, right=True)]
    used = sum(column.width for column in columns) + 4
    bar_width = max(10, min(60, (100 if width is None else width) - used))
    greatest = max((point["total"] for point in points), default=1)
    bars = ["█" * max(1, round(bar_width * point["total"] / greatest)) for point in points]
    title = "memory against time: each row is the fastest plan found with that much memory"
    return [*paragraph(title, width), *table([*columns, Column("", bars)], width)]
