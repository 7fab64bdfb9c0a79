"""``mx.base``: error classes, types and small functions for scripts written for MXNet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

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
    if name in _LIBRARY or name.endswith("Handle"):
        return _Absent(name)  # scripts import such names, and call them in rare branches
    raise AttributeError(f"mx.base has no attribute {name!r}")


class _Absent:
    """A name of MXNet's C library: it can be imported, and raises NotImplementedError when it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        advice = "there is no C library: call the functions of mx.nd, mx.sym and the others"
        if self._name.endswith("Handle"):
            advice = "objects have no handles: pass the Symbol, NDArray, Executor or KVStore itself"
        raise NotImplementedError(f"mx.base.{self._name}: {advice}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python's own questions
            raise AttributeError(name)
        self()


_LIBRARY = frozenset({
    "_LIB", "c_array", "c_array_buf", "c_handle_array", "c_str", "c_str_array", "check_call", "ctypes2buffer",
    "ctypes2docstring", "ctypes2numpy_shared", "mx_float", "mx_int", "mx_int64", "mx_uint",
})  # fmt: skip
"""Names of MXNet's C library in ``mx.base``."""
