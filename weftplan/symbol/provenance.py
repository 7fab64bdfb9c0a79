"""The first caller outside this package, for error messages and warnings.

It is found by walking the calling thread's stack; this module keeps no state.
"""

from __future__ import annotations

import os
import sys
import warnings

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def caller() -> str | None:
    """Return ``file:line`` of the innermost frame outside weftplan; None if there is none.

    This takes a fraction of a microsecond: it follows frames and reads no source.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return f"{code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def warn(message: str) -> None:
    """Issue a UserWarning at the line of the innermost caller outside this package."""
    frame, level = sys._getframe(1), 2  # warnings counts this function as 1
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
