"""The registry of resources: one stack per context and process, created on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weftplan import config, device
from weftplan.device import host_memory
from weftplan.device.context import HOST_MEMORY, Context
from weftplan.locks import Lock, whole_in_children
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
_lock = whole_in_children(Lock())
changes = 0
"""How often a context has got another resource than it had: who keeps what :func:`get` said looks at this."""

_HOST_SLACK = 16 << 20
"""Bytes that the pool of a CPU may hold beyond the recent peak of live bytes, so that small arrays of changing sizes
are found in the cache, too. Fresh pages cost a large addition on the host half as much again at most, so memory that
nobody uses is worth more to others; on a GPU, where a system allocation stops the device, pools keep what they have."""
_PREFIX = {"cpu": "CPU", "cpu_pinned": "CPU_PINNED", "gpu": "GPU", "sim": "GPU"}
"""Whose variables configure a device type; a simulated device follows the GPU's."""
PADDLE_POISON = 0xEF
"""What Paddle fills memory with under ``FLAGS_init_allocated_mem``."""


def get(context: Context) -> Resource:
    """The resource of ``context``: the pool that ``MXNET_{CPU,CPU_PINNED,GPU}_MEM_POOL_TYPE`` names, or the strategy of
    Paddle that ``FLAGS_allocator_strategy`` names.

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
    """A new stack for ``context``, configured as :func:`get` does; nobody else knows of it.

    A simulated device's memory is poisoned as it comes and goes, that of others with ``FLAGS_init_allocated_mem``;
    with ``WEFTPLAN_STORAGE_GUARD`` it has margins.
    """
    resource = _poisoned(context)
    return GuardResource(resource) if config.process("WEFTPLAN_STORAGE_GUARD") else resource


def _poisoned(context: Context) -> Resource:
    """The stack of a context up to the poison."""
    if context.device_type == "file":  # its unit is a page of the file system
        return AutoGrowth(device.get(context), release_idle=True)
    where = flags.limited(device.get(context))
    strategy = flags.chosen(context)
    own = config.lookup(f"MXNET_{_PREFIX[context.device_type]}_MEM_POOL_TYPE")
    if strategy != "mxnet" and own.text is not None:
        flags.without_effect(where, ("FLAGS_allocator_strategy",), f"{own.variable.name} is set, and nearer to it")
        strategy = "mxnet"
    if strategy == "mxnet":
        flags.warn_of_unused(where)
        resource = _mxnet(where)
    else:
        resource = flags.build(where, strategy)
    if config.process("FLAGS_init_allocated_mem"):
        if strategy == "naive_best_fit" or config.process("WEFTPLAN_STORAGE_COMPAT") != "paddle":
            return PoisonResource(resource, PADDLE_POISON)
        flags.without_effect(where, ("FLAGS_init_allocated_mem",), "Paddle fills memory with naive_best_fit alone")
    return PoisonResource(resource) if context.device_type == "sim" else resource


def _mxnet(where: device.Device) -> Resource:
    """The pool of MXNet that is configured for a device."""
    prefix = f"MXNET_{_PREFIX[where.context.device_type]}_MEM_"
    kind = config.process(prefix + "POOL_TYPE")
    if kind == "Unpooled":
        return RawResource(where)
    page = config.process(prefix + "POOL_PAGE_SIZE")
    reserve = config.process(prefix + "POOL_RESERVE")
    slack = _HOST_SLACK if where.context.device_type == "cpu" else None
    if kind == "Round":
        cutoff = config.process(prefix + "POOL_ROUND_LINEAR_CUTOFF")
        return RoundPool(where, page=page, cutoff=cutoff, reserve=reserve, slack=slack)
    large = config.process(prefix + "LARGE_ALLOC_ROUND_SIZE")
    return NaivePool(where, page=page, large=large, reserve=reserve, slack=slack)


def in_use() -> dict[Context, Resource]:
    """The resources that :func:`get` has made so far, by context; makes none."""
    with _lock:
        return dict(_resources)


def empty_cache(context: Context | None = None) -> int:
    """Give unused blocks of one context, or of all, back to the system; returns the bytes."""
    with _lock:
        places = [key for key in _resources if context is None or key == context]
        chosen = [_resources[key] for key in places]
    for place in places:
        _take_temporaries_back(place, 0)
    return sum(resource.empty_cache() for resource in chosen)


def check_guards() -> None:
    """Look for writes outside of allocations, in guard mode; call it when no operation is pending.

    Raises:
        GuardError: an operation wrote outside of its memory; names who had asked for that.
    """
    for resource in in_use().values():
        if isinstance(resource, GuardResource):
            resource.check()


def compact(context: Context | None = None) -> int:
    """Move arrays that nobody looks at together, in pools that cut chunks, so that free bytes lie together; returns the
    bytes moved.

    Arrays can move where ``WEFTPLAN_STORAGE_COMPACT`` is set, or ``WEFTPLAN_SPILL`` lists homes.
    """
    compactor = slots.COMPACTOR.value
    if compactor is None:
        return 0
    return sum(compactor(key) for key in in_use() if context is None or key == context)


def reset_peaks(context: Context | None = None) -> None:
    """Let the peaks of one context, or of all, be the figures of now."""
    for key, resource in in_use().items():
        if context is None or key == context:
            resource.reset_peaks()


def memory_summary(context: Context | None = None, *, holders: int = 10) -> str:
    """What each context holds, as text: live, cached and reserved bytes with their peaks, and who holds most.

    Args:
        context: one context; default: all from which memory has been taken.
        holders: how many operators or functions, with lines, are listed for each.
    """
    free, total = host_memory.memory_info()
    parts = [
        f"settings: {settings_in_force()}",
        f"process: {host_memory.resident():,} bytes; the machine or container has {total:,}, {free:,} of them free",
    ]
    for key, resource in in_use().items():
        if context is not None and key != context:
            continue
        now = resource.statistics()
        rows = (
            ("asked for", now.requested_bytes, now.peak_requested_bytes),
            ("in use, rounded", now.allocated_bytes, now.peak_allocated_bytes),
            ("reserved", now.reserved_bytes, now.peak_reserved_bytes),
        )
        parts.append(f"{key}: {resource!r}")
        parts += [f"  {name:<16} {nbytes:>18,} bytes   peak {peak:>18,}" for name, nbytes, peak in rows]
        parts.append(
            f"  {now.live:,} live of {now.allocations:,} allocations, {now.hits:,} of them from the cache; "
            f"{now.system_allocations:,} from the system, {now.failures:,} refused"
        )
        parts.append(f"  held by: {largest_holders(resource.holders(), holders)}")
    return "\n".join(parts)


def _empty_neighbours(context: Context, nbytes: int) -> bool:
    """A rung: the caches of all pools of host memory, where host memory is wanted."""
    if context.device_type not in HOST_MEMORY:
        return False
    with _lock:
        chosen = [resource for key, resource in _resources.items() if key.device_type in HOST_MEMORY]
    return sum(resource.empty_cache() for resource in chosen) > 0


def _take_temporaries_back(context: Context, nbytes: int) -> bool:
    """A rung: what CuPy took inside kernels and has done with."""
    temporaries = getattr(device.get(context), "temporaries", None) if context.device_type == "gpu" else None
    return temporaries is not None and temporaries.release() > 0


relief.add(20, _empty_neighbours)
relief.add(25, _take_temporaries_back)


@contextmanager
def using(resource: Resource) -> Iterator[Resource]:
    """Replace the resource of ``resource.context`` within a ``with`` block: for tests and measurements.

    Memory that was allocated inside must be freed to the same resource, wherever that happens.
    """
    global changes
    context = resource.context
    with _lock:
        before = _resources.get(context)
        _resources[context] = resource
        changes += 1
    try:
        yield resource
    finally:
        with _lock:
            changes += 1
            if before is None:
                del _resources[context]
            else:
                _resources[context] = before
