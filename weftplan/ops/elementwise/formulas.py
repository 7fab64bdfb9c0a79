"""Formulas of elementwise kernels as data: operations on single elements, recorded from the kernels.

A kernel is called once with a :class:`_Tape` in place of NumPy and with names in place of arrays, and its calls are
recorded. A formula therefore exists once, as NumPy's kernel; compilers and fusions read it from the recording. Only
operations that IEEE 754 defines to the last bit can be recorded, so a compiled formula has the bits of NumPy's. All
others (exp, tanh, integers, mixed dtypes) give None.

The module keeps no state; any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weftplan.ops.core.schema import DType, Kernel, OpContext, Params
from weftplan.support.array_types import RawArray

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
"""Those whose formulas can be recorded."""
TRUTHS = frozenset(("not_equal", "equal", "less", "less_equal", "greater", "greater_equal"))
"""Operations that give truth values."""


class Operation(NamedTuple):
    """One operation on earlier values; of ``constant`` the operand is a number of :attr:`Formula.constants`."""

    name: str
    operands: tuple[int, ...]


class Formula(NamedTuple):
    """The computation on one element of every array. Constants are kept apart, so that formulas which differ only in
    constants share a compiled kernel."""

    arrays: int
    """Arrays of a call. Value i, below their number, is the element of array i before the call."""
    operations: tuple[Operation, ...]
    """Operation k makes value ``arrays + k``."""
    results: tuple[tuple[int, int], ...]
    """(array, the value that it gets) of every array that is written."""


class _CannotRecord(Exception):
    """A kernel asks for something that is not known to have the same bits elsewhere."""


class Number:
    """A parameter whose value only the run knows; a kernel may compute with it, but not branch on it.

    >>> (1.0 - Number() * 0.5).at(0.25)
    0.875
    """

    __slots__ = ("at",)

    def __init__(self, at: Callable[[float], float] = float) -> None:
        self.at = at
        """Return the expression's result for a value of the parameter."""

    def __neg__(self) -> Number:
        return Number(lambda value: -self.at(value))

    def __mul__(self, other: float) -> Number:
        return Number(lambda value: self.at(value) * other)

    def __rmul__(self, other: float) -> Number:
        return Number(lambda value: other * self.at(value))

    def __rsub__(self, other: float) -> Number:
        return Number(lambda value: other - self.at(value))

    def __bool__(self) -> bool:
        raise _CannotRecord("a decision by a parameter that changes")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A formula with its constants."""

    formula: Formula
    constants: tuple[float | Number, ...]

    def at(self, value: float) -> Recorded:
        """Return the same where every :class:`Number` is that of ``value``."""
        numbers = [one.at(value) if isinstance(one, Number) else one for one in self.constants]
        return Recorded(self.formula, tuple(numbers))


class _Array:
    """A name for the elements of an array; only its value changes."""

    __array_ufunc__ = None
    __slots__ = ("dtype", "shape", "size", "value")

    def __init__(self, dtype: DType, value: int | None = None) -> None:
        self.dtype = dtype
        self.shape = (1,)
        self.size = 1
        self.value = value

    def reshape(self, *shape: int) -> _Array:
        """Return the same elements."""
        return self

    def __bool__(self) -> bool:
        raise _CannotRecord("a decision by values")


class _Tape:
    """Stands for NumPy: writes down what is asked of it."""

    def __init__(self, dtype: DType, arrays: int) -> None:
        self.dtype = dtype
        self.arrays = arrays
        self.operations: list[Operation] = []
        self.constants: list[float | Number] = []

    def __getattr__(self, name: str) -> Callable[..., _Array]:
        count = _OPERANDS.get(name)
        if count is None:
            raise _CannotRecord(name)

        def record(*operands: RawArray, out: Any = None, casting: str = "same_kind", **options: Any) -> _Array:
            if len(operands) == count + 1 and out is None:
                *operands, out = operands  # type: ignore[assignment]
            if options or out is None or len(operands) != count:
                raise _CannotRecord(f"{name} with {sorted(options)}")
            self._record(name, operands, out)
            return out  # type: ignore[no-any-return]

        return record

    def copyto(self, out: _Array, source: Any, **options: Any) -> None:
        """Record a copy of ``source`` to ``out``."""
        if options.pop("casting", "same_kind") not in ("same_kind", "unsafe") or options:
            raise _CannotRecord("copyto with options")
        self._keep(out, self._value(source), of_truths=self._is_truth(source))

    def clip(self, x: RawArray, low: float, high: float, *, out: _Array) -> _Array:
        """Record NumPy's ``clip``: values between the limits, -0 and NaN stay unchanged."""
        value = self._value(x)
        for name, limit in (("at_least", low), ("at_most", high)):
            if isinstance(limit, _Array):
                raise _CannotRecord("clip with arrays")
            value = self._add(name, (value, self._value(limit)))
        self._keep(out, value, of_truths=False)
        return out

    def _record(self, name: str, operands: Sequence[Any], out: _Array) -> None:
        if name in ("maximum", "minimum") and not any(type(one) in (int, float) for one in operands[1:]):
            raise _CannotRecord("which zero an extremum of two arrays is")
        if all(self._is_truth(one) for one in operands):
            raise _CannotRecord("arithmetic of truth values")
        values = [self._as_number(one) for one in operands]
        if name == "square":
            name, values = "multiply", values * 2
        elif name == "reciprocal":
            name, values = "divide", [self._value(1.0), *values]
        self._keep(out, self._add(name, tuple(values)), of_truths=name in TRUTHS)

    def _as_number(self, operand: object) -> int:
        value = self._value(operand)
        return self._add("number", (value,)) if self._is_truth(operand) else value

    def _value(self, operand: Any) -> int:
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

    def _keep(self, out: Any, value: int, *, of_truths: bool) -> None:
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
    """Scratch of a recorded kernel: more names."""

    __slots__ = ()

    def take(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return _Array(np.dtype(dtype))


Call = tuple[Kernel, Params, Sequence[int], Sequence[int]]
"""A kernel, its parameters, and the numbers of the arrays that it reads and writes."""


def recorded(calls: Sequence[Call], arrays: int, dtype: DType, *, given: Sequence[int]) -> Recorded | None:
    """Record the effect of a sequence of calls on one element; None if a call cannot be recorded.

    Args:
        arrays: number of arrays, all of one shape and of ``dtype``.
        given: the arrays that are inputs. Only they and the last call's result are live afterwards.
    """
    if dtype not in DTYPES:
        return None
    tape = _Tape(dtype, arrays)
    names = [_Array(dtype, number if number in given else None) for number in range(arrays)]
    context = _Context(tape)  # type: ignore[arg-type]
    try:
        for kernel, params, reads, writes in calls:
            kernel(context, params, [names[i] for i in reads], [names[i] for i in writes])
    except (_CannotRecord, AttributeError, TypeError, IndexError):
        return None
    kept = {*given, *calls[-1][3]}
    results = tuple(
        (i, name.value) for i, name in enumerate(names) if i in kept and name.value is not None and name.value != i
    )
    return Recorded(Formula(arrays, tuple(tape.operations), results), tuple(tape.constants))
