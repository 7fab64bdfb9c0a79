"""Registry of devices: each process has one device object per context, created on first use."""

from __future__ import annotations

import os
from collections.abc import Iterable

from weftplan.device.base import Device
from weftplan.device.context import Context
from weftplan.device.offload_targets import OffloadTarget
from weftplan.errors import DeviceError
from weftplan.locks import Lock, consistent_in_children

_devices: dict[Context, Device] = {}
_folders: dict[int, OffloadTarget] = {}
"""By index of the ``file`` context: the folder that :func:`name_folders` assigned to it."""
_lock = consistent_in_children(Lock())
"""Guards ``_devices`` and ``_folders``, so that a context never gets two devices."""


def get(context: Context) -> Device:
    """Return the device of ``context``, created on first use.

    Raises:
        DeviceError: CuPy, the driver or the GPU of a ``gpu`` context is missing, or the folder of a ``file`` context.
    """
    device = _devices.get(context)  # without the lock: dict.get is atomic, and devices are never removed
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
    if kind == "file":
        return _file(context)
    from weftplan.device.numpy_device import NumpyDevice

    return NumpyDevice(context)


def _file(context: Context) -> Device:
    """Create ``file(k)``: its folder is the k-th of :func:`name_folders`, or else of ``WEFTPLAN_SPILL``."""
    from weftplan import config
    from weftplan.device.file_device import FileDevice
    from weftplan.device.offload_targets import parse

    named = _folders.get(context.device_id)
    if named is not None:
        return FileDevice(context, named.folder, named.nbytes)
    folders = [target for target in parse(config.process("WEFTPLAN_SPILL")) if target.kind == "file"]
    if context.device_id >= len(folders):
        raise DeviceError(
            f"{context} has no folder: WEFTPLAN_SPILL lists {len(folders)} of them; set it, such as file:/tmp:50GB"
        )
    return FileDevice(context, folders[context.device_id].folder, folders[context.device_id].nbytes)


def name_folders(targets: Iterable[OffloadTarget]) -> None:
    """Make the k-th folder among ``targets`` the folder of ``file(k)``.

    Raises:
        DeviceError: ``file(k)`` already exists in another folder.
    """
    for index, target in enumerate(target for target in targets if target.kind == "file"):
        with _lock:
            folder = getattr(_devices.get(Context("file", index)), "folder", None)
            if folder is not None and os.path.realpath(folder) != os.path.realpath(target.folder):
                raise DeviceError(
                    f"file({index}) is the folder {folder!r} in this process, and cannot become {target.folder!r}: "
                    f"name folders in the same order each time"
                )
            _folders[index] = target


def peers(context: Context) -> list[Context]:
    """Return the contexts of all other devices of the same type.

    For a GPU these are all other GPUs of the machine; for another type, devices that this process has created.
    """
    if context.device_type == "gpu":
        from weftplan.device.cupy_device import count_gpus

        contexts = [Context("gpu", index) for index in range(count_gpus())]
    else:
        with _lock:
            contexts = [key for key in _devices if key.device_type == context.device_type]
    return [peer for peer in contexts if peer != context]


def put(device: Device) -> Device | None:
    """Replace the device of ``device.context``, for tests and measurements; return the previous device, or None."""
    with _lock:
        previous = _devices.get(device.context)
        _devices[device.context] = device
        return previous
