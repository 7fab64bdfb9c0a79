"""Sharing memory with other libraries: DLPack out and in, NumPy in.

Memory that leaves must not go back to the pool while the other side holds it, so what is exported is a NumPy (or CuPy)
array whose base is a small object that keeps the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import DTypeError
from weftplan.ndarray.chunk import Chunk

if TYPE_CHECKING:
    from weftplan.ndarray.array import NDArray


class _HostKeeper:
    """Looks like the bytes to NumPy, and keeps the chunk."""

    __slots__ = ("__array_interface__", "kept")

    def __init__(self, array: NDArray) -> None:
        self.kept = array.chunk, array.chunk.keeper
        self.__array_interface__ = array.raw().__array_interface__


class _CudaKeeper:
    """Looks like the bytes to CuPy, and keeps the chunk."""

    __slots__ = ("__cuda_array_interface__", "kept")

    def __init__(self, array: NDArray) -> None:
        self.kept = array.chunk, array.chunk.keeper
        self.__cuda_array_interface__ = array.raw().__cuda_array_interface__


def export(array: NDArray) -> Any:
    """A NumPy or CuPy array on the same memory, which keeps that memory; waits for everything pending.

    Planned memory of an executor moves when a larger executor joins its pool; what was exported before stays as it was.
    """
    array.wait_to_write()
    if array.context.device_type == "gpu":
        return device.get(array.context).xp.asarray(_CudaKeeper(array))
    return np.asarray(_HostKeeper(array))


def from_dlpack(source: Any) -> NDArray:
    """An array on the memory of ``source`` (anything with ``__dlpack__``); copied only where it cannot be shared.

    Shared: contiguous, writable memory of a supported dtype on the host or a GPU. The other side must not write to it
    while operations that were pushed here have not finished.

    Raises:
        DTypeError: ``source`` has no ``__dlpack__``, or a dtype that is not supported.
    """
    if not hasattr(source, "__dlpack__"):
        raise DTypeError(f"from_dlpack needs an object with __dlpack__, got {type(source).__name__}")
    kind, index = source.__dlpack_device__()
    if int(kind) == 2:
        context = Context("gpu", int(index))
        foreign = device.get(context).xp.from_dlpack(source)
        return adopt(foreign, context)
    try:
        foreign = np.from_dlpack(source)
    except (TypeError, RuntimeError, BufferError) as error:
        raise DTypeError(f"from_dlpack: NumPy cannot read this {type(source).__name__}: {error}") from error
    return adopt(foreign, Context("cpu", 0))


def from_numpy(values: np.ndarray[Any, Any], zero_copy: bool = True) -> NDArray:
    """An array on the memory of a NumPy array, or with ``zero_copy=False`` a copy of it.

    Raises:
        DTypeError: not a NumPy array, a dtype that is not supported, or memory that cannot be shared.
    """
    if not isinstance(values, np.ndarray):
        raise DTypeError(f"from_numpy needs a NumPy array, got {type(values).__name__}")
    if zero_copy and not (values.flags.c_contiguous and values.flags.writeable):
        raise DTypeError("from_numpy: only contiguous, writable memory can be shared; pass zero_copy=False")
    return adopt(values if zero_copy else values.copy(), Context("cpu", 0))


def adopt(foreign: Any, context: Context) -> NDArray:
    """An array on the memory of ``foreign``, a NumPy or CuPy array; copies when it is strided or read-only."""
    from weftplan.ndarray.array import NDArray, check_dtype

    dtype = check_dtype(foreign.dtype)
    usable = foreign.flags.c_contiguous and getattr(foreign.flags, "writeable", True) and foreign.dtype == dtype
    if not usable or foreign.size == 0:
        foreign = foreign.astype(dtype, order="C", copy=True)
    flat = foreign.reshape(-1).view(np.uint8)
    return NDArray(Chunk.wrap(context, flat, name="shared"), tuple(foreign.shape), dtype)
