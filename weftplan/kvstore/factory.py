"""``create``: the store of a given name."""

from __future__ import annotations

from weftplan.errors import KVStoreError, did_you_mean
from weftplan.kvstore.base import KVStoreBase, registered
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.on_device import KVStoreDevice

LOCAL_TYPES = ("local", "local_update_cpu", "local_allreduce_cpu")
DEVICE_TYPES = ("device", "local_allreduce_device")
FUTURE_TYPES = ("nccl", "dist_sync", "dist_async", "dist_device_sync", "dist_device_async", "dist", "p3")


def create(name: str = "local") -> KVStoreBase:
    """A new store.

    ``local`` sums on the CPU in MXNet's ``local`` order; ``device`` sums on the devices of the pushed arrays, each key
    on the device that has least to sum so far.

    Raises:
        KVStoreError: unknown name (the message lists the known ones), or one that this version does not have yet.

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
        return KVStoreDevice(lowered)
    if lowered in FUTURE_TYPES:
        raise KVStoreError(f"kvstore {name!r} is not available in this version; use 'local' or 'device'")
    known = [*LOCAL_TYPES, *DEVICE_TYPES, *plugins]
    hint = did_you_mean(lowered, known)
    raise KVStoreError(f"unknown kvstore {name!r}: {hint}known: {', '.join(known)}")
