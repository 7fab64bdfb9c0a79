"""Devices: contexts, raw memory, copies, streams and events; NumPy, CuPy and simulated.

A device knows nothing of engines or pools above it. Everything that is exported here may be called from any thread;
the current context and the current stream are those of the calling thread.
"""

from weftplan.device.base import Device, Event, Stream
from weftplan.device.context import Context, cpu, cpu_pinned, current_context, gpu, sim
from weftplan.device.gpus import gpu_memory_info, num_gpus
from weftplan.device.registry import get, name_folders
from weftplan.device.stream import current_stream

__all__ = [
    "Context",
    "Device",
    "Event",
    "Stream",
    "cpu",
    "cpu_pinned",
    "current_context",
    "current_stream",
    "get",
    "gpu",
    "gpu_memory_info",
    "name_folders",
    "num_gpus",
    "sim",
]
