"""Setting up simulated devices, for tests and experiments: capacity, cost of work, order of streams, links.

The hardware itself is ``simulated_device.py``. Every function here may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.device.context import Context, sim
from weftplan.device.links import connect
from weftplan.device.registry import get
from weftplan.device.simulated_device import POISON, SimDevice, SimEvent, SimStream, begin_together
from weftplan.device.simulated_hardware import CostModel
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
    """Set up ``sim(index)`` and return it; settings that are None stay unchanged.

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


def seconds_of(work: Callable[[], object], contexts: Sequence[Context]) -> float:
    """Return the virtual seconds from the start of ``work`` until these simulated devices have finished it.

    All devices start at the same time. The caller waits for earlier operations before the call, and ``work`` for its
    own operations (``weftplan.nd.waitall`` does both), so that no other work reaches a device. Independent operations
    may run in sequence or at the same time, since each worker thread has a stream.

    Raises:
        DeviceError: a context that is no simulated device, or none at all.

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
