"""Which kvstore a Module uses, and who applies the optimizer."""

from __future__ import annotations

from typing import Any

from weftplan import config, kvstore
from weftplan.errors import KVStoreError
from weftplan.kvstore import KVStoreBase

BIG_PARAMETER = 16 * 1024 * 1024
"""With kvstore ``local``, a network with a larger parameter (elements) is updated on the devices, as in MXNet."""


def choose_store(spec: Any, *, contexts: int, largest: int) -> tuple[KVStoreBase | None, bool]:
    """(store or None, whether it applies the optimizer).

    Args:
        spec: None, a name, or a store. A name gives no store where there is one context and one worker.
        contexts: number of contexts of the module.
        largest: elements of its largest parameter.

    Raises:
        KVStoreError: an unknown name, or something that is no store.
    """
    if spec is None:
        return None, False
    on_store = True
    if isinstance(spec, str):
        store = kvstore.create(spec)  # an unknown name is an error with one context too
        if contexts == 1 and "dist" not in spec:
            return None, False
        if spec == "local":
            on_store = largest <= BIG_PARAMETER
    elif isinstance(spec, KVStoreBase):
        store = spec
    else:
        raise KVStoreError(f"kvstore must be a name such as 'device', a store or None, got {spec!r}")
    return store, on_store and bool(config.get("MXNET_UPDATE_ON_KVSTORE")) and store.is_capable("optimizer")
