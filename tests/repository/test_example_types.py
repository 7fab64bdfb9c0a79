"""Examples of CONTRIBUTING.md pass the checks of the package: they are code to paste into it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_contributing import ROOT, SECTIONS

pytestmark = pytest.mark.stress  # mypy reads the whole package


UNKNOWN_TO_STUBS = "Add an activation"
"""Section whose example calls its new operator by name, which the stubs have only after a refresh."""


def test_examples_pass_mypy_and_ruff(tmp_path: Path) -> None:
    """Every example that is not a test passes ``mypy --strict``, ``ruff check`` and ``ruff format --check``."""
    sections = [blocks for title, blocks in SECTIONS.items() if blocks and title != UNKNOWN_TO_STUBS]
    blocks = [block for blocks in sections for block in blocks if "\ndef test_" not in block]
    for number, block in enumerate(blocks):
        (tmp_path / f"example_{number}.py").write_text(block, encoding="utf-8")
    files = [str(path) for path in sorted(tmp_path.glob("*.py"))]
    assert len(files) >= len(sections)
    for tool in (["mypy", "--strict", "--config-file"], ["ruff", "check", "--config"], ["ruff", "format", "--config"]):
        check = ["--check"] if "format" in tool else []
        command = [sys.executable, "-m", *tool, "pyproject.toml", *check, *files]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
