"""Registry of resources: one stack per context and process, created on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weftplan import config, device
from weftplan.device import host_memory
from weftplan.device.context import HOST_MEMORY, Context
from weftplan.locks import Lock, consistent_in_children
from weftplan.storage import flags, relief
from weftplan.storage.adaptors import PoisonResource
from weftplan.storage.auto_growth import AutoGrowth
from weftplan.storage.base import Resource
from weftplan.storage.guard import GuardResource
from weftplan.storage.mxnet_pools import NaivePool, RoundPool
from weftplan.storage.raw import RawResource
from weftplan.storage.report import largest_holders, settings_in_force
from weftplan.support import slots

_resources: dict[Context, Resource] = {}
_lock = consistent_in_children(Lock())
"""Guards ``_resources`` and ``changes``, so that a context never gets two resources."""
changes = 0
"""Number of times that a context's resource was replaced. Caches of :func:`get` compare it. A variable of the module,
because each call that runs inline reads it."""

_HOST_SLACK = 16 << 20
"""Bytes that a CPU pool may hold beyond the recent peak, for small arrays of changing sizes.

More cache is not worth its memory: fresh pages slow a large addition by at most half. GPU pools never shrink: a system
allocation stops the device.
"""
_PREFIX = {"cpu": "CPU", "cpu_pinned": "CPU_PINNED", "gpu": "GPU", "sim": "GPU"}
"""Prefix of the variables of each device type. A simulated device uses the GPU's."""
PADDLE_POISON = 0xEF
"""Fill byte of Paddle under ``FLAGS_init_allocated_mem``."""


def get(context: Context) -> Resource:
    """Return the resource of ``context``.

    It is the pool of ``MXNET_{CPU,CPU_PINNED,GPU}_MEM_POOL_TYPE`` or the Paddle strategy of
    ``FLAGS_allocator_strategy``.

    Raises:
        ConfigError: a variable of the pool has an illegal value.
        DeviceError: the device cannot be used.
    """
    resource = _resources.get(context)
    if resource is not None:
        return resource
    with _lock:
        resource = _resources.get(context)
        if resource is None:
            resource = _resources[context] = build(context)
    return resource


def build(context: Context) -> Resource:
    """Create an unregistered stack for ``context``, configured as in :func:`get`.

    Memory of simulated devices is poisoned, that of others with ``FLAGS_init_allocated_mem``. With
    ``WEFTPLAN_STORAGE_GUARD`` it has margins.
    """
    resource = _poisoned(context)
    return GuardResource(resource) if config.process("WEFTPLAN_STORAGE_GUARD") else resource


def _poisoned(context: Context) -> Resource:
    """Create the stack of a context up to the poison."""
    if context.device_type == "file":  # its unit is a page of the file system
        return AutoGrowth(device.get(context), release_idle=True)
    memory_device = flags.limited(device.get(context))
    strategy = flags.chosen(context)
    pool_type = config.lookup(f"MXNET_{_PREFIX[context.device_type]}_MEM_POOL_TYPE")
    if strategy != "mxnet" and pool_type.text is not None:
        flags.without_effect(
            memory_device, ("FLAGS_allocator_strategy",), f"{pool_type.variable.name} is set, and nearer to it"
        )
        strategy = "mxnet"
    if strategy == "mxnet":
        flags.warn_of_unused(memory_device)
        resource = _mxnet(memory_device)
    else:
        resource = flags.build(memory_device, strategy)
    if config.process("FLAGS_init_allocated_mem"):
        if strategy == "naive_best_fit" or config.process("WEFTPLAN_STORAGE_COMPAT") != "paddle":
            return PoisonResource(resource, PADDLE_POISON)
        flags.without_effect(
            memory_device, ("FLAGS_init_allocated_mem",), "Paddle fills memory with naive_best_fit alone"
        )
    return PoisonResource(resource) if context.device_type == "sim" else resource


def _mxnet(memory_device: device.Device) -> Resource:
    """Create the MXNet pool that is configured for a device."""
    prefix = f"MXNET_{_PREFIX[memory_device.context.device_type]}_MEM_"
    kind = config.process(prefix + "POOL_TYPE")
    if kind == "Unpooled":
        return RawResource(memory_device)
    page = config.process(prefix + "POOL_PAGE_SIZE")
    reserve = config.process(prefix + "POOL_RESERVE")
    slack = _HOST_SLACK if memory_device.context.device_type == "cpu" else None
    if kind == "Round":
        cutoff = config.process(prefix + "POOL_ROUND_LINEAR_CUTOFF")
        return RoundPool(memory_device, page=page, cutoff=cutoff, reserve=reserve, slack=slack)
    large = config.process(prefix + "LARGE_ALLOC_ROUND_SIZE")
    return NaivePool(memory_device, page=page, large=large, reserve=reserve, slack=slack)


def in_use() -> dict[Context, Resource]:
    """Return the resources that :func:`get` has created, by context."""
    with _lock:
        return dict(_resources)


def empty_cache(context: Context | None = None) -> int:
    """Return unused blocks of one context, or of all, to the system; return the bytes."""
    with _lock:
        contexts = [key for key in _resources if context is None or key == context]
        chosen = [_resources[key] for key in contexts]
    for key_context in contexts:
        _take_temporaries_back(key_context, 0)
    return sum(resource.empty_cache() for resource in chosen)


def check_guards() -> None:
    """Check all margins for out-of-bounds writes, in guard mode. Call it when no operation is pending.

    Raises:
        GuardError: an operation wrote outside its memory; the message names the allocation.
    """
    for resource in in_use().values():
        if isinstance(resource, GuardResource):
            resource.check()


def compact(context: Context | None = None) -> int:
    """Move arrays without live views, in pools that cut chunks, to merge free bytes; return the bytes moved.

    Arrays can move with ``WEFTPLAN_STORAGE_COMPACT`` or if ``WEFTPLAN_SPILL`` lists offload targets.
    """
    compactor = slots.COMPACTOR.value
    if compactor is None:
        return 0
    return sum(compactor(key) for key in in_use() if context is None or key == context)


def reset_peaks(context: Context | None = None) -> None:
    """Reset the peaks of one context, or of all, to the present figures."""
    for key, resource in in_use().items():
        if context is None or key == context:
            resource.reset_peaks()


def memory_summary(context: Context | None = None, *, holders: int = 10) -> str:
    """Return a text with live, cached and reserved bytes of each context, their peaks, and the largest holders.

    Args:
        context: one context; default: all in use.
        holders: number of operators or functions to list for each.
    """
    free, total = host_memory.memory_info()
    parts = [
        f"settings: {settings_in_force()}",
        f"process: {host_memory.resident():,} bytes; the machine or container has {total:,}, {free:,} of them free",
    ]
    for key, resource in in_use().items():
        if context is not None and key != context:
            continue
        statistics = resource.statistics()
        rows = (
            ("asked for", statistics.requested_bytes, statistics.peak_requested_bytes),
            ("in use, rounded", statistics.allocated_bytes, statistics.peak_allocated_bytes),
            ("reserved", statistics.reserved_bytes, statistics.peak_reserved_bytes),
        )
        parts.append(f"{key}: {resource!r}")
        parts += [f"  {name:<16} {nbytes:>18,} bytes   peak {peak:>18,}" for name, nbytes, peak in rows]
        parts.append(
            f"  {statistics.live:,} live of {statistics.allocations:,} allocations, "
            f"{statistics.hits:,} of them from the cache; "
            f"{statistics.system_allocations:,} from the system, {statistics.failures:,} refused"
        )
        parts.append(f"  held by: {largest_holders(resource.holders(), holders)}")
    return "\n".join(parts)


def _empty_neighbours(context: Context, nbytes: int) -> bool:
    """Rung: empty the caches of all host memory pools if host memory is wanted."""
    if context.device_type not in HOST_MEMORY:
        return False
    with _lock:
        chosen = [resource for key, resource in _resources.items() if key.device_type in HOST_MEMORY]
    return sum(resource.empty_cache() for resource in chosen) > 0


def _take_temporaries_back(context: Context, nbytes: int) -> bool:
    """Rung: release CuPy's unused kernel temporaries."""
    temporaries = getattr(device.get(context), "temporaries", None) if context.device_type == "gpu" else None
    return temporaries is not None and temporaries.release() > 0


relief.add(20, _empty_neighbours)
relief.add(25, _take_temporaries_back)


@contextmanager
def using(resource: Resource) -> Iterator[Resource]:
    """Replace the resource of ``resource.context`` for the body of a ``with`` block, for tests and measurements.

    Memory allocated inside must be freed to the same resource, even later.
    """
    global changes
    context = resource.context
    with _lock:
        previous = _resources.get(context)
        _resources[context] = resource
        changes += 1
    try:
        yield resource
    finally:
        with _lock:
            changes += 1
            if previous is None:
                del _resources[context]
            else:
                _resources[context] = previous
