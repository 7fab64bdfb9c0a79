"""Parsing of sizes such as ``2GB``, for arguments, settings and the command line.

This module touches no device. Any thread may call :func:`parse_bytes`.
"""

from __future__ import annotations

import re

from weftplan.errors import PlanError

_UNITS = {
    "": 1,
    "b": 1,
    **{prefix + tail: 1000**power for power, prefix in enumerate("kmgt", 1) for tail in ("", "b")},
    **{prefix + tail: 1024**power for power, prefix in enumerate("kmgt", 1) for tail in ("i", "ib")},
}
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e\+?([0-9]{1,2}))?\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Return the bytes of a size such as ``2GB``, ``1.5 GiB``, ``8Gi``, ``8e9``, ``800m`` or 4096, ignoring case.

    ``k``, ``M``, ``G``, ``T`` are powers of 1000; ``Ki`` to ``Ti`` are powers of 1024; a ``B`` may follow.
    Fractions of a byte are dropped.

    Raises:
        PlanError: the argument is not a positive size.

    >>> parse_bytes("2GB"), parse_bytes("1.5 GiB"), parse_bytes("8e9"), parse_bytes(4096)
    (2000000000, 1610612736, 8000000000, 4096)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        form = _FORM.fullmatch(text) if isinstance(text, str) else None
        unit = _UNITS.get(form.group(3).lower()) if form else None
        if form is None or unit is None:
            raise PlanError(f"expected a number of bytes such as 2GB, 1.5GiB or 4096; got {text!r}")
        integer, _, part = form.group(1).partition(".")
        # Integer arithmetic: a float would round large sizes.
        value = int(integer + part) * 10 ** int(form.group(2) or "0") * unit // 10 ** len(part)
    if value <= 0:
        raise PlanError(f"expected a positive number of bytes, got {text!r}")
    return value
