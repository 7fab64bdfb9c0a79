"""Debug mode of tasks: arrays that are declared as read arrive read-only, and a write to one is explained."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from weftplan.errors import UndeclaredWriteError


def read_only(array: Any) -> Any:
    """A view that refuses writes; CuPy has none, so its arrays come back as they are.

    >>> read_only(np.zeros(2)).flags.writeable
    False
    """
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def guarded(fn: Callable[..., Any], label: str, reads: Sequence[Any]) -> Callable[..., Any]:
    """``fn``, with a refused write to one of ``reads`` raised as UndeclaredWriteError that names task and array."""

    @functools.wraps(fn, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except ValueError as error:
            if "read-only" not in str(error) and "WRITEABLE" not in str(error):
                raise
            suspects = _written(error.__traceback__, reads) or [_describe(array) for array in reads]
            raise UndeclaredWriteError(
                f"task {label!r} writes to an array that it declared as read: {' or '.join(suspects)}; declare it in "
                f"out or writes"
            ) from error

    return run


def _written(traceback: TracebackType | None, reads: Sequence[Any]) -> list[str]:
    """The arrays of ``reads`` that the failing line names, with the names that it has for them.

    Looks at the innermost Python frame in which the error arose; a write inside compiled code called by nobody's Python
    line (``np.add`` submitted as it is) names nothing.
    """
    if traceback is None:
        return []
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    found: dict[str, str] = {}
    for instruction in dis.get_instructions(frame.f_code):
        line = instruction.positions.lineno if instruction.positions else None
        if line != traceback.tb_lineno or not isinstance(instruction.argval, str):
            continue
        local = frame.f_locals.get(instruction.argval)
        if not isinstance(local, np.ndarray) or local.flags.writeable:
            continue
        for array in reads:
            if isinstance(array, np.ndarray) and np.may_share_memory(local, array):
                found[instruction.argval] = f"{instruction.argval!r}, {_describe(array)}"
    return list(found.values())


def _describe(array: Any) -> str:
    return f"{type(array).__name__} of shape {getattr(array, 'shape', '?')} and dtype {getattr(array, 'dtype', '?')}"
