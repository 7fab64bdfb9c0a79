"""Parameter files in the safetensors format: a length, a header of JSON, and the arrays' bytes.

Names are those of the parameters; which of them are auxiliary states stands in the metadata, under ``aux``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.errors import FormatError
from weftplan.files import replacing
from weftplan.ndarray import NDArray

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_NAMES = {np.dtype(text): name for name, text in _DTYPES.items()}
_MOST_HEADER = 100_000_000

Params = dict[str, NDArray]


def save_safetensors(
    path: str | os.PathLike[str], arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray]
) -> None:
    """Write parameters and auxiliary states, the file whole or not at all.

    Raises:
        FormatError: a name that is both, or a dtype that the format does not know.
    """
    both = sorted(arg_params.keys() & aux_params.keys())
    if both:
        raise FormatError(f"{os.fspath(path)}: {both} are parameters and auxiliary states at once")
    header: dict[str, Any] = {"__metadata__": {"format": "mxnet", "aux": json.dumps(sorted(aux_params))}}
    end, arrays = 0, []
    for name, array in {**arg_params, **aux_params}.items():
        values = np.ascontiguousarray(array.asnumpy())
        kind = _NAMES.get(values.dtype.newbyteorder("<"))
        if kind is None:
            raise FormatError(f"{os.fspath(path)}: {name} has dtype {values.dtype}, which safetensors does not know")
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
        arrays.append(values)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for values in arrays:
            file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data.cast("B") if values.size else b"")


def load_safetensors(path: str | os.PathLike[str]) -> tuple[Params, Params]:
    """(arg_params, aux_params) of a file; without metadata of ours all of them are arguments.

    Raises:
        FormatError: the file is damaged, or something else; says what.
    """
    where = os.fspath(path)
    with open(path, "rb") as file:
        content = file.read()
    if content.startswith(b"version https://git-lfs"):
        raise FormatError(
            f"{where}: it is a pointer of Git LFS, which stands for the file until that is fetched: run `git lfs pull` "
            f"there"
        )
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= size <= min(len(content) - 8, _MOST_HEADER):
        raise FormatError(
            f"{where}: no safetensors file: the header is said to have {size:,} of {len(content):,} bytes"
        )
    try:
        header = json.loads(content[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: no safetensors file: its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise FormatError(f"{where}: no safetensors file: its header is no object")
    metadata = header.pop("__metadata__", {})
    data = memoryview(content)[8 + size :]
    raw = {name: _array(data, name, entry, where) for name, entry in header.items()}
    arrays = {name: nd.array(values, dtype=values.dtype) for name, values in raw.items()}
    states = _states(metadata, where)
    return (
        {name: value for name, value in arrays.items() if name not in states},
        {name: value for name, value in arrays.items() if name in states},
    )


def _states(metadata: Any, where: str) -> set[str]:
    text = metadata.get("aux", "[]") if isinstance(metadata, dict) else "[]"
    try:
        names = json.loads(text)
        return {str(name) for name in names}
    except (TypeError, ValueError, RecursionError):
        raise FormatError(f"{where}: damaged: the metadata's list of auxiliary states is {text!r}") from None


def _array(data: memoryview, name: str, entry: Any, where: str) -> Any:
    what = f"{where}: damaged: {name!r}"
    if not isinstance(entry, dict):
        raise FormatError(f"{what} is described by {entry!r}")
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if kind not in _DTYPES:
        raise FormatError(f"{where}: {name!r} has dtype {kind!r}; those read are {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or not all(type(dim) is int and 0 <= dim < 1 << 62 for dim in shape):
        raise FormatError(f"{what} has shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(one) is int for one in offsets):
        raise FormatError(f"{what} has data_offsets {offsets!r}")
    start, end = offsets
    dtype = np.dtype(_DTYPES[kind])
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
        raise FormatError(f"{what} of shape {shape} is said to take bytes {start:,} to {end:,} of {len(data):,}")
    if len(shape) > 32:
        raise FormatError(f"{what} has {len(shape)} dimensions; NumPy has at most 32 of them everywhere")
    values = np.frombuffer(data[start:end], dtype).reshape(shape)
    return values.astype(np.uint8) if kind == "BOOL" else values.astype(dtype.newbyteorder("="))
