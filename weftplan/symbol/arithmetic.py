"""Python operators of ``Symbol``: ``+ - * / % **``, comparisons, ``-x``, ``abs``.

Each selects the graph operator for two symbols, or for a symbol and a number, and an automatic name. This module keeps
no state; any thread may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from weftplan.errors import NotImplementedForSymbol, ParameterError
from weftplan.ops.core import registry
from weftplan.symbol import attribute, name
from weftplan.symbol.compose import apply
from weftplan.symbol.node import Entry, Node

_S = TypeVar("_S", bound="Arithmetic")
_Choice = tuple[str, str]
_BINARY: dict[str, tuple[_Choice, _Choice, _Choice]] = {
    # kind: operator of two symbols; then (operator, hint) with a number on the right, and with a number on the left
    "add": (("elemwise_add", "_plus"), ("_plus_scalar", "_plusscalar"), ("_plus_scalar", "_plusscalar")),
    "sub": (("elemwise_sub", "_minus"), ("_minus_scalar", "_minusscalar"), ("_rminus_scalar", "_rminusscalar")),
    "mul": (("elemwise_mul", "_mul"), ("_mul_scalar", "_mulscalar"), ("_mul_scalar", "_mulscalar")),
    "truediv": (("elemwise_div", "_div"), ("_div_scalar", "_divscalar"), ("_rdiv_scalar", "_rdivscalar")),
    "mod": (("_mod", "_mod"), ("_mod_scalar", "_modscalar"), ("_rmod_scalar", "_rmodscalar")),
    "pow": (("_power", "_power"), ("_power_scalar", "_powerscalar"), ("_rpower_scalar", "_rpower_scalar")),
}
# With the number on the left, the function's automatic name differs from the operator's.
_BINARY["power"] = (*_BINARY["pow"][:2], ("_rpower_scalar", "_rpowerscalar"))
for _kind in ("maximum", "minimum", "hypot"):
    _with_number = (f"_{_kind}_scalar", f"_{_kind}scalar")
    _BINARY[_kind] = ((f"_{_kind}", f"_{_kind}"), _with_number, _with_number)
for _kind, _word, _mirror in (
    ("eq", "equal", "equal"),
    ("ne", "not_equal", "not_equal"),
    ("gt", "greater", "lesser"),
    ("ge", "greater_equal", "lesser_equal"),
    ("lt", "lesser", "greater"),
    ("le", "lesser_equal", "greater_equal"),
):
    _BINARY[_kind] = (
        (f"_{_word}", f"_{_word}"),
        (f"_{_word}_scalar", f"_{_word}_scalar"),
        (f"_{_mirror}_scalar", f"_{_mirror}_scalar"),
    )


def is_number(value: object) -> bool:
    """Return whether a value is a number that an arithmetic operator accepts next to a symbol."""
    return isinstance(value, Number | np.number | np.bool_)


def binary(kind: str, lhs: object, right: object) -> Node | None:
    """Make the node of ``lhs <kind> right``; one side may be a number. Return None for NotImplemented."""
    operator, scalar, reverse = _BINARY[kind]
    if isinstance(lhs, Entry) and isinstance(right, Entry):
        return _node(*operator, [lhs, right], {})
    if isinstance(lhs, Entry) and is_number(right):
        return _node(*scalar, [lhs], {"scalar": right})
    if isinstance(right, Entry) and is_number(lhs):
        return _node(*reverse, [right], {"scalar": lhs})
    return None


def _node(op: str, hint: str, inputs: list[Entry], params: Mapping[str, object]) -> Node:
    attrs: dict[str, Any] = {**params, **attribute.current()}
    return apply(registry.get(op), name.current().get(None, hint), inputs, attrs=attrs)


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
        return type(self)([Entry(_node("_mul_scalar", "_mulscalar", [self._single()], {"scalar": -1.0}))])

    def __abs__(self) -> Self:
        return type(self)([Entry(_node("abs", "abs", [self._single()], {}))])

    def __bool__(self) -> bool:
        raise NotImplementedForSymbol(
            "a symbol has no truth value: it is a description, not data; bind it and test the result's asscalar()"
        )
