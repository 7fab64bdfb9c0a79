"""A picture of a memory plan: every buffer as a bar over time, with peak, lower bound and live bytes."""

from __future__ import annotations

import io
from functools import cache
from os import PathLike
from pathlib import Path

import numpy as np

from weftplan.device.amounts import unit_of
from weftplan.errors import MXNetError
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.report.plan_html import USES
from weftplan.support.atomic_files import replacing


@cache
def figure_class() -> type:
    """Return a subclass of matplotlib's figure with a picture for notebooks, which need no magic command then."""
    from matplotlib.figure import Figure

    class PlanFigure(Figure):
        """A figure that notebooks show as a picture."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return PlanFigure


def plot_plan(plan: MemoryPlan, path: str | PathLike[str] | None = None, *, title: str = "memory plan") -> object:
    """Draw ``plan`` and, if ``path`` is given, save it as svg, png or pdf by its suffix. Output is deterministic.

    Time runs to the right, one column per step of the schedule; addresses run upwards (for several devices, of the
    first device). A bar is one planned buffer from its first write to its last read.

    Returns:
        A ``matplotlib.figure.Figure``, which notebooks show.

    Raises:
        MXNetError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise MXNetError("pictures need matplotlib: pip install 'weftplan[plot]'") from error
    bars = plan.bars(0)
    unit, name = unit_of(max(plan.peak, 1))
    figure = figure_class()(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    collection = PatchCollection(
        [Rectangle((b.first, b.address / unit), b.last - b.first, b.nbytes / unit) for b in bars],
        edgecolor="white",
        linewidth=0.3,
        facecolor=[USES[bar.use][1] for bar in bars],
    )
    axes.add_collection(collection)
    steps = len(plan.labels.steps)
    alive = np.concatenate([plan.timeline(0), [0]]) / unit
    peak = plan.peak_by_device[plan.contexts[0]] / unit
    several = len(plan.contexts) > 1
    axes.step(np.arange(steps + 1), alive, where="post", color="#1c2430", lw=1.2, label="bytes in use")
    label = f"planned peak {peak:.2f} {name}" + (f" on {plan.contexts[0]}" if several else "")
    axes.axhline(peak, color="#c1121f", lw=1.2, ls="--", label=label)
    if not several:
        bound = plan.lower_bound / unit
        axes.axhline(bound, color="#5a6675", ls=":", lw=1.2, label=f"lower bound {bound:.2f} {name}")
    axes.set_xlim(0, max(steps, 1))
    axes.set_ylim(0, peak * 1.15 + 1e-9)
    if plan.num_forward is not None and plan.num_forward < steps:
        axes.axvline(plan.num_forward, color="#9a6fb0", lw=1.2, label="backward begins")
    axes.set_xlabel("step (forward, then backward)")
    axes.set_ylabel(f"memory, {name}")
    axes.set_title(
        f"{title}: {plan.peak / unit:.2f} {name} planned, {plan.unshared_bytes / unit:.2f} {name} without sharing",
        loc="left",
    )
    used = {bar.use for bar in bars}
    patches = [Patch(facecolor=colour, label=label) for use, (label, colour, _) in USES.items() if use in used]
    handles = [*patches, *axes.lines]  # each line has its own colour and dashes, and its name in the legend
    figure.legend(handles=handles, loc="outside lower center", ncols=(len(handles) + 1) // 2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.grid(True, color="#e6eaf0", zorder=0)
    axes.set_axisbelow(True)
    if path is not None:
        # No date and no random element names: the same plan gives the same file.
        undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix.lower())
        kind = Path(path).suffix.removeprefix(".") or None
        with rc_context({"svg.hashsalt": "weftplan"}), replacing(path) as file:
            figure.savefig(file, format=kind, metadata=undated)
    return figure
