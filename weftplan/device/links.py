"""A model of the interconnect between devices: wires with a bandwidth, and routes that use these wires.

The devices are numbered 0, 1, …; :data:`HOST` stands for host memory. Copies that share a wire delay each other. This
module only describes interconnects, except for :func:`connect`, which sets that of simulated devices;
``interconnect.py`` returns the interconnect of given contexts. Any thread may call these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftplan.errors import DeviceError

HOST = -1
"""Number that stands for host memory among the devices."""


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a copy: ``latency`` in seconds before its first byte, and the indices of its wires."""

    latency: float
    wires: tuple[int, ...]


@dataclass(frozen=True)
class Interconnect:
    """Wires and routes between ``count`` devices and the host.

    Attributes:
        count: number of devices.
        wires: bytes per second of each wire; a wire has one direction.
        routes: by (source, target). Copies between two devices without a route (not peers) pass through the host. Each
            device must have routes to and from the host.
        launch: seconds of a kernel launch.

    Raises:
        DeviceError: a bandwidth or latency out of range, an unknown device or wire, or a missing route to or from the
            host.
    """

    count: int
    wires: tuple[float, ...]
    routes: Mapping[tuple[int, int], Route]
    launch: float = field(default=5e-6)

    def __post_init__(self) -> None:
        if self.count < 1 or not all(0 < wire < float("inf") for wire in self.wires):
            raise DeviceError(f"devices need wires with a bandwidth above 0, got {self.count} devices, {self.wires}")
        endpoints = (HOST, *range(self.count))
        for (source, target), route in self.routes.items():
            is_pair = source in endpoints and target in endpoints and source != target
            if not is_pair or not route.wires or not all(0 <= wire < len(self.wires) for wire in route.wires):
                raise DeviceError(f"the route from {source} to {target} has an unknown place or wire: {route}")
            if not 0 <= route.latency < float("inf"):
                raise DeviceError(f"the route from {source} to {target} has the latency {route.latency}, expected >= 0")
        for index in range(self.count):
            if (index, HOST) not in self.routes or (HOST, index) not in self.routes:
                raise DeviceError(f"device {index} has no route to the host and back")

    def peers(self, source: int, target: int) -> bool:
        """Return whether copies from ``source`` to ``target`` have a direct route."""
        return (source, target) in self.routes

    def hops(self, source: int, target: int) -> tuple[Route, ...]:
        """Return the consecutive routes of a copy: the direct route, two through the host, or () within a device."""
        if source == target:
            return ()
        direct = self.routes.get((source, target))
        return (direct,) if direct else (self.routes[source, HOST], self.routes[HOST, target])

    def bandwidth(self, source: int, target: int) -> float:
        """Return the bytes per second of a copy alone on its wires, including both hops of a copy through the host."""
        hops = self.hops(source, target)
        return 1 / sum(1 / min(self.wires[wire] for wire in hop.wires) for hop in hops)

    def only(self, indices: Sequence[int]) -> Interconnect:
        """Return the interconnect of these devices alone, renumbered 0, 1, … in this order; no wire is removed."""
        new = {old: index for index, old in enumerate(indices)} | {HOST: HOST}
        routes = {(new[a], new[b]): route for (a, b), route in self.routes.items() if a in new and b in new}
        return Interconnect(len(indices), self.wires, routes, self.launch)

    def without_peers(self) -> Interconnect:
        """Return this interconnect without direct routes, so that all copies between devices pass through the host."""
        routes = {pair: route for pair, route in self.routes.items() if HOST in pair}
        return Interconnect(self.count, self.wires, routes, self.launch)


def matrix(
    bandwidth: Sequence[Sequence[float]],
    latency: Sequence[Sequence[float]] | float = 10e-6,
    *,
    host_bandwidth: float = 12e9,
    host_latency: float = 10e-6,
) -> Interconnect:
    """Return an interconnect whose routes, between devices and to and from the host, each have a wire of their own.

    Args:
        bandwidth: bytes per second from row to column; 0 for devices that are not peers. The diagonal is ignored.
        latency: seconds from row to column, or one number for all pairs.
        host_bandwidth: bytes per second between each device and the host.
        host_latency: seconds of latency between each device and the host.

    Raises:
        DeviceError: the matrix is not square.

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
    """Return an interconnect with one input and one output wire per device, as at an NVLink or PCIe switch."""
    routes = {}
    for a in range(count):
        routes[a, HOST], routes[HOST, a] = Route(latency, (2 * a,)), Route(latency, (2 * a + 1,))
        routes.update({(a, b): Route(latency, (2 * a, 2 * b + 1)) for b in range(count) if a != b})
    return Interconnect(count, (bandwidth,) * (2 * count), routes)


_CUBE = ("01122000", "10210200", "12020010", "21200001", "20000112", "02001021", "00101202", "00012120")


def nvlink_mesh(bandwidth: float = 22e9, latency: float = 3e-6) -> Interconnect:
    """Return the mesh of NVIDIA's DGX-1 (V100): each of 8 GPUs has 1 or 2 links of ``bandwidth`` to each of 4 GPUs."""
    return matrix([[int(_CUBE[a][b]) * bandwidth for b in range(8)] for a in range(8)], latency)


def pcie_tree(count: int = 8, below: int = 4, bandwidth: float = 12e9, latency: float = 8e-6) -> Interconnect:
    """Return a PCIe tree: one root, switches with ``below`` GPUs each, wires of equal ``bandwidth``; all are peers."""
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
    """Set the interconnect of ``sim(0)``, ``sim(1)``, … for copies enqueued from now on.

    None removes it: the cost model of its device then times each copy, independently of other copies.
    """
    _simulated[:] = [] if links is None else [links]


def connected() -> Interconnect | None:
    """Return the interconnect that :func:`connect` has set, or None."""
    return _simulated[0] if _simulated else None
