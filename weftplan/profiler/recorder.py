"""What the profiler has seen: one process-wide recorder, filled by the engine's tracer hook and by user objects.

An engine operation costs one tuple appended to a list (``list.append`` is atomic, on free-threaded Python too, because
a list locks itself). Everything else, names, flows, counters, is worked out when the trace is written.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from weftplan import engine, storage


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
    """Something a user object said: ``kind`` is span, instant or counter."""

    kind: str
    domain: str
    name: str
    thread: str
    start_ns: int
    end_ns: int
    value: float


class Recorder:
    """Operations, user records and memory samples since the last clear.

    ``active`` is what a running profiler means; the engine's ``tracer`` is set exactly while it is true.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.user: list[UserRecord] = []
        self.memory: list[tuple[int, str, int]] = []
        self.origin_ns = time.perf_counter_ns()
        self.active = False
        self.memory_period_s = 0.002
        self._sampler: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, *, memory: bool) -> None:
        """Begin to record; with ``memory`` a thread samples live bytes of every context in use."""
        if self.active:
            return
        self.active = True
        engine.set_tracer(self._operation)
        if memory:
            self._stop.clear()
            self._sampler = threading.Thread(target=self._sample, name="weftplan-profiler", daemon=True)
            self._sampler.start()

    def stop(self) -> None:
        """Stop recording; what was recorded stays."""
        if not self.active:
            return
        self.active = False
        engine.set_tracer(None)
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()
            self._sampler = None

    def clear(self) -> None:
        """Forget everything recorded."""
        self.operations = []
        self.user = []
        self.memory = []

    def _operation(self, *record: Any) -> None:
        self.operations.append(record)

    def add_user(self, record: UserRecord) -> None:
        """Take in what a user object says, if the profiler runs."""
        if self.active:
            self.user.append(record)

    def _sample(self) -> None:
        while not self._stop.wait(self.memory_period_s):
            now = time.perf_counter_ns()
            for context, resource in storage.in_use().items():
                self.memory.append((now, str(context), resource.statistics().requested_bytes))


recorder = Recorder()
"""The process's recorder."""
