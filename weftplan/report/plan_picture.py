"""A picture of a memory plan: every buffer as a bar over time, the peak, the lower bound and the bytes alive."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weftplan.errors import MXNetError
from weftplan.planner.plan import MemoryPlan


def save_plan_picture(plan: MemoryPlan, path: Path, *, title: str = "memory plan", device: int = 0) -> Path:
    """Draw ``plan`` into ``path`` (the ending says the format: svg, png, pdf); returns ``path``.

    Time runs to the right, one column per step of the schedule; address runs upwards. A bar is one planned buffer from
    its first write to its last read. Blocks that are not placed in one slab are stacked.

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
    bars = plan.bars(device)
    unit, name = _unit(max(plan.peak, 1))
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    patches = [
        Rectangle((bar.first, bar.address / unit), bar.last - bar.first, bar.nbytes / unit) for bar in bars
    ]
    collection = PatchCollection(patches, edgecolor="black", linewidth=0.2)
    collection.set_array(np.array([hash_color(bar.label) for bar in bars]))
    collection.set_cmap("turbo")
    axes.add_collection(collection)
    alive = plan.timeline(device)
    axes.step(np.arange(len(alive)), np.asarray(alive) / unit, where="post", color="black", lw=1.2, label="bytes alive")
    axes.axhline(plan.peak / unit, color="crimson", lw=1.2, label=f"planned peak {plan.peak / unit:.2f} {name}")
    axes.axhline(
        plan.lower_bound / unit, color="seagreen", ls="--", lw=1.2, label=f"lower bound {plan.lower_bound / unit:.2f} {name}"
    )
    axes.set_xlim(0, max(len(alive), 1))
    axes.set_ylim(0, plan.peak / unit * 1.12 + 1e-9)
    axes.set_xlabel("step of the schedule (forward, then backward)")
    axes.set_ylabel(f"address ({name})")
    axes.set_title(f"{title}: {plan.peak / unit:.2f} {name} planned, {plan.unshared_bytes / unit:.2f} {name} without sharing")
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
