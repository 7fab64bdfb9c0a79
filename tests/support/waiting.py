"""Waits of tests: for the end of all operations, and for a condition."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import weftplan as mx


def settled() -> None:
    """Collect garbage, and wait until all operations have ended and dead arrays are freed."""
    gc.collect()
    mx.nd.waitall()


def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` is true; fail after a minute."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()
