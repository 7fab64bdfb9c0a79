"""From contexts to devices: one object per context in a process, made at first use."""

from __future__ import annotations

from weftplan.device.base import Device
from weftplan.device.context import Context
from weftplan.locks import Lock, whole_in_children

_devices: dict[Context, Device] = {}
_lock = whole_in_children(Lock())


def get(context: Context) -> Device:
    """The device behind ``context``.

    Raises:
        DeviceError: the context is a GPU and CuPy, the driver or that GPU is missing; says what to install.
    """
    device = _devices.get(context)
    if device is not None:
        return device
    with _lock:
        device = _devices.get(context)
        if device is None:
            device = _devices[context] = _make(context)
    return device


def _make(context: Context) -> Device:
    kind = context.device_type
    if kind == "gpu":
        from weftplan.device.cupy_device import CupyDevice

        return CupyDevice(context)
    if kind == "sim":
        from weftplan.device.simulated_device import SimDevice

        return SimDevice(context)
    if kind == "cpu_pinned":
        from weftplan.device.cupy_device import pinned_device

        return pinned_device(context)
    from weftplan.device.numpy_device import NumpyDevice

    return NumpyDevice(context)
