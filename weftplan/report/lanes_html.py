"""A recorded run as a self-contained HTML page: one lane per worker, live bytes, operations by time."""

from __future__ import annotations

import html
from typing import Any

from weftplan.profiler.recorder import EventRecorder, OperationRecord
from weftplan.report.page import filled
from weftplan.support import slots

SPAN_LIMIT = 40_000
"""Most operations on a page; the longest are shown."""
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchange of gradients",
    "update": "optimizer",
    "copies": "copies",
    "other": "other operations",
    "yours": "your own spans",
}


def kind_of(name: str) -> str:
    """Return the kind of an operation, judged by its name.

    >>> [kind_of(n) for n in ("[conv1,relu1]", "fc1_backward", "sgd_update", "KVStoreReduce", "copy", "add")]
    ['forward', 'backward', 'update', 'exchange', 'copies', 'other']
    """
    if "_backward" in name:
        return "backward"
    if name.startswith("KVStore"):
        return "exchange"
    if "_update" in name:
        return "update"
    if name in ("copy", "CopyTo", "fence"):
        return "copies"
    return "forward" if name.startswith("[") else "other"


def lanes_html(recorder: EventRecorder, *, title: str = "what ran when") -> str:
    """Return the page as text. It loads no other files and needs no network."""
    records = [OperationRecord._make(record) for record in list(recorder.operations)]
    shown = sorted(records, key=lambda record: record.start_ns - record.end_ns)[:SPAN_LIMIT]
    spans = [user for user in list(recorder.user) if user.kind == "span"]
    begin_ns = min([*(record.start_ns for record in records), *(span.start_ns for span in spans)], default=0)
    end_ns = max([*(record.end_ns for record in records), *(span.end_ns for span in spans)], default=begin_ns)
    names: dict[str, int] = {}
    kinds: list[str] = []
    lanes: dict[str, list[list[float]]] = {}

    def add(lane: str, name: str, kind: str, start: int, end: int, waited: int) -> None:
        if name not in names:
            names[name] = len(names)
            kinds.append(kind)
        lanes.setdefault(lane, []).append([_us(start - begin_ns), _us(end - start), names[name], _us(waited)])

    for span in spans:
        add(f"yours: {span.thread}", span.name, "yours", span.start_ns, span.end_ns, 0)
    for record in shown:
        name = record.name or "operation"
        lane = record.worker.removeprefix("weftplan ")
        add(lane, name, kind_of(name), record.start_ns, record.end_ns, record.start_ns - record.push_ns)
    used = [kind for kind in KINDS if kind in kinds]
    data = {
        "end": max(_us(end_ns - begin_ns), 1.0),
        "kinds": [[kind, KINDS[kind]] for kind in used],
        "names": [[name, used.index(kind)] for name, kind in zip(names, kinds, strict=True)],
        "lanes": [{"name": lane, "spans": sorted(lanes[lane])} for lane in sorted(lanes)],
        "memory": _live_bytes(recorder, begin_ns),
        "table": _table(records),
    }
    marks = {
        "TITLE": html.escape(title),
        "STORY": html.escape(_story(records, end_ns - begin_ns, len(shown))).replace(" %", "&nbsp;%"),
    }
    return filled("lanes_page.html", data, marks)


def _live_bytes(recorder: EventRecorder, first_ns: int) -> list[list[float]]:
    """Return (µs since ``first_ns``, live bytes of all contexts) for each reading of a context.

    The bytes of the process and of a GPU in use by all processes contain live bytes, so they are left out of the sum.
    """
    live: dict[str, int] = {}
    points: list[list[float]] = []
    for sample in sorted(sample for sample in recorder.memory if sample.is_live):
        live[sample.counter] = sample.nbytes
        if sample.when_ns >= first_ns:
            points.append([_us(sample.when_ns - first_ns), sum(live.values())])
    return points


def _us(nanoseconds: int) -> float:
    return round(nanoseconds / 1e3, 2)


def _table(records: list[OperationRecord]) -> list[list[str | int | float]]:
    """Return rows (operation, runs, total µs, total µs waited), the longest operations first, at most 200."""
    rows: dict[str, list[Any]] = {}
    for record in records:
        row = rows.setdefault(record.name or "operation", [record.name or "operation", 0, 0.0, 0.0])
        row[1] += 1
        row[2] += (record.end_ns - record.start_ns) / 1e3
        row[3] += (record.start_ns - record.push_ns) / 1e3
    return sorted(rows.values(), key=lambda row: -row[2])[:200]


def _story(records: list[OperationRecord], total_ns: int, shown: int) -> str:
    """Return the workers' utilization in words."""
    if not records:
        return "Nothing was recorded: call mx.profiler.set_state('run') before the work and set_state('stop') after it."
    busy: dict[str, int] = {}
    for record in records:
        busy[record.worker] = busy.get(record.worker, 0) + record.end_ns - record.start_ns
    worker, busiest_ns = max(busy.items(), key=lambda pair: pair[1])
    text = (
        f"{len(records):,} operations ran on {len(busy)} workers in {total_ns / 1e6:,.1f} ms. The busiest, "
        f"{worker.removeprefix('weftplan ')}, worked {100 * busiest_ns / max(total_ns, 1):.0f} % of the time."
    )
    return text if shown == len(records) else f"{text} The page shows the {shown:,} longest operations."


slots.PROFILER_PAGE.fill(lanes_html)
