"""The schedule of copies on the wires of an interconnect, in virtual time.

Simulated devices time their copies by it, and a kvstore chooses among exchanges by it. This module takes no lock.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from weftplan.device.links import Interconnect


class Wires:
    """Schedule of copies on each wire, in virtual time.

    Each copy takes the first gap that is long enough on all its wires. Wires therefore stay free for other copies while
    a copy that was enqueued early waits for its event.
    """

    def __init__(self) -> None:
        self._links: Interconnect | None = None
        self._busy: list[list[tuple[float, float]]] = []
        """Per wire, sorted (begin, end) of its last copies; the first entry covers all earlier copies."""

    def copy(self, links: Interconnect, source: int, target: int, nbytes: int, begin: float) -> float:
        """Schedule a copy that may begin at ``begin`` and return the virtual second at which it ends.

        A copy within a device, or of a device that ``links`` does not know, uses no wire.
        """
        if links is not self._links:
            self._links, self._busy = links, [[(0.0, 0.0)] for _ in links.wires]
        if source == target or max(source, target) >= links.count:
            return begin + WITHIN_S
        for hop in links.hops(source, target):
            spans = [(self._busy[wire], nbytes / links.wires[wire]) for wire in hop.wires]
            previous = -1.0
            while previous != begin:  # until all wires of the hop are free at the same time
                previous = begin
                for busy, length in spans:
                    begin = _first_gap(busy, begin, length)
            for busy, length in spans:
                bisect.insort(busy, (begin, begin + length))
                if len(busy) > _COPIES:
                    busy[:2] = [(busy[0][0], busy[1][1])]
            begin += hop.latency + nbytes / min(links.wires[wire] for wire in hop.wires)
        return begin


WITHIN_S = 5e-6
"""Virtual seconds of a copy within a device, or of a device without known links."""

_COPIES = 256
"""Maximum number of entries per wire; older copies are merged into the first entry, without their gaps."""


def _first_gap(busy: Sequence[tuple[float, float]], begin: float, length: float) -> float:
    """Return the first time from ``begin`` at which a wire is free for ``length`` seconds."""
    index = max(0, bisect.bisect(busy, (begin, float("inf"))) - 1)
    for start, end in busy[index:]:
        if start >= begin + length:
            break
        begin = max(begin, end)
    return begin
