"""Traces of a recorded run, in the JSON format of Perfetto and chrome://tracing.

There is one process row per device and one track per worker, one track for the threads that push, and one or more
tracks for each thread with user spans. Arrows connect each push to its run. Counters show pending operations, live
bytes, and memory of the process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from weftplan.device.context import Context
from weftplan.profiler.recorder import EventRecorder, OperationRecord, UserRecord
from weftplan.support.atomic_files import write_text

_DEFAULT = Context("cpu", 0)
"""The context of an operation without a context."""
_SCOPES = {"global": "g", "process": "p", "thread": "t"}
PUSH_PID = 1
USER_PID = 2
FIRST_DEVICE_PID = 10


def trace_events(recorder: EventRecorder) -> list[dict[str, object]]:
    """Return all events, ordered by time; timestamps are microseconds since the recorder was created."""
    origin = recorder.origin_ns
    events: list[dict[str, Any]] = []
    meta: list[dict[str, Any]] = [_process(PUSH_PID, "pushes and counters"), _process(USER_PID, "user")]
    pids: dict[str, int] = {}
    tracks: dict[tuple[int, str], int] = {}

    def track(pid: int, name: str) -> int:
        tid = tracks.get((pid, name))
        if tid is None:
            tid = tracks[pid, name] = len(tracks) + 1
            meta.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        return tid

    depth: list[tuple[int, int]] = []
    push_tid = track(PUSH_PID, "push")
    for record in map(OperationRecord._make, list(recorder.operations)):
        device = str(record.context or _DEFAULT)
        pid = pids.get(device)
        if pid is None:
            pid = pids[device] = FIRST_DEVICE_PID + len(pids)
            meta.append(_process(pid, device))
        tid = track(pid, f"{record.queue}: {record.worker}")
        name = record.name or "operation"
        start, push = (record.start_ns - origin) / 1e3, (record.push_ns - origin) / 1e3
        waited = (record.start_ns - record.push_ns) / 1e3
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": "operation",
                "pid": pid,
                "tid": tid,
                "ts": start,
                "dur": (record.end_ns - record.start_ns) / 1e3,
                "args": {"id": record.ident, "waited_us": waited},
            }
        )
        flow = {"name": "push", "cat": "push", "id": record.ident}
        events.append(
            {"ph": "X", "name": name, "cat": "push", "pid": PUSH_PID, "tid": push_tid, "ts": push, "dur": 0.5}
        )
        events.append({"ph": "s", "pid": PUSH_PID, "tid": push_tid, "ts": push, **flow})
        events.append({"ph": "f", "bp": "e", "pid": pid, "tid": tid, "ts": start, **flow})
        depth += [(record.push_ns, 1), (record.start_ns, -1)]
    level = 0
    for when, change in sorted(depth, key=lambda item: (item[0], -item[1])):  # at equal times the push comes first
        level += change
        events.append(_counter("operations waiting", when - origin, level))
    for sample in recorder.memory:
        events.append(_counter(sample.counter, sample.when_ns - origin, sample.nbytes))
    users = list(recorder.user)
    for user, lane in _lanes([user for user in users if user.kind == "span"]):
        tid = track(USER_PID, user.thread if not lane else f"{user.thread} ({lane + 1})")
        common = {"name": user.name, "cat": user.domain, "pid": USER_PID, "tid": tid}
        dur = (user.end_ns - user.start_ns) / 1e3
        events.append({"ph": "X", "ts": (user.start_ns - origin) / 1e3, "dur": dur, **common})
    for user in users:
        if user.kind == "instant":
            tid = track(USER_PID, user.thread)
            common = {"name": user.name, "cat": user.domain, "pid": USER_PID, "tid": tid}
            events.append({"ph": "i", "s": _SCOPES[user.scope], "ts": (user.start_ns - origin) / 1e3, **common})
        elif user.kind == "counter" and math.isfinite(user.value):  # JSON has no infinite numbers
            events.append(_counter(f"{user.domain}:{user.name}", user.start_ns - origin, user.value))
    return meta + sorted(events, key=lambda event: float(event["ts"]))


def _lanes(spans: list[UserRecord]) -> list[tuple[UserRecord, int]]:
    """Return each span with a track number of its thread, so that the spans of a track are nested or disjoint.

    Tasks may overlap without nesting; a viewer would draw such spans of one track wrongly.
    """
    open_ends: dict[str, list[list[int]]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        lanes = open_ends.setdefault(span.thread, [])
        number = 0
        while number < len(lanes):
            ends = lanes[number]
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or ends[-1] >= span.end_ns:
                break
            number += 1
        else:
            lanes.append([])
        lanes[number].append(span.end_ns)
        placed.append((span, number))
    return placed


def write_trace(recorder: EventRecorder, path: Path) -> Path:
    """Write the trace file atomically; return ``path``."""
    text = json.dumps({"traceEvents": trace_events(recorder), "displayTimeUnit": "ms"})
    write_text(path, text)
    return path


def _process(pid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _counter(name: str, ns: int, value: float) -> dict[str, object]:
    return {"ph": "C", "name": name, "pid": PUSH_PID, "tid": 0, "ts": ns / 1e3, "args": {"value": value}}
