"""Where results of a device may wait, and how fast the way there is.

Homes come from the options, in their order and with their limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftplan.device.context import Context
from weftplan.planner.options import PlanOptions
from weftplan.planner.spill.link import FILE, PCIE, PEER, Link


@dataclass(frozen=True, slots=True)
class Place:
    """One place that takes results.

    Attributes:
        context: its memory.
        link: the way there and back.
        home: which of the homes it belongs to.
        limit: most bytes that may go to that home now, None: as many as there are.
    """

    context: Context
    link: Link
    home: int
    limit: int | None


def places(context: Context, options: PlanOptions) -> list[Place]:
    """The places for results of ``context`` in the order in which they are tried.

    Memory of the host is no home for a host, and a device none for itself; the k-th folder is the context ``file(k)``.
    """
    found: list[Place] = []
    files = 0
    for number, home in enumerate(options.homes):
        taken = options.spill_taken[number] if number < len(options.spill_taken) else 0
        limit = None if home.nbytes is None else max(home.nbytes - taken, 0)
        if home.kind == "file":
            found.append(Place(Context("file", files), FILE, number, limit))
            files += 1
        elif home.kind == "peer":
            peers = [peer for peer in options.peer_contexts if peer.device_type == context.device_type]
            found += [Place(p, _link(context, p, options, PEER), number, limit) for p in peers if p != context]
        elif context.has_streams:
            host = host_of(context)
            found.append(Place(host, _link(context, host, options, PCIE), number, limit))
    return found if context.device_type in ("cpu", "gpu", "sim") else []


def _link(context: Context, home: Context, options: PlanOptions, assumed: Link) -> Link:
    pair = (str(context), str(home))
    return next((Link(speed, latency) for a, b, speed, latency in options.links if (a, b) == pair), assumed)


def host_of(context: Context) -> Context:
    """Page-locked host memory of a device."""
    return Context("cpu_pinned", context.device_id)
