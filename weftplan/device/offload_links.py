"""Speed of copies between a device and its offload targets.

Copies of a GPU are measured once per target with CUDA events, when a bind with a budget first needs the speed.
Simulated devices have configured speeds. Measured bandwidths are rounded to powers of 1.1, so that repeated runs on a
machine nearly always make the same plan. Speeds affect plans, never results. Any thread may call :func:`speed`; other
threads wait while one measures.
"""

from __future__ import annotations

import math
from typing import Any

from weftplan.device.context import Context
from weftplan.device.interconnect import interconnect
from weftplan.device.links import HOST
from weftplan.device.offload_targets import Link
from weftplan.device.registry import get
from weftplan.locks import Lock, consistent_in_children

_SHORT, _LONG, _ROUNDS = 1 << 16, 32 << 20, 3
_STEP, _LATENCY_STEP = 1.1, 5e-6
_lock = consistent_in_children(Lock())
"""Guards ``device.offload_links``, so that two threads do not measure a link at once and disturb each other."""


def speed(context: Context, destination: Context) -> Link | None:
    """Return the speed of copies between two contexts; None if it is unknown, and the planner must assume a speed."""
    if context.device_type == "sim":
        return _simulated_link(context, destination)
    if context.device_type != "gpu":
        return None
    device: Any = get(context)
    # Measure under the lock: concurrent measurements would disturb each other, and threads need the same result.
    with _lock:
        if destination not in device.offload_links:
            device.offload_links[destination] = _measure_link(device, destination)
        link: Link | None = device.offload_links[destination]
        return link


def _simulated_link(context: Context, destination: Context) -> Link | None:
    peer = destination.device_type == "sim"
    links = interconnect([context, destination] if peer else [context])
    directions = [(0, 1), (1, 0)] if peer else [(0, HOST), (HOST, 0)]
    if links is None or any(direction not in links.routes for direction in directions):
        return None
    routes = [links.routes[direction] for direction in directions]
    return Link(min(links.wires[wire] for route in routes for wire in route.wires), max(r.latency for r in routes))


def _measure_link(device: Any, destination: Context) -> Link | None:
    """Measure short and long copies in both directions.

    Returns:
        The speed of the slower direction; None if a copy fails, for example for lack of memory, or if long copies take
        no longer than short copies.
    """
    try:
        target_device = get(destination)
        near, far = device.allocate(_LONG), target_device.allocate(_LONG)
        times = []
        for target, source in ((far, near), (near, far)):
            short, long = (
                min(device.copy_seconds(target[:nbytes], source[:nbytes]) for _ in range(_ROUNDS))
                for nbytes in (_SHORT, _LONG)
            )
            times.append((short, long))
    except Exception:  # also CuPy's classes; a lasting error reappears in the program's own copies
        return None
    if any(long <= short for short, long in times):
        return None
    bandwidth = min((_LONG - _SHORT) / (long - short) for short, long in times)
    latency = max(max(0.0, short - _SHORT / bandwidth) for short, _ in times)
    rounded = float(round(_STEP ** round(math.log(bandwidth, _STEP))))
    return Link(rounded, round(latency / _LATENCY_STEP) * _LATENCY_STEP)
