"""The encoding of unknown dimensions: 0, as in MXNet before NumPy semantics, or -1 in ``mx.np_shape()``.

-1 is always read as unknown. The switch selects the value that partial inference returns; it is per thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from weftplan.errors import ShapeError

F = TypeVar("F", bound=Callable[..., Any])

_local = threading.local()


def is_np_shape() -> bool:
    """Return whether this thread writes unknown dimensions as -1."""
    return bool(getattr(_local, "active", False))


def set_np_shape(active: bool) -> bool:
    """Write unknown dimensions as -1 (or as 0 if not ``active``); return the previous setting."""
    before = is_np_shape()
    _local.active = bool(active)
    return before


class np_shape:
    """A context ``with np_shape():`` in which unknown dimensions are -1 and unknown shapes None.

    >>> with np_shape():
    ...     shown((0, 3)), shown(None)
    ((-1, 3), None)
    >>> shown((0, 3)), shown(None)
    ((0, 3), ())
    """

    def __init__(self, active: bool = True) -> None:
        self._active = active
        self._before: list[bool] = []

    def __enter__(self) -> np_shape:
        self._before.append(set_np_shape(self._active))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        set_np_shape(self._before.pop())


def use_np_shape(function: F) -> F:
    """Decorate ``function`` to run inside ``with np_shape():``."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with np_shape():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def read(shape: Any, what: str) -> Any:
    """Convert a caller's shape to the internal form, with 0 for unknown dimensions.

    Raises:
        ShapeError: a dimension of size 0 inside ``with np_shape():``.
    """
    if shape is None or isinstance(shape, str):
        return shape
    dims: Sequence[Any] = tuple(shape)
    if is_np_shape() and 0 in dims:
        raise ShapeError(f"{what}: {dims} has no elements; arrays of a symbol need at least one along each axis")
    return tuple(0 if dim == -1 else dim for dim in dims)


def shown(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Convert a shape with 0 for unknown dimensions to the caller's form."""
    if not is_np_shape():
        return () if shape is None else shape
    return None if shape is None else tuple(dim or -1 for dim in shape)
