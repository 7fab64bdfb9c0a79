"""``mx.profiler.to_html``: a page with a lane for each worker, which loads nothing from other sites."""

from __future__ import annotations

import itertools
import json
import re

import weftplan as mx
from weftplan.profiler.recorder import EventRecorder, MemorySample, UserRecord, recorder
from weftplan.report.lanes_html import KINDS, lanes_html


def page_data(page: str) -> dict[str, object]:
    """Return the JSON data of a page."""
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, object] = json.loads(match.group(1))
    return data


def test_what_ran_is_on_the_page() -> None:
    """The page has a span for each operation, the live bytes and sums by name, and no external link."""
    mx.profiler.set_state("run")
    total = mx.nd.ones((2, 2), ctx=mx.cpu(0))
    for _ in range(3):
        total = mx.nd.exp(total)
    total.wait_to_read()
    mx.profiler.set_state("stop")
    page = mx.profiler.to_html(title="three <b>")
    data = page_data(page)
    assert sum(len(lane["spans"]) for lane in data["lanes"]) == len(recorder.operations)  # type: ignore[attr-defined]
    table = {row[0]: row[1] for row in data["table"]}  # type: ignore[attr-defined]
    assert table["exp"] == 3
    assert {nbytes for _, nbytes in data["memory"]} <= live_sums(recorder)  # type: ignore[attr-defined]
    assert "three &lt;b&gt;" in page
    assert not re.search(r"https?:|url\(|@[A-Z_]+@", page)
    assert f"{len(recorder.operations):,} operations ran on" in page


def live_sums(recording: EventRecorder) -> set[int]:
    """Return every sum of one reading of each context, which the page may show as live bytes."""
    readings: dict[str, set[int]] = {}
    for sample in recording.memory:
        if sample.counter.startswith("live bytes"):
            readings.setdefault(sample.counter, {0}).add(sample.nbytes)
    return {sum(values) for values in itertools.product(*readings.values())}


def test_live_bytes_are_those_of_contexts_alone() -> None:
    """The page adds up the live bytes of contexts, not those of the process or of a whole GPU."""
    recording = EventRecorder()
    recording.operations.append(("add", None, "q", "worker", 50, 60, 90, 1))
    recording.memory += [
        MemorySample(10, "live bytes cpu(0)", 100, is_live=True),
        MemorySample(10, "memory in use on gpu(0), all processes", 70_000, is_live=False),
        MemorySample(10, "memory of this process", 900_000, is_live=False),
        MemorySample(1060, "live bytes cpu(0)", 300, is_live=True),
        MemorySample(1060, "live bytes gpu(0)", 5, is_live=True),
        MemorySample(2060, "live bytes cpu(0)", 0, is_live=True),
    ]
    assert page_data(lanes_html(recording))["memory"] == [[1.0, 300], [1.0, 305], [2.0, 5]]


def test_spans_of_users_have_lanes_of_their_own() -> None:
    """A user's spans are in a lane of their own."""
    recording = EventRecorder()
    recording.user.append(UserRecord("span", "mine", "load", "MainThread", 1000, 5000, 0.0))
    data = page_data(lanes_html(recording))
    assert data["lanes"] == [{"name": "yours: MainThread", "spans": [[0.0, 4.0, 0, 0.0]]}]
    assert data["kinds"] == [["yours", KINDS["yours"]]]


def test_nothing_recorded() -> None:
    """Without records the page names the function that starts recording."""
    assert "Nothing was recorded: call mx.profiler.set_state" in lanes_html(EventRecorder()).replace("&#x27;", "'")
