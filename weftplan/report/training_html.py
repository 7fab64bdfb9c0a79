"""Training events as a self-contained HTML page: curves, speed, time per phase, memory, queues."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from weftplan.device.amounts import amount
from weftplan.report.page import filled
from weftplan.support import slots
from weftplan.training.fit.events import PHASES

POINT_LIMIT = 1500
"""Most points of a curve; if there are more, only every n-th is drawn."""

Event = Mapping[str, Any]


def training_html(
    events: Sequence[Event],
    *,
    title: str = "training",
    facts: Sequence[tuple[str, str]] = (),
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the page as text. It loads no other files and needs no network.

    Args:
        events: the result of :func:`weftplan.training.fit.events.read_events`.
        title: the page's title.
        facts: rows of the table at the top of the page.
        links: (text, address) of related pages.
    """
    steps = [event for event in events if event.get("event") == "step"]
    every = max(1, -(-len(steps) // POINT_LIMIT))
    shown = [*steps[::every], *([steps[-1]] if steps and (len(steps) - 1) % every else [])]
    data = {
        "charts": _charts(shown, [event for event in events if event.get("event") == "epoch"]),
        "marks": [
            {"step": event["step"], "kind": event["event"], "text": _described(event)}
            for event in events
            if event.get("event") in ("warning", "resume", "checkpoint failed") and "step" in event
        ],
        "epochs": [
            [event["epoch"] + 1, event["step"], event.get("train", {}), event.get("validation", {}), event["seconds"]]
            for event in events
            if event.get("event") == "epoch"
        ],
        "log": [
            [event["event"], event.get("step"), _described(event)]
            for event in events
            if event.get("event") not in ("step", "epoch", "begin")
        ][-200:],
    }
    rows = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in facts)
    anchors = ", ".join(f'<a href="{html.escape(href)}">{html.escape(text)}</a>' for text, href in links)
    marks = {
        "TITLE": html.escape(title),
        "STORY": html.escape(story(events)).replace(" %", "&nbsp;%"),
        "FACTS": f'<table class="facts">{rows}</table>' if rows else "",
        "LINKS": f"<p>See also: {anchors}.</p>" if anchors else "",
    }
    return filled("training_page.html", data, marks)


def story(events: Sequence[Event]) -> str:
    """Describe the course of the run in words.

    >>> story([])
    'No step has been recorded yet.'
    """
    steps = [event for event in events if event.get("event") == "step"]
    if not steps:
        return "No step has been recorded yet."
    spent = {phase: sum(event["seconds"].get(phase, 0.0) for event in steps) for phase in PHASES}
    total = max(sum(spent.values()), 1e-9)
    shares = ", ".join(f"{100 * spent[phase] / total:.0f} % {words}" for phase, words in _PHASES.items())
    final = steps[-1]
    epochs = sum(event.get("event") == "epoch" for event in events)
    text = f"{final['step']:,} steps, {epochs} whole epoch{'s' * (epochs != 1)}, {_duration(total)}: {shares}."
    kinds = [event.get("event") for event in events]
    for kind, words in (("resume", "resumed"), ("checkpoint", "checkpoints written"), ("warning", "warnings")):
        count = kinds.count(kind)
        if count:
            text += f" {count} {'warning' if (kind, count) == ('warning', 1) else words}."
    return text


_PHASES = {
    "data": "waiting for data",
    "compute": "computing",
    "exchange": "exchanging gradients and updating",
    "other": "for the rest",
}


class _Line(TypedDict):
    """A line of a chart; ``dots``: draw its points, too."""

    name: str
    color: str
    points: list[tuple[int, float | None]]
    dots: NotRequired[bool]


class _Chart(TypedDict):
    """A chart of the page; ``stacked``: the lines add up."""

    title: str
    unit: str
    lines: list[_Line]
    stacked: NotRequired[bool]


def _charts(steps: Sequence[Event], epochs: Sequence[Event]) -> list[_Chart]:
    """Return the charts of the page: each has a title, a unit, and lines of points (step, value)."""
    charts: list[_Chart] = []
    for name in dict.fromkeys(name for event in steps for name in event.get("metrics", {})):
        lines = [_line("training, its epoch so far", "a", steps, lambda event, n=name: event["metrics"].get(n))]
        points = [(event["step"], _number(event.get("validation", {}).get(name))) for event in epochs]
        if any(value is not None for _, value in points):
            lines.append({"name": "validation", "color": "b", "points": points, "dots": True})
        charts.append({"title": name, "unit": "", "lines": lines})
    lines = [
        _Line(name=_PHASES[phase], color=color, points=[(e["step"], _per_step(e, phase)) for e in steps])
        for phase, color in zip(PHASES, "cabd", strict=True)
    ]
    charts.append({"title": "where a step spends its time", "unit": "s", "stacked": True, "lines": lines})
    plain: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = (
        ("samples a second", "", (("samples_per_s", "samples/s", "a"),)),
        ("memory", "B", (("live", "live", "a"), ("reserved", "reserved by pools", "b"), ("process", "process", "d"))),
        ("processor cores in use", "", (("cpu", "cores", "a"),)),
        ("norm of the gradients", "", (("gradient_norm", "norm", "a"),)),
        ("learning rate", "", (("learning_rate", "rate", "a"),)),
        ("loss scale", "", (("loss_scale", "scale", "a"),)),
    )
    for title, unit, series in plain:
        lines = [_line(words, color, steps, lambda e, key=key: e.get(key)) for key, words, color in series]
        lines = [line for line in lines if any(value is not None for _, value in line["points"])]
        if lines:
            charts.append({"title": title, "unit": unit, "lines": lines})
    gpus = dict.fromkeys(name for event in steps for name in event.get("gpus", {}))
    for title, unit, key in (("GPUs busy", "%", "busy"), ("memory of GPUs, all processes", "B", "bytes")):
        lines = [
            _line(name, color, steps, lambda e, n=name, k=key: e.get("gpus", {}).get(n, {}).get(k))
            for name, color in zip(gpus, "abcde", strict=False)
        ]
        if any(value is not None for line in lines for _, value in line["points"]):
            charts.append({"title": title, "unit": unit, "lines": lines})
    pending = [_line("all operations that are pending", "a", steps, lambda event: event.get("pending"))]
    names = dict.fromkeys(name for event in steps for name, depth in event.get("queues", {}).items() if depth)
    for name, color in zip(names, "bcde", strict=False):
        pending.append(_line(f"ready in {name}", color, steps, lambda event, n=name: event.get("queues", {}).get(n)))
    charts.append({"title": "depth of the engine's queues", "unit": "", "lines": pending})
    return charts


def _line(name: str, color: str, steps: Sequence[Event], value: Callable[..., object]) -> _Line:
    return {"name": name, "color": color, "points": [(event["step"], _number(value(event))) for event in steps]}


def _number(value: object) -> float | None:
    """Return a number that can be drawn; events store other values as text."""
    return float(value) if isinstance(value, (int, float)) else None


def _per_step(event: Event, phase: str) -> float:
    seconds, steps = float(event["seconds"].get(phase, 0.0)), int(event.get("steps", 1))
    return seconds / max(steps, 1)


def _described(event: Event) -> str:
    """Return an event in words."""
    if "text" in event:
        return str(event["text"])
    if event["event"] == "checkpoint":
        return f"{event.get('path')} ({amount(int(event.get('bytes', 0)))}, {event.get('seconds')} s beside the run)"
    if event["event"] == "checkpoint failed":
        return f"{event.get('path')}: {event.get('why')}"
    return ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("event", "time", "step"))


def _duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> _duration(4000)
    '1 h 7 min'
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


slots.TRAINING_PAGE.fill(training_html)
