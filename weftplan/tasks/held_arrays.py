"""Arrays that a call reaches through other objects, such as bound methods, partials and containers.

Relies on the referents that Python's cyclic garbage collector follows, so that a single rule covers all kinds of
objects, and on the memory-sharing protocols of libraries. This module keeps no state; any thread may call it.
"""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np

from weftplan.errors import EngineError
from weftplan.tasks.arrays import is_array
from weftplan.tasks.handle import Task
from weftplan.tasks.registry import owner_of

DEEPEST = 3
"""Maximum nesting depth of inspected objects; containers and iterators of the standard library do not count."""
MOST_OBJECTS = 1000
"""Maximum number of objects, other than containers and leaves, that are inspected for one argument."""
_LEAVES = (str, bytes, bytearray, int, float, complex, np.generic, np.dtype, np.ufunc, type, ModuleType, CodeType)
_CLOSED = (*_LEAVES, FunctionType, FrameType)
"""Classes whose instances are not inspected: they hold no arrays, or more than the call reads."""
_CONTAINERS = frozenset({"builtins", "collections", "itertools", "functools"})
"""Modules whose objects only pass on other objects."""
_METHODS = (MethodType, BuiltinFunctionType, MethodWrapperType)
_IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul"),
)
"""Python's in-place operators, which write their left side."""
_WRITING_METHODS = frozenset(
    {"fill", "itemset", "partition", "put", "setfield", "sort", "__setitem__", *(f"__{name}__" for name in _IN_PLACE)}
)
_WHOLE_METHODS = frozenset({"fill"})
"""Methods that overwrite every element and read none."""
_WRITING_FUNCTIONS = (
    *(np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis, operator.setitem),
    *(getattr(operator, name) for name in _IN_PLACE),
)
"""Functions that write their first argument."""


def memory_of(thing: object) -> np.ndarray | None:
    """Return an array over the host memory that ``thing`` shares, without a copy; None if it shares none.

    >>> memory_of(memoryview(bytearray(3))).nbytes, memory_of([1.0])
    (3, None)
    """
    kind = type(thing)
    if isinstance(thing, np.flatiter):
        base: np.ndarray = thing.base
        return base
    if isinstance(thing, _LEAVES) and not isinstance(thing, bytearray):
        return None
    try:
        if hasattr(kind, "__array_interface__"):
            return np.asarray(thing)
        if hasattr(kind, "__dlpack__"):
            return _from_dlpack(thing)
        buffer: Any = thing
        return np.asarray(memoryview(buffer))
    except Exception:  # not on a host, or no memory to share; a foreign object may raise anything
        return None


def _from_dlpack(thing: Any) -> np.ndarray:
    """Return an array over a host tensor; a tensor that requires gradients is detached."""
    try:
        return np.from_dlpack(thing)
    except Exception:
        return np.from_dlpack(thing.detach())


def held_arrays(thing: object) -> Iterator[object]:
    """Yield the arrays, and in containers the tasks, that ``thing`` holds.

    Objects are inspected down to :data:`DEEPEST` levels, at most :data:`MOST_OBJECTS` of them.
    """
    seen: set[int] = {id(thing)}
    objects = 0
    level: list[Any] = [thing]
    for depth in range(DEEPEST + 1):
        deeper: list[Any] = []
        while level:
            item = level.pop()
            if type(item) is Task:
                if not depth:
                    yield item
                continue
            if is_array(item):
                yield item
                if isinstance(item, np.ndarray) and item.dtype.hasobject:
                    level += _fresh(item.flat, seen)
                continue
            shared = memory_of(item)
            if shared is not None:
                yield shared
                continue
            kind = type(item)
            if kind.__module__.startswith("weftplan."):
                continue
            referents = item.operands if kind is np.nditer else gc.get_referents(item)
            if kind.__module__ in _CONTAINERS:
                level += _fresh(referents, seen)
            elif objects < MOST_OBJECTS:
                objects += 1
                # The attributes may stand in the dictionary of the object, which is no object of its own.
                deeper += _fresh(referents, seen)
        level = deeper


def _fresh(items: Iterable[object], seen: set[int]) -> list[object]:
    """Return the items that may hold arrays and have not been seen; add them to ``seen``."""
    fresh = [item for item in items if (item is not None and not isinstance(item, _CLOSED)) or type(item) is bytearray]
    fresh = [item for item in fresh if id(item) not in seen]
    seen.update(map(id, fresh))
    return fresh


def arrays_of_function(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    written: Sequence[object],
    label: str,
) -> tuple[list[object], list[object], bool]:
    """Return the arrays that the callable ``fn`` holds: reads, writes, and whether it overwrites the writes completely.

    For an object of a Python class, arrays over the memory of ``written`` are omitted, because the caller has declared
    which part of that memory the method uses.

    Raises:
        EngineError: a method that replaces the memory of its array.
    """
    if type(fn) is functools.partial:
        positional = (*fn.args, *args)
        named = {**fn.keywords, **kwargs}
        reads, writes, whole = arrays_of_function(fn.func, positional, named, written, label)
        out = fn.keywords.get("out")
        targets = [a for a in out if a is not None] if isinstance(out, (tuple, list)) else [] if out is None else [out]
        reads += held_arrays([*fn.args, *(value for key, value in fn.keywords.items() if key != "out")])
        return reads, writes + targets, whole and not targets
    if any(fn is function for function in _WRITING_FUNCTIONS):
        first = list(held_arrays([args[0] if args else next(iter(kwargs.values()), None)]))
        return [], first, fn is np.copyto and "where" not in kwargs and len(args) < 4
    if isinstance(fn, MethodDescriptorType | WrapperDescriptorType):  # np.ndarray.sort and the like
        if args and is_array(args[0]):
            return _arrays_of_method(getattr(args[0], fn.__name__), args[1:], kwargs, written, label)
        return [], [], False
    if isinstance(fn, _METHODS):
        return _arrays_of_method(fn, args, kwargs, written, label)
    if isinstance(fn, _CLOSED):
        return [], [], False
    return _unless_written(held_arrays(fn), written), [], False


def _arrays_of_method(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any], label: str
) -> tuple[list[Any], list[Any], bool]:
    """Return :func:`arrays_of_function` for a bound method."""
    owner, verb = fn.__self__, fn.__name__
    if owner is None or isinstance(owner, (ModuleType, type)):
        return [], [], False
    if isinstance(owner, np.ufunc) or (verb == "shuffle" and hasattr(owner, "random")):  # numpy's, or Python's
        first = list(held_arrays(list(args[:1]))) if verb in ("at", "shuffle") else []
        return [], first, False
    is_memory = is_array(owner) or memory_of(owner) is not None
    held = list(held_arrays(owner))
    if is_memory:
        if verb in ("resize", "setflags") and isinstance(owner, np.ndarray):
            raise EngineError(
                f"task {label!r}: {verb} changes the array object, which other tasks use; wait for them with "
                f"engine.wait(array, readers=True) and call it yourself"
            )
        swaps = verb == "byteswap" and (kwargs.get("inplace") or (args and args[0]))
        in_place = verb.endswith("_") and not verb.startswith("_")  # as libraries of tensors name these
        if verb in _WRITING_METHODS or swaps or in_place or kwargs.get("inplace"):
            return [], held, verb in _WHOLE_METHODS
        return held, [], False
    if kwargs.get("inplace"):
        return [], held, False
    return (held if not isinstance(fn, MethodType) else _unless_written(held, written)), [], False


def _unless_written(held: Iterable[object], written: Sequence[object]) -> list[object]:
    """Return the arrays in ``held`` whose buffers contain no array in ``written``."""
    owners = {id(owner_of(array)) for array in written}
    return [array for array in held if id(owner_of(array)) not in owners]


def unseen_arrays(fn: Callable[..., object]) -> Iterator[tuple[str, object]]:
    """Yield the names and arrays that a function reaches through its closure, defaults and global names."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    code = getattr(fn, "__code__", None)
    if not isinstance(fn, FunctionType) or code is None:
        return
    cells: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    cells |= {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    for number, value in enumerate(fn.__defaults__ or ()):
        cells[code.co_varnames[code.co_argcount - len(fn.__defaults__ or ()) + number]] = value
    cells |= fn.__kwdefaults__ or {}
    for name, value in cells.items():
        if not isinstance(value, _CLOSED):
            for array in held_arrays(value):
                yield name, array
