"""``mx.kv.create("teststore")``: a minimal plug-in store, the counterpart of MXNet's test store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.errors import ParameterError
from weftplan.kvstore.base import KVStoreBase, register
from weftplan.ndarray import NDArray

Arrays = NDArray | Sequence[NDArray] | Sequence[Sequence[NDArray]]


def _array_list(arrays: object) -> list[NDArray]:
    several: Any = arrays
    return list(several) if isinstance(arrays, (list, tuple)) else [several]


@register
class TestStore(KVStoreBase):
    """A store without stored values and optimizer: ``broadcast`` copies values, ``pushpull`` sums them."""

    __test__ = False  # pytest: this is no test class

    def broadcast(self, key: object, value: Arrays, out: Arrays, priority: int = 0) -> None:
        (initial,) = _array_list(value)
        for target in _array_list(out):
            target[:] = initial.as_in_context(target.context)

    def pushpull(self, key: object, value: Arrays, out: Arrays | None = None, priority: int = 0) -> None:
        if isinstance(key, list):
            for key_value, arrays, target in zip(
                key, _array_list(value), _array_list(value if out is None else out), strict=True
            ):
                self.pushpull(key_value, arrays, target, priority)
            return
        values = _array_list(value)
        total = values[0].copy()
        for other in values[1:]:
            total += other.as_in_context(total.context)
        for target in values if out is None else _array_list(out):
            target[:] = total.as_in_context(target.context)

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ParameterError(f"teststore: unknown capability {capability!r}; there is {KVStoreBase.OPTIMIZER!r}")
        return False

    @property
    def type(self) -> str:
        return "teststore"

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1
