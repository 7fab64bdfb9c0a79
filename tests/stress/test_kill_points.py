"""Training that is killed at random moments and resumed ends with the bits of an undisturbed run."""

import subprocess
import sys

import pytest


def run_kill_points(seed, count):
    """Check that ``tests.stress.kill_points`` succeeds in its own process, which must fork before it has threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.kill_points", str(seed), str(count)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}: {count} processes killed" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="fork and SIGKILL")
def test_six_kill_points():
    """Trainings that are killed six times in total, and resumed, end with the bits of undisturbed runs."""
    run_kill_points(0, 6)


@pytest.mark.stress
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kill_points(seed):
    """Trainings of all kinds, killed a hundred times in total and resumed, end with the bits of undisturbed runs."""
    run_kill_points(seed, 100)
