"""The outcome of this process's main program: success, an exception, or a non-zero exit status.

The interpreter keeps an exception (``sys.last_value``), but not a ``sys.exit(3)``: functions that run at exit cannot
distinguish it from success. ``weftplan launch`` therefore runs programs in :mod:`weftplan.cli.launch.rank`, which
records their outcome here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

LINE_LENGTH = 200
"""Maximum length of a reason, in characters."""


@dataclass(frozen=True, slots=True)
class End:
    """The outcome of a program: its exit status, and in one line why it is not 0."""

    status: int
    why: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> End:
        """Return the outcome of a program whose main module raised ``error`` (None: it raised nothing)."""
        if error is None:
            return cls(0)
        if isinstance(error, SystemExit):
            if error.code is None or error.code == 0:
                return cls(0)
            if isinstance(error.code, int):
                return cls(error.code & 255, f"sys.exit({int(error.code)})")
            return cls(1, _line(f"sys.exit: {error.code}"))
        name, text = type(error).__name__, str(error).strip()
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        return cls(status, _line(f"{name}: {text}" if text else name))


_noted: list[End] = []
"""The recorded outcome; empty until :func:`note` is called."""
status_is_told: list[bool] = []
"""Not empty if the parent process reads the status elsewhere, so that this process may exit with 0."""

unfinished: list[str] = []
"""Where training has stopped before its end, such as "in epoch 2, after 17 batches"; empty after its end."""
when_lost: list[Callable[[], object]] = []
"""Functions to call when this process learns that another one was lost."""
given_up: set[int] = set()
"""Ranks for which this process has waited in vain; the launcher ends them once all others have ended."""


def note(end: End) -> None:
    """Record how the main program has ended; called before the functions that run at exit."""
    _noted[:] = [end]


def failure() -> str | None:
    """Return why this program fails, in one line; None while it runs and after success.

    An exception that is being handled counts, because the exception that ends the program also runs a ``finally`` that
    closes a store. ``StopIteration`` does not count: it only means that there are no more batches.
    """
    if _noted:
        return _noted[0].why or None
    error = _uncaught()
    if error is None:
        error = sys.exc_info()[1]
        if isinstance(error, StopIteration):
            return None
    return End.of(error).why or None


def interrupted() -> bool:
    """Return whether Ctrl-C ended the main program: a ``KeyboardInterrupt`` that no code has caught.

    An interactive session goes on after Ctrl-C, so it never counts.
    """
    return not hasattr(sys, "ps1") and issubclass(type(_uncaught()), KeyboardInterrupt)


def _uncaught() -> BaseException | None:
    """Return the exception that ended the main program; None while it runs and after success."""
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def _line(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= LINE_LENGTH else line[: LINE_LENGTH - 3] + "..."
