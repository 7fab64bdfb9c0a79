"""The interconnect between given GPUs or simulated devices. Any thread may call these functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weftplan.device.context import Context
from weftplan.device.links import HOST, Interconnect, connected, matrix, ports
from weftplan.device.peers import PEER
from weftplan.device.registry import get

_PORT, _PORT_LATENCY = 20e9, 8e-6
"""Assumed speed of a GPU's port, which the driver does not report: bytes per second in each direction, and seconds of
latency. Decisions depend more on which copies share a port than on these figures."""


_declared: list[Interconnect] = []


def declare(links: Interconnect | None) -> None:
    """Set the interconnect of ``gpu(0)``, ``gpu(1)``, …, for example as measured by ``measured_links.py``.

    None restores the assumed speeds. GPUs without peer access get no direct route, even if ``links`` has one. Existing
    stores choose their exchange again.
    """
    _declared[:] = [] if links is None else [links]


def joined() -> tuple[Interconnect | None, Interconnect | None]:
    """Return the interconnects set for simulated devices and for GPUs; plan caches compare them to detect changes."""
    return connected(), _declared[0] if _declared else None


def interconnect(contexts: Sequence[Context]) -> Interconnect | None:
    """Return the interconnect of these devices; None unless all are GPUs or all are simulated.

    GPUs are peers if they passed the check of ``peers.py``. Their speeds are those set by :func:`declare`, or assumed.
    """
    kinds = {context.device_type for context in contexts}
    indices = [context.device_id for context in contexts]
    if kinds == {"sim"}:
        costs = [get(context).cost for context in contexts]
        launch = max(cost.launch for cost in costs)
        links = connected()
        if links is not None and max(indices) < links.count:
            return replace(links.only(indices), launch=launch)
        row = [costs[0].bandwidth] * len(indices)
        sim_links = matrix([row] * len(indices), costs[0].latency, host_bandwidth=row[0], host_latency=costs[0].latency)
        return replace(sim_links, launch=launch)
    if kinds == {"gpu"}:
        declared = _declared[0] if _declared and max(indices) < _declared[0].count else None
        links = ports(len(indices), _PORT, _PORT_LATENCY) if declared is None else declared.only(indices)
        routes = {
            (a, b): route
            for (a, b), route in links.routes.items()
            if HOST in (a, b) or indices[a] == indices[b] or way(contexts[a], contexts[b]) == PEER
        }
        return replace(links, routes=routes)
    return None


def way(source: Context, target: Context) -> str:
    """Return how one GPU copies to another: :data:`~weftplan.device.peers.PEER`, or why copies pass through the host.

    Return an empty string for other devices, and within one device.
    """
    if source == target or source.device_type != "gpu" or target.device_type != "gpu":
        return ""
    return str(get(source).peers.way(get(target)))  # type: ignore[attr-defined]
