"""Expressions: formulas of elementwise kernels as data, traced once from functions of arrays and parameters.

A formula is a Python function of :class:`Expr` operands. Its operations run in the order in which the function makes
them. Each is one function of the array module, which chooses its precision from the operands, as NumPy does; the dtype
that holds the result is part of the expression (:data:`Kind`). Parameters are :class:`Scalar` values, which a call
computes once; a formula can branch only on its choices and on the dtype of the arrays (:class:`Parameters`).
:mod:`weftplan.ops.core.lowering` derives kernels with their scratch from expressions, and
:mod:`weftplan.ops.core.formulas` the input of compilers.

Expressions never change after they are made, so any thread may read them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from weftplan.ops.core.floats import is_float, is_half
from weftplan.ops.core.schema import DType, Params

Kind = DType | Literal["float", "real"] | None
"""Dtype that holds a result. None: the dtype of the arrays; "float": a dtype to compute in, float32 for float16 and
bfloat16; "real": the dtype of the arrays. "float" and "real" mean float64 for integers."""
BOOL = np.dtype(bool)
Method = Callable[[Any, object], Any]
ExprMethod = Callable[["Expr", object], "Expr"]

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
TESTS = ("isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_xor", "logical_not")
UFUNCS = frozenset(
    (*COMPARISONS, *TESTS, "add", "subtract", "multiply", "divide", "power", "hypot", "maximum", "minimum", "remainder",
     "fmod", "floor_divide", "copysign", "negative", "absolute", "sqrt", "cbrt", "square", "reciprocal", "sign", "exp",
     "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh",
     "tanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "rint", "trunc")
)  # fmt: skip
"""Functions of the array module that a formula may call by name."""


def dtype_of(kind: Kind, dtype: DType) -> DType:
    """Return the dtype that ``kind`` means for arrays of ``dtype``.

    >>> dtype_of("float", np.dtype("int8")), dtype_of("float", np.dtype("float16"))
    (dtype('float64'), dtype('float32'))
    """
    if kind is None:
        return dtype
    if isinstance(kind, str):
        if not is_float(dtype):
            return np.dtype(np.float64)
        return np.dtype(np.float32) if kind == "float" and is_half(dtype) else dtype
    return kind


class FormulaError(ValueError):
    """The error of a formula that cannot be traced, or that contradicts its operator."""


def _quotient(a: Any, b: Any) -> Any:
    """Return a / b by the rules of IEEE 754, as MXNet does: a division by 0 is infinite or NaN, no error."""
    try:
        return a / b
    except ZeroDivisionError:
        return math.copysign(math.inf, a) * math.copysign(1.0, b) if a else math.nan


def _scalar_methods(function: Callable[..., object]) -> tuple[Method, Method]:
    """Return the methods of an operator of scalars: for the left and for the right operand."""

    def left(self: Scalar, other: object) -> object:
        return NotImplemented if isinstance(other, Expr) else Scalar.call(function, self, other)

    return left, lambda self, other: Scalar.call(function, other, self)


def _expression_methods(name: str) -> tuple[ExprMethod, ExprMethod]:
    """Return the methods of an operator of expressions: for the left and for the right operand."""
    return lambda self, other: Expr(name, self, other), lambda self, other: Expr(name, other, self)


class Scalar:
    """A number that each call of a kernel computes once, from its parameters.

    >>> rate = Scalar.of("lr")
    >>> (1.0 - rate * 0.5).at({"lr": 0.25})
    0.875
    """

    __slots__ = ("at",)

    def __init__(self, at: Callable[[Params], object]) -> None:
        self.at: Callable[[Params], Any] = at

    @classmethod
    def of(cls, name: str) -> Scalar:
        """Return the value of parameter ``name``."""
        return cls(lambda params: params[name])

    @classmethod
    def call(cls, function: Callable[..., object], *arguments: object) -> Scalar:
        """Return the value of ``function(*arguments)``, whose arguments may be scalars."""
        if not any(isinstance(argument, Scalar) for argument in arguments[1:]) and isinstance(arguments[0], Scalar):
            scalar, numbers = arguments[0].at, arguments[1:]
            return cls(lambda params: function(scalar(params), *numbers))
        if len(arguments) == 2 and isinstance(arguments[1], Scalar) and not isinstance(arguments[0], Scalar):
            number, second = arguments[0], arguments[1].at
            return cls(lambda params: function(number, second(params)))
        return cls(lambda params: function(*[value_of(argument, params) for argument in arguments]))

    __add__, __radd__ = _scalar_methods(operator.add)
    __sub__, __rsub__ = _scalar_methods(operator.sub)
    __mul__, __rmul__ = _scalar_methods(operator.mul)
    __truediv__, __rtruediv__ = _scalar_methods(_quotient)
    __pow__, __rpow__ = _scalar_methods(operator.pow)

    def __neg__(self) -> Scalar:
        return Scalar.call(operator.neg, self)

    def __bool__(self) -> bool:
        raise FormulaError("a formula branches on a parameter: state the condition in `choices`")

    def __lt__(self, other: object) -> bool:
        return bool(self)

    __gt__ = __le__ = __ge__ = __eq__ = __lt__

    def __hash__(self) -> int:
        return bool(self)  # a table's key is a branch, too


def value_of(operand: object, params: Params) -> object:
    """Return the number that ``operand``, a number or a scalar, is in a call."""
    return operand.at(params) if isinstance(operand, Scalar) else operand


class Parameters:
    """The parameters as a formula sees them: values of its choices, and a :class:`Scalar` for every other name.

    Attributes:
        array_dtype: the dtype of the arrays.

    >>> p = Parameters({"clips": True}, np.dtype("float32"))
    >>> p.clips, type(p.lr).__name__
    (True, 'Scalar')
    """

    def __init__(self, choices: dict[str, object], array_dtype: DType) -> None:
        self.__dict__.update(choices)
        self.array_dtype = array_dtype

    def __getattr__(self, name: str) -> Any:
        return Scalar.of(name)


_numbers = itertools.count()


class Expr:
    """An operation on arrays and numbers, or an input.

    Attributes:
        op: a name in :data:`UFUNCS`; ``input``, ``cast``, ``clip``, ``select``; or ``call`` of ``function``.
        args: operands: expressions, numbers or scalars; for an input its name.
        kind: dtype of the result; "default": that of the kernel, or bool for comparisons.
        function: for ``call``: ``function(xp, *args, out)``; ``out`` may be the memory of the first operand.
        same: for ``call``: an operation on inputs with the same values, for compilers; None: there is none.
        as_float: whether integers are computed as float64.
    """

    __slots__ = ("args", "as_float", "function", "kind", "number", "op", "same")
    __array_ufunc__ = None

    def __init__(
        self,
        op: str,
        *args: object,
        kind: Kind | Literal["default"] = "default",
        function: Callable[..., object] | None = None,
        same: Expr | None = None,
        as_float: bool = False,
    ) -> None:
        self.op, self.kind = op, kind
        self.args: tuple[Any, ...] = args
        self.function, self.same = function, same
        self.as_float = as_float
        self.number = next(_numbers)

    @property
    def is_truth(self) -> bool:
        """Whether this is the result of a comparison or test."""
        return self.op in COMPARISONS or self.op in TESTS

    __add__, __radd__ = _expression_methods("add")
    __sub__, __rsub__ = _expression_methods("subtract")
    __mul__, __rmul__ = _expression_methods("multiply")
    __truediv__, __rtruediv__ = _expression_methods("divide")

    def __neg__(self) -> Expr:
        return Expr("negative", self)

    def __abs__(self) -> Expr:
        return Expr("absolute", self)

    def __bool__(self) -> bool:
        raise FormulaError("a formula branches on the elements of an array: use `where`")

    def __eq__(self, other: object) -> bool:
        raise FormulaError("a formula compares an array by an operator of Python: use `f.equal`, `f.less`, …")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = object.__hash__

    def square(self) -> Expr:
        """Return the square, as a product."""
        return self * self

    def sqrt(self) -> Expr:
        """Return the square root."""
        return Expr("sqrt", self)

    def clip(self, low: object, high: object) -> Expr:
        """Return the values limited to [low, high]; NaN and -0 within the limits stay unchanged."""
        return Expr("clip", self, low, high)


class _Functions:
    """The functions of formulas by name: ``f.exp(x)`` makes an expression."""

    def __getattr__(self, name: str) -> Callable[..., Expr]:
        if name not in UFUNCS:
            raise FormulaError(f"unknown function {name!r}: expected one of {', '.join(sorted(UFUNCS))}")
        return lambda *args, **options: Expr(name, *args, **options)


f = _Functions()
"""Functions of NumPy and CuPy on expressions."""


def cast(value: object, kind: Kind) -> Expr:
    """Return ``value``, an expression or a number, as an array of ``kind``; floats are truncated to integers."""
    return Expr("cast", value, kind=kind)


def where(mask: Expr, value: object, otherwise: Expr) -> Expr:
    """Return ``value`` where ``mask`` is true, else ``otherwise``."""
    return Expr("select", mask, value, otherwise)


def quotient(a: object, b: object) -> Expr:
    """Return the quotients of integers, rounded towards zero; a division by 0 gives 0."""
    return Expr(
        "floor_divide", Expr("subtract", a, Expr("fmod", a, b)), b
    )  # a multiple of b, nearer to zero than a: cannot overflow


def apply(function: Callable[..., object], *args: object, same: Expr | None = None) -> Expr:
    """Return the result of ``function(xp, *args, out)``, which ``same`` states for compilers."""
    return Expr("call", *args, function=function, same=same)


def operations(results: Iterable[object]) -> list[Expr]:
    """Return the operations that ``results`` depend on, in the order in which they were made."""
    by_number: dict[int, Expr] = {}
    pending = list(results)
    while pending:
        operand = pending.pop()
        if isinstance(operand, Expr) and operand.op != "input" and operand.number not in by_number:
            by_number[operand.number] = operand
            pending.extend(operand.args)
    return [by_number[number] for number in sorted(by_number)]


def leaves(results: Iterable[object]) -> set[str]:
    """Return the names of the inputs that ``results`` depend on."""
    results = list(results)
    operands = [*results, *(operand for operation in operations(results) for operand in operation.args)]
    return {operand.args[0] for operand in operands if isinstance(operand, Expr) and operand.op == "input"}
