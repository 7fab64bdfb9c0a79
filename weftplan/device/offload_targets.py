"""Offload targets for bytes that do not fit on a device, as ``WEFTPLAN_SPILL`` lists them.

``host`` is page-locked memory of the host, ``file:FOLDER`` a file that is unlinked once it is open, and ``peer``
another device of the same kind. Each may have a limit: ``host:8GB,file:/tmp:50GiB,peer``, in the units of
``amounts.py``. This file parses the text and touches no device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from weftplan.device.context import Context
from weftplan.device.sizes import parse_bytes
from weftplan.errors import ConfigError, PlanError

FORM = "true, false, or offload targets such as host:8GB,file:/tmp:50GB,peer"
_SIZE = re.compile(r"[0-9.]+(?: *(?:[KMGT]i?B?|B)|e\+?[0-9]+)", re.IGNORECASE)
"""Pattern of a size, as opposed to the end of a folder's name: a bare number counts as a name."""


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """Offload target. ``kind`` is ``host``, ``file`` or ``peer``; ``nbytes`` is its limit, None without a limit."""

    kind: str
    nbytes: int | None = None
    folder: str = ""

    def contexts(self, context: Context, *, files: int, peers: Iterable[Context]) -> list[Context]:
        """Return the contexts of this target for results of ``context``, in order of preference.

        Host memory is no target for a host, and a device none for itself. A folder is ``file(files)``: ``files`` is the
        number of folders before it.
        """
        if self.kind == "file":
            return [Context("file", files)]
        if self.kind == "host":
            return [Context("cpu_pinned", context.device_id)] if context.has_streams else []
        return [peer for peer in peers if peer.device_type == context.device_type and peer != context]


@dataclass(frozen=True, slots=True)
class Link:
    """Link between a device and an offload target, as fast as its slower direction."""

    bandwidth: float
    """Bytes a second."""
    latency: float = 1.0e-5
    """Seconds before the first byte."""

    def seconds(self, nbytes: int) -> float:
        """Seconds of one copy."""
        return self.latency + nbytes / self.bandwidth

    @property
    def text(self) -> str:
        """Bandwidth and latency for reports."""
        return f"{self.bandwidth / 1e9:.1f} GB/s, {self.latency * 1e6:.0f} µs"


@lru_cache(maxsize=16)
def parse(text: str) -> tuple[OffloadTarget, ...]:
    """Return the offload targets of a setting, in order.

    ``true`` and ``1`` stand for ``host``; ``false``, ``0`` and an empty text for none.

    >>> parse("host:1.5GB,file:/tmp:50GB,peer")[:2]  # doctest: +NORMALIZE_WHITESPACE
    (OffloadTarget(kind='host', nbytes=1500000000, folder=''),
     OffloadTarget(kind='file', nbytes=50000000000, folder='/tmp'))

    Raises:
        ConfigError: the text is no such list; says which part is wrong.
    """
    lowered = text.strip().lower()
    if lowered in ("", "false", "0"):
        return ()
    if lowered in ("true", "1"):
        return (OffloadTarget("host"),)
    return tuple(_target(part.strip(), text) for part in text.split(","))


def _target(part: str, text: str) -> OffloadTarget:
    kind, _, folder = part.partition(":")
    nbytes: int | None = None
    place, _, size = folder.rpartition(":") if kind == "file" else ("", "", folder)
    if _SIZE.fullmatch(size):
        nbytes = _bytes(size, part, text)
    elif kind == "file":
        place = folder  # a folder without a limit, whatever colons it has
    elif size:
        raise ConfigError(f"the size {size!r} of {part!r} in {text!r} is not legal: write one such as 8GB or 500MB")
    if kind not in ("host", "file", "peer"):
        raise ConfigError(f"{part!r} in {text!r} is no offload target: expected {FORM}")
    if kind == "file" and not place:
        raise ConfigError(f"{part!r} in {text!r} names no folder: write file:FOLDER or file:FOLDER:SIZE")
    return OffloadTarget(kind, nbytes, place)


def _bytes(size: str, part: str, text: str) -> int:
    """The bytes that a size means; 0 would be an offload target that takes nothing."""
    try:
        return parse_bytes(size)
    except PlanError:
        if re.search("[1-9]", size):
            raise ConfigError(
                f"the size {size!r} of {part!r} in {text!r} is not legal: write one such as 8GB"
            ) from None
        raise ConfigError(f"the size of {part!r} in {text!r} is 0: leave the offload target out instead") from None
