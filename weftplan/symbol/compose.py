"""Node construction: parse parameters, match inputs by position and name, create missing variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.errors import ParameterError, did_you_mean, listed
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Op
from weftplan.symbol.attribute import stored_key
from weftplan.symbol.node import Entry, Node, NodeParams, caller, copy_graph, topological_order

_PARSED: dict[tuple[Any, ...], dict[str, Any]] = {}
_PARSED_LIMIT = 65536


def parse_interned(op: Op, attrs: Mapping[str, str], *, node: str = "") -> NodeParams:
    """Parse parameters as ``ops.registry.parse_params``; equal texts share one dictionary, which must not be changed.

    Nodes of repeated layers then share their parameters, so inference and planning may cache by identity.
    """
    if op.single:
        return registry.parse_params(op, attrs, node=node)
    key = (op.name, *sorted(item for item in attrs.items() if not item[0].startswith("__")))
    parsed = _PARSED.get(key)
    if parsed is None or registry.get(op.saved_as or op.name) is not op:
        parsed = registry.parse_params(op, attrs, node=node)
        if len(_PARSED) >= _PARSED_LIMIT:
            _PARSED.clear()
        _PARSED[key] = parsed
    return parsed


def to_text(value: object) -> str:
    """Format a parameter as MXNet does: ``str(value)``, dtypes by name, NumPy scalars as plain numbers.

    >>> to_text((3, np.int64(3))), to_text(np.float16), to_text([1, 2]), to_text(True), to_text(np.float32(1.1))
    ('(3, 3)', 'float16', '[1, 2]', 'True', '1.1')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic | int | float | bool)):
        return str(np.dtype(value).name)
    return str(_plain(value))


def _plain(value: object) -> object:
    if isinstance(value, np.floating):
        return float(str(value))  # the shortest digits that mean this value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value)) if type(value) in (tuple, list) else tuple(map(_plain, value))
    return value


def apply(
    op: Op,
    name: str,
    positional: Sequence[Entry | None] = (),
    keyword: Mapping[str, Entry] | None = None,
    attrs: Mapping[str, object] | None = None,
) -> Node:
    """Make a new node of ``op``.

    Args:
        name: the node's name; may be empty.
        positional: inputs in the operator's order; None creates a variable.
        keyword: inputs by their names.
        attrs: parameters and other attributes; values that are not text are written as MXNet does.

    Inputs still missing become variables ``<name>_<input>`` that carry a copy of the node's attributes.

    Raises:
        ParameterError: a parameter or an input does not fit the operator.
    """
    owner = f"operator {op.name} ({name!r})"
    stored = {stored_key(key, owner): to_text(value) for key, value in (attrs or {}).items()}
    keyword = keyword or {}
    if op.variadic is not None and op.variadic not in stored:
        stored[op.variadic] = str(len(positional) + len(keyword))
    params = parse_interned(op, stored, node=name)
    names = op.input_names(params)
    node = Node(op, name, attrs=stored, params=params, created_at=caller())
    node.inputs = _match_inputs(node, names, positional, keyword)
    default_initializers(node)
    _count_writers(node)
    return node


def _match_inputs(
    node: Node, names: Sequence[str], positional: Sequence[Entry | None], keyword: Mapping[str, Entry]
) -> list[Entry]:
    assert node.op is not None
    caller = f"operator {node.op.name} ({node.name!r})"
    while len(positional) > len(names) and positional[-1] is None:
        positional = positional[:-1]  # an input that these parameters leave out
    if len(positional) > len(names):
        raise ParameterError(f"{caller} takes {len(names)} input(s) {listed(names)}, got {len(positional)}")
    by_name: dict[str, Entry] = {}
    for input_name, entry in zip(names, positional, strict=False):
        if entry is not None:
            by_name[input_name] = entry
    if keyword and node.op.variadic is not None and not set(keyword) <= set(names):
        raise ParameterError(f"{caller} takes any number of inputs by position, not by name {sorted(keyword)}")
    for key, entry in keyword.items():
        if key not in names:
            hint = did_you_mean(key, names)
            raise ParameterError(f"{caller}: no input is called {key!r}; {hint}inputs: {listed(names)}")
        if key in by_name:
            raise ParameterError(f"{caller}: input {key!r} is given twice, by position and by name")
        by_name[key] = entry
    return [by_name[n] if n in by_name else auto_variable(node, n) for n in names]


def auto_variable(node: Node, input_name: str) -> Entry:
    """Make the variable of a missing input; it inherits every attribute of its operator, as in MXNet."""
    name = f"{node.name}_{input_name}" if node.name else input_name
    return Entry(Node(None, name, attrs=dict(node.attrs), created_at=node.created_at))


def default_initializers(node: Node) -> None:
    """Give variables that an operator node reads their default initializers, unless they have others."""
    assert node.op is not None
    for position, init in node.op.input_init.items():
        if position < len(node.inputs) and node.inputs[position].node.op is None:
            node.inputs[position].node.attrs.setdefault("__init__", init)


def _count_writers(node: Node) -> None:
    """Record in the entries of a new operator node which versions of its variables it reads and writes.

    Raises:
        ParameterError: an auxiliary input is the output of another operator.
    """
    op = node.op
    assert op is not None
    states = op.mutated(node.params)
    for position, entry in enumerate(node.inputs):
        variable = entry.node
        if variable.op is not None:
            if position in states:
                input_name = op.input_names(node.params)[position]
                raise ParameterError(
                    f"operator {op.name} ({node.name!r}) writes to its input {input_name!r}, so it must be a variable, "
                    f"not an output of {variable.op.name} ({variable.name!r})"
                )
            continue
        if position in states:
            variable.version += 1
        if entry.version != variable.version:
            node.inputs[position] = Entry(variable, entry.index, variable.version)


def substitute(
    heads: Sequence[Entry],
    positional: Sequence[Entry],
    keyword: Mapping[str, Entry],
    what: str,
    name: str | None = None,
) -> list[Entry]:
    """Copy the graph with variables replaced by position (in their order) or by name, never both.

    ``name`` becomes the name of the first head's node. Nodes that write to variables increment the versions again, as
    in MXNet.

    Raises:
        TypeError: inputs are given both by position and by name.
        ParameterError: too many inputs, a name that no variable has, or an operator's output for a variable that an
            operator writes.
    """
    if positional and keyword:
        raise TypeError(f"composing {what}: give inputs by position or by name, not both")
    variables = [node for node in topological_order(heads) if node.op is None]
    if len(positional) > len(variables):
        raise ParameterError(f"composing {what}: {len(positional)} inputs given, it has {len(variables)} variables")
    replace: dict[Node, Entry] = dict(zip(variables, positional, strict=False))
    by_name: dict[str, list[Node]] = {}
    for node in variables:
        by_name.setdefault(node.name, []).append(node)
    for key, entry in keyword.items():
        if key not in by_name:
            hint = did_you_mean(key, by_name)
            raise ParameterError(f"composing {what}: no variable is called {key!r}; {hint}variables: {listed(by_name)}")
        replace.update(dict.fromkeys(by_name[key], entry))
    copied = copy_graph(heads, replace)
    if name and heads[0].node not in replace:
        copied[0].node.name = name
    if replace:
        replacements = set(topological_order(replace.values()))
        for node in topological_order(copied):
            if node.op is not None and node.op.aux and node not in replacements:
                _count_writers(node)
    return copied
