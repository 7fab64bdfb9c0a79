"""Progress of long loops: a live line on a terminal or in a notebook, periodic lines in a pipe.

A loop shows its progress once it has run for a second. The line goes to stderr and is erased at the end.
``WEFTPLAN_PROGRESS=0``, :func:`turn_off` or ``progress=False`` of a call turns it off. A log that shows training
messages turns it off too, because they would cut through the line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TextIO, TypeVar

from weftplan import config
from weftplan.support.package_log import is_on_screen

PATIENCE = 1.0
"""Seconds after which a live line appears."""
PERIOD = 0.1
"""Seconds between two updates of a live line."""
LINE_PERIOD = 10.0
"""Seconds between two lines in a pipe."""
WIDTH = 80
"""Columns of a notebook."""
LONG = 200
"""Columns of a line in a pipe."""
Item = TypeVar("Item")


class _Switch:
    """Whether this process shows progress."""

    on = True


_switch = _Switch()
_hidden = threading.local()


def turn_off() -> None:
    """Show no progress in this process from now on."""
    _switch.on = False


def turn_on() -> None:
    """Show progress again."""
    _switch.on = True


@contextmanager
def hidden() -> Iterator[None]:
    """Hide the progress of this thread's loops in the block, because their caller shows a line of its own."""
    mine = vars(_hidden)  # of this thread, even if another thread closes a generator suspended in the block
    mine["count"] = mine.get("count", 0) + 1
    try:
        yield
    finally:
        mine["count"] -= 1


def is_shown(wish: bool | None = None) -> bool:
    """Return whether a loop shows its progress; ``wish`` is the caller's choice, None for the default."""
    if not _switch.on or vars(_hidden).get("count", 0):
        return False
    if wish is not None:
        return wish
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0":  # only rank 0 of several processes shows progress
        return False
    return bool(config.get("WEFTPLAN_PROGRESS")) and not is_on_screen()


def width_of(stream: TextIO) -> int | None:
    """Return a stream's terminal width in columns; None for a pipe, a file, or a terminal that cannot rewrite a line.

    ``COLUMNS`` takes precedence, as in other programs. ``TERM=dumb`` means that a line cannot be rewritten.
    """
    try:
        if not stream.isatty() or os.environ.get("TERM") == "dumb":
            return None
        columns = os.environ.get("COLUMNS", "")
        return (
            int(columns) if columns.isdigit() and int(columns) else os.get_terminal_size(stream.fileno()).columns or 80
        )
    except (OSError, ValueError, AttributeError):
        return None


def live_width(stream: TextIO) -> int | None:
    """Return the width of a rewritable line: the columns of a terminal or of a notebook cell, else None."""
    width = width_of(stream)
    if width is None and type(stream).__module__.partition(".")[0] == "ipykernel":
        return WIDTH
    return width


class LiveLine:
    """A progress line that is rewritten in place. One thread uses it at a time.

    Args:
        stream: default: stderr.
        patience: seconds before the line appears.
        lines: write a new line every :data:`LINE_PERIOD` seconds if the stream cannot rewrite a line.
    """

    def __init__(self, stream: TextIO | None = None, *, patience: float = 0.0, lines: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._lines = lines
        time_s = time.perf_counter()
        self._live_at, self._line_at = time_s + patience, time_s + LINE_PERIOD
        self._shown = 0
        """Characters now on the line."""

    def update(self, text: Callable[[int], str]) -> None:
        """Show ``text(columns)`` if the next update is due."""
        time_s = time.perf_counter()
        if time_s < self._live_at:
            return
        width = live_width(self._stream)
        if width is not None:
            self._live_at = time_s + PERIOD
            self.clear()
            line = text(width - 1)[: width - 1]
            self._write(line)
            self._shown = len(line)
        elif self._lines and time_s >= self._line_at:
            self._line_at = time_s + LINE_PERIOD
            self._write(f"{text(LONG)}\n")
        else:
            self._live_at = min(time_s + PERIOD, self._line_at) if self._lines else time_s + PERIOD

    def clear(self) -> None:
        """Erase the line, so that other text can be written."""
        if self._shown:
            terminal = width_of(self._stream) is not None
            self._write("\r\x1b[K" if terminal else f"\r{' ' * self._shown}\r")  # notebook cells know no other code
            self._shown = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the stream or its reader is closed: do not fail the loop
            self._live_at = self._line_at = float("inf")


def watching(text: str, *, long: bool = True) -> AbstractContextManager[Progress | None]:
    """Return a :class:`Progress` that a thread updates, or a null context if the block is known to be short."""
    return Progress(text, watch=True) if long else nullcontext()


class Progress:
    """``with Progress("score", 40) as progress:`` and ``progress.step()`` after each of 40 batches.

    Args:
        text: the name of the task.
        total: the number of steps, if known.
        unit: the unit of a step, in the plural.
        show: as ``wish`` of :func:`is_shown`.
        watch: update the line from a thread, for a task that cannot call :meth:`step`; :meth:`say` changes the text.
    """

    def __init__(
        self,
        text: str,
        total: int | None = None,
        *,
        unit: str = "batches",
        show: bool | None = None,
        watch: bool = False,
    ) -> None:
        self._text, self._total, self._unit, self._watch = text, total, unit, watch
        self._count = 0
        self._start = time.perf_counter()
        self._line = LiveLine(patience=PATIENCE, lines=True) if is_shown(show) else None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Change the text of the line."""
        self._text = text

    def step(self, count: int = 1) -> None:
        """Count completed steps."""
        self._count += count
        if self._line is not None and self._thread is None:
            self._line.update(self._shown)

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items and count one step after each."""
        with self:
            for item in items:
                yield item
                self.step()

    def _shown(self, width: int) -> str:
        seconds = time.perf_counter() - self._start
        if not self._count:
            return f"{self._text} … {seconds:.0f} s"
        of = "" if self._total is None else f" of {self._total:,}"
        estimate = ""
        if self._total is not None and self._total > self._count:
            estimate = f", {seconds * (self._total - self._count) / self._count:.0f} s left"
        return f"{self._text}: {self._count:,}{of} {self._unit}, {self._count / max(seconds, 1e-9):,.1f}/s{estimate}"

    def __enter__(self) -> Progress:
        if self._line is not None:
            self._hiding = hidden()
            self._hiding.__enter__()
        if self._watch and self._line is not None:
            self._thread = threading.Thread(target=self._write, name="weftplan-progress", daemon=True)
            self._thread.start()
        return self

    def _write(self) -> None:
        assert self._line is not None
        while not self._ended.wait(0.2):
            self._line.update(self._shown)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._line is not None:
            self._line.clear()
            self._hiding.__exit__(None, None, None)
