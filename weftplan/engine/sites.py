"""Push sites: code object and instruction, resolved to ``file:line`` only for a message.

Any thread may call these functions. The only state is a cache of file names; concurrent threads store equal entries.
"""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

Site = tuple[CodeType, int] | None
"""Code object and instruction offset of a push; None if unknown."""

_PACKAGE = __file__.rsplit("engine", 1)[0]
_INTERNAL_FOLDERS = tuple(f"{_PACKAGE}{folder}{os.sep}" for folder in ("executor", "kvstore", "ndarray"))
USER, FOR_USER, INTERNAL = range(3)
"""Origin of a push: user code; the package for a user's function (a task); the package for itself."""
_origins: dict[str, int] = {}
"""Cache of origins by file name. It grows only by the number of files that push."""


def origin(filename: str) -> int:
    """Return the origin of pushes from a source file: USER, FOR_USER or INTERNAL."""
    cached = _origins.get(filename)
    if cached is None:
        cached = (
            INTERNAL if filename.startswith(_INTERNAL_FOLDERS) else FOR_USER if filename.startswith(_PACKAGE) else USER
        )
        _origins[filename] = cached
    return cached


def push_site(depth: int = 2) -> Site:
    """Return code and instruction of the innermost frame outside this package."""
    frame: Any = sys._getframe(depth)
    code = frame.f_code
    while True:
        name = code.co_filename
        cached = _origins.get(name)
        if not (origin(name) if cached is None else cached) or frame.f_back is None:
            return code, frame.f_lasti
        frame = frame.f_back
        code = frame.f_code


def site_text(site: Site) -> str:
    """Return ``file:line`` of a site.

    >>> site_text(None)
    'an unknown line'
    """
    if site is None:
        return "an unknown line"
    file, line = site_line(site)
    return f"{file}:{line}"


def site_line(site: Site) -> tuple[str, int]:
    """Return the file name and line of a site; ``("<unknown>", 1)`` for an unknown one, as ``warnings`` does."""
    if site is None:
        return "<unknown>", 1
    code, lasti = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= lasti < end and number is not None:
            line = number
            break
    return code.co_filename, line
