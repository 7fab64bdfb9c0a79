"""Where results of a device may wait, and how fast the way there is.

Homes come from the options, in their order and with their limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftplan.device.context import Context
from weftplan.device.homes import Link
from weftplan.planner.options import PlanOptions

PCIE = Link(bandwidth=1.2e10)
"""Sixteen lanes of the third generation, or half of what the data sheet says of the fourth."""
FILE = Link(bandwidth=1.0e9, latency=1.0e-4)
"""A solid-state disk behind the page cache."""
PEER = Link(bandwidth=2.0e10)
"""Another device on the same switch."""


@dataclass(frozen=True, slots=True)
class Place:
    """One place that takes results."""

    context: Context
    """Its memory."""
    link: Link
    """The way there and back."""
    home: int
    """Which of the homes it belongs to."""
    limit: int | None
    """Most bytes that may go to that home now; None: as many as there are."""


def places(context: Context, options: PlanOptions) -> list[Place]:
    """The places for results of ``context`` in the order in which they are tried."""
    known = {home: Link(*how) for device, home, *how in options.links if device == str(context)}
    assumed = {"host": PCIE, "file": FILE, "peer": PEER}
    found: list[Place] = []
    files = 0
    for number, home in enumerate(options.homes):
        taken = options.spill_taken[number] if number < len(options.spill_taken) else 0
        limit = None if home.nbytes is None else max(home.nbytes - taken, 0)
        for there in home.contexts(context, files=files, peers=options.peer_contexts):
            link = assumed[home.kind]
            # What is known of the memory of the host says nothing of a disk.
            found.append(Place(there, link if home.kind == "file" else known.get(str(there), link), number, limit))
        files += home.kind == "file"
    return found if context.device_type in ("cpu", "gpu", "sim") else []
