"""Arrays and tasks among a task's arguments, also in lists, tuples and dictionaries.

They are located when the task is submitted, and replaced by raw arrays and results when it runs. This module keeps no
state; any thread may call it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

from weftplan.engine.var import Var
from weftplan.support.read_only_views import read_only
from weftplan.tasks.arrays import is_array, is_ndarray
from weftplan.tasks.handle import Task
from weftplan.tasks.held_arrays import held_arrays

T = TypeVar("T")
NO_ARRAYS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), FunctionType, np.ufunc, np.float32, np.float64}
)
"""Classes of arguments that cannot contain arrays."""


def arrays_in(values: Iterable[object]) -> Iterator[object]:
    """Yield the arrays and tasks among ``values``, also inside lists, tuples, dictionaries and array-holding objects.

    :mod:`weftplan.tasks.held_arrays` handles the objects.
    """
    for value in values:
        kind = type(value)
        if kind is np.ndarray:
            yield value
        elif kind in NO_ARRAYS:
            continue
        elif kind is Task:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from arrays_in(value)
        elif isinstance(value, dict):
            yield from arrays_in(value.values())
        elif is_array(value):
            yield value
        else:
            yield from held_arrays(value)


def call_opened(fn: Callable[..., T], lock: Callable[[object], bool] | None, *args: object, **kwargs: object) -> T:
    """Call ``fn`` with NDArrays replaced by raw arrays and tasks by their results.

    This must happen when the task runs, because the memory of NDArrays may not be allocated earlier.
    """
    opened = [_open(value, lock) for value in args]
    return fn(*opened, **{key: _open(value, lock) for key, value in kwargs.items()})


def _open(value: object, lock: Callable[[object], bool] | None) -> Any:
    """Return the function's argument for ``value``: a raw array (read-only if ``lock`` says so) or a task's result."""
    if type(value) is Task:
        return value._value
    if type(value) is np.ndarray:
        return read_only(value) if lock is not None and lock(value) else value
    if isinstance(value, (list, tuple)):
        opened = [_open(item, lock) for item in value]
        return value if all(map(operator.is_, opened, value)) else _like(value, opened)
    if isinstance(value, dict):
        changed = {key: new for key, item in value.items() if (new := _open(item, lock)) is not item}
        return value if not changed else _like(value, changed)
    if isinstance(value, Var) or not is_array(value):
        return value
    raw: Any = value.raw() if is_ndarray(value) else value
    return read_only(raw) if lock is not None and lock(value) else raw


def _like(value: Any, items: Any) -> Any:
    """Copy a list, tuple or dictionary, or an instance of a derived class, with other items."""
    if hasattr(value, "_make"):
        return value._make(items)
    if isinstance(value, tuple):
        return tuple(items)
    like = copy.copy(value)
    if isinstance(value, dict):
        like.update(items)
    else:
        like[:] = items
    return like
