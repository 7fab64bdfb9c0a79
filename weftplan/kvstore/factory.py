"""The factory of stores, :func:`create`, and the names that it accepts.

Stores other than ``local`` are imported on first use. Any thread may call :func:`create`.
"""

from __future__ import annotations

from weftplan.errors import KVStoreError, did_you_mean
from weftplan.kvstore.base import KVStoreBase, registered
from weftplan.kvstore.local import KVStoreLocal
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.lazy_import import late_import

LOCAL_TYPES = ("local", "local_update_cpu", "local_allreduce_cpu")
DEVICE_TYPES = ("device", "local_allreduce_device")
NCCL_TYPES = ("nccl",)
DIST_TYPES = ("dist_sync", "dist")
DIST_DEVICE_TYPES = ("dist_device_sync", "dist_sync_device", "dist_device")
DIST_ASYNC_TYPES = ("dist_async",)
FUTURE_TYPES = ("dist_device_async", "dist_async_device", "p3")


@known_keywords()
def create(name: str = "local") -> KVStoreBase:
    """Create a store by name, ignoring case.

    ``local`` sums on the CPU in MXNet's ``local`` order; ``device`` sums on the devices of the pushed arrays, each key
    on the device with the fewest bytes to sum so far; ``nccl`` sums with NVIDIA's NCCL. ``dist_sync`` and
    ``dist_device_sync`` sum as ``local`` and ``device`` do, and then over the processes of an MPI job (``weftplan
    launch``). ``dist_async`` applies each process's pushes on servers, without waiting for the other processes.

    Raises:
        KVStoreError: the name is unknown, this version does not have the store, MPI is missing for a distributed store,
            or a GPU or NCCL is missing for ``nccl``.

    >>> create("local").type
    'local'
    """
    if not isinstance(name, str):
        raise KVStoreError(f"the name of a kvstore must be a str, got {type(name).__name__}")
    lowered = name.lower()
    plugins = registered()
    if lowered in plugins:
        return plugins[lowered]()
    if lowered in LOCAL_TYPES:
        return KVStoreLocal(lowered)
    if lowered in DEVICE_TYPES:
        return _import_store("on_device", "KVStoreDevice", lowered)
    if lowered in DIST_TYPES:
        return _import_store("distributed.sync", "KVStoreDistSync", lowered)
    if lowered in DIST_DEVICE_TYPES:
        return _import_store("distributed.sync", "KVStoreDistDeviceSync", lowered)
    if lowered in DIST_ASYNC_TYPES:
        return _import_store("distributed.asynchronous", "KVStoreDistAsync", lowered)
    if lowered in NCCL_TYPES:
        return _import_store("nccl", "KVStoreNccl", lowered)
    if lowered in FUTURE_TYPES:
        raise KVStoreError(f"kvstore {name!r} is not available in this version; use 'dist_sync' or 'dist_async'")
    suggestions = [
        *LOCAL_TYPES,
        *DEVICE_TYPES,
        *NCCL_TYPES,
        *DIST_TYPES,
        *DIST_DEVICE_TYPES,
        *DIST_ASYNC_TYPES,
        *plugins,
    ]
    hint = did_you_mean(lowered, suggestions)
    raise KVStoreError(f"unknown kvstore {name!r}: {hint}known: {', '.join(suggestions)}")


def _import_store(module: str, class_name: str, name: str) -> KVStoreBase:
    """Import a module of this package and return an instance, named ``name``, of its class."""
    store: KVStoreBase = getattr(late_import(f"weftplan.kvstore.{module}"), class_name)(name)
    return store
