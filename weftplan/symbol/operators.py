"""The mapping from Python operators of symbols to graph operators and automatic names."""

from __future__ import annotations

from numbers import Number
from typing import Any

import numpy as np

from weftplan.errors import NotImplementedForSymbol
from weftplan.ops.core import registry
from weftplan.symbol import attribute, name
from weftplan.symbol.compose import apply
from weftplan.symbol.node import Entry, Node

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


def is_number(value: Any) -> bool:
    """Return whether a value is a number that an arithmetic operator accepts next to a symbol."""
    return isinstance(value, Number | np.number | np.bool_)


def binary(kind: str, left: Entry | Any, right: Entry | Any) -> Node | None:
    """Make the node of ``left <kind> right``; one side may be a number. Return None for NotImplemented."""
    both, scalar, reverse = _BINARY[kind]
    if isinstance(left, Entry) and isinstance(right, Entry):
        return _node(*both, [left, right], {})
    if isinstance(left, Entry) and is_number(right):
        return _node(*scalar, [left], {"scalar": right})
    if isinstance(right, Entry) and is_number(left):
        return _node(*reverse, [right], {"scalar": left})
    return None


def negative(entry: Entry) -> Node:
    """Make the node of ``-x``, which MXNet writes as a multiplication."""
    return _node("_mul_scalar", "_mulscalar", [entry], {"scalar": -1.0})


def absolute(entry: Entry) -> Node:
    """Make the node of ``abs(x)``."""
    return _node("abs", "abs", [entry], {})


def _node(op: str, hint: str, inputs: list[Entry], params: dict[str, Any]) -> Node:
    attrs: dict[str, Any] = {**params, **attribute.current()}
    return apply(registry.get(op), name.current().get(None, hint), inputs, attrs=attrs)


def no_truth_value() -> NotImplementedForSymbol:
    """Return the error for ``if symbol:``."""
    return NotImplementedForSymbol(
        "a symbol has no truth value: it is a description, not data; bind it and test the result's asscalar()"
    )


def no_inplace(operator: str) -> NotImplementedForSymbol:
    """Return the error for ``symbol += …``."""
    return NotImplementedForSymbol(f"symbols never change, so {operator}= is not supported; write x = x {operator} y")
