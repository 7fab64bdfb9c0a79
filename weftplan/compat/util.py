"""``mx.util``: environment variables, GPUs, and the two switches of NumPy's semantics.

:func:`np_shape` decides how inference represents unknown dimensions. Arrays with NumPy's semantics are absent, so
:func:`use_np` and its relatives refuse.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from weftplan.device import gpu_memory_info, num_gpus
from weftplan.errors import NotImplementedForSymbol
from weftplan.symbol.inference.methods import is_np_shape, np_shape, set_np_shape, use_np_shape

__all__ = [
    "get_gpu_count",
    "get_gpu_memory",
    "getenv",
    "is_np_array",
    "is_np_shape",
    "np_array",
    "np_shape",
    "reset_np",
    "set_module",
    "set_np",
    "set_np_shape",
    "setenv",
    "use_np",
    "use_np_array",
    "use_np_shape",
]

F = TypeVar("F", bound=Callable[..., Any])


def getenv(name: str) -> str | None:
    """Return the current value of an environment variable, None if it is not set."""
    return os.environ.get(name)


def setenv(name: str, value: str | None) -> None:
    """Set an environment variable, or remove it (None)."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def get_gpu_count() -> int:
    """Return the number of usable CUDA GPUs."""
    return num_gpus()


def get_gpu_memory(gpu_dev_id: int) -> tuple[int, int]:
    """Return (free, total) bytes of a GPU."""
    return gpu_memory_info(gpu_dev_id)


def set_module(module: str) -> Callable[[F], F]:
    """Return a decorator that sets the module of a function."""

    def decorate(function: F) -> F:
        function.__module__ = module
        return function

    return decorate


def is_np_array() -> bool:
    """Return False: there are no arrays with NumPy's semantics."""
    return False


def _absent(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedForSymbol("mx.np is absent on purpose: use NumPy itself, or the operators of mx.nd and mx.sym")


def use_np(func: Callable[..., object]) -> Callable[..., NoReturn]:
    """Return a function that refuses to run, since it needs arrays with NumPy's semantics."""
    return functools.wraps(func)(lambda *args, **kwargs: _absent())


use_np_array = use_np
np_array = set_np = _absent


def reset_np() -> None:
    """Disable the semantics of :func:`np_shape`; NumPy's other semantics are never active."""
    set_np_shape(False)
