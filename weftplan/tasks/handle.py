"""What ``submit`` returns: one call of a function that the engine runs in its turn, and its result.

A handle is the function of its operation, and the operation writes the handle's own var: so whatever can be done with a
var (waiting, awaiting, failing, being skipped because an input failed) is done by the engine. Any thread may call the
methods. A task that nobody has begun is claimed by taking the one item of ``_claim``, which only one thread can.
"""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any

from weftplan.engine.operation import Waiter
from weftplan.engine.var import Var
from weftplan.errors import EngineError


class Task:
    """A call that was submitted. Made by :func:`weftplan.engine.submit` only.

    Attributes:
        array: the array given as ``out`` (a tuple or list of arrays as it is; None without).
        name: for errors and traces.
        var: written when the task is over; whatever takes arrays as ``reads`` takes a task, too.
    """

    __slots__ = ("__weakref__", "_args", "_call", "_claim", "_kwargs", "_value", "array", "name", "var")

    def __init__(
        self, var: Var, call: Callable[..., Any], args: Any, kwargs: dict[str, Any], array: Any, name: str
    ) -> None:
        self.var = var
        self._call: Any = call
        self._args = args
        self._kwargs: Any = kwargs
        self._claim = [1]
        self._value: Any = None
        self.array = array
        self.name = name

    def __call__(self) -> None:
        """Run it; for the engine."""
        try:
            del self._claim[0]
        except IndexError:
            raise CancelledError(f"task {self.name!r} was cancelled") from None
        call, args, kwargs = self._call, self._args, self._kwargs
        self._call = self._args = self._kwargs = None  # what they hold goes with the task, not with the handle
        self._value = call(*args, **kwargs) if kwargs else call(*args)

    def done(self) -> bool:
        """True when it has run, failed, or been skipped or cancelled."""
        return self.var.version > 0

    def running(self) -> bool:
        """True while it runs."""
        return not self._claim and not self.done()

    def cancel(self) -> bool:
        """Keep it from running, if it has not begun; True when it never runs.

        The arrays it would have written then hold a failure, as after one that raised: whoever waits for them, and for
        this task, gets ``concurrent.futures.CancelledError``, and tasks that read them are skipped. A wait for
        everything says nothing of it.
        """
        try:
            del self._claim[0]
        except IndexError:
            return self.cancelled()
        self._call, self._args, self._kwargs = _cancelled, None, None
        self.var.engine.future(self.var)  # the failure counts as told
        return True

    def cancelled(self) -> bool:
        """True after a :meth:`cancel` that was in time."""
        return self._call is _cancelled

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is over; raises nothing of what it raised.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            False when ``timeout`` seconds were not enough.

        Raises:
            WaitInWorkerError: called inside a task.
        """
        return _wait(self.var, timeout)

    def result(self, timeout: float | None = None) -> Any:
        """What the function returned, waiting for it.

        Raises:
            TimeoutError: ``timeout`` seconds were not enough.
            CancelledError: it was cancelled.
            BaseException: what the function raised, with a note that names the task and the line that submitted it; or
                what a task raised that was to write what this one reads.
        """
        if timeout is not None and not _wait(self.var, timeout):
            raise TimeoutError(f"task {self.name!r} was not over after {timeout} seconds")
        self.var.engine.wait_for_var(self.var)
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`result` would raise because the task failed, or None. Raises TimeoutError, as that does."""
        try:
            self.result(timeout)
        except TimeoutError:
            if not self.done():
                raise
            return self._failure()
        except BaseException as error:
            if self._failure() is None:  # not the task's: an interrupt, or a wait inside a task
                raise
            return error
        return None

    def _failure(self) -> BaseException | None:
        failure = self.var.failure
        return None if failure is None else failure.exception()

    def __await__(self) -> Generator[Any, None, Any]:
        """``await task`` in a coroutine: :meth:`result` without blocking the event loop."""
        yield from self.var.__await__()
        return self._value

    def __repr__(self) -> str:
        state = (
            "cancelled"
            if self.cancelled()
            else "pending"
            if self._claim and not self.done()
            else "running"
            if not self.done()
            else "failed"
            if self.var.failure is not None
            else "done"
        )
        return f"<Task {self.name!r}: {state}>"


def _cancelled() -> None:
    """Stands for the function of a task that was cancelled."""


def _wait(var: Var, timeout: float | None) -> bool:
    """Until ``var`` is readable, failed or not; False when ``timeout`` seconds were not enough."""
    if timeout is not None and timeout < 0:
        raise EngineError(f"timeout must be at least 0 seconds, got {timeout!r}")
    written: bool = var.engine.wait_until_written(var, timeout)
    return written


def as_completed(tasks: Iterable[Task], timeout: float | None = None) -> Iterator[Task]:
    """Tasks in the order in which they end, each once; a failed, skipped or cancelled one counts as ended.

    Args:
        tasks: what :func:`submit` returned.
        timeout: seconds for all of them together.

    Raises:
        TimeoutError: not all were over in time.

    >>> from weftplan import engine
    >>> tasks = [engine.submit(pow, 2, n) for n in range(3)]
    >>> sorted(task.result() for task in engine.as_completed(tasks))
    [1, 2, 4]
    """
    waiting = dict.fromkeys(tasks)
    ended: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in waiting:
        if type(task) is not Task:
            raise EngineError(f"as_completed: expected what engine.submit() returned, got {type(task).__name__}")
    for engine in dict.fromkeys(task.var.engine for task in waiting):
        engine._forbid_wait("as_completed")
        if engine._bulking:
            engine._flush_bulk()
    for task in waiting:  # inside the region a put is one step and blocks nobody
        engine = task.var.engine
        engine._region.ask(engine, Waiter(functools.partial(ended.put, task), (task.var,), ()))
    return _in_turn(waiting, ended, None if timeout is None else time.monotonic() + timeout)


def _in_turn(waiting: dict[Task, None], ended: queue.SimpleQueue[Task], end: float | None) -> Iterator[Task]:
    count = len(waiting)
    while waiting:
        if ended.empty():
            for engine in dict.fromkeys(task.var.engine for task in waiting):
                engine._before_wait()  # where nobody else would run them
        try:
            task = ended.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"{len(waiting)} of {count} tasks were not over in time") from None
        if task in waiting:  # else it was told twice, around an interrupt
            del waiting[task]
            yield task


def results(tasks: list[Task], timeout: float | None) -> Iterator[Any]:
    """Results in the order of ``tasks``; what has not begun is cancelled when one fails, is late, or nobody goes on."""
    end = None if timeout is None else time.monotonic() + timeout
    tasks.reverse()
    try:
        while tasks:
            yield tasks[-1].result(None if end is None else max(0.0, end - time.monotonic()))
            tasks.pop()
    finally:
        for task in tasks:
            task.cancel()
