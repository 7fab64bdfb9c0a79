"""Upgrades of old symbol files: per-node steps, which run in the order of their file versions."""

from __future__ import annotations

from collections.abc import Mapping

from weftplan.errors import FormatError
from weftplan.ops.core.params import p_inputs
from weftplan.symbol.attribute import HIDDEN_KEYS
from weftplan.symbol.compose import parse_interned
from weftplan.symbol.node import Entry, Node, NodeParams


def variable_keys(node: Node) -> None:
    """Add underscores to bare hidden names on a variable (``lr_mult``)."""
    for hidden in HIDDEN_KEYS:
        if hidden in node.attrs:
            node.attrs[f"__{hidden}__"] = node.attrs.pop(hidden)


def stored_params(node: Node, texts: Mapping[str, str], where: str) -> NodeParams:
    """Parse the parameters of a node in a file; its inputs are those that the file lists.

    Raises:
        ParameterError: the parameters do not parse.
        FormatError: a parameter counts inputs, and more of them than the file gives the node. Names of inputs are made
            from such a number, so it is compared before anything is made.
    """
    assert node.op is not None
    params = parse_interned(node.op, texts, node=node.name)
    if node.op.backward_of is None:
        for param in node.op.params:
            if param.parse is p_inputs and params[param.name] > len(node.inputs):
                raise FormatError(
                    f"{where}: node {node.name!r} ({node.op.name}) has {len(node.inputs)} input(s), but its parameter "
                    f"{param.name} says {params[param.name]}"
                )
    return params


def hidden_keys(node: Node, where: str) -> set[str]:
    """Add underscores to hidden names on an operator; move ``<input>_<hidden>`` to that input if it is a variable.

    Return the remaining keys that are no parameters.

    Raises:
        ParameterError, FormatError: as :func:`stored_params`; some operators' inputs depend on their parameters.
    """
    variable_keys(node)
    attributes = {
        key: hidden
        for hidden in HIDDEN_KEYS
        for key in node.attrs
        if key.endswith(f"_{hidden}") and not key.startswith("__")
    }
    if not attributes:
        return set()
    assert node.op is not None
    params = stored_params(node, {k: v for k, v in node.attrs.items() if k not in attributes}, where)
    inputs = dict(zip(node.op.input_names(params), (entry.node for entry in node.inputs), strict=False))
    kept: set[str] = set()
    for key, hidden in attributes.items():
        owner = inputs.get(key.removesuffix(f"_{hidden}"))
        if owner is None or owner.op is not None:
            kept.add(key)
        else:
            owner.attrs[f"__{hidden}__"] = node.attrs.pop(key)
    return kept


def argument_axis(node: Node) -> None:
    """Drop ``axis=-1`` of argmax and argmin, which meant no axis before 0.9.5."""
    assert node.op is not None
    if node.op.name in ("argmax", "argmin") and node.attrs.get("axis") == "-1":
        del node.attrs["axis"]


def missing_inputs(node: Node) -> None:
    """Append auxiliary states as variables, since files before 0.9.0 lack them."""
    assert node.op is not None
    names = node.op.input_names(node.params)
    for position in range(len(node.inputs), len(names)):
        name = f"{node.name}_{names[position]}" if node.name else names[position]
        node.inputs.append(Entry(Node(None, name, attrs=dict(node.attrs))))


def default_initializers(node: Node) -> None:
    """Add their operator's default initializer to variables, which lacked it before 0.9.4."""
    assert node.op is not None
    for position, init in node.op.input_init.items():
        if position < len(node.inputs) and node.inputs[position].node.op is None:
            node.inputs[position].node.attrs.setdefault("__init__", init)
