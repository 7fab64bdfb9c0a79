"""Arrays that a call reaches through other objects, such as bound methods, partials and containers.

Relies on the referents that Python's cyclic garbage collector follows, so that a single rule covers all kinds of
objects, and on the memory-sharing protocols of libraries. This module keeps no state; any thread may call it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np

from weftplan.errors import EngineError
from weftplan.tasks.array_vars import owner_of
from weftplan.tasks.arrays import LEAVES, is_array, memory_of
from weftplan.tasks.handle import Task
from weftplan.tasks.random_states import state_of
from weftplan.tasks.written_arguments import ITEM_METHODS, unbound, write_rule

DEEPEST = 4
"""Maximum nesting depth of inspected objects; containers and iterators of the standard library do not count.

An indexer of a DataFrame has its arrays at this depth.
"""
MAX_OBJECTS = 1000
"""Maximum number of objects, other than containers and leaves, that are inspected for one argument."""
_CLOSED = (*LEAVES, ModuleType, CodeType, FunctionType, FrameType)
"""Classes whose instances are not inspected: they hold no arrays, or more than the call reads."""
_CONTAINERS = frozenset({"builtins", "collections", "itertools", "functools"})
"""Modules whose objects only pass on other objects."""
_FUNCTIONS = (*_CLOSED, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
"""Classes of callables that hold no arrays, apart from the object of a bound method."""
_DISPATCHED = type(np.sum)
"""The class of most functions of NumPy."""
_REPLACING = frozenset({"resize", "setflags"})
"""Methods of arrays that replace the memory or the flags of the array object."""
_HIDDEN_GENERATOR = frozenset({"ranf", "sample", "seed", "set_bit_generator"})
"""Functions of ``numpy.random`` that use its global generator without being bound to it."""


def held_arrays(value: object) -> Iterator[object]:
    """Yield the arrays, and in containers the tasks, that ``value`` holds.

    Objects are inspected down to :data:`DEEPEST` levels, at most :data:`MAX_OBJECTS` of them.
    """
    seen: set[int] = {id(value)}
    objects = 0
    level: list[Any] = [value]
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
                if isinstance(item, np.ndarray):
                    if item.dtype.hasobject:
                        level += _fresh(item.flat, seen)
                    if type(item) is not np.ndarray:  # a derived class has attributes, such as the mask
                        deeper += _fresh(gc.get_referents(item), seen)
                continue
            state = state_of(item)
            if state is not None:
                yield state
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
            elif objects < MAX_OBJECTS:
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
    declared: Sequence[object],
    label: str,
) -> tuple[list[object], list[object], bool]:
    """Return the arrays that the callable ``fn`` holds: reads, writes, and whether it overwrites the writes completely.

    The writes include the arguments that ``fn`` writes by its signature.

    Args:
        declared: all arrays that the call uses, if the caller has declared them; else empty. Of an object of a Python
            class, arrays over the same memory then do not count.

    Raises:
        EngineError: a method that replaces the memory of its array.
    """
    held: list[object] = []
    if type(fn) is functools.partial:
        held += held_arrays([*fn.args, *(value for key, value in fn.keywords.items() if key != "out")])
        args, kwargs = (*fn.args, *args), {**fn.keywords, **kwargs}
        outputs = list(held_arrays([fn.keywords.get("out")]))
        reads, writes, overwrites = arrays_of_function(fn.func, args, kwargs, declared, label)
        return reads + held, writes + outputs, overwrites and not outputs
    if isinstance(fn, MethodWrapperType) and fn.__name__ == "__call__":
        called: Any = fn.__self__
        return arrays_of_function(called, args, kwargs, declared, label)
    fn, owner = unbound(fn)
    bound = owner is not None
    if bound:
        args = (owner, *args)
        held = [owner] if type(owner) is np.ndarray and not owner.dtype.hasobject else list(held_arrays(owner))
        if isinstance(fn, FunctionType):
            held = _undeclared(held, declared)
    elif type(fn) is not _DISPATCHED and not isinstance(fn, _FUNCTIONS):
        held = _undeclared(held_arrays(fn), declared)
    rule = write_rule(fn, bound=bound)
    name = getattr(fn, "__name__", "")
    method = bound or hasattr(fn, "__objclass__")
    if method and name in _REPLACING and isinstance(args[0] if args else None, np.ndarray):
        raise EngineError(
            f"task {label!r}: {name} changes the array object, which other tasks use; wait for them with "
            f"engine.wait(array, readers=True) and call it yourself"
        )
    if type(fn).__name__ == "fortran":  # of f2py: the signature does not tell which arrays it writes
        return [], list(held_arrays([*args, *kwargs.values()])), False
    if len(args) <= rule.quiet and not kwargs and name not in _HIDDEN_GENERATOR:
        return held, [], False
    out = kwargs.get("out")  # known to the caller
    writes = list(held_arrays([value for value in rule.written(args, kwargs) if value is not out]))
    if name in _HIDDEN_GENERATOR and getattr(fn, "__module__", "").startswith("numpy.random"):
        writes += held_arrays(np.random.mtrand._rand)
    overwrites = False
    if rule.writes_self and args and (is_array(args[0]) or memory_of(args[0]) is not None):
        writes += held_arrays(args[0])
        overwrites = name == "fill"
    elif rule.writes_self and name in ITEM_METHODS and type(args[0]).__module__ not in _CONTAINERS:
        writes += held  # the object stands for arrays, as `DataFrame.iloc` does
    elif fn is np.copyto:
        overwrites = "where" not in kwargs and len(args) < 4
    return [array for array in held if not any(array is other for other in writes)], writes, overwrites


def _undeclared(held: Iterable[object], declared: Sequence[object]) -> list[object]:
    """Return the arrays in ``held`` whose buffers contain no array in ``declared``."""
    owners = {id(owner_of(array)) for array in declared}
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
