"""Placeholder nodes for operators that weftplan lacks, so that the rest of a symbol file can be used.

A placeholder has the inputs, outputs and attributes of the file, and is written back unchanged. Its shapes are unknown
and it cannot be computed. If a caller needs it, :func:`require_known` raises an error that names all such operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from weftplan.errors import FormatError, UnknownOperatorError, did_you_mean
from weftplan.ops.core import registry
from weftplan.ops.core.rules import pass_dtype, pass_shape
from weftplan.ops.core.schema import Op
from weftplan.symbol.node import Node

MOST_OUTPUTS = 65536
_SHOWN = 3


def _compute(*args: object) -> NoReturn:
    raise UnknownOperatorError("a placeholder of an operator that weftplan does not have cannot be computed")


def make(name: str, inputs: int, outputs: int, what: str) -> Op:
    """Make the operator of one placeholder node.

    Raises:
        FormatError: there are more than :data:`MOST_OUTPUTS` outputs.
    """
    if outputs > MOST_OUTPUTS:
        raise FormatError(f"{what}: {outputs:,} outputs of one operator; at most {MOST_OUTPUTS:,} are read")
    return Op(
        name=name,
        forward=_compute,
        infer_shape=pass_shape,
        infer_dtype=pass_dtype,
        inputs=tuple(f"arg{i}" for i in range(inputs)),
        outputs=("output",) if outputs == 1 else tuple(f"output{i}" for i in range(outputs)),
        random=True,  # unknown semantics: never merge it with another node
        single=True,
        doc="An operator that weftplan does not have.",
    )


def is_placeholder(node: Node) -> bool:
    """Return whether a node is a placeholder, which cannot be computed."""
    return node.op is not None and node.op.forward is _compute


def label(node: Node) -> str:
    """Return the operator's name for messages; a custom operator includes its type."""
    assert node.op is not None
    kind = node.attrs.get("op_type") if node.op.name == "Custom" else None
    return node.op.name if kind is None else f"Custom(op_type={kind})"


def missing(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return names of placeholder nodes by missing operator, in the order of the graph."""
    by_operator: dict[str, list[str]] = {}
    for node in nodes:
        if is_placeholder(node):
            by_operator.setdefault(label(node), []).append(node.name)
    return by_operator


def usable(nodes: Sequence[Node]) -> list[Node]:
    """Return operator nodes that depend on no placeholder, inputs first."""
    lost: set[Node] = set()
    good: list[Node] = []
    for node in nodes:
        if node.op is None:
            continue
        if is_placeholder(node) or any(entry.node in lost for entry in node.inputs):
            lost.add(node)
        else:
            good.append(node)
    return good


def explain(nodes: Sequence[Node]) -> str:
    """Describe the missing operators of a graph, its usable outputs, and how to provide the operators."""
    lines = []
    for name, nodes_of_op in missing(nodes).items():
        more = f", and {len(nodes_of_op) - _SHOWN} more" if len(nodes_of_op) > _SHOWN else ""
        near = did_you_mean(name, registry.names()).rstrip()
        count = f"{len(nodes_of_op)} node{'s' * (len(nodes_of_op) > 1)}"
        lines.append(f"{name} ({count}: {', '.join(nodes_of_op[:_SHOWN])}{more}{near and f'; {near}'})")
    good = usable(nodes)
    if good:
        output_node = good[-1]
        output = (
            f"{output_node.name}_{output_node.op.output_names(output_node.params)[0]}"
            if output_node.op is not None
            else output_node.name
        )
        part = (
            f"Of {sum(node.op is not None for node in nodes)} operations {len(good)} can be used without: cut the "
            f"network with symbol.get_internals()[{output!r}], for instance"
        )
    else:
        part = "No operation can be used without"
    return (
        f"weftplan does not have {len(lines)} operator{'s' * (len(lines) > 1)} of this network: "
        f"{'; '.join(lines)}. {part}. To compute one of them yourself, register a "
        f"CustomOpProp under its name with mx.operator.register and load the file again"
    )


def require_known(nodes: Sequence[Node], what: str) -> None:
    """Refuse a graph that needs a placeholder.

    Raises:
        UnknownOperatorError: names all operators that are missing.
    """
    for node in nodes:
        if node.op is not None and is_placeholder(node):
            raise UnknownOperatorError(f"{what}: {explain(nodes)}")


def output_counts(data: Mapping[str, object], count: int) -> list[int | None]:
    """Return the number of outputs of each of the ``count`` nodes of a file, from ``node_row_ptr``, or None."""
    rows = data.get("node_row_ptr")
    if not isinstance(rows, list) or len(rows) != count + 1 or not all(type(row) is int for row in rows):
        return [None] * count
    return [end - start if end > start else None for start, end in pairwise(rows)]
