"""Links between workers: two levels, devices of a machine and machines. Pure data, from names or numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from weftplan.errors import KVStoreError, did_you_mean


@dataclass(frozen=True, slots=True)
class Link:
    """What joins one worker, or one machine, to the others.

    Attributes:
        latency: seconds from the beginning of a message to its first byte at the other end.
        bandwidth: bytes a second in each direction.
        overhead: seconds that each message keeps its sender busy.
        shared: all workers together have this bandwidth, as the processes of one machine have its memory's.
    """

    latency: float
    bandwidth: float
    overhead: float = 1e-6
    shared: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.latency < float("inf") and 0 < self.bandwidth < float("inf") and 0 <= self.overhead < 1):
            raise KVStoreError(f"a link needs a latency >= 0, a bandwidth > 0 and an overhead >= 0 seconds, got {self}")


@dataclass(frozen=True, slots=True)
class Topology:
    """Machines of ``per_machine`` workers each: ``inner`` joins those of one machine, ``outer`` the machines.

    ``fixed``: seconds that each exchange takes before any data moves, where they have been measured, and ``per_key``
    those that each gradient takes beside it: to be pushed and pulled, and to update its weight where that is counted.
    ``per_byte``: those of each byte of the gradients beside the links: shares are added up and results copied, on the
    cores that workers have where it is measured; how many workers there are matters little. 0 where links are given.
    ``busy``: exchanges need the cores that compute, so that nothing is exchanged beside backward.
    """

    name: str
    inner: Link
    outer: Link
    per_machine: int
    fixed: float = 0.0
    per_key: float = 0.0
    per_byte: float = 0.0
    busy: bool = False


PRESETS: dict[str, Link] = {
    "nvlink4": Link(2e-6, 370e9),
    "pcie4": Link(8e-6, 13e9, shared=True),
    "memory": Link(5e-6, 8e9, 5e-6, shared=True),
    "10gbe": Link(30e-6, 1.15e9, 3e-6),
    "25gbe": Link(20e-6, 2.9e9, 3e-6),
    "100gbe": Link(5e-6, 11.5e9, 2e-6),
    "ib400": Link(2.5e-6, 46e9),
}
"""Links by name: from data sheets, and what their users report of them, at most a quarter off; none was measured here.
``nvlink4`` is the bus bandwidth of NCCL on eight H100, ``pcie4`` what MXNet's users had between GPUs below one switch,
networks have 92 % of their line rate. ``memory`` stands for processes of one machine: measure yours."""

_FORM = "LINK, or NxINNER+OUTER with N workers a machine, such as 8xnvlink4+100gbe"


def parse_topology(text: str) -> Topology:
    """A topology from ``100gbe``, ``8xnvlink4+100gbe``, or with numbers, ``4x(5us,12GB/s)+(20us,1.1GB/s)``.

    Raises:
        KVStoreError: another form, an unknown name, or a number that makes no sense.

    >>> parse_topology("8xnvlink4+100gbe").per_machine
    8
    >>> parse_topology("(20us,1.1GB/s)").outer.bandwidth
    1100000000.0
    """
    found = re.fullmatch(r"(?:(\d+)x([^+]+)\+)?([^+]+)", text.strip())
    if found is None:
        raise KVStoreError(f"a topology is {_FORM}; got {text!r}")
    count, inner, outer = found.groups()
    if count is None:
        link = _link(outer, text)
        return Topology(text, link, link, 1)
    if not 1 <= int(count) <= 1 << 16:
        raise KVStoreError(f"a machine has 1 to 65,536 workers, got {count} in {text!r}")
    return Topology(text, _link(inner, text), _link(outer, text), int(count))


def _link(text: str, whole: str) -> Link:
    text = text.strip()
    numbers = re.fullmatch(r"\(\s*([\d.]+)\s*us\s*,\s*([\d.]+)\s*GB/s\s*\)", text)
    if numbers is not None:
        try:
            latency, bandwidth = map(float, numbers.groups())
        except ValueError:
            raise KVStoreError(f"a link is (LATENCY us,BANDWIDTH GB/s), got {text!r} in {whole!r}") from None
        return Link(latency / 1e6, bandwidth * 1e9)
    link: Any = PRESETS.get(text.lower())
    if link is None:
        raise KVStoreError(
            f"unknown link {text!r} in {whole!r}: {did_you_mean(text.lower(), list(PRESETS))}known are "
            f"{', '.join(PRESETS)}, and (5us,12GB/s) gives one by numbers; a topology is {_FORM}"
        )
    found: Link = link
    return found
