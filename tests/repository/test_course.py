"""The course module: its grader passes the solution, and fails the empty exercise and each usual mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COURSE = Path(__file__).parents[2] / "examples" / "course"
MISTAKES = {
    "inputs alone": "return [set(step.inputs) for step in plan.steps]",
    "serial": "return [set(range(k)) for k in range(len(plan.steps))]",
    "makers without readers": "return [set(step.inputs) | {i for i in range(k) if plan.share_bytes(i, k)}"
    " for k, step in enumerate(plan.steps)]",
}


def grade(answer: Path) -> subprocess.CompletedProcess[str]:
    """Run the grader on a file."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(COURSE / "grade.py")]
    environment = {**os.environ, "EXERCISE": str(answer), "PYTHONPATH": str(COURSE)}
    return subprocess.run(command, cwd=COURSE, env=environment, capture_output=True, text=True)


def test_the_solution_passes() -> None:
    """The solution passes every check of the grader."""
    done = grade(COURSE / "solution.py")
    assert done.returncode == 0, done.stdout
    assert "40 passed" in done.stdout


def test_the_empty_exercise_fails() -> None:
    """The exercise as students get it fails, and its message asks the question of the exercise."""
    done = grade(COURSE / "exercise.py")
    assert "40 failed" in done.stdout
    assert "which earlier steps use the bytes" in done.stdout


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_fails(name: str, tmp_path: Path) -> None:
    """The grader refuses rules that order too little or too much."""
    answer = tmp_path / "answer.py"
    answer.write_text(f"def before(plan):\n    {MISTAKES[name]}\n")
    assert grade(answer).returncode == 1


def test_the_demonstration_shows_the_fault() -> None:
    """The engine's own program prints right and wrong results of one plan under several orders."""
    done = subprocess.run([sys.executable, str(COURSE / "step_engine.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1608 bytes, 2424 without sharing")
    assert "14950.0" in done.stdout
    assert "wrong: two results met" in done.stdout


def test_files_of_the_lecture_are_short() -> None:
    """The two files to read in the lecture have at most 100 lines."""
    for name in ("memory_plan.py", "step_engine.py"):
        assert len((COURSE / name).read_text().splitlines()) <= 100
