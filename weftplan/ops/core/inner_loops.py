"""Small calls as sequences of NumPy's own inner loops, in numbers.

Of a NumPy function on a hundred numbers the numbers take a tenth of the time. Its inner loop is a C function of
addresses, sizes and strides; an operator that says which loops its kernel ends up in can have them called one after the
other with nothing in between (:mod:`weftplan.ops.compiled.loops`), and has the same bits, because NumPy computes them.

A kernel says so with a function ``loops(params, inputs, outputs)``, which gives :class:`Loops` for contiguous arrays of
these shapes and dtypes, or None. Everything here is plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from weftplan.ops.core.products import halfway
from weftplan.ops.core.schema import DType, Params, Shape, TensorSpec

Place = tuple[int, int, int]
"""An operand: which array (inputs, then outputs), bytes to its first element there, bytes from one repetition to the
next."""
SCRATCH, START = -1, -2
"""In place of an array: the scratch, and the one number that sums begin with."""
MOST_ARRAYS = 8
MOST_SCRATCH = 4096
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Calls of one inner loop.

    Attributes:
        ufunc: whose.
        dims: sizes, as NumPy gives them to the loop.
        strides: bytes, as NumPy gives them.
        places: of the operands, inputs and then the output.
        repeats: how many calls.
    """

    ufunc: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    places: tuple[Place, ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Loops:
    """A call: loops on operands of one dtype, one after the other."""

    dtype: DType
    steps: tuple[Loop, ...]
    scratch: int = 0
    """Bytes."""


Rule = Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], "Loops | None"]
"""How a kernel says what its calls end up in."""


def one_dtype(*specs: TensorSpec) -> DType | None:
    """The dtype of all arrays if it is one that computes as it is, without a wider one in between; else None."""
    kinds = {spec.dtype for spec in specs}
    found = kinds.pop()
    return found if not kinds and found.char in "fd" and len(specs) <= MOST_ARRAYS else None


def elementwise(ufunc: str, size: int, dtype: DType, inputs: int) -> Loops:
    """``ufunc`` of inputs and an output of ``size`` elements each."""
    loop = Loop(ufunc, (size,), (dtype.itemsize,) * (inputs + 1), tuple((i, 0, 0) for i in range(inputs + 1)))
    return Loops(dtype, (loop,))


def by_rows(ufunc: str, rows: int, size: int, itemsize: int, left: int, right: int, out: int) -> Loop:
    """Row by row: ``out = ufunc(left, right)`` where ``right`` has one element for each row."""
    row = size * itemsize
    strides = (itemsize, 0, itemsize)
    return Loop(ufunc, (size,), strides, ((left, 0, row), (right, 0, itemsize), (out, 0, row)), rows)


def copied(count: int, itemsize: int, source: Place, step: int, target: Place, repeats: int = 1) -> Loop:
    """``count`` elements that are ``step`` bytes apart in the source go to neighbours in the target."""
    return Loop("positive", (count,), (step, itemsize), (source, target), repeats)


def reduced_rows(ufunc: str, rows: int, size: int, itemsize: int, source: int, target: int) -> list[Loop]:
    """Each of ``rows`` rows reduced to one element of the target, as NumPy does: sums begin with a number of their own,
    others with the first element."""
    row = size * itemsize
    own = ufunc == "add"
    begin = copied(rows, itemsize, (START, 0, 0) if own else (source, 0, 0), 0 if own else row, (target, 0, 0))
    first = 0 if own else 1
    if size == first:
        return [begin]
    acc = (target, 0, itemsize)
    places = (acc, (source, first * itemsize, row), acc)
    return [begin, Loop(ufunc, (size - first,), (0, itemsize, 0), places, rows)]


def reduction(ufunc: str, shape: Shape, axes: Sequence[int], dtype: DType) -> Loops | None:
    """Array 0 reduced over its first or its last axes to array 1; None where other axes remain."""
    runs: list[tuple[bool, int]] = []
    for axis, size in enumerate(shape):
        if size != 1:
            away = axis in axes
            if runs and runs[-1][0] == away:
                runs[-1] = away, runs[-1][1] * size
            else:
                runs.append((away, size))
    size = dtype.itemsize
    pattern = [one for one, _ in runs]
    if pattern in ([True], [False, True]):
        steps = reduced_rows(ufunc, prod(shape) // runs[-1][1], runs[-1][1], size, 0, 1)
    elif pattern == [True, False]:
        (_, rows), (_, length) = runs
        own = ufunc == "add"
        begin = copied(length, size, (START if own else 0, 0, 0), 0 if own else size, (1, 0, 0))
        source = (0, 0 if own else length * size, length * size)
        steps = [begin, Loop(ufunc, (length,), (size,) * 3, ((1, 0, 0), source, (1, 0, 0)), rows - (not own))]
    else:
        return None
    return Loops(dtype, tuple(steps))


def product(rows: int, columns: int, inner: int, itemsize: int, arrays: tuple[int, int, int]) -> list[Loop]:
    """``out = left @ right.T`` for matrices (rows, inner) and (columns, inner), as ``products.multiply`` calls it."""
    strides = (0, 0, 0, inner * itemsize, itemsize, itemsize, inner * itemsize, columns * itemsize, itemsize)
    left, right, out = arrays
    ends = [0, halfway(columns), columns] if rows == columns > 1 else [0, columns]
    return [
        Loop(
            "matmul",
            (1, rows, inner, last - first),
            strides,
            ((left, 0, 0), (right, first * inner * itemsize, 0), (out, first * itemsize, 0)),
        )
        for first, last in pairwise(ends)
    ]


def start_of_sums(dtype: DType) -> bytes:
    """The number with which NumPy's sums begin: 0, or -0 where a sum of -0 stays -0."""
    first: bytes = np.add.reduce(np.full(1, -0.0, dtype)).tobytes()
    return first.ljust(8, b"\0")
