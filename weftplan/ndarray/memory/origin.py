"""The origin of an allocation: an operator or function and the user's line, formatted on first read."""

from __future__ import annotations

import sys
import threading
from typing import Any

from weftplan.engine.sites import Site, _origins, origin, site_text

_LEAST = 16384
"""Bytes from which the user's line is recorded. For smaller arrays the search takes longer than making the array, and
reports name only the largest allocations."""


class Origin:
    """``str(origin)`` is ``NAME at FILE:LINE``."""

    __slots__ = ("name", "site")

    def __init__(self, name: str, site: Site) -> None:
        self.name = name
        self.site = site

    def __str__(self) -> str:
        return f"{self.name} at {site_text(self.site)}"

    __repr__ = __str__


def origin_of(name: str | None, nbytes: int) -> object:
    """Return the origin of memory that a function of this package is allocating.

    It holds ``name``, or else that function's name, and the line of the innermost caller outside the package. Small
    allocations have only a name.
    """
    if nbytes < _LEAST:
        return name or "a small array"
    frame: Any = sys._getframe(2)
    code, inner = frame.f_code, None
    while True:
        filename = code.co_filename
        cached = _origins.get(filename)
        if not (origin(filename) if cached is None else cached):
            break
        inner, frame = code, frame.f_back
        if frame is None:
            return name
        code = frame.f_code
    function = name or (inner.co_name if inner is not None else "memory")
    if filename == threading.__file__:  # a worker: there is no user's line
        return function
    return Origin(function, (code, frame.f_lasti))
