"""A picture of a memory plan: every buffer as a bar over time, the peak, the lower bound and the bytes alive."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weftplan.errors import MXNetError
from weftplan.planner.plan import PlannedGraph
from weftplan.report.plan_rows import buffer_rows, live_bytes


def save_plan_picture(planned: PlannedGraph, path: Path, *, title: str = "memory plan") -> Path:
    """Draw the plan of ``planned`` into ``path`` (the ending says the format: svg, png, pdf); returns ``path``.

    Time runs to the right, one column per step of the schedule; address runs upwards (with several devices, that of the
    first). A bar is one planned buffer from its first write to its last read.

    Raises:
        MXNetError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise MXNetError("pictures need matplotlib: pip install 'weftplan[plot]'") from error
    plan = planned.memory
    rows = buffer_rows(planned)
    device = rows[0].device if rows else ""
    bars = [row for row in rows if row.device == device]
    unit, name = _unit(max(plan.peak, 1))
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    collection = PatchCollection(
        [Rectangle((b.first, b.address / unit), b.last - b.first, b.nbytes / unit) for b in bars],
        edgecolor="black",
        linewidth=0.2,
        cmap="turbo",
    )
    collection.set_array(np.array([hash_color(bar.operator) for bar in bars]))
    axes.add_collection(collection)
    steps = len(planned.order)
    alive = np.asarray([*live_bytes(rows, steps, device), 0]) / unit
    axes.step(np.arange(steps + 1), alive, where="post", color="black", lw=1.2, label="bytes alive")
    peak, bound, unshared = plan.peak / unit, plan.lower_bound / unit, plan.unshared_bytes / unit
    axes.axhline(peak, color="crimson", lw=1.2, label=f"planned peak {peak:.2f} {name}")
    axes.axhline(bound, color="seagreen", ls="--", lw=1.2, label=f"lower bound {bound:.2f} {name}")
    axes.set_xlim(0, max(steps, 1))
    axes.set_ylim(0, peak * 1.15 + 1e-9)
    axes.axvline(planned.num_forward_nodes, color="grey", lw=0.8, ls=":")
    axes.set_xlabel("step of the schedule (forward, then backward)")
    axes.set_ylabel(f"address ({name})")
    axes.set_title(f"{title}: {peak:.2f} {name} planned, {unshared:.2f} {name} without sharing")
    axes.legend(loc="upper right")
    figure.savefig(path)
    return path


def hash_color(label: str) -> float:
    """A number in [0, 1) that depends on the label alone, so that pictures are the same on every run."""
    value = 0
    for char in label:
        value = (value * 131 + ord(char)) % 9973
    return value / 9973


def _unit(nbytes: int) -> tuple[float, str]:
    for scale, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= scale:
            return float(scale), name
    return 1.0, "bytes"
