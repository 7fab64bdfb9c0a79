"""The number of Python calls and files of a bind is bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_CALLS, MAX_FILES = 1520, 90


def test_a_small_bind_calls_few_functions() -> None:
    """Binding a small network in a new process takes at most 1,520 Python calls in at most 90 files."""
    shown = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "bind_calls.py"), "--most", "5"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.splitlines()
    calls, _, _, files, _ = shown[0].split()
    assert 300 < int(calls) <= MOST_CALLS
    assert 30 < int(files) <= MAX_FILES
    assert len(shown) == 6
