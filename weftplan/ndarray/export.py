"""Export of an array's memory to other libraries, as a NumPy or CuPy array or a DLPack capsule.

Exported memory must not return to the pool while the other library holds it. So the exported array's base is a small
object that keeps the chunk alive. :func:`export` waits for pending operations; any thread may call it outside an
operation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan import device
from weftplan.ndarray.base import NDArrayBase
from weftplan.support.array_types import RawArray


class _HostKeeper:
    """The array interface of the bytes for NumPy; keeps the chunk alive."""

    __slots__ = ("__array_interface__", "owners")

    def __init__(self, array: NDArrayBase) -> None:
        self.owners = array.chunk, array.chunk.keeper
        self.__array_interface__ = array.raw().__array_interface__


class _CudaKeeper:
    """The array interface of the bytes for CuPy; keeps the chunk alive."""

    __slots__ = ("__cuda_array_interface__", "owners")

    def __init__(self, array: NDArrayBase) -> None:
        self.owners = array.chunk, array.chunk.keeper
        raw: Any = array.raw()
        self.__cuda_array_interface__ = raw.__cuda_array_interface__


def export(array: NDArrayBase) -> RawArray:
    """Return a NumPy or CuPy array that shares the memory and keeps it alive; wait for pending operations first.

    Planned memory of an executor moves when a larger executor joins its pool; earlier exports keep the old memory.
    """
    array.wait_to_write()
    if array.context.device_type == "gpu":
        shared: RawArray = device.get(array.context).xp.asarray(_CudaKeeper(array))
        return shared
    return np.asarray(_HostKeeper(array))
