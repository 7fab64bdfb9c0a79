"""Ctrl-C while the command ``weftplan`` is being imported: the process ends with 130 and without a traceback.

``import weftplan`` imports this module first. It imports nothing that takes time, and does nothing in other programs.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in shells."""


def _is_command() -> bool:
    """Return whether this process runs ``weftplan`` or ``python -m weftplan``."""
    if sys.argv[:1] == ["-m"]:  # while Python imports the package of the module
        return "weftplan" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("weftplan") - 1] == "-m"
    return os.path.basename(sys.argv[0] if sys.argv else "").removesuffix(".exe") == "weftplan"


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    sys.stderr.write("interrupted\n")
    raise SystemExit(INTERRUPTED)


if sys.excepthook is sys.__excepthook__ and _is_command():
    sys.excepthook = _show
