"""Profiling of Python operators: time in Python itself, and in each operation that they call.

A Python operator is one operation of the engine, whose user code works with arrays on its thread's own engine. While a
recording is active, that engine's operations and the time between them become spans of one domain, under MXNet's names:
``kind::pure_python`` and ``kind::operation``. Otherwise the module does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from weftplan.engine import Engine
from weftplan.profiler.recorder import OperationRecord, UserRecord, recorder

DOMAIN = "Custom Operator"


@contextmanager
def recorded(kind: str, engine: Engine) -> Iterator[None]:
    """Record the operations of the operator ``kind`` on ``engine``, which belongs to this thread."""
    if not recorder.active:
        yield
        return
    thread = threading.current_thread().name
    since = time.perf_counter_ns()

    def span(what: str, start: int, end: int) -> None:
        recorder.add_user(UserRecord("span", DOMAIN, f"{kind}::{what}", thread, start, end, 0.0))

    def operation(*fields: object) -> None:
        nonlocal since
        record = OperationRecord._make(fields)
        span("pure_python", since, record.start_ns)
        span(record.name or "operation", record.start_ns, record.end_ns)
        since = record.end_ns

    before, engine.tracer = engine.tracer, operation
    try:
        yield
    finally:
        engine.tracer = before  # if one Python operator calls another, the operation belongs to the caller
        span("pure_python", since, time.perf_counter_ns())
