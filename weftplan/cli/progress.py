"""A line on the terminal while something takes longer than a second.

A :class:`Progress` belongs to one block of work; while that lasts, a thread of its own writes the line.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from weftplan.cli.columns import output_width

PATIENCE = 1.0
"""Seconds after which the line appears."""


class Progress:
    """``with Progress("planning resnet50") as progress:`` writes to stderr, if that is a terminal, and wipes it again.

    A thread writes the line, because the work has no place to do so; ``say`` changes it from any thread.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._done = threading.Event()
        self._width = output_width(stderr=True)
        self._thread: threading.Thread | None = None
        self._stream: Any = sys.stderr

    def say(self, text: str) -> None:
        """What the line says from now on."""
        self._text = text

    def __enter__(self) -> Progress:
        if self._width is not None:
            self._thread = threading.Thread(target=self._show, name="weftplan-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        start = time.monotonic()
        shown = False
        assert self._width is not None
        while not self._done.wait(PATIENCE if not shown else 0.2):
            line = f"{self._text} … {time.monotonic() - start:.0f} s"
            self._stream.write(f"\r\x1b[K{line[: self._width - 1]}")
            self._stream.flush()
            shown = True
        if shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
