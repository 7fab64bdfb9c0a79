"""Messages of C and C++ libraries on standard error, discarded for a moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def without_stderr() -> Iterator[None]:
    """Discard the output of all threads on standard error within the ``with`` block."""
    saved = -1
    with suppress(OSError):  # without a standard error there is nothing to discard
        saved = os.dup(2)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
    try:
        yield
    finally:
        if saved >= 0:
            os.dup2(saved, 2)
            os.close(saved)
