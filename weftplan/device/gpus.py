"""MXNet's functions for the number of GPUs and their free memory.

Both functions load CuPy and the driver on first use. Any thread may call them.
"""

from __future__ import annotations

from typing import SupportsIndex

from weftplan.device.context import gpu
from weftplan.device.registry import get


def num_gpus() -> int:
    """Return the number of usable GPUs; 0 if CuPy, the driver or the hardware is missing."""
    from weftplan.device.cupy_device import count_gpus  # imported on first use, as all CuPy code

    return count_gpus()


def gpu_memory_info(device_id: SupportsIndex = 0) -> tuple[int, int]:
    """Return (free, total) bytes of the memory of ``gpu(device_id)``.

    Raises:
        DeviceError: the GPU, CuPy or the driver is missing.
    """
    return get(gpu(device_id)).memory_info()
