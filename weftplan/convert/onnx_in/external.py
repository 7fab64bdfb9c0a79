"""External data of ONNX models: values that exporters store in separate files.

A file is read only if it lies inside the model's folder, after following links: an untrusted model must not make its
reader open other files.
"""

from __future__ import annotations

import math
import os
from types import ModuleType
from typing import Any

import numpy as np

from weftplan.errors import FormatError
from weftplan.support.array_types import RawArray


def check_amount(tensors: Any, file: str) -> None:
    """Refuse a model whose values exceed twice the size of their files.

    Otherwise a few names in a small file could request the same large range many times.
    """
    nbytes_by_file: dict[str, int] = {}
    for tensor in tensors:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        if facts:
            path = _inside(file, facts.get("location", ""), tensor.name)
            length = facts.get("length", "")
            nbytes = int(length) if length.isdecimal() else 4 * abs(math.prod(tensor.dims))
            nbytes_by_file[path] = nbytes_by_file.get(path, 0) + nbytes
    for path, nbytes in nbytes_by_file.items():
        if nbytes > 2 * os.stat(path).st_size:
            raise FormatError(f"{file}: damaged: its values take {nbytes:,} bytes of {path}, which is much smaller")


def external_tensor(onnx: ModuleType, tensor: Any, file: str) -> RawArray:
    """Return the values of a tensor whose bytes are in another file.

    Raises:
        FormatError: the file is outside the model's folder, missing or too short, or its size contradicts the shape.
    """
    facts = {entry.key: entry.value for entry in tensor.external_data}
    path = _inside(file, facts.get("location", ""), tensor.name)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    count = math.prod(tensor.dims)
    try:
        offset = int(facts.get("offset", "0"))
        nbytes = int(facts.get("length", count * dtype.itemsize))
        size = os.stat(path).st_size
    except (ValueError, OSError) as error:
        raise FormatError(f"{file}: {tensor.name!r} in {path}: {error}") from error
    if any(dim < 0 for dim in tensor.dims) or nbytes != count * dtype.itemsize:
        raise FormatError(
            f"{file}: damaged: {tensor.name!r} of shape {list(tensor.dims)} and {dtype} has {nbytes} bytes in {path}"
        )
    if offset < 0 or offset + nbytes > size:
        raise FormatError(
            f"{file}: {tensor.name!r} needs bytes {offset} to {offset + nbytes} of {path}, which has {size}: copy the "
            f"whole file next to the model"
        )
    return np.fromfile(path, dtype.newbyteorder("<"), count, offset=offset).astype(dtype).reshape(tensor.dims)


def _inside(model_file: str, location: str, name: str) -> str:
    """Return the path of a file that the model names, if it lies inside the model's folder."""
    folder = os.path.realpath(os.path.dirname(os.path.abspath(model_file)))
    path = os.path.realpath(os.path.join(folder, location))
    if not location or os.path.isabs(location) or os.path.commonpath([folder, path]) != folder:
        raise FormatError(f"{model_file}: {name!r} lies in {location!r}, outside the model's folder: that is not read")
    if not os.path.isfile(path):
        raise FormatError(f"{model_file}: {name!r} lies in {location!r}, which is missing: copy it next to the model")
    return path
