"""Submission of tasks on plain arrays: ``submit``, ``task`` and ``wait``.

The vars of a task are derived from its array arguments.

>>> import numpy as np
>>> from weftplan import engine
>>> a, b, c = np.ones(3), np.zeros(3), np.zeros(3)
>>> first = engine.submit(np.add, a, 1, out=b)  # returns at once
>>> second = engine.submit(np.multiply, b, 10, out=c)  # runs after the addition, since it reads b
>>> engine.wait(c)
>>> c
array([20., 20., 20.])
>>> second
<Task 'multiply': done>

A function runs on a worker once no earlier task still writes an array that it reads, or uses an array that it writes.
Arrays are NumPy and CuPy arrays and NDArrays (the function gets their raw array); views of one buffer count as that
buffer. An array that a function reaches other than through its arguments must be named in ``reads`` or ``writes``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import NoneType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.factory import get
from weftplan.engine.operation import FnProperty, check_runs, dedupe, label_of, runs
from weftplan.engine.var import Var
from weftplan.errors import EngineError, UndeclaredAccessWarning
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.progress import Progress, is_shown
from weftplan.support.slots import TASK_MEMORY
from weftplan.tasks.arguments import NO_ARRAYS, arrays_in, call_opened
from weftplan.tasks.array_vars import in_flight, owner_of, registry
from weftplan.tasks.arrays import context_of, is_array, is_ndarray, resources, var_of, vars_of
from weftplan.tasks.call_vars import components, inherited, vars_for
from weftplan.tasks.handle import Task, results
from weftplan.tasks.held_arrays import arrays_of_function, unseen_arrays
from weftplan.tasks.undeclared_writes import Candidate, candidate
from weftplan.tasks.written_arguments import in_library

P = ParamSpec("P")
T = TypeVar("T")


def submit(
    fn: Callable[..., T],
    *args: object,
    out: object = None,
    reads: Sequence[object] | None = None,
    writes: Sequence[object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    ctx: Context | None = None,
    priority: int = 0,
    prop: FnProperty = FnProperty.TASK,
    name: str | None = None,
    nout: int | None = None,
    **options: object,
) -> Task[T]:
    """Schedule ``fn(*args, **options, out=out)``; without ``out``, ``fn(*args, **options)``.

    A list, tuple or dictionary among the arguments is the caller's own, unless there are NDArrays or tasks in it: then
    the function gets a copy, with raw arrays and results in their places.

    Args:
        fn: any function; NumPy functions with an ``out`` argument can be used directly.
        args: positional arguments. Arrays among them, also in lists, tuples and dictionaries, count as read. A task is
            replaced by its result: the call runs after that task and is skipped if it fails.
        out: an array, or a tuple or list of arrays, that it writes; None in it is an output that is not wanted.
        reads, writes: arrays, generators or vars that it uses without getting them as arguments, or that it writes
            although they are among ``args``. With ``reads``, even an empty list, an object whose method is submitted
            counts without its arrays over the same memory. ``writes=[]`` says that it writes nothing.
        kwargs, options: keyword arguments of the function; arrays among them count as read, and ``out`` as written.
            ``kwargs`` takes those that have the name of a parameter here.
        ctx: the context; default: that of the first written array, else of the first read array, else ``cpu(0)``. Each
            context has its own workers, so contexts are lanes that run concurrently.
        priority: larger first, in queues that honour it.
        prop: kind of work.
        name: for errors and traces; default: the function's.
        nout: how many results it returns, so that the handle can be unpacked: ``a, b = submit(divmod, 7, 2, nout=2)``.

    Returns:
        A handle of the call: ``result()``, ``wait(timeout)``, ``await``, ``cancel()``. The caller need not keep it.

    Raises:
        EngineError: ``out``, ``reads`` or ``writes`` holds something that is no array, or nothing of ``fn`` would run
            (``async def``, or with ``yield``). Nothing has been scheduled then.

    Warns:
        UndeclaredAccessWarning: when it runs, if it gets arrays, declares no write, and returns None.
    """
    if reads is not None or writes is not None:
        for which, several in (("reads", reads), ("writes", writes)):
            if is_array(several) or isinstance(several, str) or not isinstance(several, (Iterable, NoneType)):
                got = "" if is_array(several) else f", got {several!r}"
                raise EngineError(f"submit: {which} is a sequence of arrays; write {which}=[array] for one{got}")
    if kwargs:
        overlap = sorted(set(kwargs) & ({*options, "out"} if out is not None else set(options)))
        if overlap:
            raise EngineError(f"submit: {overlap[0]!r} is given twice, in kwargs and by itself")
        options.update(kwargs)
    outputs: list[Any] = []
    if out is not None:
        outputs = [out] if type(out) is np.ndarray else resources(out if isinstance(out, (tuple, list)) else (out,))
    elif "out" in options:  # from `kwargs`, where it may be no array
        out = options.pop("out")
        outputs = list(arrays_in((out,)))
    read: list[Any] = []
    for value in (*args, *options.values()) if options else args:
        kind = type(value)
        if kind is np.ndarray:
            read.append(value)
        elif kind not in NO_ARRAYS:
            read += arrays_in((value,))
    if out is not None:
        options["out"] = out
    declared: Sequence[Any] | None = None
    if reads is not None:
        declared = resources(reads)
        read += declared
    written = [*outputs, *resources(writes)] if writes else outputs
    return _schedule(
        fn, args, options, read, written, ctx, priority, prop, name, out, nout, outputs, declared, writes is not None
    )


def submit_each(
    fn: Callable[..., T], *iterables: Iterable[object], timeout: float | None = None, progress: bool | None = None
) -> Iterator[T]:
    """Submit ``fn`` for all sets of arguments, and yield results in order, as ``concurrent.futures.Executor.map``.

    Arrays among the arguments count as read. If a call fails, or the iterator is closed, calls that have not begun are
    cancelled.

    Args:
        iterables: one for each argument of ``fn``; the shortest determines the number of calls.
        timeout: seconds from now until the last result.
        progress: whether a live line shows how many results there are; by default as for all long loops.

    Raises:
        TimeoutError: from the iterator, if a result was not ready in time.
        BaseException: from the iterator, the exception of ``fn``.

    >>> from weftplan import engine
    >>> list(engine.map(pow, [2, 3], [5, 2]))
    [32, 9]
    """
    tasks = [submit(fn, *args) for args in zip(*iterables, strict=False)]
    outcomes = results(tasks, timeout)
    return _watched(outcomes, label_of(fn, None), len(tasks), progress) if is_shown(progress) else outcomes


def _watched(results: Iterator[T], name: str, count: int, progress: bool | None) -> Iterator[T]:
    """Yield the results with a live line that counts them."""
    try:
        yield from Progress(name, count, unit="results", show=progress).each(results)
    finally:
        close = getattr(results, "close", None)
        if close is not None:
            close()  # cancels what has not begun


@known_keywords()
def task(
    *function: object,
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    ctx: Context | None = None,
    priority: int = 0,
    prop: FnProperty = FnProperty.TASK,
    name: str | None = None,
    nout: int | None = None,
) -> Callable[[Callable[P, T]], Callable[P, Task[T]]]:
    """Decorate a function so that a call submits it and returns a handle; its array arguments order it.

    Args:
        reads: names of the parameters that it reads; default: all that are not written. When given, an array passed to
            a parameter that is in neither list is an error.
        writes: names of the parameters that it writes; an empty list says that it writes none.
        ctx, priority, prop, name, nout: as for :func:`submit`.

    The plain function stays reachable as ``__wrapped__``. Arrays that are defaults of parameters count, too.

    Raises:
        EngineError: a name that is no parameter of the function, or in both lists; used without parentheses; at the
            call, an array that was not declared.

    >>> import numpy as np
    >>> @task(reads=["a"], writes=["total"])
    ... def accumulate(a, total):
    ...     total += a
    >>> total = np.zeros(2)
    >>> for i in range(3):
    ...     _ = accumulate(np.full(2, i), total)
    >>> wait(total)
    >>> total
    array([3., 3.])
    """

    if function:
        raise EngineError(
            "@engine.task must be told what the function writes: write @engine.task(writes=['name', ...]), or "
            "@engine.task(writes=[]) for one that only reads"
        )

    def decorate(fn: Callable[P, T]) -> Callable[P, Task[T]]:
        signature = inspect.signature(fn)
        label = label_of(fn, name)
        read_names, write_names = _checked_names(label, list(signature.parameters), reads, writes or ())
        check_runs(fn, label)
        positional = _plain_positional(signature)
        defaults = {
            key: parameter.default
            for key, parameter in signature.parameters.items()
            if parameter.default is not parameter.empty and list(arrays_in((parameter.default,)))
        }

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> Task[T]:
            every: tuple[Any, ...] = args
            named: Mapping[str, Any] = kwargs
            if positional is not None and not kwargs and len(args) == len(positional):
                values: Mapping[str, Any] = dict(zip(positional, args, strict=True))
            else:
                try:
                    bound = signature.bind(*args, **kwargs)
                except TypeError as error:
                    raise TypeError(f"task {label!r}: {error}") from None
                values = bound.arguments
                if defaults:
                    values = {**defaults, **values}
                    bound.apply_defaults()
                    every, named = bound.args, bound.kwargs
            read: list[Any] = []
            written: list[Any] = []
            for parameter, value in values.items():
                arrays = list(arrays_in((value,)))
                if parameter in write_names:
                    if not arrays:
                        raise EngineError(
                            f"task {label!r}: parameter {parameter!r} is declared as written, so an array is expected, "
                            f"got {type(value).__name__}"
                        )
                    written += arrays
                elif read_names is None or parameter in read_names:
                    read += arrays
                elif arrays:
                    raise EngineError(
                        f"task {label!r} got an array in parameter {parameter!r}, which is in neither reads nor "
                        f"writes; add it to the one that is true"
                    )
            options, knows = dict(named), writes is not None
            return _schedule(fn, every, options, read, written, ctx, priority, prop, label, None, nout, (), None, knows)

        return call

    return decorate


@known_keywords(timeout="what submit returned has wait(timeout)")
def wait(*arrays: object, readers: bool = False) -> None:
    """Block until all tasks submitted so far have written ``arrays``; without arrays, until everything is done.

    Args:
        arrays: as for :func:`submit`, or vars, or tasks; also lists, tuples, sets and iterators of them.
        readers: also wait for tasks that read them; needed before the caller writes them directly.

    Raises:
        WaitInWorkerError: called inside a task.
        BaseException: the exception of a failed task, with a note that names it and the line that submitted it.
    """
    if not arrays:
        get().wait_for_all()
        return
    every = (part for array in _flattened(arrays) for part in (array, *components(array)))
    variables = list(dict.fromkeys(var for array in resources(every) for var in vars_of(array, get())))
    if readers:
        for read_var in variables:
            _engine_of(read_var).push(_nothing, (), (read_var,), name="wait")
    var: Var | None = None
    try:
        for var in variables:
            _engine_of(var).wait_for_var(var)
    finally:
        del arrays, variables, var  # the error's traceback must not hold objects that hold the error


def _flattened(arrays: Iterable[object]) -> Iterator[object]:
    """Yield the arrays and tasks in ``arrays`` and in the collections in it."""
    for array in arrays:
        if (
            type(array) is not Task
            and not is_array(array)
            and isinstance(array, Iterable)
            and not isinstance(array, str)
        ):
            yield from _flattened(array)
        else:
            yield array


def _tell_unseen(fn: Callable[..., object], seen: Sequence[object], label: str) -> None:
    """Warn, in debug mode, about arrays of other tasks that ``fn`` reaches without declaring them."""
    owners = {id(owner_of(array)) for array in seen}
    names = {name for name, array in unseen_arrays(fn) if id(owner_of(array)) not in owners and registry.has(array)}
    if names:
        warnings.warn(
            f"task {label!r} reaches arrays that other tasks use through its closure, defaults or globals, so it is "
            f"not ordered with those tasks: {', '.join(sorted(names))}; pass the arrays as arguments, or name them in "
            f"reads=[...] or writes=[...]",
            UndeclaredAccessWarning,
            stacklevel=4,
        )


def future(array: T) -> Future[T]:
    """Return a future whose result is ``array``: done when all tasks submitted so far have written it.

    If one of these tasks fails, the future raises its exception.

    In a coroutine ``await asyncio.wrap_future(engine.future(array))``, or ``await engine.var_of(array)``.
    """
    var = var_of(array)  # of the engine in use
    result: Future[Any] = Future()

    def settle(finished: Future[Var]) -> None:
        error = finished.exception()
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(array)

    if result.set_running_or_notify_cancel():  # from here on it cannot be cancelled, so that settling cannot fail
        _engine_of(var).future(var).add_done_callback(settle)
    return result


def _schedule(
    fn: Callable[..., T],
    args: Sequence[object],
    kwargs: dict[str, object],
    read: Sequence[object],
    written: Sequence[object],
    ctx: Context | None,
    priority: int,
    prop: FnProperty,
    name: str | None,
    out: object,
    nout: int | None,
    overwritten: Sequence[object],
    declared: Sequence[object] | None,
    knows: bool,
) -> Task[T]:
    """Push the call with the vars of ``read`` and ``written``; this takes ownership of ``kwargs``.

    Args:
        out: the handle's array.
        overwritten: the written arrays whose elements it overwrites completely, unless it has a mask or reads them.
        declared: the arrays of ``reads``; None if the caller has not declared what the call reads.
        knows: whether the caller has said what it writes, be it nothing.
    """
    if not callable(fn):
        hint = ": write submit(fn, x), not submit(fn(x))" if fn is None else ""
        raise EngineError(f"expected a function, got {type(fn).__name__}{hint}")
    engine = get()
    label = label_of(fn, name)
    if nout is not None and (type(nout) is not int or nout < 1):
        raise EngineError(f"task {label!r}: nout must be the number of results, an integer >= 1, got {nout!r}")
    if type(fn) is np.ufunc:
        if len(args) > fn.nin:  # outputs by position
            written = [*written, *arrays_in(args[fn.nin :])]
    elif not runs(fn) or in_library[fn.__module__]:
        check_runs(fn, label)
        declared_arrays = () if declared is None else (*declared, *written)
        held, changed, overwrites = arrays_of_function(fn, args, kwargs, declared_arrays, label)
        read, written = [*read, *held], [*written, *changed]
        if overwrites:
            overwritten = changed
            read = _without(read, changed)
    undeclared: Candidate | None = None
    if read and not written and not knows:
        undeclared_reads = (
            read if not declared else [array for array in read if not any(array is other for other in declared)]
        )
        undeclared = candidate(fn, undeclared_reads)
    work = fn
    reads: Sequence[Var] = ()
    writes: Sequence[Var] = ()
    inherits: Sequence[Var] = ()
    var = engine.new_variable()
    try:
        if engine._debug:
            _tell_unseen(fn, [*read, *written], label)
        if read or written:
            try:
                read_vars, write_vars, plain = vars_for(read, written, engine, var)
            except EngineError as error:
                raise EngineError(f"task {label!r}: {error}") from None
            if len({*read_vars, *write_vars}) == len(read_vars) + len(write_vars):
                reads, writes = read_vars, write_vars
            else:
                reads, writes = dedupe(read_vars, write_vars)
            if engine._any_failure:
                masked = "where" in kwargs or "where" in getattr(fn, "keywords", ())
                inherits = inherited(read_vars, written, () if masked else overwritten, engine)
            if engine._debug:
                changing = frozenset(writes)
                work = functools.partial(call_opened, fn, lambda array: changing.isdisjoint(vars_of(array, engine)))
            if not plain:
                if ctx is None:
                    ctx = next(
                        (context for array in (*written, *read) if (context := context_of(array)) is not None), None
                    )
                if not engine._debug and any(type(array) is Task or is_ndarray(array) for array in (*read, *written)):
                    work = functools.partial(call_opened, fn, None)
                if (holding := TASK_MEMORY.value) is not None and (
                    ndarrays := [array for array in (*read, *written) if is_ndarray(array)]
                ):
                    work = holding(ndarrays, work)
        task: Task[Any] = Task(var, work, args, kwargs, out, label, nout, inherits, undeclared)
        engine.push(task, tuple(reads), (*writes, var), ctx, prop=prop, priority=priority, name=label)
    finally:
        in_flight.discard(var)
    return task


def _without(arrays: Sequence[object], removed: Sequence[object]) -> list[object]:
    """Return ``arrays`` without the first occurrence of each of ``removed``; another occurrence is another argument."""
    remaining = list(arrays)
    for array in removed:
        position = next((number for number, other in enumerate(remaining) if other is array), None)
        if position is not None:
            del remaining[position]
    return remaining


def _checked_names(
    label: str, parameters: Sequence[str], reads: Sequence[str] | None, writes: Sequence[str]
) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Return the declared names as sets; raise EngineError if they do not fit the function."""
    for which, names in (("reads", reads or ()), ("writes", writes)):
        if isinstance(names, str):
            raise EngineError(f"task {label!r}: {which} must be a sequence of names, such as [{names!r}]")
        for name in names:
            if name not in parameters:
                raise EngineError(
                    f"task {label!r}: {which} names {name!r}, which is none of its parameters: {', '.join(parameters)}"
                )
    overlap = sorted(set(reads or ()) & set(writes))
    if overlap:
        raise EngineError(f"task {label!r}: {overlap[0]!r} is in reads and in writes; written arrays may be read, too")
    return (None if reads is None else frozenset(reads)), frozenset(writes)


def _plain_positional(signature: inspect.Signature) -> list[str] | None:
    """Return the parameter names if all can be passed by position, which needs no binding; else None."""
    simple = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    return [p.name for p in parameters] if all(p.kind in simple for p in parameters) else None


def _engine_of(var: Var) -> Engine:
    if var.engine is None:
        raise EngineError(f"{var!r} has been deleted; nothing can be waited for")
    engine: Engine = var.engine
    return engine


def _nothing() -> None:
    """Do nothing, in an operation that waits for the readers of a var."""
