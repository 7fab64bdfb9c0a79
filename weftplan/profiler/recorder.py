"""The process-wide recorder, filled by the engine's tracer hook and by user objects.

An engine operation costs one tuple appended to a list (``list.append`` is atomic, on free-threaded Python too, because
a list locks itself). Names, flows and counters are computed when the trace is written.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from weftplan import device, engine, storage
from weftplan.device import host_memory


class OperationRecord(NamedTuple):
    """One executed engine operation; times are ``time.perf_counter_ns``."""

    name: str | None
    context: Any
    queue: str
    worker: str
    push_ns: int
    start_ns: int
    end_ns: int
    ident: int


class UserRecord(NamedTuple):
    """A record of a user object: ``kind`` is span, instant or counter."""

    kind: str
    domain: str
    name: str
    thread: str
    start_ns: int
    end_ns: int
    value: float
    scope: str = "process"
    """Extent of an instant's line: process, thread or global."""


PYTHON_OPERATORS = "Custom Operator"
"""Domain of the spans of Python operators."""


class MemorySample(NamedTuple):
    """One reading of one memory counter; ``when_ns`` is ``time.perf_counter_ns``."""

    when_ns: int
    counter: str
    nbytes: int
    is_live: bool
    """True for the live bytes of one context; only such counters may be added up."""


class EventRecorder:
    """Operations, user records and memory samples since the last clear.

    While ``active`` is true, this recorder is the tracer of the engine that was process-wide at the start. Only one
    thread may start and stop at a time; records come from any thread.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.user: list[UserRecord] = []
        self.memory: list[MemorySample] = []
        """Live bytes of contexts, resident bytes of this process, and bytes of GPUs in use by all processes."""
        self.origin_ns = time.perf_counter_ns()
        self.active = False
        self.python_operators: set[str] = set()
        """Kinds of Python operators that have run; the names of the operations that they push begin with the kind."""
        self.memory_period_s = 0.002
        self._sampler: threading.Thread | None = None
        self._engine: engine.Engine | None = None
        self._stop = threading.Event()

    def start(self, *, memory: bool) -> None:
        """Start recording; with ``memory``, a thread samples live bytes of every context in use and of the process."""
        if self.active:
            return
        self.active = True
        self._engine = engine.get()
        self._engine.tracer = self._operation
        if memory:
            self._stop.clear()
            self._sample_once()
            self._sampler = threading.Thread(target=self._sample, name="weftplan-profiler", daemon=True)
            self._sampler.start()

    def stop(self) -> None:
        """Stop recording; keep the records."""
        if not self.active:
            return
        self.active = False
        if self._engine is not None:
            self._engine.tracer = None
            self._engine = None
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()
            self._sampler = None
            self._sample_once()

    def clear(self) -> None:
        """Clear all records."""
        self.operations = []
        self.user = []
        self.memory = []

    def _operation(self, *record: object) -> None:
        # An operation that was pushed before the start has no push time; the engine uses its start time instead.
        if self.python_operators and str(record[0]).partition("::")[0] in self.python_operators:
            name, _, _, thread, _, start, end, _ = OperationRecord._make(record)
            self.user.append(UserRecord("span", PYTHON_OPERATORS, str(name), thread, start, end, 0.0))
            return
        self.operations.append(record)

    def add_user(self, record: UserRecord) -> None:
        """Add a user object's record if the profiler runs."""
        if self.active:
            self.user.append(record)

    def _sample(self) -> None:
        while not self._stop.wait(self.memory_period_s):
            self._sample_once()

    def _sample_once(self) -> None:
        time_ns = time.perf_counter_ns()
        for context, resource in storage.in_use().items():
            live = resource.statistics().requested_bytes
            self.memory.append(MemorySample(time_ns, f"live bytes {context}", live, is_live=True))
            if context.device_type == "gpu":
                free, total = device.get(context).memory_info()
                counter = f"memory in use on {context}, all processes"
                self.memory.append(MemorySample(time_ns, counter, total - free, is_live=False))
        self.memory.append(MemorySample(time_ns, "memory of this process", host_memory.resident(), is_live=False))


recorder = EventRecorder()
"""The process-wide recorder."""
