"""``Task``, the handle that ``submit`` returns: one deferred function call and its result.

A handle is also the function of its engine operation, and the operation writes the handle's own var. So waiting,
awaiting, failing and skipping after a failed input are the engine's behaviour for vars. Any thread may call the
methods. To claim a task that has not begun, a thread removes the single item of ``_claim``; only one thread succeeds.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import operator
import queue
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import CancelledError, Future
from contextvars import Context, copy_context
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from weftplan.engine.execution import report
from weftplan.engine.operation import FnProperty, FutureBlock, Waiter
from weftplan.engine.sites import push_site
from weftplan.engine.var import Var
from weftplan.errors import EngineError
from weftplan.support.array_types import DTypeLike

T = TypeVar("T")
_callbacks: weakref.WeakKeyDictionary[Task[Any], list[Callable[[Any], object]]] = weakref.WeakKeyDictionary()
"""Pending callbacks of each task."""


class Task(Generic[T]):
    """A submitted call, made only by :func:`weftplan.engine.submit`.

    A task is no value: like a future it is equal to itself alone, and true. Compare and test ``task.result()``.

    Attributes:
        array: the value of ``out``: an array, or a tuple or list of arrays; None without ``out``.
        name: for errors and traces.
        var: written when the task is over; a task is accepted in ``reads`` like an array.
    """

    __slots__ = (
        "__weakref__",
        "_args",
        "_call",
        "_check",
        "_claim",
        "_context",
        "_kwargs",
        "_nout",
        "_value",
        "array",
        "inherits",
        "name",
        "var",
    )

    def __init__(
        self,
        var: Var,
        call: Callable[..., object],
        args: Sequence[object],
        kwargs: dict[str, object],
        array: object,
        name: str,
        nout: int | None = None,
        inherits: Sequence[Var] = (),
        check: Callable[[str, object], None] | None = None,
    ) -> None:
        self.var = var
        self._check = check
        """Called with the name and the result, in the submitter's context."""
        self._context: Context | None = copy_context()
        self._nout = nout
        self.inherits = inherits
        """Failed vars that it writes without overwriting all their elements; the task is skipped for that failure."""
        self._call: Any = call
        self._args: Any = args
        self._kwargs: Any = kwargs
        self._claim = [1]  # a list, because `del` of its item is atomic: one thread succeeds
        self._value: Any = None
        self.array = array
        self.name = name

    def __call__(self) -> None:
        """Run the task; called by the engine."""
        try:
            del self._claim[0]
        except IndexError:
            raise CancelledError(f"task {self.name!r} was cancelled") from None
        call, args, kwargs, context = self._call, self._args, self._kwargs, self._context
        # Drop the references here, so that arguments live as long as the task, not as long as the handle.
        self._call = self._args = self._kwargs = self._context = None
        value = context.run(call, *args, **kwargs) if kwargs else context.run(call, *args)  # type: ignore[union-attr]
        kind = type(value)
        if kind in _LAZY:
            _refuse_unrun(self.name, value)
        if self._check is not None:
            context.run(self._check, self.name, value)  # type: ignore[union-attr]
        self._value = value

    def done(self) -> bool:
        """Return whether the task has run, failed, or been skipped or cancelled."""
        return self.var.version > 0

    def running(self) -> bool:
        """Return whether the task is running."""
        return not self._claim and not self.done()

    def cancel(self) -> bool:
        """Cancel the task if it has not begun; return whether it will never run.

        The arrays that it would have written then hold a failure, as after an exception: waiting for them or for this
        task raises ``concurrent.futures.CancelledError``, and tasks that read them are skipped. A wait for everything
        does not report it.
        """
        try:
            del self._claim[0]
        except IndexError:
            return self.cancelled()
        self._call, self._args, self._kwargs, self._context = _cancelled, None, None, None
        self.var.engine.future(self.var)  # the failure counts as reported
        return True

    def cancelled(self) -> bool:
        """Return whether :meth:`cancel` was called in time."""
        return self._call is _cancelled

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the task is over, without raising its exception.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            False if ``timeout`` seconds were not enough.

        Raises:
            WaitInWorkerError: called inside a task.
        """
        return _wait(self.var, timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the task and return the function's result.

        Raises:
            TimeoutError: ``timeout`` seconds were not enough.
            CancelledError: it was cancelled.
            BaseException: the exception of the function, with a note that names the task and the line that submitted
                it; or the exception of an earlier task that failed to write an array that this task reads.
        """
        if timeout is not None and not _wait(self.var, timeout):
            raise TimeoutError(f"task {self.name!r} was not over after {timeout} seconds")
        try:
            self.var.engine.wait_for_var(self.var)
        except BaseException:
            del self  # the traceback, which the task's error holds, must not hold the task
            raise
        return self._value  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that :meth:`result` would raise for a failed task, or None; may raise TimeoutError."""
        try:
            self.result(timeout)
        except TimeoutError:
            if not self.done():
                raise
            return self._failure()
        except BaseException as error:
            failure = self.var.failure
            if failure is None:  # not the task's: an interrupt, or a wait inside a task
                raise
            return BaseException.with_traceback(error, failure.traceback)  # without this frame, which holds the task
        return None

    def _failure(self) -> BaseException | None:
        failure = self.var.failure
        return None if failure is None else failure.exception()

    def future(self) -> Future[T]:
        """Return a ``concurrent.futures.Future`` of the result, for functions that accept no other handle.

        ``concurrent.futures.wait([task.future()])``, ``asyncio.wrap_future(task.future())``.
        """
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so that settling cannot fail

        def settle(finished: Future[Var]) -> None:
            error = finished.exception()
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(self._value)

        self.var.engine.future(self.var).add_done_callback(settle)
        return result

    def add_done_callback(self, fn: Callable[[Task[T]], object]) -> None:
        """Call ``fn(task)`` when the task is over, immediately if it is over already.

        If registered in a coroutine, ``fn`` runs in its event loop, else on a worker thread. An error of ``fn`` is
        reported on stderr.
        """
        if not callable(fn):
            raise EngineError(f"add_done_callback: expected a function of the task, got {type(fn).__name__}")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        callbacks = _callbacks.setdefault(self, [])
        callbacks.append(fn)

        def call() -> None:
            if fn in callbacks:
                callbacks.remove(fn)
                try:
                    fn(self)
                except BaseException as error:
                    report(error)

        settle = call if loop is None else functools.partial(loop.call_soon_threadsafe, call)
        engine = self.var.engine
        engine._flush_bulk()
        engine._submit(FutureBlock(settle, (self.var,), (), "callback", push_site(), prop=FnProperty.NO_SKIP))
        engine._drive(self.var)

    def remove_done_callback(self, fn: Callable[[Task[T]], object]) -> int:
        """Remove all pending callbacks ``fn``; return their number."""
        callbacks = _callbacks.get(self, [])
        old_count = len(callbacks)
        callbacks[:] = [callback for callback in callbacks if callback != fn]
        return old_count - len(callbacks)

    def __await__(self) -> Generator[object, None, T]:
        """Support ``await task``: :meth:`result` without blocking the event loop."""
        try:
            yield from self.var.__await__()
        except BaseException:
            del self  # as in result
            raise
        return self._value  # type: ignore[no-any-return]

    def __getitem__(self, index: object) -> Task[Any]:
        """Return a task for one item of the result; it fails if this task fails."""
        if self._nout is not None and isinstance(index, int) and not -self._nout <= index < self._nout:
            raise IndexError(f"task {self.name!r} has {self._nout} results, so none at {index}")
        engine = self.var.engine
        var = engine.new_variable()
        item: Task[Any] = Task(var, _item, (self, index), {}, None, f"{self.name}[{index!r}]")
        engine.push(item, (self.var,), (var,), prop=FnProperty.TASK, name=item.name)
        return item

    def __iter__(self) -> Iterator[Task[Any]]:
        """Return an iterator over ``nout`` item tasks."""
        if self._nout is None:
            raise EngineError(
                f"task {self.name!r} cannot be unpacked before it has run: say how many results it has, as in "
                f"a, b = engine.submit(fn, nout=2)"
            )
        return iter([self[index] for index in range(self._nout)])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Support ``np.asarray(task)``: wait for the result and convert it to an array."""
        result = np.asarray(self.result(), dtype=dtype)
        return result.copy() if copy else result

    @property
    def _condition(self) -> NoReturn:
        """Explain that a task is no future; ``concurrent.futures.wait`` and ``as_completed`` access this attribute."""
        raise AttributeError(
            f"task {self.name!r} is no future: use engine.wait(tasks) or engine.as_completed(tasks), await it, or pass "
            f"task.future() to a function that needs a concurrent.futures.Future"
        )

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


def _item(task: Task[Any], index: object) -> object:
    """Return an item of the result; raise EngineError if ``nout`` is not the number of items."""
    value, nout = task._value, task._nout
    if nout is not None:
        count = len(value) if isinstance(value, Sized) else None
        if count != nout:
            kind = type(value).__name__
            came = f"its result is a single {kind}" if count is None else f"its result, a {kind}, has {count}"
            raise EngineError(f"task {task.name!r} was submitted with nout={nout}, but {came}")
    return operator.getitem(value, index)


_LAZY = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType, map, filter, itertools.starmap})
"""Classes of results that have not called the functions of their work."""


def _refuse_unrun(name: str, value: Any) -> None:
    """Raise EngineError if none of the work of a returned coroutine or generator has run."""
    if isinstance(value, CoroutineType):
        value.close()
        result_kind, remedy = "a coroutine", "call asyncio.run(...) inside it"
    elif isinstance(value, GeneratorType):
        if inspect.getgeneratorstate(value) != inspect.GEN_CREATED:
            return
        result_kind, remedy = "a generator", "return list(...) of it"
    elif not isinstance(value, AsyncGeneratorType):
        result_kind, remedy = f"a {type(value).__name__} object", "return list(...) of it"
    else:
        result_kind, remedy = "an asynchronous generator", "use it with asyncio.run(...) inside it"
    raise EngineError(
        f"task {name!r} returned {result_kind}, so none of its work has run; submit a plain function, or {remedy}"
    )


def _cancelled() -> None:
    """Mark a cancelled task by standing in for its function."""


def _wait(var: Var, timeout: float | None) -> bool:
    """Wait until ``var`` is readable or failed; return False if ``timeout`` seconds were not enough."""
    if timeout is not None and not timeout >= 0:
        raise EngineError(f"timeout must be at least 0 seconds, got {timeout!r}")
    written: bool = var.engine.wait_until_written(var, timeout)
    return written


def as_completed(tasks: Iterable[Task[T]], timeout: float | None = None) -> Iterator[Task[T]]:
    """Yield tasks as they end, each once; failed, skipped and cancelled tasks count as ended.

    Args:
        tasks: handles returned by :func:`submit`.
        timeout: seconds for all of them together.

    Raises:
        TimeoutError: not all were over in time.

    >>> from weftplan import engine
    >>> tasks = [engine.submit(pow, 2, n) for n in range(3)]
    >>> sorted(task.result() for task in engine.as_completed(tasks))
    [1, 2, 4]
    """
    if type(tasks) is Task or not isinstance(tasks, Iterable):
        raise EngineError(f"as_completed: expected a list of tasks, got {tasks!r}; write as_completed([task]) for one")
    tasks = list(tasks)
    for task in tasks:
        if type(task) is not Task:
            raise EngineError(f"as_completed: expected what engine.submit() returned, got {type(task).__name__}")
    waiting = dict.fromkeys(tasks)
    ended: queue.SimpleQueue[Task[T]] = queue.SimpleQueue()
    for engine in dict.fromkeys(task.var.engine for task in waiting):
        engine._forbid_wait("as_completed")
        if engine._bulking:
            engine._flush_bulk()
    for task in waiting:  # inside the region a put is one step and blocks no thread
        engine = task.var.engine
        engine._region.ask(engine, Waiter(functools.partial(ended.put, task), (task.var,), ()))
    return _in_turn(waiting, ended, None if timeout is None else time.monotonic() + timeout)


def _in_turn(waiting: dict[Task[T], None], ended: queue.SimpleQueue[Task[T]], end: float | None) -> Iterator[Task[T]]:
    count = len(waiting)
    while waiting:
        if ended.empty():
            for engine in dict.fromkeys(task.var.engine for task in waiting):
                engine._before_wait()  # on engines without workers the waiting thread runs the tasks
        try:
            task = ended.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"{len(waiting)} of {count} tasks were not over in time") from None
        if task in waiting:  # else it was notified twice, around an interrupt
            del waiting[task]
            yield task


def results(tasks: list[Task[T]], timeout: float | None) -> Iterator[T]:
    """Yield results in the order of ``tasks``; after a failure, a timeout or a close, cancel tasks not yet begun."""
    end = None if timeout is None else time.monotonic() + timeout
    tasks.reverse()
    try:
        while tasks:
            yield tasks[-1].result(None if end is None else max(0.0, end - time.monotonic()))
            tasks.pop()
    finally:
        while tasks:
            tasks.pop().cancel()
