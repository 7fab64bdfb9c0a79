"""Offload targets: memory for arrays that do not fit on a device, as the setting ``WEFTPLAN_SPILL`` lists them.

``host`` is page-locked host memory, ``file:FOLDER`` files in a folder, and ``peer`` another device of the same type. A
target may have a limit, in the units of ``sizes.py``: ``host:8GB,file:/tmp:50GiB,peer``. This module parses the text
and touches no device.
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
"""Pattern that distinguishes a size after a colon from the end of a folder's name; a bare number is a name."""


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """An offload target.

    Attributes:
        kind: ``"host"``, ``"file"`` or ``"peer"``.
        nbytes: limit in bytes; None for no limit.
        folder: folder of a ``file`` target, else empty.
    """

    kind: str
    nbytes: int | None = None
    folder: str = ""

    def contexts(self, context: Context, *, files: int, peers: Iterable[Context]) -> list[Context]:
        """Return the contexts to which this target offloads arrays of ``context``, in order of preference.

        ``host`` applies only to devices with streams (gpu, sim). ``peer`` gives those of ``peers`` that have the same
        type. A folder is ``file(files)``: ``files`` is the number of folders listed before this target.
        """
        if self.kind == "file":
            return [Context("file", files)]
        if self.kind == "host":
            return [Context("cpu_pinned", context.device_id)] if context.has_streams else []
        return [peer for peer in peers if peer.device_type == context.device_type and peer != context]


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of copies between a device and an offload target, in the slower direction."""

    bandwidth: float
    """Bytes per second."""
    latency: float = 1.0e-5
    """Seconds before the first byte."""

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of one copy of ``nbytes``."""
        return self.latency + nbytes / self.bandwidth

    @property
    def text(self) -> str:
        """Bandwidth and latency for reports."""
        return f"{self.bandwidth / 1e9:.1f} GB/s, {self.latency * 1e6:.0f} µs"


@lru_cache(maxsize=16)
def parse(text: str) -> tuple[OffloadTarget, ...]:
    """Return the offload targets that ``text`` lists, in order.

    ``true`` and ``1`` stand for ``host``; ``false``, ``0`` and an empty text for no target.

    >>> parse("host:1.5GB,file:/tmp:50GB,peer")[:2]  # doctest: +NORMALIZE_WHITESPACE
    (OffloadTarget(kind='host', nbytes=1500000000, folder=''),
     OffloadTarget(kind='file', nbytes=50000000000, folder='/tmp'))

    Raises:
        ConfigError: the text is not a list of offload targets; the message quotes the wrong part.
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
    path, _, size = folder.rpartition(":") if kind == "file" else ("", "", folder)
    if _SIZE.fullmatch(size):
        nbytes = _bytes(size, part, text)
    elif kind == "file":
        path = folder  # a folder without a limit, whatever colons it has
    elif size:
        raise ConfigError(f"the size {size!r} of {part!r} in {text!r} is not legal: write one such as 8GB or 500MB")
    if kind not in ("host", "file", "peer"):
        raise ConfigError(f"{part!r} in {text!r} is no offload target: expected {FORM}")
    if kind == "file" and not path:
        raise ConfigError(f"{part!r} in {text!r} names no folder: write file:FOLDER or file:FOLDER:SIZE")
    return OffloadTarget(kind, nbytes, path)


def _bytes(size: str, part: str, text: str) -> int:
    """Return the bytes of ``size``; raises ConfigError, with its own message for a size of 0."""
    try:
        return parse_bytes(size)
    except PlanError:
        if re.search("[1-9]", size):
            raise ConfigError(
                f"the size {size!r} of {part!r} in {text!r} is not legal: write one such as 8GB"
            ) from None
        raise ConfigError(f"the size of {part!r} in {text!r} is 0: leave the offload target out instead") from None
