"""Protocols between the parts of the engine and the whole, and thread counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from weftplan.engine.region import Driver, Region

if TYPE_CHECKING:
    from weftplan.engine.failure import Failure, Outcome
    from weftplan.engine.operation import OprBlock
    from weftplan.engine.var import Var

T = TypeVar("T")


class Runs(Protocol):
    """Interface of an engine towards its streams."""

    _any_failure: bool
    _careful: bool
    _streams: list[Any]
    _streams_used: bool

    def _add_unobserved(self, failure: Failure) -> None: ...
    def _exclusively(self, change: Callable[[], T]) -> T: ...
    def _hold(self, var: Var, failure: Failure) -> None: ...
    def _is_healed(self, failure: Failure) -> bool: ...
    def _execute_carefully(self, op: OprBlock, *, on_stream: bool = False) -> Outcome: ...
    def _start_async(self, op: OprBlock, on_outcome: Callable[[Outcome], None], *, on_stream: bool = False) -> None: ...


class Core(Runs, Driver, Protocol):
    """Interface of an engine towards bulks, forks, the watchdog and starved threads."""

    _bulking: list[object]
    _debug: bool
    _fork: Any
    _starved: list[object]
    _region: Region
    _running_on: dict[int, int]

    def _at_work(self) -> int: ...
    def _flush_bulk(self) -> None: ...
    def _forget_threads(self) -> None: ...
    def _update_detours(self) -> None: ...
    def _refuse(self, message: str) -> None: ...
    def _run_another(self) -> bool: ...
    def dump(self, format: str = "text") -> str: ...
    def settle(self, timeout: float) -> bool: ...
    def stop(self) -> None: ...


class Threads(Core, Protocol):
    """Interface of an engine with worker threads towards the workers and their stand-ins."""

    _detours: tuple[str, ...]
    _single_worker: bool
    _no_thread: BaseException | None
    _shutdown: bool
    _tracer: Callable[..., None] | None
    _waiters_help: str

    def _complete(self, op: OprBlock, failure: Outcome) -> None: ...
    def _end_with_engine(self) -> None: ...
    def _execute(self, op: OprBlock) -> Outcome: ...
    def _raise(self, failure: Failure) -> None: ...
    def _trace(self, op: OprBlock, queue: str, worker: str, start_ns: int) -> None: ...
    def push(
        self,
        fn: Callable[[], object],
        const_vars: Sequence[Var] = (),
        mutable_vars: Sequence[Var] = (),
        *,
        name: str | None = None,
    ) -> object: ...


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Thread counts of an engine; None: the type has no such threads, or the caller of ``create`` requests no count."""

    cpu_workers: int | None = None
    task_workers: int | None = None
    priority_workers: int | None = None
    gpu_workers: int | None = None
    copy_workers: int | None = None
    single_worker: bool = False
    """Whether the caller requests a single CPU worker, so that no operation is split over idle cores."""
