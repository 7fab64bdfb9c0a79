"""Import of other libraries' memory through DLPack and NumPy, without a copy if it can be shared.

``export.py`` is the opposite direction. Any thread may call this module.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.device.stream import no_stream
from weftplan.errors import DTypeError, ParameterError
from weftplan.ndarray.array import NDArray
from weftplan.ndarray.base import check_dtype
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.support.array_types import RawArray


class _Writable:
    """A writable array interface of a NumPy array's bytes."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, values: RawArray) -> None:
        self.owner = values
        described = values.__array_interface__
        self.__array_interface__ = {**described, "data": (described["data"][0], False)}


class _Capsule:
    """A DLPack capsule wrapped in an object with ``__dlpack__``, as NumPy and CuPy require."""

    __slots__ = ("_capsule", "_device", "plain")
    plain: bool
    """Whether the capsule has no version, hence no read-only flag."""

    def __init__(self, capsule: object) -> None:
        api = ctypes.pythonapi
        api.PyCapsule_IsValid.argtypes = api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        for name, start in ((b"dltensor", 0), (b"dltensor_versioned", 32)):  # the tensor's offset in the struct
            if api.PyCapsule_IsValid(capsule, name):
                address = api.PyCapsule_GetPointer(capsule, name) + start + ctypes.sizeof(ctypes.c_void_p)
                kind, index = (ctypes.c_int32 * 2).from_address(address)
                self._capsule, self._device, self.plain = capsule, (kind, index), start == 0
                return
        raise DTypeError("from_dlpack: this capsule is no DLPack tensor, or was used already: each can be used once")

    def __dlpack__(self, **kwargs: object) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def to_dlpack_for_read(data: NDArray) -> object:
    """Return a DLPack capsule of ``data`` for reading by another library or :func:`from_dlpack`.

    See ``NDArray.__dlpack__``.
    """
    return data.__dlpack__()


def to_dlpack_for_write(data: NDArray) -> object:
    """Return a DLPack capsule of ``data`` for writing by another library; finish there before using the array again."""
    return data.__dlpack__()


def from_dlpack(dlpack: object) -> NDArray:
    """Make an array on the memory of ``dlpack``; copy only if it cannot be shared.

    ``dlpack`` is anything with ``__dlpack__``, or a capsule, which can be used once.

    Shared: contiguous, writable memory of a supported dtype on the host or a GPU. The other side must not write to it
    while operations that were pushed here have not finished.

    Raises:
        DTypeError: ``dlpack`` is another object, a capsule that was used already, or has an unsupported dtype.
    """
    if isinstance(dlpack, np.ndarray):  # NumPy 2.0 would mark its own memory read-only on the way
        return adopt(dlpack, Context("cpu", 0))
    source: Any = _Capsule(dlpack) if type(dlpack).__name__ == "PyCapsule" else dlpack
    if not hasattr(source, "__dlpack__"):
        raise DTypeError(f"from_dlpack needs an object with __dlpack__, got {type(source).__name__}")
    kind, index = source.__dlpack_device__()
    if int(kind) == 2:
        context = Context("gpu", int(index))
        source_device = device.get(context)
        imported = []
        # Without a stream of ours the launch ends by waiting for CuPy's stream, after the other library's kernels. Our
        # streams do not wait for CuPy's.
        with no_stream():
            source_device.launch(lambda: imported.append(source_device.xp.from_dlpack(source)))
        return adopt(imported[0], context)
    try:
        foreign = np.from_dlpack(source)
    except (TypeError, RuntimeError, BufferError) as error:
        raise DTypeError(f"from_dlpack: NumPy cannot read this {type(source).__name__}: {error}") from error
    if isinstance(source, _Capsule) and source.plain:
        foreign = np.asarray(_Writable(foreign))  # NumPy marks it read-only for want of knowledge
    return adopt(foreign, Context("cpu", 0))


_lent: dict[int, weakref.ref[Any]] = {}
"""NumPy arrays that :func:`from_numpy` has made read-only, by their ids; they can be shared repeatedly."""


def from_numpy(ndarray: RawArray, zero_copy: bool = True, array_cls: type[NDArray] = NDArray) -> NDArray:
    """Make an array on the memory of a NumPy array, or with ``zero_copy=False`` on a copy.

    If memory is shared, the NumPy array becomes read-only, as in MXNet, because the engine would not notice its writes.

    Args:
        ndarray: the NumPy array.
        zero_copy: whether the memory is shared.
        array_cls: NDArray, since arrays with NumPy's semantics do not exist.

    Raises:
        DTypeError: not a NumPy array, or a dtype that is not supported.
        ParameterError: memory that cannot be shared; a ValueError, as in MXNet.
    """
    if array_cls is not NDArray:
        raise ParameterError(f"from_numpy: array_cls must be NDArray, got {array_cls!r}")
    if not isinstance(ndarray, np.ndarray):
        raise DTypeError(f"from_numpy needs a NumPy array, got {type(ndarray).__name__}")
    if not zero_copy:
        return adopt(ndarray.copy(), Context("cpu", 0))
    lent = _lent.get(id(ndarray), lambda: None)() is ndarray
    if lent:
        ndarray.flags.writeable = True
    if not (ndarray.flags.c_contiguous and ndarray.flags.writeable):
        raise ParameterError("from_numpy: only contiguous, writable memory can be shared; pass zero_copy=False")
    shared = adopt(ndarray, Context("cpu", 0))
    if not np.may_share_memory(shared.chunk.raw, ndarray):  # another order of bytes, or none
        return shared
    ndarray.flags.writeable = False
    if not lent:
        identity = id(ndarray)
        _lent[identity] = weakref.ref(ndarray, lambda reference: _lent.pop(identity, None))
    return shared


def adopt(foreign: RawArray, context: Context) -> NDArray:
    """Make an array on the memory of ``foreign``, a NumPy or CuPy array; copy it if it is strided or read-only."""
    dtype = check_dtype(foreign.dtype)
    usable = foreign.flags.c_contiguous and getattr(foreign.flags, "writeable", True) and foreign.dtype == dtype
    if not usable or foreign.size == 0:
        foreign = foreign.astype(dtype, order="C", copy=True)
    flat = foreign.reshape(-1).view(np.uint8)
    return NDArray(Chunk.wrap(context, flat, name="shared"), tuple(foreign.shape), dtype)
