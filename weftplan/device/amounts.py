"""Byte counts as text: budgets such as ``2GB`` or ``80%`` of a device's memory, and amounts such as ``1.50 KiB``.

The module has no state; any thread may call it.
"""

from __future__ import annotations

import re

from weftplan.device import registry
from weftplan.device.context import Context
from weftplan.device.sizes import parse_bytes
from weftplan.errors import PlanError

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which gets a plural ``s`` unless the number is 1.

    >>> counted(1, "node"), counted(2179, "node")
    ('1 node', '2,179 nodes')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def bytes_of(budget: int | str, context: Context | None = None) -> int:
    """Return the bytes of a budget: ``2GB``, ``1.5 GiB``, an integer, or ``80%`` of the memory of ``context``.

    ``context`` defaults to ``cpu(0)``, whose memory is that of the machine, or of the container if that is less.

    Raises:
        PlanError: the budget is not a positive size, or not above 0 and at most 100 %.
        DeviceError: the budget is a percentage and the device is missing.

    >>> bytes_of("2GB"), bytes_of(4096)
    (2000000000, 4096)
    >>> bytes_of("50%", Context("sim", 0)) == registry.get(Context("sim", 0)).memory_info()[1] // 2
    True
    """
    share = _SHARE.fullmatch(budget) if isinstance(budget, str) else None
    if share is None:
        return parse_bytes(budget)
    percent = float(share.group(1))
    if not 0 < percent <= 100:
        raise PlanError(f"a budget in percent must be above 0 % and at most 100 %, got {budget!r}")
    device = registry.get(Context("cpu", 0) if context is None else context)
    return int(device.memory_info()[1] * percent / 100)


def amount(nbytes: float) -> str:
    """Return a number of bytes as text, in units of powers of 1024.

    >>> amount(1536), amount(10)
    ('1.50 KiB', '10 B')
    """
    scale, unit = unit_of(nbytes)
    return f"{nbytes / scale:.2f} {unit}" if unit != "B" else f"{nbytes:.0f} B"


def pasteable(nbytes: int) -> str:
    """Return a number of bytes as digits that can be pasted as a budget, followed by :func:`amount`.

    >>> pasteable(1536)
    '1536 (1.50 KiB)'
    """
    return f"{nbytes} ({amount(nbytes)})"


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return (bytes, name) of the largest unit that is not larger than ``nbytes``.

    >>> unit_of(5 << 20)
    (1048576, 'MiB')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 1024**power:
            return 1024**power, unit
    return 1, "B"
