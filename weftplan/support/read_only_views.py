"""Read-only views of input arrays for debug mode, and errors that explain a refused write.

Relies on NumPy's own refusal; arrays of CuPy cannot be made read-only. Any thread may call this module.
"""

from __future__ import annotations

import dis
from types import TracebackType

import numpy as np

from weftplan.errors import UndeclaredWriteError
from weftplan.support.array_types import RawArray


def read_only(array: RawArray) -> RawArray:
    """Return a view that refuses writes; CuPy has no such views, so its arrays are returned unchanged.

    >>> read_only(np.zeros(2)).flags.writeable
    False
    """
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def undeclared_write(label: str, error: BaseException) -> BaseException:
    """Turn NumPy's read-only error into an error that names the operation ``label`` and the suspected arrays.

    Any other error is returned unchanged.
    """
    try:
        text = str(error) if isinstance(error, ValueError) else ""
        if "read-only" not in text and "WRITEABLE" not in text:
            return error
        suspects = _suspects(error.__traceback__)
    except Exception:  # raised by the user's error class, or by an inspected object
        return error
    raised = UndeclaredWriteError(
        f"operation {label!r} wrote to an array that it declared as read{suspects}; declare the array as written, or "
        f"write to a copy"
    )
    raised.__cause__ = error
    raised.__traceback__ = error.__traceback__
    return raised


def _suspects(trace: TracebackType | None) -> str:
    """Describe the read-only arrays in the innermost frame that has any, with its line.

    If the line names some of these arrays, only those are listed.
    """
    description = ""
    while trace is not None:
        frame, line = trace.tb_frame, trace.tb_lineno
        read_only = {name: text for name, value in frame.f_locals.items() if (text := _describe(value))}
        if read_only:
            on_line = {
                instruction.argval
                for instruction in dis.get_instructions(frame.f_code)
                if instruction.positions
                and instruction.positions.lineno == line
                and isinstance(instruction.argval, str)
            }
            named = {name: text for name, text in read_only.items() if name in on_line} or read_only
            arrays = " or ".join(f"{name!r}, {text}" for name, text in named.items())
            description = f" ({arrays} at {frame.f_code.co_filename}:{line})"
        trace = trace.tb_next
    return description


def _describe(value: object) -> str:
    """Describe a read-only array, or the first of them in a tuple or list; empty for anything else."""
    if isinstance(value, (tuple, list)):
        return next((text for entry in value if isinstance(entry, np.ndarray) and (text := _describe(entry))), "")
    if getattr(getattr(value, "flags", None), "writeable", True) is not False:
        return ""
    return f"{type(value).__name__} of shape {getattr(value, 'shape', '?')} and dtype {getattr(value, 'dtype', '?')}"
