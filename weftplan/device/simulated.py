"""Configuration of simulated devices for tests and experiments: capacity, costs, execution order, links.

``simulated_device.py`` implements the devices. Any thread may call these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.device.context import Context, sim
from weftplan.device.cost_model import CostModel
from weftplan.device.links import connect
from weftplan.device.registry import get
from weftplan.device.simulated_device import POISON, SimDevice, SimEvent, SimStream, begin_together
from weftplan.errors import DeviceError

__all__ = ["POISON", "CostModel", "SimDevice", "SimEvent", "SimStream", "configure", "connect", "seconds_of"]


def configure(
    index: int = 0,
    *,
    capacity: int | None = None,
    cost: CostModel | None = None,
    order: str | None = None,
    seed: int | None = None,
) -> SimDevice:
    """Configure ``sim(index)`` and return it; arguments that are None change nothing.

    Args:
        index: number of the simulated device.
        capacity: bytes of device memory.
        cost: model of the virtual seconds that kernels and copies take.
        order: ``"lazy"`` (run only the work that a wait needs) or ``"random"`` (pick streams at random).
        seed: seed of the random order.

    Raises:
        DeviceError: the order is unknown, or the capacity is below the bytes in use.
    """
    device = get(sim(index))
    assert isinstance(device, SimDevice)
    device.configure(capacity=capacity, cost=cost, order=order, seed=seed)
    return device


def seconds_of(work: Callable[[], object], contexts: Sequence[Context]) -> float:
    """Return the virtual seconds from the start of ``work`` until these simulated devices have finished it.

    The clocks of all devices start at the same time. The caller must wait for earlier operations before this call, and
    ``work`` must wait for the operations that it pushes; ``weftplan.nd.waitall`` does both. Independent operations may
    overlap or not, since each worker thread has its own stream.

    Raises:
        DeviceError: ``contexts`` is empty, or a context is not simulated.

    Examples:
        >>> import weftplan as mx
        >>> _ = configure(7, cost=CostModel(launch=2e-3))
        >>> x = mx.nd.ones((4,), ctx=mx.sim(7))
        >>> mx.nd.waitall()
        >>> def two_in_a_row():
        ...     ((x + 1) * 3).wait_to_read()
        >>> round(seconds_of(two_in_a_row, [mx.sim(7)]), 9)
        0.004
    """
    devices = [device for device in map(get, contexts) if isinstance(device, SimDevice)]
    if not devices or len(devices) != len(contexts):
        raise DeviceError(f"seconds_of needs simulated devices, such as [sim(0), sim(1)], got {list(contexts)}")
    start = begin_together(devices)
    work()
    for device in devices:
        device.synchronize()
    return max(device.clock for device in devices) - start
