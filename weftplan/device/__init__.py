"""Devices: contexts, raw memory, copies, streams and events, for hosts, GPUs, files and simulated hardware.

Devices do not depend on engines or memory pools. Any thread may call the functions exported by this package; the
current context and the current stream are thread-local.
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
