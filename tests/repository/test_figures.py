"""Command output that documents quote equals the current output.

A block marked ``console`` has commands after ``$`` and their output; ``…`` stands for lines or for a part of a line.
Memory is compared with NumPy's kernels, whose scratch memory is the same on every machine. The tables of README.md and
docs/comparison.md have the figures of plans made now, and of the stored runs of benches.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_documents import documents
from weftplan import models
from weftplan.planner import PlanOptions, plan_symbol

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


def cells(page: str, row: str) -> str:
    """Return the text after the first cell of a table's row."""
    (found,) = re.findall(rf"^\| {re.escape(row)}[^|]*\| (.*) \|$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    return str(found)


def ratios_to_mxnet(monkeypatch: pytest.MonkeyPatch, mode: str, recompute: str = "off") -> list[float]:
    """Return our bytes / those of MXNet 1.9.1 for the plans of eleven networks, as ``bench/bench_planner.py`` does."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    from mxnet_networks import batch_of, load

    ratios = []
    for name, theirs in json.loads((ROOT / "bench/data/mxnet_plans.json").read_text())["networks"].items():
        options = PlanOptions.from_environment(workspaces=False, recompute=recompute)
        shapes, grad_req = models.input_shapes(name, batch_of(name)), "write" if mode == "training" else "null"
        plan = plan_symbol(load(name), shapes, grad_req=grad_req, options=options).memory
        ratios.append(plan.peak / theirs[mode]["planned"])
    return ratios


def test_ratios_of_plans_are_those_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratios to MXNet's plans in both tables are those of plans made now, without recomputation."""
    for mode, bound in (("training", "1.000"), ("inference", "1.000")):
        ratios = ratios_to_mxnet(monkeypatch, mode)
        mean = f"{statistics.geometric_mean(ratios):.3f}"
        assert cells("docs/comparison.md", f"{mode}, geometric mean") == f"{mean} ({max(ratios):.3f}) | {bound}"
        if mode == "training":
            assert cells("README.md", "memory of training") == mean
            assert f"take {float(mean):.2f} of MXNet's memory" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.stress
@pytest.mark.parametrize("policy", ["cheap", "sqrt"])
def test_ratios_of_recomputed_plans_are_those_of_today(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """The same with recomputation, which takes a minute to plan."""
    mean = f"{statistics.geometric_mean(ratios_to_mxnet(monkeypatch, 'training', policy)):.3f}"
    row = {"cheap": "training, recomputing what is cheap", "sqrt": "training, recomputing segments"}[policy]
    assert cells("docs/comparison.md", row) == f"{mean} |"


def test_the_readme_has_the_figures_of_the_comparison() -> None:
    """README's rows are those of the comparison: recomputation, and the ranges of steps and of engine operations."""
    cheap = cells("docs/comparison.md", "training, recomputing what is cheap")
    assert f"{cells('README.md', 'memory with cheap recomputation')} |" == cheap
    page = (ROOT / "docs/comparison.md").read_text("utf-8")
    shown = {
        "time of a training step": re.findall(r"^\| (?:one|two) threads? each.*?\|(.*)\|$", page, re.MULTILINE),
        "engine operations": re.findall(r"^\| MXNet 1.9.1 / weftplan, \d workers?.*?\|(.*)\|$", page, re.MULTILINE),
    }
    for row, lines in shown.items():
        numbers = sorted(float(number) for line in lines for number in re.findall(r"[\d.]+", line))
        least, most = (f"{number:.2f}" if number < 1.5 else f"{number:.1f}" for number in (numbers[0], numbers[-1]))
        assert cells("README.md", row) == f"{least} to {most}"
