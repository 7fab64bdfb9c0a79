"""``mx.base``: error classes, types and small functions that scripts written for MXNet import from there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from weftplan import errors
from weftplan.errors import MXNetError, NotImplementedForSymbol
from weftplan.ndarray import NDArray
from weftplan.training.metrics.base import as_list

__all__ = [
    "MXNetError",
    "NotImplementedForSymbol",
    "data_dir",
    "integer_types",
    "mx_real_t",
    "numeric_types",
    "py_str",
    "string_types",
]

mx_real_t = np.float32
"""The dtype of arrays for which nothing else is said."""
integer_types = (int, np.int32, np.int64)
numeric_types = (float, int, np.generic)
string_types = (str,)


def py_str(value: bytes | str) -> str:
    """Bytes as text; names that callbacks get are text here already."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


def data_dir() -> str:
    """The folder for files that scripts fetch: ``MXNET_HOME``, or ``~/.mxnet``."""
    return os.environ.get("MXNET_HOME") or str(Path("~").expanduser() / ".mxnet")


def _as_list(value: Any) -> list[Any]:
    """A list or tuple as a list, anything else as a list with it."""
    return as_list(value) if isinstance(value, (list, tuple, NDArray, np.ndarray)) else [value]


def __getattr__(name: str) -> Any:
    """Every class of :mod:`weftplan.errors`."""
    if not name.startswith("_") and hasattr(errors, name):
        return getattr(errors, name)
    raise AttributeError(f"mx.base has no attribute {name!r}; the library behind MXNet's is not there")
