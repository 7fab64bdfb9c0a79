"""Symbol files of old releases: what each step changes on one node. Steps run in the order of their file versions."""

from __future__ import annotations

from weftplan.symbol.attribute import HIDDEN_KEYS
from weftplan.symbol.node import Entry, Node


def variable_keys(node: Node) -> None:
    """Bare hidden names on a variable (``lr_mult``) get their underscores."""
    for hidden in HIDDEN_KEYS:
        if hidden in node.attrs:
            node.attrs[f"__{hidden}__"] = node.attrs.pop(hidden)


def hidden_keys(node: Node) -> set[str]:
    """The same on an operator; ``<input>_<hidden>`` moves to that input when it is a variable.

    Returns the keys that stay and are no parameters. Needs the names of the inputs before the parameters are parsed,
    so it goes by the names of variables: ``<node>_<input>``.
    """
    variable_keys(node)
    kept: set[str] = set()
    for hidden in HIDDEN_KEYS:
        for key in [k for k in node.attrs if k.endswith(f"_{hidden}") and not k.startswith("__")]:
            owner = _input_variable(node, key.removesuffix(f"_{hidden}"))
            if owner is None:
                kept.add(key)
            else:
                owner.attrs[f"__{hidden}__"] = node.attrs.pop(key)
    return kept


def _input_variable(node: Node, name: str) -> Node | None:
    assert node.op is not None
    if isinstance(node.op.inputs, tuple):
        names = node.op.inputs
        if name in names and names.index(name) < len(node.inputs):
            found = node.inputs[names.index(name)].node
            return found if found.op is None else None
    for entry in node.inputs:
        if entry.node.op is None and entry.node.name in (f"{node.name}_{name}", name):
            return entry.node
    return None


def argument_axis(node: Node) -> None:
    """Before 0.9.5, ``axis=-1`` of argmax and argmin meant no axis at all."""
    assert node.op is not None
    if node.op.name in ("argmax", "argmin") and node.attrs.get("axis") == "-1":
        del node.attrs["axis"]


def missing_inputs(node: Node) -> None:
    """Before 0.9.0, auxiliary states were not in the file: append them as variables."""
    assert node.op is not None
    names = node.op.input_names(node.params)
    for position in range(len(node.inputs), len(names)):
        name = f"{node.name}_{names[position]}" if node.name else names[position]
        variable = Node(None, name, attrs=dict(node.attrs))
        if position in node.op.aux:
            variable.version = 1
        node.inputs.append(Entry(variable, 0, variable.version))


def default_initializers(node: Node) -> None:
    """Before 0.9.4, variables did not carry their operator's default initializer."""
    assert node.op is not None
    for position, init in node.op.input_init.items():
        if position < len(node.inputs) and node.inputs[position].node.op is None:
            node.inputs[position].node.attrs.setdefault("__init__", init)
