"""Profiling of Python operators: time in Python itself, and in each operation that they call.

A Python operator is one operation of the engine; its user code pushes further operations. While a recording is active,
its call and these operations become spans of one domain, under MXNet's names: ``kind::pure_python`` and
``kind::operation``. Otherwise the module does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from weftplan.engine.execution import running
from weftplan.profiler.recorder import PYTHON_OPERATORS, UserRecord, recorder


@contextmanager
def recorded(kind: str) -> Iterator[None]:
    """Record a call of the operator ``kind``, and the operations that this thread pushes in it."""
    if not recorder.active:
        yield
        return
    since, pusher = time.perf_counter_ns(), running.pusher
    running.pusher = kind
    recorder.python_operators.add(kind)
    try:
        yield
    finally:
        running.pusher = pusher  # if one Python operator calls another, the operation belongs to the caller
        thread = threading.current_thread().name
        name = f"{kind}::pure_python"
        recorder.add_user(UserRecord("span", PYTHON_OPERATORS, name, thread, since, time.perf_counter_ns(), 0.0))
