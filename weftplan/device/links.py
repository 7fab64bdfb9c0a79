"""Wires between devices, each with a bandwidth, and the wires of each route.

Devices have the places 0, 1, …; :data:`HOST` is the memory of the host. Copies that share a wire alternate on it.
Everything here is data, except for :func:`connect`, which sets the wires of simulated devices; any thread may call it.
``interconnect.py`` returns the wires of given contexts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftplan.errors import DeviceError

HOST = -1
"""The place of the host's memory."""


@dataclass(frozen=True, slots=True)
class Route:
    """How a copy gets from one place to another: seconds before its first byte, and the wires that it takes."""

    latency: float
    wires: tuple[int, ...]


@dataclass(frozen=True)
class Interconnect:
    """Wires and routes between ``count`` devices and the host.

    Attributes:
        count: devices.
        wires: bytes a second of each wire, in one direction.
        routes: by (from, to); two devices without one are no peers, and copies between them pass through the host. A
            device and the host always have one.
        launch: seconds of a kernel.

    Raises:
        DeviceError: a bandwidth or a latency that makes no sense, an unknown place or wire, or a route to the host is
            missing.
    """

    count: int
    wires: tuple[float, ...]
    routes: Mapping[tuple[int, int], Route]
    launch: float = field(default=5e-6)

    def __post_init__(self) -> None:
        if self.count < 1 or not all(0 < wire < float("inf") for wire in self.wires):
            raise DeviceError(f"devices need wires with a bandwidth above 0, got {self.count} devices, {self.wires}")
        places = (HOST, *range(self.count))
        for (source, target), route in self.routes.items():
            known = source in places and target in places and source != target
            if not known or not route.wires or not all(0 <= wire < len(self.wires) for wire in route.wires):
                raise DeviceError(f"the route from {source} to {target} has an unknown place or wire: {route}")
            if not 0 <= route.latency < float("inf"):
                raise DeviceError(f"the route from {source} to {target} has the latency {route.latency}, expected >= 0")
        for place in range(self.count):
            if (place, HOST) not in self.routes or (HOST, place) not in self.routes:
                raise DeviceError(f"device {place} has no route to the host and back")

    def peers(self, source: int, target: int) -> bool:
        """Return whether copies between the two do not pass through the host."""
        return (source, target) in self.routes

    def hops(self, source: int, target: int) -> tuple[Route, ...]:
        """The routes that a copy takes, one after the other; none within a device."""
        if source == target:
            return ()
        direct = self.routes.get((source, target))
        return (direct,) if direct else (self.routes[source, HOST], self.routes[HOST, target])

    def bandwidth(self, source: int, target: int) -> float:
        """Return the bytes per second of a copy without competing copies; half of it for a copy through the host."""
        hops = self.hops(source, target)
        return 1 / sum(1 / min(self.wires[wire] for wire in hop.wires) for hop in hops)

    def only(self, places: Sequence[int]) -> Interconnect:
        """Of these devices, which get the places 0, 1, …, with all wires."""
        new = {place: index for index, place in enumerate(places)} | {HOST: HOST}
        routes = {(new[a], new[b]): route for (a, b), route in self.routes.items() if a in new and b in new}
        return Interconnect(len(places), self.wires, routes, self.launch)

    def without_peers(self) -> Interconnect:
        """Return the same with every copy between devices through the host."""
        routes = {pair: route for pair, route in self.routes.items() if HOST in pair}
        return Interconnect(self.count, self.wires, routes, self.launch)


def matrix(
    bandwidth: Sequence[Sequence[float]],
    latency: Sequence[Sequence[float]] | float = 10e-6,
    *,
    host_bandwidth: float = 12e9,
    host_latency: float = 10e-6,
) -> Interconnect:
    """Return an interconnect in which each pair of devices, and each device and the host, have wires of their own.

    Args:
        bandwidth: bytes per second from row to column; 0 for two devices that are no peers. The diagonal is ignored.
        latency: seconds, alike, or one number for all.
        host_bandwidth, host_latency: between each device and the host.

    >>> two = matrix([[0, 50e9], [50e9, 0]], 2e-6)
    >>> two.bandwidth(0, 1)
    50000000000.0
    """
    count = len(bandwidth)
    if any(len(row) != count for row in bandwidth):
        raise DeviceError(f"a matrix of links has as many columns as rows, got rows of {[len(r) for r in bandwidth]}")
    wires: list[float] = []
    routes: dict[tuple[int, int], Route] = {}

    def join(source: int, target: int, speed: float, seconds: float) -> None:
        routes[source, target] = Route(seconds, (len(wires),))
        wires.append(speed)

    for a in range(count):
        join(a, HOST, host_bandwidth, host_latency)
        join(HOST, a, host_bandwidth, host_latency)
        for b in range(count):
            if a != b and bandwidth[a][b]:
                join(a, b, bandwidth[a][b], latency if isinstance(latency, float | int) else latency[a][b])
    return Interconnect(count, tuple(wires), routes)


def ports(count: int, bandwidth: float, latency: float) -> Interconnect:
    """Return an interconnect in which each device has one port in and one port out: a switch of NVLink or PCIe."""
    routes = {}
    for a in range(count):
        routes[a, HOST], routes[HOST, a] = Route(latency, (2 * a,)), Route(latency, (2 * a + 1,))
        routes.update({(a, b): Route(latency, (2 * a, 2 * b + 1)) for b in range(count) if a != b})
    return Interconnect(count, (bandwidth,) * (2 * count), routes)


_CUBE = ("01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120")


def nvlink_mesh(bandwidth: float = 22e9, latency: float = 3e-6) -> Interconnect:
    """Eight GPUs as in NVIDIA's DGX-1 with V100: one or two NVLinks of ``bandwidth`` to four others, none to three."""
    return matrix([[int(_CUBE[a][b]) * bandwidth for b in range(8)] for a in range(8)], latency)


def pcie_tree(count: int = 8, below: int = 4, bandwidth: float = 12e9, latency: float = 8e-6) -> Interconnect:
    """``below`` GPUs below each switch, and switches below one root, every wire of ``bandwidth``; all are peers."""
    switches = -(-count // below)
    up, down = range(count), range(count, 2 * count)
    switch_up = range(2 * count, 2 * count + switches)
    switch_down = range(2 * count + switches, 2 * count + 2 * switches)
    routes = {}
    for a in range(count):
        routes[a, HOST] = Route(latency, (up[a], switch_up[a // below]))
        routes[HOST, a] = Route(latency, (switch_down[a // below], down[a]))
        for b in range(count):
            if a // below == b // below:
                between: tuple[int, ...] = ()
            else:
                between = (switch_up[a // below], switch_down[b // below])
            if a != b:
                routes[a, b] = Route(latency + 1e-6 * len(between), (up[a], *between, down[b]))
    return Interconnect(count, (bandwidth,) * (2 * (count + switches)), routes)


_simulated: list[Interconnect] = []


def connect(links: Interconnect | None) -> None:
    """Join ``sim(0)``, ``sim(1)``, … like this from now on: their copies take these routes, and take turns on wires.

    None: every copy takes the time that the cost model of its device says, whatever else is copied.
    """
    _simulated[:] = [] if links is None else [links]


def connected() -> Interconnect | None:
    """What :func:`connect` has set."""
    return _simulated[0] if _simulated else None
