"""Creation of engines by name, and the process-wide engine, created on first use."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import SupportsIndex, cast

from weftplan import config
from weftplan.engine.core import Engine
from weftplan.engine.edges import forking
from weftplan.engine.execution import Tracer, live_engines, running
from weftplan.engine.inspection import users_pending
from weftplan.engine.naive import NaiveEngine
from weftplan.engine.per_device import ThreadedEnginePerDevice
from weftplan.engine.registry import find
from weftplan.engine.shield import signals_deferred
from weftplan.engine.simulator import Simulator
from weftplan.engine.threaded import ThreadedEngine
from weftplan.engine.types import ThreadCounts
from weftplan.errors import ConfigError, EngineError, did_you_mean
from weftplan.locks import ReentrantLock, free_in_children, members
from weftplan.support import blas_threads, program_end, slots

EXIT_PATIENCE_S = 30.0
"""Seconds that exit waits for running operations before it names and abandons them."""
INTERRUPTED_PATIENCE_S = 1.0
"""The same after Ctrl-C has ended the program."""

MAX_KINDS = 5
"""Number of kinds of failures listed at exit."""

_lock = free_in_children(ReentrantLock())
"""Guards the fields of ``_process``. Reentrant, because a finalizer under it may submit a task."""
_ENDING = "the interpreter is ending: nothing is pushed or waited for any more; do it before, not in a destructor"


class _Process:
    """The engines of this process; changed under the lock, read without it by every push."""

    def __init__(self) -> None:
        self.current: Engine | None = None
        """The process-wide engine."""
        self.nested = 0
        """Number of threads inside :func:`nested`. While it is 0, ``get`` skips the thread-local lookup."""
        self.user_code = 0
        """Number of threads inside :func:`user_code`; exit waits for them."""
        self.ending = False
        """Whether the interpreter is ending."""


_process = _Process()
_local = threading.local()
"""``engine``: engine of :func:`nested`, None outside. ``cached``: the thread's engine for it, created on first use."""
_inner: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines of :func:`nested`. Operations pending at exit may still use them."""


def create(
    kind: str = ThreadedEnginePerDevice.kind,
    *,
    cpu_workers: int | None = None,
    task_workers: int | None = None,
    priority_workers: int | None = None,
    gpu_workers: int | None = None,
    copy_workers: int | None = None,
    **options: object,
) -> Engine:
    """Create an engine.

    Args:
        kind: ``NaiveEngine``, ``ThreadedEngine``, ``ThreadedEnginePerDevice``, ``Simulator``, or another registered
            type (:func:`weftplan.engine.registry.register`).
        cpu_workers, priority_workers, gpu_workers, copy_workers: thread counts; default: MXNET_CPU_WORKER_NTHREADS,
            MXNET_CPU_PRIORITY_NTHREADS, MXNET_GPU_WORKER_NTHREADS, MXNET_GPU_COPY_NTHREADS. ``ThreadedEngine`` has 16
            workers by default. With ``cpu_workers=1`` no operation is split over idle cores.
        task_workers: threads for tasks; default: ``cpu_workers`` if passed, else WEFTPLAN_TASK_WORKERS, which is the
            number of usable cores. ``ThreadedEngine`` runs tasks on its other workers.
        options: options of the type (:attr:`Engine.options`): ``seed`` and ``choose`` of the simulator.

    Raises:
        ConfigError: an unknown kind, or a thread count below 1.
    """
    if _process.ending:
        raise EngineError(_ENDING)
    threads = ThreadCounts(cpu_workers, task_workers, priority_workers, gpu_workers, copy_workers, cpu_workers == 1)
    counts = dataclasses.asdict(threads)
    del counts["single_worker"]
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < 1):
            raise ConfigError(f"engine.create: {name} must be an integer >= 1, got {value!r}")
    klass = find(kind)
    unknown = sorted(set(options) - set(klass.options))
    if unknown:
        hint = did_you_mean(unknown[0], counts)
        raise EngineError(
            f"engine.create: {kind} has no options {unknown}; {hint}there are {', '.join(counts)}, and "
            f"{' and '.join(Simulator.options)} of the {Simulator.kind}"
        )
    blas_threads.limit()  # for every type, so that all compute the same bits
    return klass.build(_with_defaults(threads, klass), **options)


def _with_defaults(threads: ThreadCounts, klass: type[Engine]) -> ThreadCounts:
    """Return the thread counts of an engine type: those that the caller requests, else the environment's or fixed."""
    if issubclass(klass, ThreadedEngine):
        # 16: as many operations may wait for devices or files at a time; threads without work cost nothing.
        return dataclasses.replace(
            threads, cpu_workers=threads.cpu_workers or 16, copy_workers=threads.copy_workers or 1
        )
    if not issubclass(klass, ThreadedEnginePerDevice):
        return threads
    in_child = forking.process.in_child
    workers = config.process("MXNET_MP_WORKER_NTHREADS" if in_child else "MXNET_CPU_WORKER_NTHREADS")
    tasks = (workers if in_child else config.process("WEFTPLAN_TASK_WORKERS")) or blas_threads.usable_cpus()
    return ThreadCounts(
        cpu_workers=threads.cpu_workers or workers,
        task_workers=threads.task_workers or threads.cpu_workers or tasks,
        priority_workers=threads.priority_workers or config.process("MXNET_CPU_PRIORITY_NTHREADS"),
        gpu_workers=threads.gpu_workers or config.process("MXNET_GPU_WORKER_NTHREADS"),
        copy_workers=threads.copy_workers or config.process("MXNET_GPU_COPY_NTHREADS"),
        single_worker=threads.single_worker,
    )


def get() -> Engine:
    """Return the process-wide engine, created on first use. MXNET_ENGINE_TYPE selects its kind.

    Raises:
        ConfigError: MXNET_ENGINE_TYPE names no engine.
    """
    if _process.nested:
        inner: Engine | None = getattr(_local, "engine", None)
        if inner is not None:
            return inner
    engine = _process.current
    return engine if engine is not None else _make()


@contextmanager
def user_code() -> Iterator[Engine]:
    """Inside an operation, let user code push to the engine and wait for vars as if it were outside.

    While it waits, another worker takes the slot of its thread. ``wait_for_all`` stays forbidden, because the operation
    itself is pending. User code must not wait for a var that the operation itself holds.
    """
    outer_depth = running.user_depth
    running.user_depth = len(running.engines)
    with _lock:
        _process.user_code += 1
    try:
        yield get()
    finally:
        with _lock:
            _process.user_code -= 1
        running.user_depth = outer_depth


@contextmanager
def nested() -> Iterator[Engine]:
    """Use a NaiveEngine of this thread, beside a process-wide engine that only one thread may use.

    Its pushes run immediately. Arrays of the process-wide engine must be wrapped in new arrays.
    """
    outer = getattr(_local, "engine", None)
    mine = outer or getattr(_local, "cached", None)
    if mine is None:
        mine = _local.cached = _create_inner()
    with _lock:
        _process.nested += 1
    _local.engine = mine
    try:
        yield mine
    finally:
        _local.engine = outer
        with _lock:
            _process.nested -= 1


def _create_inner() -> Engine:
    engine = NaiveEngine()
    with _lock:
        _inner.add(engine)
    return engine


def _make() -> Engine:
    """Create the process-wide engine, unless it exists."""
    # A signal handler that submits would make an engine within this one, and wait for locks that this thread holds.
    with signals_deferred(), _lock:
        if _process.current is None:
            engine = create(config.process("MXNET_ENGINE_TYPE"))
            if _process.current is None:  # else a finalizer has needed it meanwhile
                _process.current = engine
        return _process.current


def set_engine(engine: Engine | None) -> Engine | None:
    """Make ``engine`` the process-wide engine (None: create one on next use) and return the old one. For tests."""
    if engine is not None and not isinstance(engine, Engine):
        raise EngineError(
            f"expected an engine, got {engine!r}; make one with engine.create({engine!r})"
            if isinstance(engine, str)
            else f"expected an engine made by engine.create(), got {type(engine).__name__}"
        )
    with _lock:
        previous, _process.current = _process.current, engine
    return previous


@contextmanager
def using(engine: Engine) -> Iterator[Engine]:
    """Make ``engine`` the process-wide engine for the body of a ``with`` block; wait for its work at the end."""
    previous = set_engine(engine)
    try:
        yield engine
        engine.wait_for_all()
    finally:
        set_engine(previous)


def set_tracer(tracer: Tracer | None) -> None:
    """Set the tracer of the process-wide engine; None removes it."""
    get().tracer = tracer


def debug_enabled() -> bool:
    """Return whether the process-wide engine is in debug mode, which adds costly checks such as read-only inputs."""
    return get()._debug


def _at_exit() -> None:
    """Finish submitted work, run deletes, and report failures that no wait has raised.

    New pushes are refused: threads that keep pushing would delay exit, and later, when the interpreter stops threads,
    no thread would run the pushes of destructors.
    """
    # Refuse new work first, so that the waits below end.
    _process.ending = True
    engines = cast("list[Engine]", forking.engines())
    for engine in engines:
        engine._flush_bulk()
        # Pending operations may still push to nested engines.
        if engine not in _inner:
            _close(engine)
    interrupted = program_end.interrupted()
    patience = INTERRUPTED_PATIENCE_S if interrupted else EXIT_PATIENCE_S
    try:
        for engine in () if interrupted else engines:
            _finish(engine)
    except KeyboardInterrupt:  # the user does not want to wait
        patience = 0.0
    # Nested engines last: operations on the others may still use their arrays.
    outer, inner = ([engine for engine in engines if (engine in _inner) is is_inner] for is_inner in (False, True))
    _end(outer, patience)
    for engine in inner:
        _close(engine)
    _end(inner, patience)


def _end(engines: Sequence[Engine], patience: float) -> None:
    """Wait for running operations, drop the rest, and report unobserved failures."""
    for engine in engines:
        engine.notify_shutdown()
    for engine in engines:
        if not engine._wait_idle(patience):
            _print_busy(engine)
        if engine._dropped:
            count = len(engine._dropped)
            print(
                f"weftplan: {count} operation{'s' if count > 1 else ''} had not run when the process ended; call "
                "wait_for_all() first",
                file=sys.stderr,
            )
        _print_unobserved(engine)


def _print_unobserved(engine: Engine) -> None:
    """Print the failures that no wait has raised: one line for a single failure, else their number and kinds."""
    failures = engine.unobserved_failures()
    count = len(failures) + engine._unrecorded
    if count == 1 and failures:
        print(
            f"weftplan: an engine operation failed and nobody waited for it: {failures[0].describe()}", file=sys.stderr
        )
    elif count:
        kinds = Counter(line for failure in failures for line in failure.describe().splitlines()[:1])
        lines = [f"  {number} x {line}" for line, number in kinds.most_common(MAX_KINDS)]
        remaining = count - sum(number for _, number in kinds.most_common(MAX_KINDS))
        lines += [f"  {remaining} more"] if remaining else []
        print(
            f"weftplan: {count} engine operations failed and nobody waited for them:\n" + "\n".join(lines),
            file=sys.stderr,
        )


def _close(engine: Engine) -> None:
    """Refuse new work. Finalizers may still delete vars; the memory goes with the process."""
    engine._refuse(_ENDING)
    engine.delete_variable = _keep  # type: ignore[method-assign]


def _finish(engine: Engine) -> None:
    """Wait until no user operation is pending, without a time limit. Stop if no thread is working on them."""
    ran_user_code = False
    while users_pending() or _process.user_code:
        ran_user_code = True
        if engine._wait_idle(EXIT_PATIENCE_S):
            return
        _print_busy(engine)
        if not engine._at_work():
            return
    if ran_user_code:
        engine._wait_idle(EXIT_PATIENCE_S)  # for the operations that its code has pushed


def _print_busy(engine: Engine) -> None:
    print(f"weftplan: at exit {engine!r} is still busy:\n{engine.dump()}", file=sys.stderr)


def _workers_at_work() -> int:
    return sum([engine._at_work() for engine in members(live_engines)])


def _keep(*args: object, **options: object) -> None:
    """Ignore a delete."""


slots.WORKER_COUNT.fill(_workers_at_work)
atexit.register(_at_exit)
