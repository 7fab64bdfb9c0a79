"""Key-value stores: they sum gradients over devices or processes and update weights. ``mx.kv.create("device")``.

:func:`create` returns a store by name. Any thread may use a store; the engine orders its operations by the arrays that
they read and write.
"""

from typing import TYPE_CHECKING

from weftplan.kvstore.base import KVStoreBase, register
from weftplan.kvstore.factory import create
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.teststore import TestStore
from weftplan.kvstore.updater import Updater
from weftplan.support.lazy_import import late_import

if TYPE_CHECKING:
    from weftplan.kvstore.on_device import KVStoreDevice

KVStore = KVStoreLocal

__all__ = ["KVStore", "KVStoreBase", "KVStoreDevice", "KVStoreLocal", "TestStore", "Updater", "create", "register"]


def __getattr__(name: str) -> object:
    if name != "KVStoreDevice":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    store: object = late_import("weftplan.kvstore.on_device").KVStoreDevice
    return store


def __dir__() -> list[str]:
    return sorted(__all__)
