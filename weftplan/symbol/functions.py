"""``mx.sym.<Operator>``: one function per registered operator and alias, made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weftplan.errors import ParameterError
from weftplan.ops import registry
from weftplan.ops.schema import REQUIRED, Op
from weftplan.symbol import attribute, name
from weftplan.symbol.compose import apply
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.symbol import Symbol, single

_made: dict[str, tuple[Op, Callable[..., Symbol]]] = {}


def function(op_name: str) -> Callable[..., Symbol]:
    """The function of an operator or alias; automatic names follow the spelling used, as in MXNet.

    Raises:
        UnknownOperatorError: no such operator; the message lists near names.
    """
    op = registry.get(op_name)
    found = _made.get(op_name)
    if found is None or found[0] is not op:
        found = _made[op_name] = (op, _make(op, op_name))
    return found[1]


def _make(op: Op, spelling: str) -> Callable[..., Symbol]:
    hint = spelling.lower()

    def call(*args: Any, **kwargs: Any) -> Symbol:
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
        params: dict[str, Any] = dict(zip(_positional_params(op, len(args) - split), args[split:], strict=True))
        input_names = op.inputs if isinstance(op.inputs, tuple) else ()
        for key, value in kwargs.items():
            if isinstance(value, Symbol):
                keyword[key] = single(value, f"{what}: {key}")
            elif value is None and key in input_names:
                continue
            elif key in params:
                raise ParameterError(f"{what}: parameter {key!r} is given twice, by position and by name")
            else:
                params[key] = value
        # The scope's attributes win over keywords of the same name, as in MXNet.
        params.update(attribute.current(attr))
        node = apply(op, name.current().get(given_name, hint), positional, keyword, params)
        return visible(node)

    call.__name__ = call.__qualname__ = spelling
    call.__doc__ = _document(op)
    return call


def visible(node: Node) -> Symbol:
    """A symbol of a node's visible outputs."""
    return Symbol(Entry(node, i) for i in range(node.num_visible_outputs))


def _count_inputs(op: Op, args: tuple[Any, ...]) -> int:
    """How many leading positional arguments are inputs: symbols, or None for one to be made."""
    limit = len(op.inputs) if isinstance(op.inputs, tuple) and op.variadic is None else len(args)
    count = 0
    while count < min(limit, len(args)) and (args[count] is None or isinstance(args[count], Symbol)):
        count += 1
    return count


def _positional_params(op: Op, count: int) -> list[str]:
    names = [param.name for param in op.params if param.name != op.variadic]
    if count > len(names):
        raise ParameterError(f"operator {op.name}: {count} parameters by position, it has {len(names)}: {names}")
    return names[:count]


def _document(op: Op) -> str:
    lines = [op.doc or f"The operator {op.name}.", ""]
    if isinstance(op.inputs, tuple) and op.inputs:
        lines += ["Inputs: " + ", ".join(op.inputs), ""]
    if op.params:
        lines.append("Parameters:")
        for param in op.params:
            default = "required" if param.default is REQUIRED else f"default {param.default!r}"
            lines.append(f"    {param.name}: {param.doc or 'see MXNet 1.9.1'} ({default})")
    return "\n".join(lines)
