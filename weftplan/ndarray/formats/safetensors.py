"""The safetensors file format: a length, a JSON header, and the arrays' bytes.

This file owns only the format; the caller defines the meaning of the names. Files are written atomically. Any thread
may read and write.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from weftplan.errors import FormatError
from weftplan.support.atomic_files import open_to_read, other_kind, replacing

Host = np.ndarray[Any, np.dtype[Any]]

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_NAMES = {np.dtype(text): name for name, text in _DTYPES.items()}
_MAX_HEADER = 100_000_000


def write(path: str | os.PathLike[str], arrays: Mapping[str, Host], metadata: Mapping[str, str]) -> None:
    """Write named arrays and named texts.

    Raises:
        FormatError: the format does not support a dtype.
        OSError: the file cannot be written; the previous file stays.
    """
    parts = encode(arrays, metadata, os.fspath(path))
    with replacing(path) as file:
        for part in parts:
            file.write(part)


def encode(arrays: Mapping[str, Host], metadata: Mapping[str, str], file: str) -> list[bytes | memoryview]:
    """Return the content of a file in parts; ``file`` names it in errors.

    Raises:
        FormatError: the format does not support a dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end, parts = 0, list[bytes | memoryview]()
    for name, array in arrays.items():
        values = np.ascontiguousarray(array)
        kind = _NAMES.get(values.dtype.newbyteorder("<"))
        if kind is None:
            raise FormatError(f"{file}: {name} has dtype {values.dtype}, which safetensors does not know")
        # Not the contiguous copy's shape, which has one dimension if the array has none.
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        parts.append(little.data.cast("B") if values.size else b"")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Host], dict[str, object]]:
    """Read (arrays by name, metadata) from a file.

    Raises:
        FormatError: the file is damaged or of another kind; the message names the kind.
    """
    with open_to_read(path) as file:
        return decode(file.read(), os.fspath(path))


def decode(content: bytes, file: str) -> tuple[dict[str, Host], dict[str, Any]]:
    """Return (arrays by name, metadata) of a file's content; ``file`` names it in errors.

    Raises:
        FormatError: as :func:`read`.
    """
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= size <= min(len(content) - 8, _MAX_HEADER):
        what = other_kind(content[:64]) or f"the header is said to have {size:,} of {len(content):,} bytes"
        raise FormatError(f"{file}: no safetensors file: {what}")
    try:
        header = json.loads(content[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        what = other_kind(content[:64]) or f"its header is no JSON ({error})"
        raise FormatError(f"{file}: no safetensors file: {what}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{file}: no safetensors file: its header is no object")
    metadata = header.pop("__metadata__", {})
    data = memoryview(content)[8 + size :]
    remaining, arrays = len(data), {}
    for name, entry in header.items():
        values = _array(data, name, entry, file)
        remaining -= values.nbytes
        if remaining < 0:
            raise FormatError(f"{file}: damaged: {name!r} and arrays before it share bytes")
        arrays[name] = values
    return arrays, metadata if isinstance(metadata, dict) else {}


def _array(data: memoryview, name: str, entry: object, file: str) -> Host:
    what = f"{file}: damaged: {name!r}"
    if not isinstance(entry, dict):
        raise FormatError(f"{what} is described by {entry!r}")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if kind not in _DTYPES:
        raise FormatError(f"{file}: {name!r} has dtype {kind!r}; those read are {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim < 1 << 62 for dim in shape):
        raise FormatError(f"{what} has shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise FormatError(f"{what} has data_offsets {offsets!r}")
    start, end = offsets
    dtype = np.dtype(_DTYPES[kind])
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise FormatError(f"{what} of shape {shape} is said to take bytes {start:,} to {end:,} of {len(data):,}")
    if len(shape) > 32:
        raise FormatError(f"{what} has {len(shape)} dimensions; NumPy has at most 32 of them everywhere")
    values = np.frombuffer(data[start:end], dtype).reshape(shape)
    return values.astype(np.uint8) if kind == "BOOL" else values.astype(dtype.newbyteorder("="))
