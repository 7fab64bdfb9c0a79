"""The bench for GPUs runs to its end without one, and says what could not be measured."""

import json
import pathlib
import subprocess
import sys

BENCH = pathlib.Path(__file__).parents[2] / "bench" / "bench_gpu.py"
PARTS = ("correctness", "copies", "graphs", "allocations")


def test_the_bench_ends_on_the_stand_in(tmp_path):
    """Table and JSON of the short parts: what has a goal and is counted meets it, times are marked."""
    path = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCH), "--standin", "--every", "80", "--json", str(path), "--only", *PARTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    parts = json.loads(path.read_text())["parts"]
    assert tuple(parts) == PARTS
    rows = [row for part in parts.values() for row in part["rows"]]
    marked = [row for row in rows if "not measured" in str(row["value"])]
    assert marked
    assert all(row.get("met") for row in rows if row.get("goal") and row not in marked), rows
    for row in rows:
        assert row["what"] in done.stdout
