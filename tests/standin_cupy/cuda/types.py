"""C's types: the usual arithmetic conversions, literals, and integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.standin_cupy.cuda.memory import KernelError, Pointer
from tests.standin_cupy.cuda.syntax import CompileException

_RANKS = ["int32", "uint32", "int64", "uint64", "float32", "float64"]


_name = cache(str)
"""Return a dtype's name, cached because NumPy formats it each time, which took a sixth of a kernel's time."""


def kind_of(value: Any) -> str:
    """Return the name of a value's type."""
    return _name(value.dtype)


@cache
def common_type(a: str, b: str) -> str:
    """Return the common type of two operands: at least int, the wider integer, or a float."""
    for kind in (a, b):
        if kind == "float16":
            raise CompileException("__half is only loaded, stored and cast: cast it to float to compute with it")
    ranks = [_RANKS.index(kind) if kind in _RANKS else 0 for kind in (a, b)]
    return _RANKS[max(ranks)]


def convert(value: Any, kind: str) -> Any:
    """Return ``value`` converted as in C; floats outside an integer's range saturate, as on a GPU.

    NaN converts as by PTX's ``cvt``: to the lowest value for 64 bits, and for 32 bits from a double, otherwise to 0.
    """
    if isinstance(value, Pointer):
        raise CompileException("a pointer is no number")
    if kind_of(value) == kind:
        return value
    if value.dtype.kind == "f" and kind not in ("float16", "float32", "float64", "bool"):
        info = np.iinfo(kind)
        whole = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        low, high = whole <= float(info.min), whole >= float(info.max)
        inside = np.where(low | high, 0, whole).astype(kind)
        actual = np.where(low, info.min, np.where(high, info.max, inside)).astype(kind)
        if info.bits >= 32 and (info.bits == 64 or value.dtype.itemsize == 8):
            actual = np.where(np.isnan(value), np.array(1 << info.bits - 1, f"uint{info.bits}").astype(kind), actual)
        return actual
    return value.astype(kind)


def number(text: str) -> Any:
    """Return the value of a literal: 1, 1u, 1ll and 0x1ull are integers, 1.0 is double, 1.0f is float."""
    actual = _number(text)
    actual.flags.writeable = False
    return actual


@cache
def _number(text: str) -> Any:
    low = text.lower()
    if low.startswith("0x") or not any(c in low for c in ".e"):
        digits = low.rstrip("ul")
        if low.endswith("f") and not low.startswith("0x"):
            raise CompileException(f"{text}: a float needs a point")
        suffix = low[len(digits) :]
        value = int(digits, 0)
        kind = {"": "int32", "u": "uint32", "ll": "int64", "ull": "uint64", "llu": "uint64"}[suffix]
        if kind == "int32" and value >= 1 << 31:
            kind = "int64"
        return np.array(value, kind)
    return np.array(float(low.rstrip("f")), "float32" if low.endswith("f") else "float64")


def _divided(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return a / b
    if np.any(b == 0):
        raise KernelError("a thread divides a whole number by 0")
    actual = a // b
    return np.where((actual * b != a) & ((a < 0) != (b < 0)), actual + 1, actual).astype(a.dtype)


def _rest(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        raise CompileException("% is for whole numbers")
    return a - _divided(a, b) * b


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": _divided,
    "%": _rest,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    ">": np.greater,
    "<=": np.less_equal,
    ">=": np.greater_equal,
}


def shifted(sign: str, a: Any, b: Any) -> Any:
    """Return ``a << b`` or ``a >> b``, by ``sign``, in the type of ``a``."""
    kind = common_type(kind_of(a), "int32")
    a = convert(a, kind)
    b = convert(b, kind)
    if np.any(b >= a.dtype.itemsize * 8) or np.any(b < 0):
        raise KernelError(f"a thread shifts {kind} by {b.max()} bits")
    return (np.left_shift if sign == "<<" else np.right_shift)(a, b)


def _high(a: Any, b: Any) -> Any:
    """Return the upper 64 bits of the product of two 64-bit numbers."""
    a, b = convert(a, "uint64"), convert(b, "uint64")
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + (a0 * b0 >> half)
    second = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (second >> half)


def _float(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        kind = kind_of(given[0])
        for value in given[1:]:
            kind = common_type(kind, kind_of(value))
        if kind not in ("float32", "float64"):
            kind = "float64"
        return function(*(convert(value, kind) for value in given)).astype(kind)

    return call


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Any, b: Any) -> Any:
        kind = common_type(kind_of(a), kind_of(b))
        if kind_of(a) != kind_of(b):
            raise CompileException(f"min and max of {kind_of(a)} and {kind_of(b)} are ambiguous")
        return function(convert(a, kind), convert(b, kind))

    return call


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _float(getattr(np, name)) for name in
       ("exp", "log", "sqrt", "tanh", "floor", "ceil", "rint", "sin", "cos", "log1p", "expm1", "fmax", "fmin",
        "trunc", "copysign")},
    "fabs": _float(np.abs),
    "lgamma": _float(np.vectorize(math.lgamma, otypes=[np.float64])),
    "pow": _float(np.power),
    "isnan": np.isnan,
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "min": _whole(np.minimum),
    "max": _whole(np.maximum),
    "__umul64hi": _high,
}  # fmt: skip
"""Functions that kernels may call, with C++'s overload for the argument's type."""
