"""Python operators of symbols: which graph operator each one becomes, and under which automatic name."""

from __future__ import annotations

from numbers import Number
from typing import Any

import numpy as np

from weftplan.errors import NotImplementedForSymbol
from weftplan.ops import registry
from weftplan.symbol import attribute, name
from weftplan.symbol.compose import apply
from weftplan.symbol.node import Entry, Node

_BINARY = {
    # method: (operator for two symbols, its hint, operator for a number, its hint, for a number on the left, its hint)
    "add": ("elemwise_add", "_plus", "_plus_scalar", "_plusscalar", "_plus_scalar", "_plusscalar"),
    "sub": ("elemwise_sub", "_minus", "_minus_scalar", "_minusscalar", "_rminus_scalar", "_rminusscalar"),
    "mul": ("elemwise_mul", "_mul", "_mul_scalar", "_mulscalar", "_mul_scalar", "_mulscalar"),
    "truediv": ("elemwise_div", "_div", "_div_scalar", "_divscalar", "_rdiv_scalar", "_rdivscalar"),
    "mod": ("_mod", "_mod", "_mod_scalar", "_modscalar", "_rmod_scalar", "_rmodscalar"),
    "pow": ("_power", "_power", "_power_scalar", "_powerscalar", "_rpower_scalar", "_rpower_scalar"),
    "maximum": ("_maximum", "_maximum", "_maximum_scalar", "_maximumscalar", "_maximum_scalar", "_maximumscalar"),
    "minimum": ("_minimum", "_minimum", "_minimum_scalar", "_minimumscalar", "_minimum_scalar", "_minimumscalar"),
    "eq": ("_equal", "_equal", "_equal_scalar", "_equal_scalar", "_equal_scalar", "_equal_scalar"),
    "ne": (
        "_not_equal",
        "_not_equal",
        "_not_equal_scalar",
        "_not_equal_scalar",
        "_not_equal_scalar",
        "_not_equal_scalar",
    ),
    "gt": ("_greater", "_greater", "_greater_scalar", "_greater_scalar", "_lesser_scalar", "_lesser_scalar"),
    "ge": (
        "_greater_equal",
        "_greater_equal",
        "_greater_equal_scalar",
        "_greater_equal_scalar",
        "_lesser_equal_scalar",
        "_lesser_equal_scalar",
    ),
    "lt": ("_lesser", "_lesser", "_lesser_scalar", "_lesser_scalar", "_greater_scalar", "_greater_scalar"),
    "le": (
        "_lesser_equal",
        "_lesser_equal",
        "_lesser_equal_scalar",
        "_lesser_equal_scalar",
        "_greater_equal_scalar",
        "_greater_equal_scalar",
    ),
}


def is_number(value: Any) -> bool:
    """True for what an arithmetic operator accepts beside symbols."""
    return isinstance(value, Number | np.number | np.bool_)


def binary(kind: str, left: Entry | Any, right: Entry | Any) -> Node | None:
    """The node of ``left <kind> right``, where one side may be a number; None when Python should try elsewhere."""
    both, both_hint, scalar, hint, reverse, reverse_hint = _BINARY[kind]
    if isinstance(left, Entry) and isinstance(right, Entry):
        return _node(both, both_hint, [left, right], {})
    if isinstance(left, Entry) and is_number(right):
        return _node(scalar, hint, [left], {"scalar": right})
    if isinstance(right, Entry) and is_number(left):
        return _node(reverse, reverse_hint, [right], {"scalar": left})
    return None


def negative(entry: Entry) -> Node:
    """``-x``, which MXNet writes as a multiplication."""
    return _node("_mul_scalar", "_mulscalar", [entry], {"scalar": -1.0})


def absolute(entry: Entry) -> Node:
    """``abs(x)``."""
    return _node("abs", "abs", [entry], {})


def _node(op: str, hint: str, inputs: list[Entry], params: dict[str, Any]) -> Node:
    attrs: dict[str, Any] = {**params, **attribute.current()}
    return apply(registry.get(op), name.current().get(None, hint), inputs, attrs=attrs)


def no_truth_value() -> NotImplementedForSymbol:
    """The error of ``if symbol:``."""
    return NotImplementedForSymbol(
        "a symbol has no truth value: it is a description, not data; bind it and test the result's asscalar()"
    )


def no_inplace(operator: str) -> NotImplementedForSymbol:
    """The error of ``symbol += …``."""
    return NotImplementedForSymbol(f"symbols never change, so {operator}= is not supported; write x = x {operator} y")
