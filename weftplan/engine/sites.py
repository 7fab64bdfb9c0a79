"""Where operations were pushed: code object and instruction, made into ``file:line`` only when an error needs it."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

Site = tuple[CodeType, int] | None
"""Code object and instruction offset of a push, None when unknown."""

_PACKAGE = __file__.rsplit("engine", 1)[0]
internal: dict[str, bool] = {}
"""File name -> inside this package. Only grows, by as many entries as there are files that push."""


def is_internal(filename: str) -> bool:
    """True for files of this package: the interesting line is the user's."""
    known = internal.get(filename)
    if known is None:
        known = internal[filename] = filename.startswith(_PACKAGE)
    return known


def push_site(depth: int = 2) -> Site:
    """Code and instruction of the innermost frame outside this package."""
    frame: Any = sys._getframe(depth)
    code = frame.f_code
    while True:
        name = code.co_filename
        known = internal.get(name)
        if not (is_internal(name) if known is None else known) or frame.f_back is None:
            return code, frame.f_lasti
        frame = frame.f_back
        code = frame.f_code


def site_text(site: Site) -> str:
    """``file:line`` of a site.

    >>> site_text(None)
    'an unknown line'
    """
    if site is None:
        return "an unknown line"
    code, lasti = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= lasti < end and number is not None:
            line = number
            break
    return f"{code.co_filename}:{line}"
