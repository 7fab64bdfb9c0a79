"""Small calls by way of NumPy's own inner loops (:mod:`weftplan.ops.core.inner_loops` says which).

It is a function of Python's own kind (``METH_FASTCALL``): Python calls it as it calls ``len``, with arrays, and it
reads their addresses itself, since converting them for :mod:`ctypes` takes longer than the work. What it does is in the
bytes that it is bound to, so one function of some hundred instructions, which is the same for every processor, serves
all calls. It has the GIL all the time, checks nothing and looks for no errors: for few numbers, in arrays that the
caller knows. The bits are NumPy's, because NumPy's loops compute them.

Where Python or NumPy lay out their objects in another way than their headers say, :func:`refusal` says so. Functions
keep no state; any thread may ask for them and call them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from weftplan.ops.compiled.addresses import ADDRESS_FIRST, HEAD
from weftplan.ops.compiled.ir import Function
from weftplan.ops.compiled.jit import library
from weftplan.ops.compiled.target import host
from weftplan.ops.core.inner_loops import MOST_ARRAYS, MOST_SCRATCH, Loop, Loops, start_of_sums

Call = Callable[..., object]
_HEAD = HEAD
"""Behind it are an array's address and the fields of a ufunc."""
_BYTES_HEAD = bytes.__basicsize__ - 1
_OPERANDS, _DIMS, _STRIDES = 3, 4, 9
_FASTCALL = 0x80
_TABLES = -2
"""The number of the first address in the function's table: constants, scratch, arrays."""
_FIXED = 4
"""Words before the first step: the function that counts references, None, the number of steps, what sums begin with."""
_STEP = 3 + _DIMS + _STRIDES + 3 * _OPERANDS
"""Words of a step: loop, its data, repetitions, sizes, strides, places of operands."""


class _Definition(ctypes.Structure):
    """``PyMethodDef``."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


@functools.cache
def refusal() -> str:
    """Why there is no such function here; empty where there is."""
    found = host()
    if isinstance(found, str):
        return found
    if not ADDRESS_FIRST:
        return "this Python or NumPy lays out its arrays in an unknown way"
    if any(_fields(ufunc) is None for ufunc in (np.positive, np.add, np.matmul)):
        return "this NumPy lays out its functions in an unknown way"
    return ""


@functools.lru_cache(maxsize=1024)
def compiled(loops: Loops) -> Call | None:
    """A function of NumPy arrays, inputs and outputs, that makes these calls; None where a function has no such loop.

    Arrays must be contiguous and have the shapes and dtypes that the calls are for: nothing is checked.
    """
    if refusal() or loops.scratch > MOST_SCRATCH:
        return None
    definition = _definition()
    none, counts = None, ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value
    start = struct.unpack("q", start_of_sums(loops.dtype))[0]
    words: list[int] = [counts or 0, id(none), len(loops.steps), start]
    for loop in loops.steps:
        found = _found(loop, loops.dtype.char)
        if found is None:
            return None
        words += found
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    made: Call = make(ctypes.addressof(definition), struct.pack(f"{len(words)}q", *words), None)
    return made


def prepare() -> None:
    """Compile now what :func:`compiled` needs."""
    _definition()


def _found(loop: Loop, char: str) -> list[int] | None:
    """The words of a step."""
    ufunc: Any = getattr(np, loop.ufunc)
    fields = _fields(ufunc)
    types = f"{char * ufunc.nin}->{char * ufunc.nout}"
    if fields is None or types not in ufunc.types or len(loop.places) > _OPERANDS:
        return None
    functions, data = fields
    number = ufunc.types.index(types)
    function = _pointer(functions + 8 * number)
    if not function:  # NumPy has loops of a newer kind, too, which are not in this table
        return None
    words = [function, _pointer(data + 8 * number), loop.repeats]
    for values, room in ((loop.dims, _DIMS), (loop.strides, _STRIDES)):
        words += [*values, *[0] * (room - len(values))]
    for which, offset, step in (*loop.places, *[(_TABLES, 0, 0)] * (_OPERANDS - len(loop.places))):
        assert _TABLES <= which < MOST_ARRAYS, which
        words += (which - _TABLES, offset, step)
    assert len(words) == _STEP
    return words


def _pointer(address: int) -> int:
    return ctypes.c_void_p.from_address(address).value or 0


def _fields(ufunc: Any) -> tuple[int, int] | None:
    """Where a ufunc keeps its loops and their data; None where it is not laid out as NumPy's header says."""
    begin = id(ufunc) + _HEAD
    *counts, _, functions, data, kinds = struct.unpack("4iqqi", ctypes.string_at(begin, 36))
    if counts != [ufunc.nin, ufunc.nout, ufunc.nargs] or kinds != ufunc.ntypes:
        return None
    return functions, data


@functools.cache
def _definition() -> _Definition:
    """What Python makes functions from, for ever."""
    entry: Any = library("numpy-loops", lambda target: [_function()], ("loops",))["loops"]
    return _Definition(b"numpy_loops", ctypes.cast(entry, ctypes.c_void_p).value, _FASTCALL, None)


def _function() -> Function:
    """``PyObject *loops(PyObject *bytes, PyObject *const *arrays, Py_ssize_t count)``."""
    f = Function("loops", (("ptr", "self"), ("ptr", "arrays"), ("i64", "count")), "float", 4)
    table, scratch, operands = f.local("ptr", MOST_ARRAYS - _TABLES), f.local("i8", MOST_SCRATCH), f.local("ptr", 3)
    words = f.at("%self", _BYTES_HEAD)
    _keep(f, f.at(words, 8 * (_FIXED - 1)), table, 0)
    _keep(f, scratch, table, 1)
    with f.loop(0, "%count") as number:
        _keep(f, f.pointer(f.at(f.pointer("%arrays", number), _HEAD)), table, f.add(number, -_TABLES))
    steps = f.at(words, 8 * _FIXED)
    with f.loop(0, f.word(words, 2)) as number:
        step = f.at(steps, f.mul(number, 8 * _STEP))
        places = f.at(step, 8 * (3 + _DIMS + _STRIDES))
        with f.loop(0, f.word(step, 2)) as turn:
            for operand in range(_OPERANDS):
                which, offset, by = (f.word(places, 3 * operand + i) for i in range(3))
                _keep(f, f.at(f.pointer(table, which), f.add(offset, f.mul(turn, by))), operands, operand)
            dims, strides = f.at(step, 8 * 3), f.at(step, 8 * (3 + _DIMS))
            f.emit(f"call void {f.pointer(step)}(ptr {operands}, ptr {dims}, ptr {strides}, ptr {f.pointer(step, 1)})")
    none = f.pointer(words, 1)
    f.emit(f"call void {f.pointer(words)}(ptr {none})")
    f.result = none
    return f


def _keep(f: Function, pointer: str, table: str, index: int | str) -> None:
    """Store a pointer."""
    f.emit(f"store ptr {pointer}, ptr {f.at(table, f.mul(index, 8))}, align 8")
