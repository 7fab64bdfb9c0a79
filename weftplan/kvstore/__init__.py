"""Key-value stores: sums of arrays over devices, updates on the store. ``mx.kv.create("device")``.

``create`` chooses the store. A store may be used from any thread; its work is ordered by the vars of the arrays.
"""

from weftplan.kvstore.base import KVStoreBase, register
from weftplan.kvstore.factory import create
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.on_device import KVStoreDevice
from weftplan.kvstore.teststore import TestStore
from weftplan.kvstore.updater import Updater

KVStore = KVStoreLocal

__all__ = ["KVStore", "KVStoreBase", "KVStoreDevice", "KVStoreLocal", "TestStore", "Updater", "create", "register"]


def __dir__() -> list[str]:
    return sorted(__all__)
