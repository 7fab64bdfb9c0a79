"""Measurement of the links between devices; stores choose exchange routes and trees by the result.

Measured speeds vary from run to run, and with them the chosen routes and the order of additions. The package therefore
never measures by itself: a program calls :func:`measured`, may save the result, and passes it to ``links.connect``
(simulated devices) or ``interconnect.declare`` (GPUs).
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.device.base import Device
from weftplan.device.context import Context
from weftplan.device.interconnect import interconnect
from weftplan.device.links import HOST, Interconnect, Route
from weftplan.device.registry import get
from weftplan.device.simulated_device import begin_together
from weftplan.errors import DeviceError
from weftplan.support.array_types import RawArray

_SHORT, _LONG = 256, 8 << 20
"""Bytes of the two copies from which latency and bandwidth are computed."""
_ROUNDS = 3
"""Repeats of a copy, of which the fastest counts: noise only makes a copy slower."""


def measured(contexts: Sequence[Context]) -> Interconnect:
    """Measure copies between each two of these devices and the host; return an interconnect with one wire per route.

    Copies run one at a time, so shared wires are not detected. Simulated devices are measured in virtual time, GPUs
    with the host's clock; the fastest of three copies counts. Devices that are not peers get no direct route.

    Raises:
        DeviceError: fewer than two devices, duplicates, or devices that are not all GPUs or all simulated.

    >>> import weftplan as mx
    >>> links = measured([mx.sim(0), mx.sim(1)])
    >>> links.peers(0, 1), links.count
    (True, 2)
    """
    nominal = interconnect(contexts) if len(contexts) > 1 else None
    if nominal is None or len(set(contexts)) < len(contexts):
        raise DeviceError(
            f"links are measured between two or more GPUs, or simulated devices, each named once; got "
            f"{', '.join(map(str, contexts))}"
        )
    devices = [get(context) for context in contexts]
    host = get(Context("cpu_pinned", 0))
    buffers = [device.allocate(_LONG) for device in devices]
    memory = host.allocate(_LONG)
    try:
        wires: list[float] = []
        routes: dict[tuple[int, int], Route] = {}
        endpoints = [HOST, *range(len(devices))]
        raws = {HOST: memory, **dict(enumerate(buffers))}
        for a in endpoints:
            for b in endpoints:
                if a == b or (HOST not in (a, b) and not nominal.peers(a, b)):
                    continue
                driver = devices[a if b == HOST else b]
                begin_together(devices)
                short, long = (_seconds(driver, raws[b][:n], raws[a][:n]) for n in (_SHORT, _LONG))
                speed = (_LONG - _SHORT) / max(long - short, 1e-9)
                routes[a, b] = Route(max(0.0, short - _SHORT / speed), (len(wires),))
                wires.append(speed)
    finally:
        for device, buffer in zip(devices, buffers, strict=True):
            device.free(buffer)
        host.free(memory)
    return Interconnect(len(devices), tuple(wires), routes, nominal.launch)


def _seconds(device: Device, target: RawArray, source: RawArray) -> float:
    times = []
    with device.new_stream() as stream:
        for _ in range(_ROUNDS):
            stream.synchronize()
            start = stream.clock()
            device.copy(target, source)
            stream.synchronize()
            times.append(stream.clock() - start)
    return min(times)
