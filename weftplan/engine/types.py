"""What each part of the engine asks of the whole: for types only, so that no part imports one that is above it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSet
from typing import Any, Protocol


class Collects(Protocol):
    """For bulks."""

    _any_failure: bool
    _bulking: list[Any]
    _debug: bool

    def _note_unusual(self) -> None: ...

    def _push_bulk(self, shared: list[Any]) -> None: ...


class Runs(Protocol):
    """For streams, and whatever else runs operations."""

    _any_failure: bool
    _careful: bool
    _failed_vars: MutableSet[Any]
    _streams: list[Any]
    _streams_used: bool

    def _add_unobserved(self, failure: Any) -> None: ...

    def _exclusively(self, change: Callable[[], Any]) -> Any: ...

    def _execute_carefully(self, op: Any, *, on_stream: bool = False) -> Any: ...

    def _start_async(self, op: Any, done: Callable[[Any], None], *, on_stream: bool = False) -> None: ...


class Works(Runs, Protocol):
    """For workers."""

    _no_thread: BaseException | None
    _requests: deque[Any]
    _token: dict[int, Any]
    _tracer: Any

    def _apply(self) -> None: ...

    def _complete(self, op: Any, failure: Any) -> None: ...

    def _end_with_engine(self) -> None: ...

    def _execute(self, op: Any) -> Any: ...

    def _trace(self, op: Any, queue: str, worker: str, start_ns: int) -> None: ...


class Helped(Works, Protocol):
    """For threads that stand in for workers."""

    _all_queues: list[Any]
    _seq: int
    _waiters_help: str

    @property
    def _pending(self) -> int: ...

    def _can_help(self, queue: Any) -> bool: ...

    def _queue_with(self, op: Any) -> Any: ...

    def _raise(self, failure: Any) -> None: ...


class Forkable(Protocol):
    """For forks."""

    _completed: int
    _fork: Any
    _here: deque[Any]
    _idle_waiters: list[Any]
    _ready: deque[Any]
    _requests: deque[Any]
    _seq: int
    _token: dict[int, Any]

    @property
    def _pending(self) -> int: ...

    def _apply(self) -> None: ...

    def _flush_bulk(self) -> None: ...

    def _forget_threads(self) -> None: ...

    def _refuse(self, message: str) -> None: ...

    def _refuse_inside(self) -> None: ...

    def stop(self) -> None: ...


class Yields(Protocol):
    """For who lacks memory."""

    _completed: int
    _lacking: list[object]

    @property
    def _pending(self) -> int: ...

    def _at_work(self) -> int: ...

    def _run_another(self) -> bool: ...

    def settle(self, timeout: float) -> bool: ...


class Watched(Protocol):
    """For the watchdog."""

    _completed: int
    _in_flight: dict[int, Any]
    _running_on: dict[int, int]
    _waits: int

    @property
    def _pending(self) -> int: ...

    def dump(self, format: str = "text") -> str: ...
