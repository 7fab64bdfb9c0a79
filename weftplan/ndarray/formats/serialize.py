"""MXNet's ``.params`` format: ``save``, ``load`` and ``load_frombuffer``.

A file is a list of array records, optionally with one name each. Records exist in versions 0 (first word is the number
of dimensions), 1, 2 and 3, which is 2 with NumPy's meaning of empty shapes; all are read. Version 2 is written, as
MXNet 1.9.1 does; an array without dimensions or without elements, which version 2 cannot express, is written as version
3, and MXNet reads that under ``npx.set_np()`` only. Everything is little endian.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import string
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import DeviceError, DTypeError, FormatError
from weftplan.ndarray.array import NDArray, from_host
from weftplan.ops.core.params import dtype_code
from weftplan.support import slots
from weftplan.support.array_types import DType, RawArray
from weftplan.support.atomic_files import open_to_read, other_kind, replacing

_LIST_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_MAX_DIMS = 32
_MAX_ELEMENTS = 1 << 59
_MAX_EMPTY = 10_000
"""Maximum arrays without a shape in one file: each takes four bytes of the file, and a thousand bytes of memory."""
_DTYPES = dict(
    enumerate("float32 float64 float16 uint8 int32 int8 int64 bool int16 uint16 uint32 uint64".split())  # noqa: SIM905
)
_BFLOAT16 = 12
_SPARSE = {1: ("row_sparse", 1), 2: ("csr", 2)}
"""Storage type -> (name, number of auxiliary arrays)."""


# ------------------------------------------------------------------------------------------------------------ writing


def save(fname: str | os.PathLike[str], data: NDArray | Sequence[NDArray] | Mapping[str, NDArray]) -> None:
    """Write an array, a list, or a dictionary of arrays; wait for their values.

    The file is written atomically: to a temporary file in the same folder, which is then renamed.

    Raises:
        DTypeError: ``data`` is none of these.
        OSError: the folder does not exist or cannot be written.
    """
    names: list[str] = []
    if isinstance(data, NDArray):
        arrays = [data]
    elif isinstance(data, Mapping):
        names, arrays = list(data.keys()), list(data.values())
        if not all(isinstance(name, str) for name in names):
            raise DTypeError("save: the keys of a dictionary of arrays must be strings")
    elif isinstance(data, list | tuple):
        arrays = list(data)
    else:
        raise DTypeError(
            f"save needs an NDArray, a list of them or a dictionary of names and NDArrays, got {type(data).__name__}"
        )
    for position, array in enumerate(arrays):
        if not isinstance(array, NDArray):
            which = repr(names[position]) if names else f"number {position}"
            raise DTypeError(f"save: array {which} must be an NDArray, got {type(array).__name__}")
    with replacing(fname) as file:
        _write(file, arrays, names)


def _write(file: BinaryIO, arrays: Sequence[NDArray], names: Sequence[str]) -> None:
    file.write(struct.pack("<QQQ", _LIST_MAGIC, 0, len(arrays)))
    for array in arrays:
        file.write(dump_record(array))
    file.write(struct.pack("<Q", len(names)))
    for name in names:
        text = name.encode()
        file.write(struct.pack("<Q", len(text)))
        file.write(text)


def dump_record(array: NDArray) -> bytes:
    """Return a single array record, as MXNet pickles arrays."""
    values = np.ascontiguousarray(array.asnumpy()).astype(array.np_dtype.newbyteorder("<"), copy=False)
    return _header(array) + values.tobytes()


def _header(array: NDArray) -> bytes:
    version = _V3 if array.size == 0 or not array.shape else _V2
    context = array.context
    # MXNet knows no simulated devices, and memory that is pinned here need not be there.
    kind, index = (context.device_typeid, context.device_id) if context.device_type in ("cpu", "gpu") else (1, 0)
    return struct.pack(
        f"<Iii{array.ndim}qiii", version, 0, array.ndim, *array.shape, kind, index, dtype_code(array.np_dtype)
    )


# ------------------------------------------------------------------------------------------------------------ reading


def load(fname: str | os.PathLike[str]) -> list[NDArray] | dict[str, NDArray]:
    """Load the arrays of a file: a list if they have no names, else a dictionary.

    An array that was saved on a GPU that does not exist here is read to ``cpu(0)``; bfloat16 is read as float32, with a
    warning.

    Raises:
        DTypeError: ``fname`` is no path.
        FormatError: truncated, no ``.params`` file, or with sparse arrays (the message names them).
        OSError: the file cannot be read.
    """
    if not isinstance(fname, str | os.PathLike):  # open() would take a number for a file descriptor, and close it
        raise DTypeError(f"load needs the path of a file, got {type(fname).__name__}; use load_frombuffer for bytes")
    path = os.fspath(fname)
    with open_to_read(fname) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):  # a pipe has no size and cannot be mapped
            return _read(memoryview(file.read()), path)
        if facts.st_size == 0:
            raise FormatError(f"{path}: the file is empty")
        return _read(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), path)


def load_frombuffer(buf: bytes | bytearray | memoryview) -> list[NDArray] | dict[str, NDArray]:
    """Load arrays from the bytes of a file, as :func:`load`.

    Raises:
        DTypeError: ``buf`` is not bytes.
        FormatError: as :func:`load`.
    """
    if not isinstance(buf, bytes | bytearray | memoryview):
        raise DTypeError(f"load_frombuffer needs bytes, got {type(buf).__name__}")
    view = memoryview(buf)
    if not view.c_contiguous:
        raise DTypeError("load_frombuffer needs contiguous bytes; pass bytes(buf)")
    return _read(view.cast("B"), "buffer")


def load_record(data: bytes, file: str) -> NDArray:
    """Read a single array record, as MXNet pickles arrays; ``file`` names its source in messages.

    Raises:
        FormatError: truncated, damaged, or a sparse array.
    """
    reader = _Reader(memoryview(data), file)
    record = reader.record(0)
    if isinstance(record, str) or reader.remaining:
        raise FormatError(f"{file}: expected one dense array, got {record if isinstance(record, str) else 'more'}")
    values, context, _ = record
    return from_host(values, context)


slots.ARRAY_RECORD.fill(load_record)


def _read(data: memoryview, file: str) -> list[NDArray] | dict[str, NDArray]:
    if len(data) < 24 and (_text(bytes(data)) or other_kind(bytes(data))):
        raise FormatError(f"{file}: no .params file: {_instead(bytes(data), 0)}")
    reader = _Reader(data, file)
    magic, _, count = reader.unpack("<QQQ", "header")
    if magic != _LIST_MAGIC:
        raise FormatError(f"{file}: no .params file: {_instead(bytes(data[:512]), magic)}")
    if count > reader.remaining // 4:
        raise FormatError(f"{file}: truncated or damaged: {count:,} arrays cannot fit in {reader.remaining:,} bytes")
    records = [reader.record(index) for index in range(count)]
    (named,) = reader.unpack("<Q", "number of names")
    if named not in (0, count):
        raise FormatError(f"{file}: damaged: {named:,} names for {count:,} arrays")
    names = list(reader.names(named))
    if reader.remaining:
        raise FormatError(f"{file}: damaged: {reader.remaining:,} bytes follow the last name")
    if len(set(names)) != len(names):
        raise FormatError(f"{file}: damaged: a name occurs twice")
    arrays = []
    for index, record in enumerate(records):
        shown = repr(names[index]) if names else f"number {index}"
        if isinstance(record, str):
            raise FormatError(f"{file}: array {shown} is {record}: only dense arrays are supported; save it as dense")
        values, context, note = record
        if note:
            warnings.warn(f"{file}: array {shown} {note}", stacklevel=3)
        arrays.append(from_host(values, context))
    return dict(zip(names, arrays, strict=True)) if names else arrays


def _text(start: bytes) -> str:
    """Return the beginning of a file as text; empty if it is no text."""
    try:
        text = start.decode("ascii")
    except UnicodeDecodeError:
        return ""
    return text if text.strip() and (text.isprintable() or set(text) - set(string.printable) == set()) else ""


def _instead(start: bytes, magic: int) -> str:
    """Describe the kind of a file that begins with these bytes."""
    text = _text(start)
    if kind := other_kind(start):
        return kind
    if text.lstrip().startswith("{"):
        return "it is JSON text; a symbol file is opened with mx.sym.load"
    if text:
        return f"it is text, beginning with {text[:40]!r}"
    return f"it begins with {magic:#x} instead of {_LIST_MAGIC:#x}"


class _Reader:
    """A cursor over the bytes, whose errors name the position."""

    def __init__(self, data: memoryview, path: str) -> None:
        self._data = data
        self._path = path
        self._at = 0
        self._empty = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes > self.remaining:
            raise FormatError(
                f"{self._path}: truncated: {what} needs {nbytes:,} bytes at byte {self._at:,}, "
                f"{self.remaining:,} are left"
            )
        start = self._at
        self._at += nbytes
        return self._data[start : self._at]

    def unpack(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def shape(self, ndim: int, form: str, what: str) -> tuple[int, ...]:
        if not 0 <= ndim <= _MAX_DIMS:
            raise FormatError(f"{self._path}: damaged: {what} has {ndim} dimensions")
        dims = self.unpack(f"<{ndim}{form}", f"shape of {what}")
        # NumPy makes no array of (0, 2**62): of the other dimensions it wants a product, too.
        empty = 0 in dims and math.prod(dim for dim in dims if dim) >= _MAX_ELEMENTS
        if empty or any(dim < 0 for dim in dims):
            raise FormatError(f"{self._path}: damaged: {what} has the shape {dims}")
        return dims

    def names(self, count: int) -> Iterator[str]:
        for index in range(count):
            (length,) = self.unpack("<Q", f"length of name {index}")
            try:
                yield bytes(self.take(length, f"name {index}")).decode()
            except UnicodeDecodeError as error:
                raise FormatError(f"{self._path}: damaged: name {index} is not UTF-8") from error

    def record(self, index: int) -> tuple[RawArray, Context, str] | str:
        """Return (values, context, note) of one array, or the name of its sparse storage type."""
        what = f"array {index}"
        (magic,) = self.unpack("<I", what)
        sparse = None
        storage_shape: tuple[int, ...] = ()
        if magic in (_V2, _V3):
            (stype,) = self.unpack("<i", f"storage type of {what}")
            if stype in _SPARSE:
                sparse = _SPARSE[stype]
                storage_shape = self.shape(self.unpack("<i", what)[0], "q", f"storage of {what}")
            elif stype not in (0, -1):
                raise FormatError(f"{self._path}: damaged: {what} has the storage type {stype}")
            ndim = self.unpack("<i", what)[0]
            shape, none = ((), True) if ndim == -1 and magic == _V3 else (self.shape(ndim, "q", what), False)
            none = none or (magic == _V2 and not shape)
        elif magic == _V1:
            shape = self.shape(self.unpack("<i", what)[0], "q", what)
            none = not shape
        else:
            shape = self.shape(magic, "I", what)
            none = not shape
        if none:  # an array that was never given a shape: the record ends here
            self._empty += 1
            if self._empty > _MAX_EMPTY:
                raise FormatError(f"{self._path}: damaged: more than {_MAX_EMPTY:,} arrays have no shape")
            return np.empty(0, np.float32), Context("cpu", 0), ""
        kind, device_id, code = self.unpack("<iii", f"context and dtype of {what}")
        aux = [(self._dtype(c, what), self._aux_shape(what)) for c in self._aux_codes(sparse, what)]
        dtype = self._dtype(code, what)
        if sparse:
            # The last auxiliary array has one index per stored row or element. MXNet 1.9.1 may write an older storage
            # shape.
            stored = (*aux[-1][1], *storage_shape[1:])
        values = self.take(math.prod(stored if sparse else shape) * dtype.itemsize, f"data of {what}")
        for aux_dtype, aux_shape in aux:
            self.take(math.prod(aux_shape) * aux_dtype.itemsize, f"auxiliary data of {what}")
        if sparse:
            return sparse[0]
        array = np.frombuffer(values, dtype).reshape(shape)
        if code == _BFLOAT16:
            wide = (array.astype(np.uint32) << 16).view(np.float32)
            return wide, self._context(kind, device_id, what), "is bfloat16 and was read as float32"
        return array.astype(dtype.newbyteorder("="), copy=False), self._context(kind, device_id, what), ""

    def _aux_codes(self, sparse: tuple[str, int] | None, what: str) -> Iterator[int]:
        for _ in range(sparse[1] if sparse else 0):
            yield self.unpack("<i", f"auxiliary dtype of {what}")[0]

    def _aux_shape(self, what: str) -> tuple[int, ...]:
        return self.shape(self.unpack("<i", what)[0], "q", f"auxiliary array of {what}")

    def _dtype(self, code: int, what: str) -> DType:
        if code == _BFLOAT16:
            return np.dtype("<u2")
        if code not in _DTYPES:
            raise FormatError(f"{self._path}: damaged: {what} has the unknown dtype code {code}")
        return np.dtype(_DTYPES[code]).newbyteorder("<")

    def _context(self, kind: int, device_id: int, what: str) -> Context:
        if kind == 2 and device_id >= 0:
            context = Context("gpu", device_id)
            try:
                device.get(context)
                return context
            except DeviceError:
                return Context("cpu", 0)
        if kind not in (1, 3, 5):
            raise FormatError(f"{self._path}: damaged: {what} has the device type {kind}")
        return Context("cpu", max(device_id, 0) if kind == 1 else 0)
