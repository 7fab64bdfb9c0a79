"""A number of bytes as people write it, in arguments, settings and on the command line: one rule for all of them.

This file reads text alone and touches no device. Any thread may call this.
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
    """Return the bytes meant by ``2GB``, ``1.5 GiB``, ``8Gi``, ``8e9``, ``800m`` or a plain integer.

    ``k``, ``M``, ``G``, ``T`` are powers of 1000, ``Ki`` and so on of 1024; a ``B`` may follow. Capitals do not matter.
    Fractions of a byte are dropped.

    Raises:
        PlanError: the text is no positive size.

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
        whole, _, part = form.group(1).partition(".")
        # In integers: a float would lose bytes of large sizes.
        value = int(whole + part) * 10 ** int(form.group(2) or "0") * unit // 10 ** len(part)
    if value <= 0:
        raise PlanError(f"expected a positive number of bytes, got {text!r}")
    return value
