"""Links between devices as they are found by copying: for stores that choose their ways, and trees, by them.

What is chosen by measured links may differ from run to run, and with it the order of additions. So nothing here is done
by itself: a program measures, keeps what it has found if it likes, and gives it to ``links.connect`` for simulated
devices, or to ``interconnect.declare`` for GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from weftplan.device.context import Context
from weftplan.device.interconnect import interconnect
from weftplan.device.links import HOST, Interconnect, Route
from weftplan.device.registry import get
from weftplan.device.simulated_device import SimDevice, begin_together
from weftplan.errors import DeviceError

_SHORT, _LONG = 256, 8 << 20
_ROUNDS = 3


def measured(contexts: Sequence[Context]) -> Interconnect:
    """What joins these devices: a wire for each pair, and for each device and the host, with a latency and a bandwidth.

    Every copy is made alone, so wires that several pairs share are not found. Simulated devices are measured in
    virtual time, others with the host's clock; of each copy the fastest of three counts. Two devices that are no peers
    now get no wire, since their copies pass through the host.

    Raises:
        DeviceError: fewer than two devices, one of them twice, or such as the host reads where they are.

    >>> import weftplan as mx
    >>> links = measured([mx.sim(0), mx.sim(1)])
    >>> links.peers(0, 1), links.count
    (True, 2)
    """
    known = interconnect(contexts) if len(contexts) > 1 else None
    if known is None or len(set(contexts)) < len(contexts):
        raise DeviceError(
            f"links are measured between two or more GPUs, or simulated devices, each named once; got "
            f"{', '.join(map(str, contexts))}"
        )
    devices = [get(context) for context in contexts]
    host = get(Context("cpu_pinned", 0))
    rooms = [device.allocate(_LONG) for device in devices]
    memory = host.allocate(_LONG)
    try:
        wires: list[float] = []
        routes: dict[tuple[int, int], Route] = {}
        places = [HOST, *range(len(devices))]
        raws = {HOST: memory, **dict(enumerate(rooms))}
        for a in places:
            for b in places:
                if a == b or (HOST not in (a, b) and not known.peers(a, b)):
                    continue
                driver = devices[a if b == HOST else b]
                if isinstance(driver, SimDevice):
                    begin_together([device for device in devices if isinstance(device, SimDevice)])
                short, long = (_seconds(driver, raws[b][:n], raws[a][:n]) for n in (_SHORT, _LONG))
                speed = (_LONG - _SHORT) / max(long - short, 1e-9)
                routes[a, b] = Route(max(0.0, short - _SHORT / speed), (len(wires),))
                wires.append(speed)
    finally:
        for device, room in zip(devices, rooms, strict=True):
            device.free(room)
        host.free(memory)
    return Interconnect(len(devices), tuple(wires), routes, known.launch)


def _seconds(device: Any, target: Any, source: Any) -> float:
    if not isinstance(device, SimDevice):
        return _fastest(device, target, source, time.perf_counter)
    # The device's clock is that of its last stream, which may be ahead of all that a copy needs.
    stream = device.new_stream()
    return _fastest(stream, target, source, lambda: stream.time)


def _fastest(waits: Any, target: Any, source: Any, clock: Callable[[], float]) -> float:
    found = []
    for _ in range(_ROUNDS):
        waits.synchronize()
        start = clock()
        waits.copy(target, source)
        waits.synchronize()
        found.append(clock() - start)
    return min(found)
