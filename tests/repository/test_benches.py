"""Benches: collection by pytest, scripts without the libraries they compare with, and the tables of speed."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import script

ROOT = Path(__file__).parents[2]
PEERS = ("dask", "mxnet", "tensorflow", "torch", "cupy")
WITHOUT_PEERS = (
    f"import runpy, sys; sys.modules.update(dict.fromkeys({PEERS})); del sys.argv[0]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
SUBJECTS = {"bench_torch.py"}
"""Scripts that cannot start without the library that they measure."""


@pytest.fixture(scope="module")
def figures_module() -> ModuleType:
    """Return the module ``bench/figures.py``."""
    module: ModuleType = script("refresh").figures
    return module


def run_record(processor: str, date: str, figure: float, load: float = 0.0) -> dict[str, Any]:
    """Return a record of a bench run with one figure of the engine."""
    return {"processor": processor, "date": date, "load": load, "figures": {"engine": {"row": {"chain": figure}}}}


def test_a_cell_has_the_range_over_processors(figures_module: ModuleType) -> None:
    """A cell has the range over processors, with the latest run of each; a cell without figures is empty."""
    runs = [run_record("A", "2026-01-01", 9.0), run_record("B", "2026-01-02", 2.5), run_record("A", "2026-01-03", 1.25)]
    head, _, row, _, command, source, _ = figures_module.markdown(runs).split("\n")
    assert head.startswith("| engine")
    assert row == "| row (1) |  | 1.25 to 2.5 |  |  |"
    assert command == "(1) `python bench/bench_engine.py --mxnet-python PATH`  "
    assert source.endswith("A, 2026-01-03; B, 2026-01-02.")


def test_each_row_has_its_command(figures_module: ModuleType) -> None:
    """Each row of the data file has the number of its command, in a note of at most 80 columns."""
    for table in figures_module.TABLES:
        runs = [one for one in figures_module.load() if table.key in one["figures"]]
        lines = figures_module.markdown(
            [{**one, "figures": {table.key: one["figures"][table.key]}} for one in runs]
        ).split("\n")
        notes = dict(re.findall(r"^\((\d)\) `(.*)`  $", "\n".join(lines), re.MULTILINE))
        for row in {row for one in runs for row in one["figures"][table.key]}:
            number = next(re.findall(r"\((\d)\) \|", line)[0] for line in lines if line.startswith(f"| {row} ("))
            assert notes[number] == table.command_of(row)
        assert all(len(line) <= 80 for line in lines if line.startswith("("))
        assert len(notes) == max(1, len(table.options))


def test_commands_of_rows_are_options_of_their_scripts(figures_module: ModuleType) -> None:
    """Each option in the commands of rows is an option of the script."""
    for command in {
        table.command_of(text) for table in figures_module.TABLES for text, _ in (*table.options, ("", ""))
    }:
        _, path, *options = command.split()
        shown = subprocess.run([sys.executable, path, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert all(one in shown.stdout for one in options if one.startswith("--")), command


def test_a_loaded_machine_is_named(figures_module: ModuleType) -> None:
    """A run under a load of more than one core is marked as loaded."""
    assert "A, 2026-01-01, loaded." in figures_module.markdown([run_record("A", "2026-01-01", 9.0, load=3.0)])


def test_the_page_needs_both_marks(figures_module: ModuleType) -> None:
    """A page without the end mark raises an error that names the mark."""
    with pytest.raises(ValueError, match="end of speed"):
        figures_module.filled(f"text {figures_module.BEGIN} text")


def test_the_tables_of_speed_are_fresh(figures_module: ModuleType) -> None:
    """The tables of speed are current, and a changed column title would be replaced."""
    text = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    assert "| chain |" in text
    stale = text.replace("| chain |", "| knot |")
    assert figures_module.filled(stale) == figures_module.filled(text) == text


def test_pytest_collects_benches_only_if_asked() -> None:
    """``pytest bench`` collects test_speed.py only, and ``pytest`` collects no bench."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(names) >= 15, done.stdout + done.stderr
    assert all(name.startswith("bench/test_speed.py::") for name in names)
    assert "bench" not in (ROOT / "pyproject.toml").read_text().partition("testpaths = ")[2].partition("\n")[0]


def test_benches_start_without_their_peers() -> None:
    """Each script prints its help in an interpreter without the libraries that it compares with."""
    names = sorted(path.name for path in (ROOT / "bench").glob("*.py") if "argparse" in path.read_text())
    names = [name for name in names if name not in SUBJECTS]
    assert "bench_engine.py" in names
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "bench")))}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_PEERS, f"bench/{name}", "--help"],
            cwd=ROOT,
            env={key: value for key, value in environment.items() if not key.startswith("OPENBLAS")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    failed = {name: process.communicate(timeout=100)[1] for name, process in zip(names, started, strict=True)}
    assert {name: failed[name] for name, process in zip(names, started, strict=True) if process.returncode} == {}


@pytest.mark.parametrize("installed", [False, True])
def test_the_engine_bench_skips_dask(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """The engine bench measures dask only if it is installed."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BENCH_PLACEMENT", "free")  # the bench changes this variable
    bench = importlib.import_module("bench_engine")
    called: list[str] = []

    def call(python: str, name: str, *_: object) -> dict[str, float]:
        called.append(name)
        return dict.fromkeys((*bench.SHAPES, "loop", "numpy_add"), 1.0)

    monkeypatch.setattr(bench, "call", call)
    monkeypatch.setattr(bench, "HAS_DASK", installed)
    bench.no_ops(argparse.Namespace(rounds=1, count=10, mxnet_python=None), "together")
    assert ("dask_engine.py" in called) is installed
    assert "weftplan_engine.py" in called
