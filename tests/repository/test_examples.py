"""The examples run, print the expected lines, and are listed on the page of examples."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from weftplan import engine, models

ROOT = Path(__file__).parents[2]
EXPECTED_OUTPUT = {
    "engine_in_100_lines.py": "['write a', 'read a, write b', 'write a again'] versions 2 1",
    "executorch_memory.py": "executorch: ",
    "fit_a_budget.py": "bit for bit",
    "leftover_model.py": "classes [",
    "overnight.py": "ended with the same weights, bit for bit",
    "planner_in_100_lines.py": "this planner 3,156,480 bytes; weftplan's match_range 3,156,480",
    "predict_workers.py": "4,096    100.18        25.97      99.8%       46  within+halving",
    "read_a_trace.py": "KVStoreReduce",
    "stencil_with_tasks.py": "both gave the same bits",
    "tinygrad_memory.py": "tinygrad: ",
    "two_devices.py": "gave the same weights, bit for bit",
}


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_an_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example runs without an error and prints the expected text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert EXPECTED_OUTPUT[name] in capsys.readouterr().out


def test_every_example_is_in_the_gallery() -> None:
    """docs/gallery.md names each example, and each example is tested."""
    page = (ROOT / "docs" / "gallery.md").read_text()
    files = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in files if f"examples/{name}" not in page} == set()
    assert set(EXPECTED_OUTPUT) | {"engine_pipeline.py", "feed_from_workers.py"} == files


def test_a_dataset_for_workers(tmp_path: Path) -> None:
    """The example gives the same weights with and without workers, and replaces a killed worker.

    It runs in a subprocess, since workers import the example.
    """
    script = str(ROOT / "examples" / "feed_from_workers.py")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "both learned the same weights, bit for bit" in done.stdout
    assert "another one went on: 16 batches of 16" in done.stdout


@pytest.mark.parametrize("name", ["engine", "planner"])
def test_a_hundred_lines(name: str) -> None:
    """The engine and planner examples have at most 100 lines."""
    assert len((ROOT / "examples" / f"{name}_in_100_lines.py").read_text().splitlines()) <= 100


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", models.names())
def test_the_short_planner_agrees_with_the_real_one(name: str, batch: int) -> None:
    """The example's peak equals that of ``match_range`` without the steps that the example omits, for each network."""
    example = runpy.run_path(str(ROOT / "examples" / "planner_in_100_lines.py"))
    shapes = models.input_shapes(name, batch)
    assert example["plan"](models.get(name), **shapes)[0] == example["reference"](models.get(name), shapes)


@pytest.mark.parametrize("seed", range(20))
def test_the_short_engine_agrees_with_the_real_one(seed: int) -> None:
    """Random programs of 200 operations give equal results on the example's engine and the ThreadedEngine."""
    example = runpy.run_path(str(ROOT / "examples" / "engine_in_100_lines.py"))
    rng = random.Random(seed)
    program = [(rng.sample(range(5), rng.randint(0, 3)), rng.sample(range(5), rng.randint(0, 2))) for _ in range(200)]
    short = run(program, example["Engine"](3), [example["Var"]() for _ in range(5)])
    with engine.using(engine.create("ThreadedEngine")) as real:
        assert short == run(program, real, [real.new_variable() for _ in range(5)])
    assert short[1] == [sum(place in writes for _, writes in program) for place in range(5)]


def run(program: list[tuple[list[int], list[int]]], on: Any, variables: list[Any]) -> tuple[list[int], list[int]]:
    """Run ``program`` and return (values, versions); operation ``n`` writes a hash of ``n`` and its inputs.

    Args:
        program: (reads, writes) of each operation, as indices of variables.
        on: the engine.
    """
    values = [0] * 5

    def step(number: int, reads: list[int], writes: list[int]) -> None:
        seen = hash((number, *(values[place] for place in reads)))
        if number % 7 == 0:
            time.sleep(0.0005)  # gives independent operations time to overtake
        for place in writes:
            values[place] = hash((values[place], seen))

    for number, (reads, writes) in enumerate(program):
        reads = [place for place in reads if place not in writes]
        call = partial(step, number, reads, writes)
        on.push(call, [variables[place] for place in reads], [variables[place] for place in writes])
    on.wait_for_all()
    return values, [variable.version for variable in variables]
