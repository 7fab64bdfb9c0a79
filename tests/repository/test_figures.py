"""Command output that documents quote equals the current output.

A block marked ``console`` has commands after ``$`` and their output; ``…`` stands for lines or for a part of a line.
Memory is compared with NumPy's kernels, whose scratch memory is the same on every machine.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_documents import documents

ROOT = Path(__file__).parents[2]
COMPARED = ("weftplan plan", "weftplan inspect")
"""Commands whose output depends on the code alone."""


def quoted_output(page: Path) -> list[tuple[str, list[str]]]:
    """Return (command, quoted lines) of each compared command of a page."""
    results: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                results.append((line[2:], []))
            else:
                results[-1][1].append(line)
    return [(command, lines) for command, lines in results if command.startswith(COMPARED)]


def first_missing(lines: list[str], output: str) -> str | None:
    """Return the first quoted line that is not in the output, after the lines before it; or None.

    Runs of spaces count as one space.
    """
    printed = [" ".join(line.split()) for line in output.splitlines()]
    place = 0
    for line in lines:
        if line.strip() in ("…", ""):
            continue
        pattern = ".*".join(map(re.escape, " ".join(line.split()).split("…")))
        remaining = [number for number, one in enumerate(printed[place:], place) if re.fullmatch(pattern, one)]
        if not remaining:
            return line
        place = remaining[0] + 1
    return None


PAGES = [page for page in documents() if quoted_output(page) and page.name not in ("mxnet-models.md", "README.md")]
"""Pages with compared commands, but for two pages about a model: ``tests/cli/test_model_page.py`` makes its files."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_figures_are_those_of_today(page: Path, tmp_path: Path) -> None:
    """Each compared command of a page prints the quoted lines."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WEFTPLAN_KERNELS": "numpy", "COLUMNS": "250"}
    for command, lines in quoted_output(page):
        call = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert first_missing(lines, done.stdout) is None, f"{command} prints now:\n{done.stdout}"


def test_the_comparison_can_fail() -> None:
    """``first_missing`` returns a line with a wrong number or in a wrong order, and ignores gaps and spaces."""
    output = "peak   12 bytes\nmore\ntotal  15 bytes\n"
    assert first_missing(["peak 12 bytes", "…", "total 15 …"], output) is None
    assert first_missing(["peak 13 bytes"], output) == "peak 13 bytes"
    assert first_missing(["total 15 bytes", "peak 12 bytes"], output) == "peak 12 bytes"


def test_pages_quote_commands() -> None:
    """planning-memory.md has compared commands."""
    assert {page.name for page in PAGES} >= {"planning-memory.md"}
