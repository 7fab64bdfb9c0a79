"""``mx.sym.<Operator>``: one function per registered operator and alias, made on first use.

This file owns the table of functions made so far. It relies on the operator registry for signatures and documentation.
Any thread may use it; two threads that look up the same new function concurrently may get two equal functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weftplan.errors import DTypeError, ParameterError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Op
from weftplan.ops.core.signatures import document, signature
from weftplan.support import slots
from weftplan.symbol import attribute, name
from weftplan.symbol.compose import apply
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.symbol import Symbol, single

_made: dict[tuple[str, str], tuple[Op, Callable[..., Symbol]]] = {}


def function(op_name: str, hint: str = "") -> Callable[..., Symbol]:
    """Return the function of an operator or alias; automatic names follow ``hint``, by default its name, as in MXNet.

    Raises:
        UnknownOperatorError: no such operator; the message lists near names.
    """
    op = registry.get(op_name)
    key = (op_name, hint or op_name)
    cached = _made.get(key)
    if cached is None or cached[0] is not op:
        cached = _made[key] = (op, _make(op, *key))
    return cached[1]


def _make(op: Op, spelling: str, hint: str) -> Callable[..., Symbol]:
    hint = hint.lower()
    declared = {param.name for param in op.params}

    def call(*args: object, **kwargs: Any) -> Symbol:
        given_name = kwargs.pop("name", None)
        attr = kwargs.pop("attr", None)
        if kwargs.pop("out", None) is not None:
            raise ParameterError(f"operator {op.name}: out= is for arrays; the planner places a symbol's outputs")
        if op.variadic is not None and len(args) == 1 and isinstance(args[0], list | tuple):
            args = tuple(args[0])
        split = _count_inputs(op, args)
        what = f"operator {op.name}"
        positional: list[Entry | None] = [
            None if value is None else single(value, f"{what}: input {i}") for i, value in enumerate(args[:split])
        ]
        keyword: dict[str, Entry] = {}
        params: dict[str, Any] = dict(zip(_positional_params(op, args, split, kwargs), args[split:], strict=True))
        for key, value in kwargs.items():
            if isinstance(value, Symbol):
                keyword[key] = single(value, f"{what}: {key}")
            elif key in declared:
                params[key] = value
            elif value is None:
                continue  # an input to be made
            elif key in _input_names(op, kwargs):
                raise _no_symbol(op, f"input {key!r}", value)
            else:
                params[key] = value
        # The scope's attributes win over keywords of the same name, as in MXNet.
        params.update(attribute.current(attr))
        node = apply(op, name.current().get(given_name, hint), positional, keyword, params)
        return visible(node)

    call.__name__ = call.__qualname__ = spelling
    call.__doc__ = document(op)
    call.__signature__ = signature(op, "Symbol", ("name", "attr"))  # type: ignore[attr-defined]
    return call


def visible(node: Node) -> Symbol:
    """Return a symbol of a node's visible outputs."""
    return Symbol(Entry(node, i) for i in range(node.num_visible_outputs))


def _count_inputs(op: Op, args: tuple[object, ...]) -> int:
    """Count the leading positional arguments that are inputs: symbols, or None for a variable to be created."""
    limit = len(op.inputs) if isinstance(op.inputs, tuple) and op.variadic is None else len(args)
    count = 0
    while count < min(limit, len(args)) and (args[count] is None or isinstance(args[count], Symbol)):
        count += 1
    return count


def _positional_params(op: Op, args: tuple[object, ...], split: int, kwargs: Mapping[str, object]) -> list[str]:
    """Return the names of the parameters that the positional arguments from ``split`` on set.

    Raises:
        DTypeError: the first of them is at the position of an input, and cannot be a parameter.
        ParameterError: there are too many, or a parameter is also given by name.
    """
    names = [param.name for param in op.params if param.name != op.variadic]
    count = len(args) - split
    twice = sorted(kwargs.keys() & names[:count])
    # An array, or a symbol after another argument.
    misplaced = any(hasattr(value, "wait_to_read") for value in args[split:])
    if misplaced or twice or count > len(names):
        most = len(args) if misplaced and op.variadic is not None else len(_input_names(op, kwargs))
        if split < most:
            raise _no_symbol(op, f"input {split}", args[split])
    if twice:
        raise ParameterError(f"operator {op.name}: parameter {twice[0]!r} is given twice, by position and by name")
    if count > len(names):
        raise ParameterError(f"operator {op.name}: {count} parameters by position, it has {len(names)}: {names}")
    return names[:count]


def _input_names(op: Op, kwargs: Mapping[str, object]) -> tuple[str, ...]:
    """Return the input names for the parameters in ``kwargs``; no names if these do not parse."""
    if isinstance(op.inputs, tuple):
        return op.inputs
    declared = {param.name for param in op.params}
    try:
        return op.input_names(registry.parse_params(op, {k: v for k, v in kwargs.items() if k in declared}))
    except ParameterError:
        return ()


def _no_symbol(op: Op, which: str, value: object) -> DTypeError:
    """Return the error for an array or a number passed as an input."""
    advice = "inputs come first, then parameters"
    if hasattr(value, "shape"):
        advice = f"use mx.nd.{op.name} for arrays, or give mx.sym.Variable(...) and bind the array to it"
    return DTypeError(f"operator {op.name}: {which} must be a Symbol, got {type(value).__name__}; {advice}")


slots.SYMBOL_OPERATOR.fill(function)
