"""Training killed at random moments and resumed: the same bits."""

import subprocess
import sys

import pytest


def killed(seed, count):
    """Run the script in its own process, which forks before it has any thread."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.kill_points", str(seed), str(count)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}: {count} processes killed" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="fork and SIGKILL")
def test_six_kill_points():
    """One of each kind: killed once, resumed, the same bits."""
    killed(0, 6)


@pytest.mark.stress
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_kill_points(seed):
    """A long run."""
    killed(seed, 100)
