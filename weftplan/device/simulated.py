"""Setting up simulated devices, for tests and experiments: capacity, cost of work, order of streams, links.

The hardware itself is ``simulated_device.py``. Every function here may be called from any thread.
"""

from __future__ import annotations

from weftplan.device.context import sim
from weftplan.device.links import connect
from weftplan.device.registry import get
from weftplan.device.simulated_device import POISON, SimDevice, SimEvent, SimStream
from weftplan.device.simulated_hardware import CostModel

__all__ = ["POISON", "CostModel", "SimDevice", "SimEvent", "SimStream", "configure", "connect"]


def configure(
    index: int = 0,
    *,
    capacity: int | None = None,
    cost: CostModel | None = None,
    order: str | None = None,
    seed: int | None = None,
) -> SimDevice:
    """Set up ``sim(index)`` and return it; what is None stays as it is.

    Args:
        capacity: bytes of device memory.
        cost: virtual seconds of work.
        order: ``"lazy"`` (run only what a wait needs) or ``"random"`` (seeded choice among streams).
        seed: seed of order ``"random"``.

    Raises:
        DeviceError: an unknown order, or a capacity below what is in use.
    """
    device = get(sim(index))
    assert isinstance(device, SimDevice)
    device.configure(capacity=capacity, cost=cost, order=order, seed=seed)
    return device
