"""User-defined profiling objects: Domain, Task, Frame, Event, Counter, Marker.

Objects record times while a recording is active, and otherwise record nothing. Any thread may use an object.
"""

from __future__ import annotations

import threading
import time
from numbers import Integral, Real
from typing import Self

from weftplan.errors import MXNetError, ParameterError
from weftplan.locks import Lock, consistent_in_children
from weftplan.profiler.recorder import UserRecord, recorder


class Domain:
    """A group of user objects; its name precedes theirs."""

    def __init__(self, name: str) -> None:
        self.name = str(name)

    def new_task(self, name: str) -> Task:
        """Return a new task of this domain."""
        return Task(self, name)

    def new_frame(self, name: str) -> Frame:
        """Return a new frame of this domain."""
        return Frame(self, name)

    def new_counter(self, name: str, value: float | None = None) -> Counter:
        """Return a new counter of this domain."""
        return Counter(self, name, value)

    def new_marker(self, name: str) -> Marker:
        """Return a new marker of this domain."""
        return Marker(self, name)

    def __str__(self) -> str:
        return self.name


class _Span:
    """Base of objects with a start and a stop; also a context manager."""

    def __init__(self, domain: Domain, name: str) -> None:
        self.domain = domain
        self.name = str(name)
        self._start_ns = -1

    def start(self) -> None:
        """Start the span."""
        self._start_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Stop, and record the span if the profiler runs; raise MXNetError if the span was not started."""
        if self._start_ns < 0:
            raise MXNetError(f"{type(self).__name__} {self.name!r}: stop() before start()")
        thread = threading.current_thread().name
        end_ns = time.perf_counter_ns()
        recorder.add_user(UserRecord("span", str(self.domain), self.name, thread, self._start_ns, end_ns, 0.0))
        self._start_ns = -1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __str__(self) -> str:
        return self.name


class Task(_Span):
    """A unit of work that may overlap others."""


class Frame(_Span):
    """One of many similar steps, such as a batch."""


class Event(_Span):
    """A span of this thread that belongs to no domain."""

    def __init__(self, name: str) -> None:
        super().__init__(Domain("event"), name)


class Counter:
    """A number over time. A trace omits the moments when it was infinite or not a number."""

    def __init__(self, domain: Domain, name: str, value: float | None = None) -> None:
        self.domain = domain
        self.name = str(name)
        self._lock = consistent_in_children(Lock())  # a change and its record are one step, so records are in order
        self.value = 0.0
        if value is not None:
            self.set_value(value)

    def set_value(self, value: float) -> None:
        """Set the counter.

        Raises:
            ParameterError: not a number.
        """
        value = self._number(value)
        with self._lock:
            self._record(value)

    def increment(self, delta: float = 1) -> None:
        """Add to the counter; concurrent additions are not lost."""
        delta = self._number(delta)
        with self._lock:
            self._record(self.value + delta)

    def _record(self, value: float) -> None:
        """Record the value; the caller holds the lock, so records are in the order of the values."""
        self.value = value
        time_ns = time.perf_counter_ns()
        recorder.add_user(UserRecord("counter", str(self.domain), self.name, "", time_ns, time_ns, value))

    def decrement(self, delta: float = 1) -> None:
        """Subtract from the counter."""
        self.increment(-self._number(delta))

    def _number(self, value: object) -> float:
        """Return ``value``, a NumPy number as a Python number, so that a trace can be written."""
        if not isinstance(value, Real):
            raise ParameterError(f"Counter {self.name!r}: expected a number, got {type(value).__name__}: {value!r}")
        try:
            as_float = float(value)
            return int(value) if isinstance(value, Integral) else as_float
        except OverflowError:
            raise ParameterError(f"Counter {self.name!r}: {value!r} is too large for a trace") from None

    def __iadd__(self, delta: float) -> Counter:
        self.increment(delta)
        return self

    def __isub__(self, delta: float) -> Counter:
        self.decrement(delta)
        return self


class Marker:
    """A point in time."""

    def __init__(self, domain: Domain, name: str) -> None:
        self.domain = domain
        self.name = str(name)

    def mark(self, scope: str = "process") -> None:
        """Record the current time if the profiler runs.

        Args:
            scope: extent of the line in a viewer: ``process``, ``thread`` or ``global``.

        Raises:
            ParameterError: another scope.
        """
        if scope not in ("process", "thread", "global"):
            raise ParameterError(f"Marker.mark: scope must be 'process', 'thread' or 'global', got {scope!r}")
        thread = threading.current_thread().name
        time_ns = time.perf_counter_ns()
        recorder.add_user(UserRecord("instant", str(self.domain), self.name, thread, time_ns, time_ns, 0.0, scope))
