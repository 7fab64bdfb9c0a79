"""Number of GPUs, and their free memory.

Both functions load CuPy and the driver if they are installed, and keep no state. Any thread may ask.
"""

from __future__ import annotations

from typing import SupportsIndex

from weftplan.device.context import gpu
from weftplan.device.registry import get


def num_gpus() -> int:
    """Return how many GPUs there are for ``gpu(0)``, ``gpu(1)``, …; 0 where CuPy, the driver or the hardware is
    missing."""
    from weftplan.device.cupy_device import count_gpus  # not before it is asked for: nothing of CuPy is

    return count_gpus()


def gpu_memory_info(device_id: SupportsIndex = 0) -> tuple[int, int]:
    """Return (free, total) bytes of the memory of ``gpu(device_id)``.

    Raises:
        DeviceError: there is no such GPU, or CuPy or the driver is missing; names the package to install.
    """
    return get(gpu(device_id)).memory_info()
