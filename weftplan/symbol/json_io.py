"""Symbol files: reading and writing of MXNet 1.9.1 JSON; older forms are read through upgrades."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weftplan.errors import FormatError, UnknownOperatorError, listed
from weftplan.ops.core import registry
from weftplan.ops.core.params import p_inputs
from weftplan.support.atomic_files import other_kind
from weftplan.support.gc_pause import resting
from weftplan.symbol import placeholder
from weftplan.symbol.attribute import HIDDEN_KEYS
from weftplan.symbol.compose import auto_variable, default_initializers, parse_interned
from weftplan.symbol.node import Entry, Node, NodeParams, topological_order

MXNET_VERSION = 10901
"""The MXNet release whose format is written: major * 10000 + minor * 100 + patch."""
MAX_OUTPUTS = 1 << 22
"""Maximum outputs of all operators of one file together. A file states only their number, so a few characters could
request more outputs than fit in memory."""


# ------------------------------------------------------------------------------------------------------------- writing


def dumps(entries: Sequence[Entry]) -> str:
    """Format the graph of ``entries`` as JSON, character for character as MXNet 1.9.1 does."""
    nodes = topological_order(entries)
    nid = {node: i for i, node in enumerate(nodes)}
    rows = [0]
    for node in nodes:
        rows.append(rows[-1] + node.num_outputs)
    fields = [
        ("nodes", _array([_node_text(node, nid) for node in nodes], 1, tall=True)),
        ("arg_nodes", _array([str(i) for i, node in enumerate(nodes) if node.op is None], 1)),
        ("node_row_ptr", _array([str(row) for row in rows], 1)),
        ("heads", _array([_entry_text(entry, nid) for entry in entries], 1)),
        ("attrs", '{"mxnet_version": ["int", %d]}' % MXNET_VERSION),  # noqa: UP031 - braces
    ]
    return _object(fields, 0, tall=True)


def _node_text(node: Node, nid: dict[Node, int]) -> str:
    fields = [
        ("op", _string("null" if node.op is None else node.op.saved_as or node.op.name)),
        ("name", _string(node.name)),
    ]
    if node.attrs:
        items = [(key, _string(value)) for key, value in sorted(node.attrs.items())]
        fields.append(("attrs", _object(items, 3, tall=len(items) > 1)))
    fields.append(("inputs", _array([_entry_text(entry, nid) for entry in node.inputs], 3)))
    if node.control_deps:
        fields.append(("control_deps", _array([str(nid[dep]) for dep in node.control_deps], 3)))
    return _object(fields, 2, tall=True)


def _entry_text(entry: Entry, nid: dict[Node, int]) -> str:
    return f"[{nid[entry.node]}, {entry.index}, {entry.version}]"


def _array(items: list[str], depth: int, *, tall: bool | None = None) -> str:
    """Format a list; lists of more than ten items, and lists of objects, get one line per item."""
    if not items or not (len(items) > 10 if tall is None else tall):
        return f"[{', '.join(items)}]"
    inner = "\n" + "  " * (depth + 1)
    return f"[{inner}{f', {inner}'.join(items)}\n{'  ' * depth}]"


def _object(fields: list[tuple[str, str]], depth: int, *, tall: bool) -> str:
    items = [f"{_string(key)}: {value}" for key, value in fields]
    if not tall:
        return f"{{{', '.join(items)}}}"
    inner = "\n" + "  " * (depth + 1)
    return f"{{{inner}{f', {inner}'.join(items)}\n{'  ' * depth}}}"


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def _string(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


# ------------------------------------------------------------------------------------------------------------- reading


@resting
def loads(text: str, where: str = "symbol JSON") -> list[Entry]:
    """Parse the graph in ``text`` and return its heads; ``where`` names the source in messages.

    A node whose operator is not registered becomes a :mod:`placeholder <weftplan.symbol.placeholder>`.

    Raises:
        FormatError: the text is truncated or malformed, has a dangling reference, or the graph has a cycle.
        ParameterError: an operator's parameters do not parse.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        what = other_kind(text[:64].encode("utf-8", "replace")) or (
            f"not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); "
            "the file is truncated or not a symbol"
        )
        raise FormatError(f"{where}: {what}") from error
    except RecursionError as error:
        raise FormatError(f"{where}: nested too deeply to be a symbol") from error
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object with 'nodes' and 'heads', got {type(data).__name__}")
    raw = _list(data, "nodes", where)
    version = _version(data, where)
    nodes = [_bare_node(item, f"{where}: node {i}") for i, item in enumerate(raw)]
    unknown = [i for i, node in enumerate(nodes) if node.op is None and raw[i]["op"] != "null"]
    for i, (node, item) in enumerate(zip(nodes, raw, strict=True)):
        what = f"{where}: node {i} ({node.name!r})"
        node.inputs = _entries(item.get("inputs", []), nodes, f"{what}: input")
        node.control_deps = _deps(item.get("control_deps", []), nodes, what)
        if node.op is None and node.inputs and item["op"] == "null":
            raise FormatError(f"{what}: a variable has {len(node.inputs)} inputs")
    heads = _entries(_list(data, "heads", where), nodes, f"{where}: head")
    if not heads:
        raise FormatError(f"{where}: the graph has no heads")
    if unknown:
        _stand_in(data, nodes, heads, unknown, where)
    topological_order([Entry(node) for node in nodes])  # raises when there is a cycle
    for node in nodes:
        for entry in node.inputs:
            if entry.node.op is None and entry.version > entry.node.version:
                entry.node.version = entry.version
    outputs = 0
    for node in nodes:
        if node.op is not None:
            _finish(node, version, where)
            outputs += node.num_outputs
            if outputs > MAX_OUTPUTS:
                raise FormatError(
                    f"{where}: {outputs:,} outputs up to node {node.name!r}; at most {MAX_OUTPUTS:,} are read"
                )
    for reader in (*nodes, None):
        for entry in heads if reader is None else reader.inputs:
            if entry.index >= entry.node.num_outputs:
                by = "a head" if reader is None else f"node {reader.name!r}"
                raise FormatError(
                    f"{where}: {by} refers to output {entry.index} of {entry.node.name!r}, "
                    f"which has {entry.node.num_outputs}"
                )
    return heads


def _stand_in(
    data: dict[str, Any], nodes: Sequence[Node], heads: Sequence[Entry], which: list[int], source: str
) -> None:
    """Give each node with an unknown operator a placeholder with the number of outputs that the file uses."""
    raw, counts = data["nodes"], placeholder.output_counts(data, len(nodes))
    used: dict[Node, int] = {}
    for entry in (*heads, *(entry for node in nodes for entry in node.inputs)):
        used[entry.node] = max(used.get(entry.node, 0), entry.index + 1)
    for i in which:
        node = nodes[i]
        outputs = max(counts[i] or 1, used.get(node, 1))
        node.op = placeholder.make(raw[i]["op"], len(node.inputs), outputs, f"{source}: node {i} ({node.name!r})")


def _finish(node: Node, version: int, source: str) -> None:
    """Upgrade an operator node from its file's version, parse its parameters, check its inputs."""
    assert node.op is not None
    if placeholder.is_placeholder(node):
        return
    hidden = hidden_keys(node, source)
    if version < 905 and node.op.name in ("argmax", "argmin") and node.attrs.get("axis") == "-1":
        del node.attrs["axis"]  # which meant no axis
    texts = {k: v for k, v in node.attrs.items() if k not in hidden}
    node.params = stored_params(node, texts, source)
    names = node.op.input_names(node.params)
    if version < 900:  # files without auxiliary states
        node.inputs += [auto_variable(node, name) for name in names[len(node.inputs) :]]
    if version < 904:
        default_initializers(node)
    if len(names) != len(node.inputs):
        raise FormatError(
            f"{source}: node {node.name!r} ({node.op.name}) has {len(node.inputs)} input(s), "
            f"its operator takes {len(names)}: {listed(names)}"
        )


def _bare_node(item: object, what: str) -> Node:
    if not isinstance(item, dict):
        raise FormatError(f"{what}: expected an object, got {item!r}")
    op_name, name = item.get("op"), item.get("name")
    if not isinstance(op_name, str) or not isinstance(name, str):
        raise FormatError(f"{what}: 'op' and 'name' must be text, got {op_name!r} and {name!r}")
    attrs: dict[str, str] = {}
    for key in ("param", "attr", "attrs"):  # up to 0.8 both of the first two; from 0.9 `attr`; from 1.0 `attrs`
        field = item.get(key)
        if field is None:
            continue
        if not isinstance(field, dict) or not all(isinstance(v, str) for v in field.values()):
            raise FormatError(f"{what} ({name!r}): {key!r} must be an object of texts, got {field!r}")
        attrs.update(field)
    if op_name == "null":
        node = Node(None, name, attrs=attrs)
        variable_keys(node)
        return node
    try:
        op = registry.resolve(op_name, attrs)
    except UnknownOperatorError:
        return Node(None, name, attrs=attrs)  # a placeholder replaces it once inputs and outputs are known
    return Node(op, name, attrs=attrs)


def _entries(items: object, nodes: Sequence[Node], what: str) -> list[Entry]:
    if not isinstance(items, list):
        raise FormatError(f"{what}s must be a list, got {items!r}")
    entries = []
    for position, item in enumerate(items):
        if not isinstance(item, list) or len(item) not in (2, 3) or not all(type(x) is int for x in item):
            raise FormatError(f"{what} {position}: expected [node, output] or [node, output, version], got {item!r}")
        if not 0 <= item[0] < len(nodes) or item[1] < 0:
            raise FormatError(f"{what} {position}: {item} refers to no node; there are {len(nodes)}")
        version = item[2] if len(item) == 3 else 0
        entries.append(Entry(nodes[item[0]], item[1], version))
    return entries


def _deps(items: object, nodes: Sequence[Node], what: str) -> list[Node]:
    if not isinstance(items, list) or not all(type(x) is int and 0 <= x < len(nodes) for x in items):
        raise FormatError(f"{what}: control_deps must be a list of node numbers below {len(nodes)}, got {items!r}")
    return [nodes[i] for i in items]


def _list(data: dict[str, Any], key: str, source: str) -> list[Any]:
    value = data.get(key)
    if not isinstance(value, list):
        raise FormatError(f"{source}: {key!r} must be a list, got {type(value).__name__}; this is not a symbol file")
    return value


def _version(data: Mapping[str, object], source: str) -> int:
    """Return the release that wrote the file; 800 if it is not stated, as in releases up to 0.8."""
    attrs = data.get("attrs")
    stored = attrs.get("mxnet_version") if isinstance(attrs, dict) else None
    if stored is None:
        return 800
    if not isinstance(stored, list) or len(stored) != 2 or type(stored[1]) is not int:
        raise FormatError(f'{source}: mxnet_version must be ["int", number], got {stored!r}')
    return stored[1]


# ----------------------------------------------------------------------------------------------------------- debugging


def debug_text(entries: Sequence[Entry]) -> str:
    """Format a graph as MXNet's ``debug_str``: heads, then one paragraph per node."""
    nodes = topological_order(entries)
    if len(nodes) == 1:
        node = nodes[0]
        return (
            f"Variable:{node.name}\n" if node.op is None else f"AtomicFunctor  Op:{node.op.saved_as or node.op.name}\n"
        )
    lines = ["Symbol Outputs:"]
    lines += [f"\toutput[{i}]={entry.node.name}({entry.index})" for i, entry in enumerate(entries)]
    for node in nodes:
        reads = [
            f"{maker.name}({index}){f' version={version}' if maker.op is None else ''}"
            for maker, index, version in node.inputs
        ]
        lines += debug_lines(node, reads, [dep.name for dep in node.control_deps])
    return "\n".join(lines) + "\n"


def debug_lines(node: Node, inputs: Sequence[str], controls: Sequence[str]) -> list[str]:
    """Format one node, given the texts of its inputs and the names of its control dependencies."""
    if node.op is None:
        return [f"Variable:{node.name}"]
    lines = ["-" * 20, f"Op:{node.op.saved_as or node.op.name}, Name={node.name}", "Inputs:"]
    lines += [f"\targ[{i}]={text}" for i, text in enumerate(inputs)]
    if node.attrs:
        lines += ["Attrs:", *(f"\t{key}={value}" for key, value in sorted(node.attrs.items()))]
    if controls:
        lines += ["Control deps:", *(f"\tcdep[{i}]={name}" for i, name in enumerate(controls))]
    return lines


# ------------------------------------------------------------------------------------------------- older releases


def variable_keys(node: Node) -> None:
    """Add underscores to bare hidden names on a variable (``lr_mult``)."""
    for hidden in HIDDEN_KEYS:
        if hidden in node.attrs:
            node.attrs[f"__{hidden}__"] = node.attrs.pop(hidden)


def stored_params(node: Node, texts: Mapping[str, str], source: str) -> NodeParams:
    """Parse the parameters of a node in a file; its inputs are those that the file lists.

    Raises:
        ParameterError: the parameters do not parse.
        FormatError: a parameter states more inputs than the node has in the file. This check comes before the input
            names are made, because their number would have no bound.
    """
    assert node.op is not None
    params = parse_interned(node.op, texts, node=node.name)
    if node.op.backward_of is None:
        for param in node.op.params:
            if param.parse is p_inputs and params[param.name] > len(node.inputs):
                raise FormatError(
                    f"{source}: node {node.name!r} ({node.op.name}) has {len(node.inputs)} input(s), but its parameter "
                    f"{param.name} says {params[param.name]}"
                )
    return params


def hidden_keys(node: Node, source: str) -> set[str]:
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
    params = stored_params(node, {k: v for k, v in node.attrs.items() if k not in attributes}, source)
    inputs = dict(zip(node.op.input_names(params), (entry.node for entry in node.inputs), strict=False))
    keys: set[str] = set()
    for key, hidden in attributes.items():
        owner = inputs.get(key.removesuffix(f"_{hidden}"))
        if owner is None or owner.op is not None:
            keys.add(key)
        else:
            owner.attrs[f"__{hidden}__"] = node.attrs.pop(key)
    return keys
