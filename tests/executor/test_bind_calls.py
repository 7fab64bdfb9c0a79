"""A bind of a small network calls few functions, so that what it costs stays in view."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_CALLS, MOST_FILES = 1200, 90


def test_a_small_bind_calls_few_functions() -> None:
    """Convolution, batch norm, relu, fully connected layer and softmax, counted in a process of its own."""
    shown = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "bind_calls.py"), "--most", "5"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.splitlines()
    calls, _, _, files, _ = shown[0].split()
    assert 300 < int(calls) <= MOST_CALLS
    assert 30 < int(files) <= MOST_FILES
    assert len(shown) == 6
