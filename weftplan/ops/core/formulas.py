"""Formulas as flat lists of operations on single elements: the input of compilers and of fused kernels.

A kernel that has the method ``expressions`` (:class:`~weftplan.ops.core.formula_kernel.FormulaKernel`) states its own
formula; :class:`Flattening` joins the formulas of several kernels. By default only operations that IEEE 754 defines to
the last bit are accepted, so that a compiled formula has the same bits as NumPy's. A caller that compiles with the same
functions as the kernel's array module may also allow :data:`FUNCTIONS`.

The module has no state; any thread may call its functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weftplan.ops.core.expression import COMPARISONS, Expr, FormulaError, Scalar, dtype_of, operations
from weftplan.ops.core.forms import resolved
from weftplan.ops.core.schema import DType, Kernel, Params

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
"""Dtypes of formulas that compilers accept."""
TRUTHS = frozenset(COMPARISONS)
"""Operations whose results are truth values."""
FUNCTIONS = {
    **dict.fromkeys(("exp", "log", "tanh", "log1p", "expm1", "sin", "cos", "floor", "ceil", "rint", "trunc"), 1),
    "copysign": 2,
}
"""Functions whose bits depend on the library that computes them, with the number of their operands."""
_EXACT = frozenset(("add", "subtract", "multiply", "divide", "negative", "absolute", "sqrt", "sign", *TRUTHS))
_LOGIC = frozenset(("logical_and", "logical_or", "logical_not"))


class Operation(NamedTuple):
    """An operation on earlier values; the operand of ``constant`` is an index into :attr:`Computation.constants`."""

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


class Computation(NamedTuple):
    """A formula with its constants: numbers, or scalars that depend on parameters."""

    formula: Formula
    constants: tuple[float | Scalar, ...]

    def at(self, params: Params, dtype: DType) -> Computation:
        """Return the same formula with every scalar replaced by its value for ``params``."""
        return Computation(self.formula, tuple([_number(constant, params, dtype) for constant in self.constants]))


class Flattening:
    """A formula under construction, of arrays of one dtype.

    Args:
        arrays: number of arrays.
        dtype: dtype of all arrays.
        functions: whether :data:`FUNCTIONS`, ``isnan``, logic and selections are accepted, too.
    """

    def __init__(self, arrays: int, dtype: DType, *, functions: bool = False) -> None:
        if dtype not in DTYPES:
            raise FormulaError(f"no formulas of {dtype}")
        self.arrays, self.dtype, self.functions = arrays, dtype, functions
        self.operations: list[Operation] = []
        self.constants: list[float | Scalar] = []
        self.truths: set[int] = set()
        """Numbers of the values that are truth values."""

    def add(
        self, kernel: Kernel, params: Params, reads: Sequence[int | None], *, wanted: Sequence[bool] | None = None,
        is_open: bool = False,
    ) -> list[int]:  # fmt: skip
        """Add the formula of a kernel; return the numbers of its outputs, then of its new states.

        Args:
            reads: numbers of the values that the kernel reads; None for an ignored input.
            wanted: whether each output is needed; the number of an output that is not is -1. None: all results.
            is_open: whether scalars remain in the constants.

        Raises:
            FormulaError: the kernel has no formula, or one with an operation that is not accepted.
        """
        kernel, params = resolved(kernel, params)
        expressions = getattr(kernel, "expressions", None)
        if expressions is None:
            raise FormulaError("a kernel without a formula")
        results = expressions(params, self.dtype, [Expr("input", number) for number in reads])
        wanted = [True] * len(results) if wanted is None else wanted
        needed = [expr for expr, is_wanted in zip(results, wanted, strict=False) if is_wanted]
        compute = getattr(kernel, "compute", None)
        numbers: dict[int, int] = {}

        def value(operand: object) -> int:
            if isinstance(operand, Expr):
                return operand.args[0] if operand.op == "input" else numbers[operand.number]
            if is_open and isinstance(operand, Scalar):
                return self._constant(operand)
            return self._constant(_number(operand, params, self.dtype))

        for expr in operations(needed):
            kind = dtype_of(compute if expr.kind == "default" else expr.kind, self.dtype)
            if kind != self.dtype and not expr.is_truth:
                raise FormulaError(f"a result of {kind}")
            source = expr if expr.same is None else expr.same
            numbers[expr.number] = self._operation(source, [value(operand) for operand in source.args])
        result_numbers = iter([self._as_number(value(expr)) for expr in needed])
        return [next(result_numbers) if is_wanted else -1 for is_wanted in wanted]

    def computation(self, results: Sequence[tuple[int, int]]) -> Computation:
        """Return the formula with ``results``: (array, number of its new value)."""
        return Computation(Formula(self.arrays, tuple(self.operations), tuple(results)), tuple(self.constants))

    def _operation(self, expr: Expr, operands: list[int]) -> int:
        name = expr.op
        if name == "cast":
            return self._as_number(operands[0])
        if name == "clip":
            return self._append("at_most", self._append("at_least", *operands[:2]), operands[2])
        if self.functions and name in _LOGIC:
            if not self.truths.issuperset(operands):
                raise FormulaError("logic of numbers")
            return self._append(name, *operands)
        if self.functions and name == "select":
            if operands[0] not in self.truths:
                raise FormulaError("a selection by numbers")
            return self._append(name, operands[0], *map(self._as_number, operands[1:]))
        if self.truths.issuperset(operands):
            raise FormulaError("arithmetic of truth values")
        operands = [self._as_number(operand) for operand in operands]
        if name == "square":
            return self._append("multiply", *operands * 2)
        if name == "reciprocal":
            return self._append("divide", self._constant(1.0), *operands)
        if name in ("maximum", "minimum"):
            if isinstance(expr.args[1], Expr):
                raise FormulaError("the sign of zero of an extremum of two arrays")
        elif name not in _EXACT and not (self.functions and (name in FUNCTIONS or name == "isnan")):
            raise FormulaError(f"the function {name}")
        return self._append(name, *operands)

    def _as_number(self, value: int) -> int:
        return self._append("number", value) if value in self.truths else value

    def _constant(self, value: float | Scalar) -> int:
        self.constants.append(value)
        return self._append("constant", len(self.constants) - 1)

    def _append(self, name: str, *operands: int) -> int:
        self.operations.append(Operation(name, operands))
        number = self.arrays + len(self.operations) - 1
        if name in TRUTHS or name in _LOGIC or name == "isnan":
            self.truths.add(number)
        return number


def _number(value: object, params: Params, dtype: DType) -> float:
    """Return a constant of a formula as a float."""
    if isinstance(value, Scalar):
        value = value.at(params)
    if type(value) in (int, float) or (isinstance(value, np.generic) and value.dtype == dtype):
        return float(value)  # type: ignore[arg-type]
    raise FormulaError(f"a constant of type {type(value).__name__}")


def computation(
    kernel: Kernel, params: Params, arrays: int, dtype: DType, *, out: int, is_open: bool = False
) -> Computation | None:
    """Return the formula of a kernel that reads arrays 0 to ``arrays`` - 1 and writes array ``out`` and its states.

    None if the kernel has no formula that is accepted. ``is_open``: whether scalars remain in the constants.
    """
    try:
        flat = Flattening(max(arrays, out + 1), dtype)
        value, *states = flat.add(kernel, params, range(arrays), is_open=is_open)
    except FormulaError:
        return None
    return flat.computation([*zip(getattr(kernel, "states", ()), states, strict=True), (out, value)])
