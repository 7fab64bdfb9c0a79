"""Python operators of ``Symbol``: ``+ - * / % **``, comparisons, ``-x``, ``abs``.

Each selects the graph operator for two symbols, or for a symbol and a number, and an automatic name. Operators
are looked up once per process; any thread may use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from numbers import Number
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from weftplan.errors import NotImplementedForSymbol, ParameterError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Op
from weftplan.symbol import attribute, name
from weftplan.symbol.compose import apply
from weftplan.symbol.node import Entry, Node

_S = TypeVar("_S", bound="Arithmetic")
_COMPARISONS = {
    "eq": "_equal", "ne": "_not_equal", "gt": "_greater", "ge": "_greater_equal", "lt": "_lesser", "le": "_lesser_equal"
}  # fmt: skip
_OPERATORS = {
    "add": "elemwise_add", "sub": "elemwise_sub", "mul": "elemwise_mul", "truediv": "elemwise_div", "mod": "_mod",
    "pow": "_power", "power": "_power", "maximum": "_maximum", "minimum": "_minimum", "hypot": "_hypot", **_COMPARISONS
}  # fmt: skip
"""Kind of a Python operator or function -> operator of two symbols."""


def is_number(value: object) -> bool:
    """Return whether a value is a number that an arithmetic operator accepts next to a symbol."""
    return isinstance(value, Number | np.number | np.bool_)


def binary(kind: str, lhs: object, right: object) -> Node | None:
    """Make the node of ``lhs <kind> right``; one side may be a number. Return None for NotImplemented."""
    if isinstance(lhs, Entry) and isinstance(right, Entry):
        return _node(*_choice(kind), [lhs, right], {})
    if isinstance(lhs, Entry) and is_number(right):
        return _node(*_choice(kind, 0), [lhs], {"scalar": right})
    if isinstance(right, Entry) and is_number(lhs):
        return _node(*_choice(kind, 1), [right], {"scalar": lhs})
    return None


@cache
def _choice(kind: str, symbol: int | None = None) -> tuple[Op, str]:
    """Return the operator of two symbols, or of a symbol and a number, and the beginning of its automatic names.

    ``symbol``: index of the operand that is no number; None: neither is.
    """
    op = registry.get(_OPERATORS[kind])
    if symbol is not None:
        op = registry.get(op.with_number[symbol])
    # Names are MXNet's: of comparisons and ``2 ** x`` the operator's name, of all others its last alias.
    by_name = kind in _COMPARISONS or (kind == "pow" and symbol == 1)
    return op, op.name if by_name else op.aliases[-1].lower()


def _node(op: Op, hint: str, inputs: list[Entry], params: Mapping[str, object]) -> Node:
    attrs: dict[str, Any] = {**params, **attribute.current()}
    return apply(op, name.current().get(None, hint), inputs, attrs=attrs)


def _operator(kind: str, *, swapped: bool = False) -> Callable[[_S, object], _S]:
    """Make the method of a Python operator; with ``swapped`` the reflected method, such as ``__rsub__``."""

    def method(self: _S, other: object) -> _S:
        return self._binary(kind, other, swapped=swapped)

    return method


def _refused(operator: str) -> Callable[[_S, object], NoReturn]:
    """Make the method of ``symbol += …``, which raises."""

    def method(self: _S, other: object) -> NoReturn:
        raise NotImplementedForSymbol(
            f"symbols never change, so {operator}= is not supported; write x = x {operator} y"
        )

    return method


class Arithmetic:
    """A mixin of Python operators: they make new nodes, comparisons give 0 or 1, and those that need data raise."""

    __slots__ = ()
    entries: list[Entry]
    __array_ufunc__ = None
    """NumPy scalars and arrays leave ``2 + x`` to the symbol, instead of reading it as a sequence of sequences."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        raise NotImplementedError

    def _single(self) -> Entry:
        """Return the only entry; raise ParameterError for a group."""
        if len(self.entries) != 1:
            raise ParameterError(
                f"an arithmetic operator expects one output, {self!r} has {len(self.entries)}; pick one by index"
            )
        return self.entries[0]

    def _binary(self, kind: str, other: object, *, swapped: bool = False) -> Self:
        mine = self._single()
        theirs = other._single() if isinstance(other, Arithmetic) else other
        node = binary(kind, theirs, mine) if swapped else binary(kind, mine, theirs)
        return NotImplemented if node is None else type(self)([Entry(node)])

    __add__ = __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub"), _operator("sub", swapped=True)
    __mul__ = __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("truediv"), _operator("truediv", swapped=True)
    __mod__, __rmod__ = _operator("mod"), _operator("mod", swapped=True)
    __pow__, __rpow__ = _operator("pow"), _operator("pow", swapped=True)
    __eq__, __ne__ = _operator("eq"), _operator("ne")  # type: ignore[assignment]
    __gt__, __ge__, __lt__, __le__ = _operator("gt"), _operator("ge"), _operator("lt"), _operator("le")
    __iadd__, __isub__, __imul__, __itruediv__ = _refused("+"), _refused("-"), _refused("*"), _refused("/")
    __hash__ = object.__hash__

    def __neg__(self) -> Self:
        """Return ``-x``, which MXNet writes as a multiplication."""
        return type(self)([Entry(_node(*_choice("mul", 0), [self._single()], {"scalar": -1.0}))])

    def __abs__(self) -> Self:
        return type(self)([Entry(_node(registry.get("abs"), "abs", [self._single()], {}))])

    def __bool__(self) -> bool:
        raise NotImplementedForSymbol(
            "a symbol has no truth value: it is a description, not data; bind it and test the result's asscalar()"
        )
