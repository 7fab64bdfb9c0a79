"""A memory plan as a self-contained HTML page: bars over time, peak line, hover, a sortable table."""

from __future__ import annotations

import html
from typing import Any

from weftplan.device.amounts import amount
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.report.page import filled
from weftplan.report.plan_text import story

MOST_BARS = 20_000
"""Most buffers on a page; the largest are shown. A browser draws this number without delay."""
LEGEND = {
    "weights": "weights",
    "activations": "activations",
    "gradients": "gradients",
    "scratch": "scratch",
    "recomputed": "computed again",
    "spilled": "waiting on the host",
    "states": "optimizer states",
}
"""The meaning of each colour, in the order of the legend."""
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


def plan_html(plan: MemoryPlan, *, title: str = "memory plan") -> str:
    """Return the page as text. It loads no other files and needs no network.

    If a plan has more than :data:`MOST_BARS` buffers, the page shows the largest and says so.
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
            f"<td>{html.escape(meaning(name))}</td></tr>"
            for name, nbytes in facts(plan)
        ),
        "STRATEGY": html.escape(plan.strategy),
        "LEFT_OUT": html.escape(plan.left_out),
        "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in notes),
    }
    return filled("plan_page.html", data, marks)


def facts(plan: MemoryPlan) -> list[tuple[str, int]]:
    """Return the figures of a plan in bytes, as reports list them.

    >>> from weftplan import symbol as sym
    >>> plan = sym.exp(sym.Variable("x")).plan({"x": (1000,)}, train=False)
    >>> [name for name, nbytes in facts(plan)][:2]
    ['planned peak', 'lower bound']
    """
    rows = [
        ("planned peak", plan.peak),
        ("lower bound", plan.lower_bound),
        ("without sharing", plan.unshared_bytes),
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
    "cublas_workspaces": "workspaces of cuBLAS, one for each worker",
    "host_copies": "Module's copies on the host",
    "kvstore_stored": "weights that the kvstore keeps",
    "kvstore_merged": "sums of gradients in the kvstore",
    "kvstore_staging": "copies of gradients at the place of the sum",
    "kvstore_compression": "residuals and packed gradients of the kvstore",
    "kvstore_exchange": "memory for exchanges between processes",
    "kvstore_wire": "copies on the host of what travels between processes",
    "kvstore_residual": "residuals of what travels between processes",
    "kvstore_server": "values that this process serves",
    "other_devices": "executors of the other devices",
}


_MEANINGS = {
    "planned peak": "Memory that the planner places: results, gradients in flight, outputs and scratch. It is allocated.",
    "lower bound": "The most bytes in use at one step. No placement of these buffers in this order can need less.",
    "without sharing": "What the same buffers take when none uses the memory of another.",
    "arguments: weights and inputs": "Arrays that you bring, or that simple_bind and Module make.",
    "gradients of arguments": "One array for each argument whose gradient is wanted.",
    "auxiliary states": "Arrays that operators update, such as the moving averages of BatchNorm.",
    "gradients of outputs": "What you give to backward where no loss is at the end.",
    "states of the optimizer": "What the optimizer keeps from step to step, such as momentum.",
    "Module's copies on the host": "Module keeps the parameters in host memory too, to save and share them.",
    "weights that the kvstore keeps": "One copy of each weight, from which every device pulls.",
    "sums of gradients in the kvstore": "Merge buffers, where the gradients of all devices are added.",
    "copies of gradients at the place of the sum": "Gradients of other devices, brought to where they are added.",
    "residuals and packed gradients of the kvstore": "What gradient compression has not sent yet, and what it sends.",
    "memory for exchanges between processes": "What others read of this process, or where it receives what they send.",
    "copies on the host of what travels between processes": "Sums made on devices pass through page-locked host memory.",
    "residuals of what travels between processes": "What gradient compression has not sent to other processes yet.",
    "values that this process serves": "Its share of the values of dist_async, with a gradient for each.",
    "executors of the other devices": "Planned memory and arrays of the devices beside the one that is drawn.",
    "total": "The planned peak and everything above that is not part of it. A budget limits this figure.",
}


def meaning(figure: str) -> str:
    """Return the definition of each figure of :func:`facts`."""
    if figure.startswith("planned peak on "):
        return "The part of the planned peak that is on this device."
    return _MEANINGS[figure]


_BANDS = (
    ("weights", "weights and inputs", "arguments", "aux"),
    ("gradients", "gradients", "gradients", "head_grads"),
    ("scratch", "workspaces of cuBLAS", "cublas_workspaces"),
)


def _bands(plan: MemoryPlan) -> list[dict[str, Any]]:
    """Return memory outside the planned buffers that is in use at every step; for a plan of one device."""
    if len(plan.contexts) > 1:
        return []
    external = plan.external_bytes
    bands = [
        {"use": use, "name": name, "nbytes": sum(external.get(purpose, 0) for purpose in purposes)}
        for use, name, *purposes in _BANDS
    ]
    bands.append({"use": "states", "name": "optimizer states", "nbytes": external.get("optimizer_states", 0)})
    return [band for band in bands if band["nbytes"]]


def _data(plan: MemoryPlan) -> tuple[dict[str, Any], int]:
    """Return (the data of the page's script, the number of omitted buffers)."""
    bars = plan.bars()
    # Largest first, which is the order of painting: small buffers stay visible.
    shown = sorted(bars, key=lambda bar: -bar.nbytes)[:MOST_BARS]
    rows = [[bar.as_dict()[column] for column in COLUMNS] for bar in shown]
    devices = [
        {"name": str(context), "peak": peak, "alive": plan.timeline(index).tolist(), "bands": _bands(plan)}
        for index, (context, peak) in enumerate(plan.peak_by_device.items())
    ]
    used = {bar.use for bar in shown} | {band["use"] for band in _bands(plan)}
    data = {
        "uses": [[use, label] for use, label in LEGEND.items() if use in used],
        "steps": len(plan.labels.steps),
        "forward": plan.num_forward,
        "devices": devices,
        "columns": COLUMNS,
        "rows": rows,
    }
    return data, len(bars) - len(shown)
