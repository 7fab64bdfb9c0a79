"""The folder that ``weftplan train --report`` writes: the plan, the curve of the loss, what ran when, and an index."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftplan.planner import MemoryPlan
from weftplan.planner.explain import amount

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5a6675; --page: #fff; --panel: #f4f6f9; --line: #d5dbe3;
  --a: #0072b2; --b: #e69f00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaf0; --soft: #a3afbf; --page: #12161c; --panel: #1b212a;
  --line: #343d4a; --a: #3d9bd8; --b: #e6a52e; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; color: var(--text); background: var(--page); }
main { max-width: 900px; margin: 0 auto; padding: 1.2rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 1.6rem; }
a { color: var(--a); } svg { width: 100%; height: auto; background: var(--panel); border-radius: 8px; }
td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); }
.soft, svg text { color: var(--soft); fill: var(--soft); font-size: 13px; }
"""
_COLOURS = ("var(--b)", "var(--a)")


def write_report(
    folder: Path,
    network: str,
    plan: MemoryPlan,
    curve: Sequence[Mapping[str, Any]],
    lanes: str,
    result: Mapping[str, Any],
) -> None:
    """Write ``index.html`` and what it links to.

    Args:
        plan: of one device.
        curve: a row for each batch: epoch, batch, and the metrics of its epoch so far.
        lanes: the page of what ran when.
        result: figures of the run, which also go to ``result.json``.
    """
    plan.plot(folder / "memory-plan.svg", title=f"{network}: memory plan")
    (folder / "plan.html").write_text(plan.to_html(title=f"training {network}, one device"), encoding="utf-8")
    (folder / "lanes.html").write_text(lanes, encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "curve.json").write_text(json.dumps(list(curve)) + "\n")
    rows = [
        ("test accuracy", f"{result['test_accuracy']:.4f}"),
        ("images per second", f"{result['images_per_s']:,.0f}"),
        ("time", f"{result['wall_s']:.1f} s"),
        ("planned memory, all devices", amount(result["planned_peak_bytes"])),
        ("allocated", f"{result['allocated_bytes']:,} bytes, {result['planned_peak_bytes']:,} were planned"),
        ("devices", ", ".join(result["devices"])),
    ]
    table = "".join(f"<tr><td>{name}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>training {html.escape(network)}</title><style>{_STYLE}</style></head><body><main>
<h1>Training {html.escape(network)}</h1>
<table>{table}</table>
<h2>Loss and accuracy</h2>
{draw_curve(curve)}
<p class="soft">Each point is the average of its epoch so far.</p>
<h2>Memory</h2>
<p><a href="plan.html">The plan of one device, to explore</a>; <a href="memory-plan.svg">as a picture</a>.</p>
<h2>What ran when</h2>
<p><a href="lanes.html">The workers in the last epoch, lane by lane</a>.</p>
<p class="soft">The figures: <a href="result.json">result.json</a>, <a href="curve.json">curve.json</a>.</p>
</main></body></html>
"""
    (folder / "index.html").write_text(page, encoding="utf-8")


def draw_curve(curve: Sequence[Mapping[str, Any]]) -> str:
    """The metrics over the batches as an SVG: a line for each, scaled to its own largest value.

    >>> draw_curve([])
    '<p class="soft">No batch has run.</p>'
    """
    if not curve:
        return '<p class="soft">No batch has run.</p>'
    names = [name for name in curve[0] if name not in ("epoch", "batch")]
    width, height, left, bottom = 860, 300, 20, 30
    parts = []
    for name, colour in zip(names, _COLOURS, strict=False):
        values = [float(row.get(name, 0.0)) for row in curve]
        top = max((value for value in values if value == value and value < float("inf")), default=1.0) or 1.0
        points = [
            (left + (width - 2 * left) * i / max(len(values) - 1, 1), 56 + (height - bottom - 56) * (1 - value / top))
            for i, value in enumerate(values)
            if value == value and value < float("inf")
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        label = f"{html.escape(name)}: from {values[0]:.4f} to {values[-1]:.4f}, top of the picture {top:.3g}"
        at = 24 + 18 * names.index(name)
        parts.append(f'<rect x="{left}" y="{at - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="{at}">{label}</text>')
    epochs = curve[-1]["epoch"] + 1
    label = f"{len(curve):,} batches, {epochs} epochs"
    parts.append(f'<text x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">{label}</text>')
    drawn = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="metrics over batches">{drawn}</svg>'
