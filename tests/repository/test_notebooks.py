"""Notebooks: their cells run in order, and their files have no outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def test_there_is_a_notebook_for_each_lecture() -> None:
    """There are notebooks about the engine, the kvstore and the planner."""
    assert [path.stem for path in NOTEBOOKS] == ["engine", "kvstore", "planner"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    """The cells of a notebook, in one process, run without an error or warning."""
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in cells(path)), encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    """The stored notebook has no cell outputs."""
    assert [cell["outputs"] for cell in cells(path)] == [[]] * len(cells(path))
