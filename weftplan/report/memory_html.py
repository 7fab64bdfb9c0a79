"""A memory snapshot as a self-contained HTML page: bytes over time, system blocks, largest holders."""

from __future__ import annotations

import html

from weftplan.device.context import Context
from weftplan.report.page import filled
from weftplan.storage import Snapshot, Statistics
from weftplan.storage.base import Segment
from weftplan.storage.recording import StorageEvent
from weftplan.storage.report import by_origin

SEGMENT_LIMIT, HOLDER_LIMIT, POINT_LIMIT = 60, 200, 20_000


def memory_html(snapshot: Snapshot) -> str:
    """Return the page as text. It loads no other files and needs no network."""
    data = {
        "devices": [
            _device(context, statistics, segments, [event for event in snapshot.events if event.context == context])
            for context, statistics, segments in zip(
                snapshot.contexts, snapshot.statistics, snapshot.segments, strict=True
            )
        ]
    }
    marks = {"TITLE": "Memory snapshot", "SETTINGS": html.escape(snapshot.settings)}
    return filled("memory_page.html", data, marks)


def _device(
    context: Context, statistics: Statistics, segments: tuple[Segment, ...], events: list[StorageEvent]
) -> dict[str, object]:
    """Return one device's data for the page's script."""
    held = [part[2] for segment in segments for part in segment.parts if part[2] is not None]
    origins = sorted(by_origin(held).items(), key=lambda item: -item[1][0])
    return {
        "name": str(context),
        "facts": [
            ["asked for, bytes", statistics.requested_bytes],
            ["in use, rounded, bytes", statistics.allocated_bytes],
            ["from the system, bytes", statistics.reserved_bytes],
            ["most ever asked for, bytes", statistics.peak_requested_bytes],
            ["most ever from the system, bytes", statistics.peak_reserved_bytes],
            ["refused requests", statistics.failures],
        ],
        "holders": [[origin, nbytes, count] for origin, (nbytes, count) in origins[:HOLDER_LIMIT]],
        "segments": [
            {
                "nbytes": int(segment.raw.nbytes),
                "parts": [
                    [at, nbytes, None if held is None else str(held.name or "unnamed")]
                    for at, nbytes, held in segment.parts
                ],
            }
            for segment in sorted(segments, key=lambda segment: -int(segment.raw.nbytes))[:SEGMENT_LIMIT]
        ],
        "timeline": timeline(events, statistics.allocated_bytes, statistics.reserved_bytes)[-POINT_LIMIT:],
        "refused": [[event.time_ns // 1000, event.nbytes] for event in events if event.action == "oom"],
    }


def timeline(events: list[StorageEvent], allocated: int, reserved: int) -> list[list[int]]:
    """Return (µs, bytes in use, bytes from the system) after each event, computed backwards from the final state."""
    bars = []
    for event in reversed(events):
        bars.append([event.time_ns // 1000, allocated, reserved])
        if event.action == "alloc":
            allocated -= event.nbytes
        elif event.action == "free":
            allocated += event.nbytes
        elif event.action == "segment_alloc":
            reserved -= event.nbytes
        elif event.action == "segment_free":
            reserved += event.nbytes
    bars.reverse()
    return bars
