"""Nodes that follow one another become one: a layer and its relu, the gradient of a relu and that of its layer, and a
convolution and its batch norm where nobody wants their gradients.

The array between the two is then never written, and every element is read once less; bits stay as they are. Two nodes
are joined when nobody else reads what passes between them, and when their attributes give both to the same device and
recompute both or neither. A joined node has the name of the last, whose output it makes.
:func:`join` runs on the graph with its gradients, before anything has a size; ``parting.py`` undoes it. Nothing is
kept, and no node of others is changed; any thread may call it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Sequence

from weftplan.ops.core.schema import Op
from weftplan.ops.fusion import relu as joined
from weftplan.ops.nn.batch_norm import NORM
from weftplan.symbol.gradient import INHERITED
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import Order, all_followed, positions, redirect

ALIKE = (*INHERITED, "__force_mirroring__", "force_mirroring")
"""Attributes in which two nodes must agree to become one."""
_ALIKE = frozenset(ALIKE)
LAYER = "__layer__"
"""The attribute of a joined node that is the name of its layer."""
NORMALIZED = "__norm__"
"""The attribute of one with a batch norm in it: the name and the attributes of that, as JSON."""


def join(
    entries: Sequence[Entry], order: Sequence[Node], given: Container[Node]
) -> tuple[list[Entry], int, Order | None]:
    """(entries of a graph in which such pairs are one node, number of pairs, its depth-first order where it is known).

    A joined node has the place of its layer, or of its gradient, in that order: it needs first what they needed first,
    and all else that gradients read is in the forward part, which comes before. Only a convolution with a batch norm
    behind it needs its bias later than before.

    Args:
        order: the depth-first order of ``entries``.
        given: nodes that must not change, all that there are gradients of among them.
    """
    candidates = [node for node in order if _may_follow(node)]
    if not candidates:
        return list(entries), 0, None
    norms = [node for node in candidates if node.op is not None and node.op.name == "BatchNorm"]
    uses = _uses(entries, order, {*(node.inputs[0][0] for node in candidates), *norms})
    behind: dict[Node, list[Node]] = {}  # node -> those that it must precede: its gradients
    for node in order:
        for dep in node.control_deps:
            behind.setdefault(dep, []).append(node)
    layers: dict[Node, Node] = {}  # layer -> its relu
    inner: dict[Node, Node] = {}  # gradient of a layer -> gradient of the relu before it
    before_norm: dict[Node, Node] = {}  # batch norm -> the convolution before it
    for node in candidates:
        before = node.inputs[0]
        first = before[0]
        if first.op is None or uses[first, before[1]] != 1 or not alike(first, node):
            continue
        if _is_relu(node):
            if first.op.name in joined.LAYERS and before[1] == 0 and not first.control_deps and not node.control_deps:
                layers[first] = node
        elif node.op is not None and node.op.name == "BatchNorm":
            free = not any(one.control_deps or one in behind for one in (first, node))
            alone = free and not uses[node, 1] and not uses[node, 2]
            if alone and first.op.name == "Convolution" and node.params["axis"] == 1:
                before_norm[node] = first
        elif first not in behind and _is_gradient_of_relu(first) and _normalization(node, first) is not None:
            inner[node] = first
    # The shapes of a gradient are those of its forward node's inputs, so that of a relu needs the relu as it is.
    gone = set(inner.values())
    layers = {layer: relu for layer, relu in layers.items() if gone.issuperset(behind.get(relu, ()))}
    count = len(layers) + len(inner) + len(before_norm)
    if not count:
        return list(entries), 0, None
    made, places = _rebuilt(entries, order, given, layers=layers, inner=inner, before_norm=before_norm)
    return made, count, None if before_norm else positions(places)


def _may_follow(node: Node) -> bool:
    """Whether a node is one of a kind that is joined to what it reads first."""
    op = node.op
    if op is None or not node.inputs:
        return False
    return op.name in joined.GRADIENTS or op.name == "BatchNorm" or joined.is_relu(op, node.params)


def _uses(entries: Sequence[Entry], order: Sequence[Node], makers: set[Node]) -> Counter[tuple[Node, int]]:
    """How often each output of ``makers`` is read or is an output of the graph."""
    uses = Counter([(entry[0], entry[1]) for node in order for entry in node.inputs if entry[0] in makers])
    uses.update((entry[0], entry[1]) for entry in entries if entry[0] in makers)
    return uses


def _is_relu(node: Node) -> bool:
    return node.op is not None and joined.is_relu(node.op, node.params)


def _is_gradient_of_relu(node: Node) -> bool:
    return node.op is not None and joined.is_gradient_of_relu(node.op, node.params)


def _normalization(node: Node, before: Node) -> Node | None:
    """The batch norm of which ``node`` is the gradient, if ``before`` is that of the relu behind it."""
    norm = before.inputs[1][0].inputs[0][0]
    return norm if norm in node.control_deps else None


def alike(a: Node, b: Node) -> bool:
    """Whether two nodes have the attributes of one."""
    if a.mirror_of is not None or b.mirror_of is not None:
        return False
    plain = _ALIKE.isdisjoint(a.attrs) and _ALIKE.isdisjoint(b.attrs)  # most are
    return plain or all(a.attrs.get(key) == b.attrs.get(key) for key in ALIKE)


def _rebuilt(
    entries: Sequence[Entry], order: Sequence[Node], given: Container[Node], *, layers: dict[Node, Node],
    inner: dict[Node, Node], before_norm: dict[Node, Node],
) -> tuple[list[Entry], list[Node]]:  # fmt: skip
    """(the entries, the nodes in the order of those in whose place they are)."""
    gone = {*layers.values(), *inner.values(), *before_norm.values()}
    moved: dict[Node, Node] = {}
    known: dict[tuple[int, int], dict[str, object]] = {}  # equal layers share their parameters
    places: list[Node] = []

    def one(op: Op, name: str, main: Node, *, inputs: list[Entry], other: Node, more: dict[str, str]) -> Node:
        controls = dict.fromkeys(moved.get(dep, dep) for dep in (*main.control_deps, *other.control_deps))
        return Node(
            op,
            name,
            attrs={**main.attrs, **more},
            params=main.params,
            inputs=all_followed(inputs, moved),
            control_deps=list(controls),
            created_at=main.created_at,
        )

    for node in order:
        op = node.op
        if node in gone:
            continue  # a relu was met with its layer; others will be with what they feed
        if op is None:
            places.append(node)
            continue
        relu, before, first = layers.get(node), inner.get(node), before_norm.get(node)
        if first is not None:
            params = known.setdefault((id(first.params), id(node.params)), {**first.params, NORM: node.params})
            moved[node] = Node(
                joined.NORMALIZED[joined.RELU if relu is not None else ""],
                (relu or node).name,
                attrs={**first.attrs, LAYER: first.name, NORMALIZED: json.dumps([node.name, node.attrs])},
                params=params,
                inputs=all_followed((*first.inputs[:2], *node.inputs[1:], *first.inputs[2:]), moved),
                created_at=first.created_at,
            )
            if relu is not None:
                moved[relu] = moved[node]
        elif relu is not None:
            made = joined.LAYERS[op.name]
            named = {LAYER: node.name}
            moved[node] = moved[relu] = one(made, relu.name, node, inputs=node.inputs, other=relu, more=named)
        elif before is not None:
            norm = _normalization(node, before)
            assert norm is not None
            inputs = [before.inputs[0], *node.inputs[1:3], norm.inputs[2], *node.inputs[3:]]
            moved[node] = one(joined.GRADIENTS[op.name], node.name, node, inputs=inputs, other=before, more={})
        elif not moved.keys().isdisjoint([entry[0] for entry in node.inputs] + node.control_deps):
            redirect(node, all_followed(node.inputs, moved), moved, given)
        places.append(moved.get(node, node))
    return all_followed(entries, moved), places
