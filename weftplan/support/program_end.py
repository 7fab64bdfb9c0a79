"""How the program of this process ends: in good order, or by an exception or a status that says that it failed.

The interpreter keeps an exception (``sys.last_value``), but not a ``sys.exit(3)``: functions that run at exit cannot
tell it from an end in good order. ``weftplan launch`` therefore runs programs in :mod:`weftplan.cli.launch.rank`, which
notes their end here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

MOST = 200
"""Letters of a reason at most."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a program: its exit status, and in one line why it is not 0."""

    status: int
    why: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> End:
        """The end of a program whose main module raised ``error``, or nothing."""
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
"""The end that :func:`note` was told."""
status_is_told: list[bool] = []
"""Not empty if whatever has started this process reads its status elsewhere, so that it may exit with 0."""


def note(end: End) -> None:
    """Note how the main program has ended; called before whatever runs at exit."""
    _noted[:] = [end]


def failure() -> str | None:
    """Why this program fails, in one line; None while it runs, and for one that has ended in good order.

    An exception that is being handled counts: a ``finally`` that closes a store is run by what ends the program.
    ``StopIteration`` does not, which says that there are no more batches.
    """
    if _noted:
        return _noted[0].why or None
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        error = sys.exc_info()[1]
        if isinstance(error, StopIteration):
            return None
    return End.of(error).why or None


def _line(text: str) -> str:
    first = text.splitlines()[0]
    return first if len(first) <= MOST else first[: MOST - 3] + "..."
