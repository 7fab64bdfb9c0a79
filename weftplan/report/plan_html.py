"""A memory plan as one self-contained HTML page: bars over time, peak line, hover, a table to sort and filter."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import Any

from weftplan.planner.memory_plan import MemoryPlan

MOST_BARS = 20_000
"""A page shows so many buffers, the largest ones: a browser draws them without delay."""
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
)


def plan_html(plan: MemoryPlan, *, title: str = "memory plan") -> str:
    """The page as text. It loads nothing from anywhere and needs no network.

    Plans of more than :data:`MOST_BARS` buffers show the largest ones and say so.
    """
    data, omitted = _data(plan)
    notes = list(plan.notes)
    if omitted:
        notes.append(f"the {omitted:,} smallest buffers are left out of the picture and the table, not of the figures")
    parts = {
        "@TITLE@": html.escape(title),
        "@FACTS@": "".join(
            f"<tr><td>{html.escape(name)}</td><td class=n>{nbytes:,}</td></tr>" for name, nbytes in facts(plan)
        ),
        "@STRATEGY@": html.escape(plan.strategy),
        "@LEFT_OUT@": html.escape(plan.left_out),
        "@NOTES@": "".join(f"<li>{html.escape(note)}</li>" for note in notes),
        # "</" would end the script element that holds the data.
        "@DATA@": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
    }
    page = resources.files("weftplan.report").joinpath("plan_page.html").read_text(encoding="utf-8")
    # In one pass: a name that looks like a placeholder stays as it is.
    return re.sub("|".join(parts), lambda found: parts[found.group()], page)


def facts(plan: MemoryPlan) -> list[tuple[str, int]]:
    """The figures of a plan in bytes, as reports list them.

    >>> from weftplan import symbol as sym
    >>> plan = sym.exp(sym.Variable("x")).plan({"x": (1000,)}, train=False)
    >>> [name for name, nbytes in facts(plan)][:2]
    ['planned peak', 'lower bound of these buffers in this order']
    """
    rows = [
        ("planned peak", plan.peak),
        ("lower bound of these buffers in this order", plan.lower_bound),
        ("without any sharing", plan.unshared_bytes),
    ]
    if len(plan.contexts) > 1:
        rows += [(f"planned peak on {context}", nbytes) for context, nbytes in plan.peak_by_device.items()]
    rows += [
        (_PURPOSES.get(purpose, purpose.replace("_", " ")), nbytes)
        for purpose, nbytes in plan.external_bytes.items()
        if nbytes
    ]
    return [*rows, ("total", plan.total)]


_PURPOSES = {
    "arguments": "arguments: weights and inputs",
    "gradients": "gradients of arguments",
    "aux": "auxiliary states",
    "head_grads": "gradients of outputs",
    "optimizer_states": "states of the optimizer",
    "host_copies": "Module's copies on the host",
    "kvstore": "buffers of the kvstore",
    "other_devices": "executors of the other devices",
}


def _data(plan: MemoryPlan) -> tuple[dict[str, Any], int]:
    """(what the page's script reads, how many buffers it does not get)."""
    bars = plan.bars()
    # The largest first, which is the order of painting: small ones stay visible.
    shown = sorted(bars, key=lambda bar: -bar.nbytes)[:MOST_BARS]
    rows = [[bar.as_dict()[column] for column in COLUMNS] for bar in shown]
    devices = [
        {"name": str(context), "peak": peak, "alive": plan.timeline(index).tolist()}
        for index, (context, peak) in enumerate(plan.peak_by_device.items())
    ]
    data = {
        "steps": len(plan.labels.steps),
        "forward": plan.num_forward,
        "devices": devices,
        "columns": COLUMNS,
        "rows": rows,
    }
    return data, len(bars) - len(shown)
