"""What joins the devices of some contexts: one question for GPUs and for simulated devices. Any thread may ask."""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.device.context import Context
from weftplan.device.links import HOST, Interconnect, connected, matrix, ports
from weftplan.device.peers import PEER
from weftplan.device.registry import get
from weftplan.device.simulated_device import SimDevice

_PORT, _PORT_LATENCY = 20e9, 8e-6
"""Assumed of GPUs, whose driver does not say: bytes a second of each in each direction, and seconds of a copy's first
byte. What is decided from them depends on who shares a port more than on how fast it is."""


def interconnect(contexts: Sequence[Context]) -> Interconnect | None:
    """What joins these devices, all GPUs or all simulated; None for others, which the host reads where they are.

    Of GPUs those are peers that have shown it (``peers.py``). The bandwidth of their ports is assumed.
    """
    kinds = {context.device_type for context in contexts}
    places = [context.device_id for context in contexts]
    if kinds == {"sim"}:
        links = connected()
        if links is None or max(places) >= links.count:
            place = get(contexts[0])
            assert isinstance(place, SimDevice)
            cost, row = place.cost, [place.cost.bandwidth] * len(places)
            return matrix([row] * len(places), cost.latency, host_bandwidth=row[0], host_latency=cost.latency)
        return links.only(places)
    if kinds == {"gpu"}:
        links = ports(len(places), _PORT, _PORT_LATENCY)
        routes = {
            (a, b): route
            for (a, b), route in links.routes.items()
            if HOST in (a, b) or places[a] == places[b] or way(contexts[a], contexts[b]) == PEER
        }
        return Interconnect(links.count, links.wires, routes)
    return None


def way(source: Context, target: Context) -> str:
    """How a GPU copies to another one: :data:`~weftplan.device.peers.PEER`, or why it passes through the host.

    Empty for other devices, and within one.
    """
    if source == target or source.device_type != "gpu" or target.device_type != "gpu":
        return ""
    return str(get(source).peers.way(get(target)))  # type: ignore[attr-defined]
