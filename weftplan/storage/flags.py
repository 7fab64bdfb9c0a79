"""Pools configured by ``FLAGS_*``: Paddle's two strategies, their sizes, the limit.

Paddle's documents and its source disagree in places. ``WEFTPLAN_STORAGE_COMPAT=documents`` (the default) follows the
documents, ``paddle`` the source of 2020 to 2025:

* A chunk is a share of the free memory less 5 %, each further chunk of the memory free then.
* Every block has a header of 64 bytes, which counts when a request is compared with the size of a chunk.
* A chunk that the device refuses is an error.
* ``cpu(i)`` has no pool; the share of page-locked memory is a cap, and a chunk is the 256th part of it.
* ``auto_growth`` caches idle chunks until the device refuses.
* ``FLAGS_init_allocated_mem`` works only with ``naive_best_fit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from weftplan import config
from weftplan.device.base import Device
from weftplan.device.context import Context
from weftplan.storage.auto_growth import AutoGrowth
from weftplan.storage.base import Resource
from weftplan.storage.limited import LimitedDevice
from weftplan.storage.naive_best_fit import HEADER, NaiveBestFit
from weftplan.storage.raw import RawResource

MIB = 1 << 20  # unit of the flags whose names end in "_in_mb"
_SPARE = 1 / 16
"""Share of the peak in use that ``auto_growth`` may hold beyond it."""
_GROWING = ("FLAGS_auto_growth_chunk_size_in_mb", "FLAGS_free_when_no_cache_hit")
"""Flags of ``auto_growth``."""
_PADDLE_UNIT = {"cpu": 4096, "cpu_pinned": 65536, "gpu": 256, "sim": 256}
_SIZES = {
    "cpu": ("FLAGS_fraction_of_cpu_memory_to_use", "FLAGS_initial_cpu_memory_in_mb"),
    "cpu_pinned": ("FLAGS_fraction_of_cuda_pinned_memory_to_use",),
    "gpu": (
        "FLAGS_fraction_of_gpu_memory_to_use",
        "FLAGS_initial_gpu_memory_in_mb",
        "FLAGS_reallocate_gpu_memory_in_mb",
    ),
}
"""Flags for the chunks of ``naive_best_fit``, by device type; ``sim`` has those of ``gpu``."""


def limited(device: Device) -> Device:
    """Return the device, limited by ``FLAGS_gpu_memory_limit_mb`` if that is set."""
    limit = config.process("FLAGS_gpu_memory_limit_mb") if device.context.device_type in ("gpu", "sim") else 0
    if not limit:
        return device
    return LimitedDevice(device, limit * MIB, f"FLAGS_gpu_memory_limit_mb={limit}")


def chosen(context: Context) -> str:
    """Return the strategy that ``FLAGS_allocator_strategy`` names.

    If that flag is unset but the memory share of ``naive_best_fit`` is set, return ``naive_best_fit``, because Paddle's
    documents set the share alone.
    """
    strategy = config.process("FLAGS_allocator_strategy")
    share = config.lookup(_sizes(context.device_type)[0])
    only_share_set = config.lookup("FLAGS_allocator_strategy").text is None and share.text is not None
    return "naive_best_fit" if only_share_set else str(strategy)


def build(device: Device, strategy: str) -> Resource:
    """Create the pool of a device under one of Paddle's strategies."""
    kind = device.context.device_type
    paddle = config.process("WEFTPLAN_STORAGE_COMPAT") == "paddle"
    if paddle and kind == "cpu":
        without_effect(device, (*_sizes(kind), *_GROWING), "Paddle has no pool there")
        return RawResource(device)
    if strategy == "auto_growth" and not (paddle and kind == "cpu_pinned"):
        without_effect(device, _sizes(kind), "the strategy in force is auto_growth")
        unit = _PADDLE_UNIT[kind] if paddle else None
        release = config.process(_GROWING[1])
        chunk = config.process(_GROWING[0]) * MIB
        return AutoGrowth(device, chunk=chunk, unit=unit, release_idle=release, spare=None if paddle else _SPARE)
    without_effect(device, _GROWING, f"the strategy in force is {strategy}")
    if kind == "cpu":
        share = int(config.process("FLAGS_fraction_of_cpu_memory_to_use") * device.memory_info()[1])
        return NaiveBestFit(device, first=min(config.process("FLAGS_initial_cpu_memory_in_mb") * MIB, share))
    if kind == "cpu_pinned":
        share = int(config.process("FLAGS_fraction_of_cuda_pinned_memory_to_use") * device.memory_info()[1])
        if paddle:
            unit = _PADDLE_UNIT[kind]
            return NaiveBestFit(device, first=share // 256, unit=unit, header=HEADER, insist=True, cap=share)
        return NaiveBestFit(device, first=share)
    initial = config.process("FLAGS_initial_gpu_memory_in_mb") * MIB
    further = config.process("FLAGS_reallocate_gpu_memory_in_mb") * MIB
    fraction = config.process("FLAGS_fraction_of_gpu_memory_to_use")
    if initial and further:
        without_effect(device, ("FLAGS_fraction_of_gpu_memory_to_use",), "both sizes in MiB are given")
    share_now = partial(_share, device, fraction, 95 if paddle else 100)
    refill: int | Callable[[], int] | None = further or (share_now if paddle or initial else None)
    if paddle:
        unit = _PADDLE_UNIT[kind]
        return NaiveBestFit(device, first=initial or share_now, refill=refill, unit=unit, header=HEADER, insist=True)
    return NaiveBestFit(device, first=initial or share_now, refill=refill)


def _share(device: Device, fraction: float, percent: int) -> int:
    """Return ``fraction`` of ``percent`` of the memory that is free now."""
    return int(fraction * (device.memory_info()[0] * percent // 100))


def warn_of_unused(device: Device) -> None:
    """Warn of flags for chunks that are set although no strategy of Paddle is in force."""
    kind = device.context.device_type
    why = "the pools are MXNet's; set FLAGS_allocator_strategy"
    without_effect(device, (*_sizes(kind), *_GROWING), why)


def without_effect(device: Device, names: Iterable[str], why: str) -> None:
    """Warn, once per name and reason, of variables that are set but have no effect on this device."""
    for name in names:
        setting = config.lookup(name)
        if setting.text is not None:
            config.warn_once(name, f"{name}={setting.text} has no effect on {device.context}: {why}")


def _sizes(kind: str) -> tuple[str, ...]:
    return _SIZES["gpu" if kind == "sim" else kind]
