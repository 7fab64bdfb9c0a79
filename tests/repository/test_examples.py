"""The gallery: every example runs, prints the expected lines, and has a line on the page of examples."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAYS = {
    "fit_a_budget.py": "bit for bit",
    "leftover_model.py": "classes [",
    "overnight.py": "ended with the same weights, bit for bit",
    "planner_in_100_lines.py": "this planner 3,156,480 bytes; weftplan's match_range 3,156,480",
    "predict_workers.py": "4,096    100.18        25.97      99.8%       46  within+halving",
    "read_a_trace.py": "lanes.html: open it in a browser",
    "stencil_with_tasks.py": "both gave the same bits",
    "two_devices.py": "gave the same weights, bit for bit",
}


@pytest.mark.parametrize("name", SAYS)
def test_an_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends without an error, and prints its result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out


def test_every_example_is_in_the_gallery() -> None:
    """The page names each file of the folder; each is tested here, or by a test of its own."""
    page = (ROOT / "docs" / "gallery.md").read_text()
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in files if f"examples/{name}" not in page} == set()
    assert set(SAYS) | {"engine_pipeline.py", "feed_from_workers.py"} == files


def test_a_dataset_for_workers(tmp_path: Path) -> None:
    """In a process of its own, since workers import the example: same weights with workers, and one that is killed is
    replaced."""
    script = str(ROOT / "examples" / "feed_from_workers.py")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "both learned the same weights, bit for bit" in done.stdout
    assert "another one went on: 16 batches of 16" in done.stdout


def test_the_planner_is_short() -> None:
    """A planner in 100 lines has no more."""
    assert len((ROOT / "examples" / "planner_in_100_lines.py").read_text().splitlines()) <= 100
