"""A memory plan as a self-contained HTML page: bars over time, peak line, hover, a sortable table."""

from __future__ import annotations

import html
from collections.abc import Iterable

from weftplan.device.amounts import amount
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.report import plan_figures
from weftplan.report.page import filled
from weftplan.report.plan_text import story

MAX_BARS = 20_000
"""Most buffers on a page; the largest are shown. A browser draws this number without delay."""
USES = {
    "weights": ("weights", "#009e73", "#2bb38a"),
    "activations": ("activations", "#0072b2", "#3d9bd8"),
    "gradients": ("gradients", "#e69f00", "#e6a52e"),
    "scratch": ("scratch", "#9aa3ad", "#77828f"),
    "recomputed": ("computed again", "#56b4e9", "#8fcdf2"),
    "spilled": ("waiting on the host", "#cc79a7", "#d78fb6"),
    "states": ("optimizer states", "#b8a13a", "#cdb85a"),
}
"""The uses of memory in the order of the legend: words, colour on a light page, colour on a dark page.

Pages and pictures take them from here. The colours are safe for colour-blind readers.
"""
COLUMNS = (
    "name",
    "kind",
    "device",
    "first",
    "last",
    "address",
    "nbytes",
    "shape",
    "dtype",
    "op",
    "maker",
    "last_reader",
    "storage",
    "use",
)


def plan_html(plan: MemoryPlan, *, title: str = "memory plan", tables: Iterable[str] = ()) -> str:
    """Return the page as text, with ``tables`` of plain text below the figures. It loads nothing over a network.

    If a plan has more than :data:`MAX_BARS` buffers, the page shows the largest and says so.
    """
    data, omitted = _data(plan)
    notes = list(plan.notes)
    if omitted:
        notes.append(f"the {omitted:,} smallest buffers are left out of the picture and the table, not of the figures")
    marks = {
        "TITLE": html.escape(title),
        "STORY": html.escape(story(plan)).replace(" %", "&nbsp;%"),
        "FACTS": "".join(
            f"<tr><td>{html.escape(name)}</td><td class=n>{amount(nbytes)}</td><td class='n exact'>{nbytes:,}</td>"
            f"<td>{html.escape(plan_figures.meaning(name))}</td></tr>"
            for name, nbytes in plan_figures.facts(plan)
        ),
        "LIGHT": " ".join(f"--{use}: {light};" for use, (_, light, _) in USES.items()),
        "DARK": " ".join(f"--{use}: {dark};" for use, (_, _, dark) in USES.items()),
        "STRATEGY": html.escape(plan.strategy),
        "LEFT_OUT": html.escape(plan.left_out),
        "TABLES": "".join(f"<pre>{html.escape(table)}</pre>" for table in tables),
        "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in notes),
        "PASSES": "".join(
            f"<li>{html.escape(graph_pass.text)}{f', {spent}' if (spent := plan_figures.milliseconds(plan.pass_seconds.get(graph_pass.name))) else ''}</li>"
            for graph_pass in plan.passes
        ),
    }
    return filled("plan_page.html", data, marks)


_BANDS = {
    "weights": "weights",
    "inputs": "inputs",
    "weights and inputs": "weights",
    "auxiliary states": "weights",
    "gradients": "gradients",
    "optimizer": "states",
    "workspaces of cuBLAS": "scratch",
}
"""Part of :func:`weftplan.report.plan_figures.parts` -> its colour."""


def _bands(plan: MemoryPlan) -> list[dict[str, str | int]]:
    """Return memory outside the planned buffers that is in use at every step; for a plan of one device."""
    if len(plan.contexts) > 1:
        return []
    by_part = plan_figures.parts(plan)
    return [{"use": use, "name": name, "nbytes": by_part[name]} for name, use in _BANDS.items() if name in by_part]


def _data(plan: MemoryPlan) -> tuple[dict[str, object], int]:
    """Return (the data of the page's script, the number of omitted buffers)."""
    bars = plan.bars()
    # Largest first, which is the order of painting: small buffers stay visible.
    shown = sorted(bars, key=lambda bar: -bar.nbytes)[:MAX_BARS]
    rows = [[bar.as_dict()[column] for column in COLUMNS] for bar in shown]
    devices = [
        {"name": str(context), "peak": peak, "alive": plan.timeline(index).tolist(), "bands": _bands(plan)}
        for index, (context, peak) in enumerate(plan.peak_by_device.items())
    ]
    used = {bar.use for bar in shown} | {band["use"] for band in _bands(plan)}
    data = {
        "uses": [[use, label] for use, (label, _, _) in USES.items() if use in used],
        "steps": len(plan.labels.steps),
        "forward": plan.num_forward,
        "devices": devices,
        "unshared": None if len(bars) > len(shown) else plan.unshared_bytes,
        "columns": COLUMNS,
        "rows": rows,
    }
    return data, len(bars) - len(shown)
