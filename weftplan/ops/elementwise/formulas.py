"""Formulas of elementwise kernels as data: operations on single elements, recorded from the kernels.

A kernel is called once with a :class:`_Tape` in place of NumPy and placeholders in place of arrays; the tape records
its operations. A formula is therefore written once, as a NumPy kernel; compilers and fusion read the recording. By
default only operations that IEEE 754 defines to the last bit can be recorded, so that a compiled formula has the same
bits as NumPy's. A kernel with any other operation (exp, tanh, integers, mixed dtypes) is not recorded. A caller that
compiles with the same functions as the kernel's array module may also allow :data:`FUNCTIONS`.

The module has no state; any thread may call its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from weftplan.ops.core.schema import DType, Kernel, OpContext, Params
from weftplan.support.array_types import DTypeLike, RawArray

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
"""Dtypes whose formulas can be recorded."""
TRUTHS = frozenset(("not_equal", "equal", "less", "less_equal", "greater", "greater_equal"))
"""Operations whose results are truth values."""
FUNCTIONS = {
    **dict.fromkeys(("exp", "log", "tanh", "log1p", "expm1", "sin", "cos", "floor", "ceil", "rint", "trunc"), 1),
    "copysign": 2,
}
"""Functions whose bits depend on the library that computes them, with the number of their operands."""
_LOGIC = {"logical_and": 2, "logical_or": 2, "logical_not": 1}


class Operation(NamedTuple):
    """An operation on earlier values; the operand of ``constant`` is an index into :attr:`Recorded.constants`."""

    name: str
    operands: tuple[int, ...]


class Formula(NamedTuple):
    """The computation on one element of every array.

    The constants are not part of it, so that formulas that differ only in constants share a compiled kernel.
    """

    arrays: int
    """Number of arrays. Value i < ``arrays`` is the element of array i before the call."""
    operations: tuple[Operation, ...]
    """The operations in order; operation k computes value ``arrays + k``."""
    results: tuple[tuple[int, int], ...]
    """(array, number of its new value) of every array that is written."""


class _CannotRecord(Exception):
    """The error of a kernel whose operations cannot be recorded."""


class Number:
    """A parameter whose value is set for each run; a kernel may compute with it, but not branch on it.

    >>> (1.0 - Number("lr") * 0.5).at({"lr": 0.25})
    0.875
    """

    __slots__ = ("at",)

    def __init__(self, name: str = "", at: Callable[[Mapping[str, float]], float] | None = None) -> None:
        self.at = at or itemgetter(name)
        """Function from the values of the parameters to the value of this expression."""

    def __neg__(self) -> Number:
        return Number(at=lambda values: -self.at(values))

    def __mul__(self, other: float) -> Number:
        return Number(at=lambda values: self.at(values) * other)

    def __rmul__(self, other: float) -> Number:
        return Number(at=lambda values: other * self.at(values))

    def __rsub__(self, other: float) -> Number:
        return Number(at=lambda values: other - self.at(values))

    def __rtruediv__(self, other: float) -> Number:
        return Number(at=lambda values: other / self.at(values))

    def __bool__(self) -> bool:
        raise _CannotRecord("a decision by a parameter that changes")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A formula with its constants."""

    formula: Formula
    constants: tuple[float | Number, ...]

    def at(self, values: Mapping[str, float]) -> Recorded:
        """Return the same formula with every :class:`Number` replaced by its value for ``values``."""
        numbers = [one.at(values) if isinstance(one, Number) else one for one in self.constants]
        return Recorded(self.formula, tuple(numbers))


class Value:
    """A value in an expression that is recorded; it has a few of an NDArray's operators and methods."""

    __slots__ = ("_tape", "number")

    def __init__(self, tape: _Tape, number: int) -> None:
        self._tape, self.number = tape, number

    def __add__(self, other: Value | float | Number) -> Value:
        return self._tape.expression("add", self, other)

    def __sub__(self, other: Value | float | Number) -> Value:
        return self._tape.expression("subtract", self, other)

    def __mul__(self, other: Value | float | Number) -> Value:
        return self._tape.expression("multiply", self, other)

    def __truediv__(self, other: Value | float | Number) -> Value:
        return self._tape.expression("divide", self, other)

    def square(self) -> Value:
        """Return the square of this value."""
        return self * self

    def sqrt(self) -> Value:
        """Return the square root of this value."""
        return self._tape.expression("sqrt", self)

    def clip(self, low: float, high: float) -> Value:
        """Return this value limited to [low, high]."""
        return self._tape.expression("at_most", self._tape.expression("at_least", self, low), high)


class _Array:
    """A placeholder for an array; ``value`` is the number of its elements' current value, None before a write."""

    __array_ufunc__ = None
    __slots__ = ("_tape", "dtype", "ndim", "shape", "size", "value")

    def __init__(self, tape: _Tape, dtype: DType, value: int | None = None) -> None:
        self._tape = tape
        self.dtype = dtype
        self.shape = (1,)
        self.size = self.ndim = 1
        self.value = value

    def reshape(self, *shape: int) -> _Array:
        """Return this placeholder, since shapes do not matter to a single element."""
        return self

    def fill(self, value: float) -> None:
        """Record that every element becomes ``value``."""
        self._tape.copyto(self, value)

    def __setitem__(self, key: object, source: RawArray) -> None:
        if key is not ...:
            raise _CannotRecord("a part of an array")
        self._tape.copyto(self, source)

    def __bool__(self) -> bool:
        raise _CannotRecord("a decision by values")


class _Tape:
    """A substitute for the array module that records the operations of a kernel."""

    def __init__(self, dtype: DType, arrays: int, *, functions: bool) -> None:
        self.dtype = dtype
        self.arrays = arrays
        self._operands = _OPERANDS | FUNCTIONS | {"isnan": 1} if functions else _OPERANDS
        self._logic = _LOGIC if functions else {}
        self.operations: list[Operation] = []
        self.constants: list[float | Number] = []

    def __getattr__(self, name: str) -> Callable[..., _Array]:
        count = self._logic.get(name) or self._operands.get(name)
        if count is None:
            raise _CannotRecord(name)

        def record(*operands: Any, out: Any = None, casting: str = "same_kind", **options: object) -> _Array:
            if len(operands) == count + 1 and out is None:
                *operands, out = operands  # type: ignore[assignment]
            if options or out is None or len(operands) != count:
                raise _CannotRecord(f"{name} with {sorted(options)}")
            self._record(name, operands, out)
            return out  # type: ignore[no-any-return]

        return record

    def copyto(self, out: _Array, source: object, **options: object) -> None:
        """Record a copy of ``source`` to ``out``, with ``where`` only for elements whose mask is true."""
        mask = options.pop("where", None)
        if options.pop("casting", "same_kind") not in ("same_kind", "unsafe") or options:
            raise _CannotRecord("copyto with options")
        value = self._value(source)
        if mask is not None:
            if not self._logic or not self._is_truth(mask) or self._is_truth(source):
                raise _CannotRecord("copyto with where")
            value = self._add("select", (self._value(mask), value, self._value(out)))
        self._keep(out, value, of_truths=self._is_truth(source))

    def clip(self, x: RawArray, low: float, high: float, *, out: _Array) -> _Array:
        """Record NumPy's ``clip``; values within the limits, -0 and NaN stay unchanged."""
        value = self._value(x)
        for name, limit in (("at_least", low), ("at_most", high)):
            if isinstance(limit, _Array):
                raise _CannotRecord("clip with arrays")
            value = self._add(name, (value, self._value(limit)))
        self._keep(out, value, of_truths=False)
        return out

    def _record(self, name: str, operands: Sequence[object], out: _Array) -> None:
        if name in ("maximum", "minimum") and not any(type(one) in (int, float) for one in operands[1:]):
            raise _CannotRecord("which zero an extremum of two arrays is")
        truths = all(self._is_truth(one) for one in operands)
        if name in self._logic:
            if not truths:
                raise _CannotRecord("logic of numbers")
            self._keep(out, self._add(name, tuple(map(self._value, operands))), of_truths=True)
            return
        if truths:
            raise _CannotRecord("arithmetic of truth values")
        values = [self._as_number(one) for one in operands]
        if name == "square":
            name, values = "multiply", values * 2
        elif name == "reciprocal":
            name, values = "divide", [self._value(1.0), *values]
        self._keep(out, self._add(name, tuple(values)), of_truths=name in TRUTHS or name == "isnan")

    def _as_number(self, operand: object) -> int:
        value = self._value(operand)
        return self._add("number", (value,)) if self._is_truth(operand) else value

    def expression(self, name: str, *operands: Value | float | Number) -> Value:
        """Record an operation of an expression."""
        return Value(self, self._add(name, tuple(map(self._value, operands))))

    def _value(self, operand: Any) -> int:
        if isinstance(operand, Value):
            return operand.number
        if isinstance(operand, _Array):
            if operand.value is None:
                raise _CannotRecord("an array is read before it is written")
            return operand.value
        if type(operand) in (int, float) or (isinstance(operand, np.generic) and operand.dtype == self.dtype):
            operand = float(operand)
        if type(operand) in (float, Number):
            self.constants.append(operand)
            return self._add("constant", (len(self.constants) - 1,))
        raise _CannotRecord(f"a constant of type {type(operand).__name__}")

    def _is_truth(self, operand: object) -> bool:
        return isinstance(operand, _Array) and operand.dtype == bool

    def _keep(self, out: object, value: int, *, of_truths: bool) -> None:
        if not isinstance(out, _Array) or out.dtype != (np.dtype(bool) if of_truths else self.dtype):
            raise _CannotRecord("a result of another dtype")
        out.value = value

    def _add(self, name: str, operands: tuple[int, ...]) -> int:
        self.operations.append(Operation(name, operands))
        return self.arrays + len(self.operations) - 1


_OPERANDS = {
    **dict.fromkeys(("add", "subtract", "multiply", "divide", "maximum", "minimum", *TRUTHS), 2),
    **dict.fromkeys(("negative", "absolute", "sqrt", "square", "reciprocal", "sign"), 1),
}
"""Functions of NumPy that can be recorded, with the number of their operands."""


class _Context(OpContext):
    """The context of a kernel that is recorded; its scratch arrays are placeholders."""

    __slots__ = ()

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return _Array(self.xp, np.dtype(dtype))  # type: ignore[arg-type]


Call = tuple[Kernel, Params, Sequence[int | None], Sequence[int | None]]
"""A kernel, its parameters, and the numbers of the arrays that it reads and writes; None for an absent array."""


def recorded(
    calls: Sequence[Call],
    arrays: int,
    dtype: DType,
    *,
    given: Sequence[int],
    results: Sequence[int] | None = None,
    functions: bool = False,
) -> Recorded | None:
    """Record the effect of a sequence of calls on one element; None if a call cannot be recorded.

    Args:
        calls: kernels with their parameters and arrays.
        arrays: number of arrays, all of one shape and of ``dtype``.
        dtype: dtype of all arrays.
        given: numbers of the arrays that are inputs.
        results: numbers of the arrays that are live after the calls; None: the inputs and the last call's results.
        functions: also record :data:`FUNCTIONS`, ``isnan``, logic and copies with a mask.
    """
    if dtype not in DTYPES:
        return None
    tape = _Tape(dtype, arrays, functions=functions)
    names = [_Array(tape, dtype, number if number in given else None) for number in range(arrays)]
    context = _Context(tape)  # type: ignore[arg-type]
    try:
        for kernel, params, reads, writes in calls:
            ins, outs = ([None if i is None else names[i] for i in numbers] for numbers in (reads, writes))
            kernel(context, params, ins, outs)
    except (_CannotRecord, AttributeError, TypeError, IndexError):
        return None
    kept = {*given, *calls[-1][3]} if results is None else set(results)
    written = tuple(
        (i, name.value) for i, name in enumerate(names) if i in kept and name.value is not None and name.value != i
    )
    return Recorded(Formula(arrays, tuple(tape.operations), written), tuple(tape.constants))


def expressed(expression: Expression, arrays: int, dtype: DType, numbers: Mapping[str, object]) -> Recorded:
    """Record an expression whose results replace a weight and its states. The weight is written last.

    Args:
        expression: see :data:`Expression`.
        arrays: number of arrays: a weight, its gradient, and its states.
        dtype: dtype of all arrays.
        numbers: parameters: numbers, None, or a :class:`Number` for each parameter that may change.
    """
    tape = _Tape(dtype, arrays, functions=False)
    results = expression(*(Value(tape, number) for number in range(arrays)), **numbers)
    new, *states = results
    written = (*((array, value.number) for array, value in enumerate(states, 2)), (0, new.number))
    return Recorded(Formula(arrays, tuple(tape.operations), written), tuple(tape.constants))


Expression = Callable[..., tuple[Any, ...]]
"""``expression(weight, gradient, *states, **numbers)`` returns the new weight and the new states, written with ``+``,
``-``, ``*``, ``/`` of arrays and numbers and the methods of :class:`Value`. It runs on NDArrays, too."""
