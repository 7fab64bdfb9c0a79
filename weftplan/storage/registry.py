"""From contexts to resources: one stack per context in a process, made at first use from the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weftplan import config, device
from weftplan.device.context import Context
from weftplan.locks import Lock, whole_in_children
from weftplan.storage.adaptors import PoisonResource
from weftplan.storage.base import Resource
from weftplan.storage.mxnet_pools import NaivePool, RoundPool
from weftplan.storage.raw import RawResource

_resources: dict[Context, Resource] = {}
_lock = whole_in_children(Lock())

_HOST_SLACK = 16 << 20
"""Bytes that the pool of a CPU may hold beyond the peak of live bytes, so that small arrays of changing sizes are found
in the cache, too. Fresh pages cost a large addition on the host half as much again at most, so memory that nobody uses
is worth more to others; on a GPU, where a system allocation stops the device, pools keep what they have."""
_PREFIX = {"cpu": "CPU", "cpu_pinned": "CPU_PINNED", "gpu": "GPU", "sim": "GPU"}
"""Whose variables configure a device type; a simulated device follows the GPU's."""


def get(context: Context) -> Resource:
    """The resource of ``context``: the pool that ``MXNET_{CPU,CPU_PINNED,GPU}_MEM_POOL_TYPE`` names.

    A simulated device's memory is poisoned as it comes and goes.

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
    """A new stack for ``context``, configured as :func:`get` does; nobody else knows of it."""
    where = device.get(context)
    prefix = f"MXNET_{_PREFIX[context.device_type]}_MEM_"
    kind = config.process(prefix + "POOL_TYPE")
    resource: Resource
    if kind == "Unpooled":
        resource = RawResource(where)
    else:
        page = config.process(prefix + "POOL_PAGE_SIZE")
        reserve = config.process(prefix + "POOL_RESERVE")
        slack = _HOST_SLACK if context.device_type == "cpu" else None
        if kind == "Round":
            cutoff = config.process(prefix + "POOL_ROUND_LINEAR_CUTOFF")
            resource = RoundPool(where, page=page, cutoff=cutoff, reserve=reserve, slack=slack)
        else:
            large = config.process(prefix + "LARGE_ALLOC_ROUND_SIZE")
            resource = NaivePool(where, page=page, large=large, reserve=reserve, slack=slack)
    return PoisonResource(resource) if context.device_type == "sim" else resource


def in_use() -> dict[Context, Resource]:
    """The resources that :func:`get` has made so far, by context; makes none."""
    with _lock:
        return dict(_resources)


def empty_cache(context: Context | None = None) -> int:
    """Give unused blocks of one context, or of all, back to the system; returns the bytes."""
    with _lock:
        chosen = [resource for key, resource in _resources.items() if context is None or key == context]
    return sum(resource.empty_cache() for resource in chosen)


@contextmanager
def using(resource: Resource) -> Iterator[Resource]:
    """Replace the resource of ``resource.context`` within a ``with`` block: for tests and measurements.

    Memory that was allocated inside must be freed to the same resource, wherever that happens.
    """
    context = resource.context
    with _lock:
        before = _resources.get(context)
        _resources[context] = resource
    try:
        yield resource
    finally:
        with _lock:
            if before is None:
                del _resources[context]
            else:
                _resources[context] = before
