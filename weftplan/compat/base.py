"""``mx.base``: error classes, types and small functions for scripts written for MXNet."""

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
"""The default dtype of arrays."""
integer_types = (int, np.int32, np.int64)
numeric_types = (float, int, np.generic)
string_types = (str,)


def py_str(x: bytes | str) -> str:
    """Return bytes as text; callbacks receive names as text here already."""
    return x.decode("utf-8") if isinstance(x, bytes) else x


def data_dir() -> str:
    """Return the folder for downloaded files: ``MXNET_HOME``, or ``~/.mxnet``."""
    return os.environ.get("MXNET_HOME") or str(Path("~").expanduser() / ".mxnet")


def _as_list(value: object) -> list[Any]:
    """Return a list or tuple as a list, any other value as a list of one element."""
    return as_list(value) if isinstance(value, (list, tuple, NDArray, np.ndarray)) else [value]


def __getattr__(name: str) -> object:
    """Return the class of this name in :mod:`weftplan.errors`."""
    if not name.startswith("_") and hasattr(errors, name):
        return getattr(errors, name)
    advice = "there is no C library behind it: call the functions of mx.nd, mx.sym and the others"
    if name.endswith("Handle"):
        advice = "objects have no handles: pass the Symbol, NDArray, Executor or KVStore itself"
    raise AttributeError(f"mx.base has no {name} on purpose; {advice}")
