"""The pipeline example: equal results, overlapping operations in its trace, and a picture with every task."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine_pipeline.py"
SVG = "{http://www.w3.org/2000/svg}"


def test_trace_and_picture(tmp_path: Path):
    """Each file is read, converted and computed in order, and a read overlaps with other work.

    In the trace, lanes of ``read``, ``convert`` and ``compute`` show eight operations each, and the picture has a bar
    for each of the 24.
    """
    trace = tmp_path / "trace.json"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), "--trace", str(trace)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "same bits" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    lanes: dict[str, list[tuple[float, float]]] = {}
    for e in sorted((e for e in events if e["ph"] == "X" and e["cat"] == "operation"), key=lambda e: e["ts"]):
        lanes.setdefault(e["name"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert {name: len(lane) for name, lane in lanes.items()} == {"read": 8, "convert": 8, "compute": 8}
    for read, convert, compute in zip(lanes["read"], lanes["convert"], lanes["compute"], strict=True):
        assert read[1] <= convert[0] + 1e-3
        assert convert[1] <= compute[0] + 1e-3
    others = lanes["convert"] + lanes["compute"]
    assert any(r[0] < o[1] and o[0] < r[1] for r in lanes["read"] for o in others)
    root = xml.etree.ElementTree.parse(trace.with_suffix(".svg")).getroot()
    assert sum(1 for bar in root.iter(SVG + "rect")) == 24 + 1
    stored = xml.etree.ElementTree.parse(EXAMPLE.parents[1] / "docs/images/engine-pipeline.svg").getroot()
    assert labels(root) == labels(stored), "copy the new picture there: python examples/engine_pipeline.py --trace FILE"


def labels(picture: xml.etree.ElementTree.Element) -> set[str]:
    """Return the texts of a picture that are not numbers."""
    return {text for one in picture.iter(SVG + "text") if not (text := one.text or "")[:1].isdigit()}
