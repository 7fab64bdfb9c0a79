"""A depthwise convolution between two batch norms becomes one node, and so do the gradients of the three.

Nothing else may read what passes between them. Then the array between the first batch norm and the convolution is made
by nobody, and no gradient between the three is written. ``ops/fusion/depthwise_block.py`` has the operators.

Why no cycle comes of it: the forward node makes what the second batch norm made, and beside it only what the gradients
read, so whoever reads it read one of the three. A gradient reads nothing that another gradient of the three does not
make but what comes from before all of them, or from the forward graph. Nothing is kept, and no node of others is
changed; any thread may call this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from weftplan.ops.core import registry
from weftplan.ops.fusion.depthwise_block import BEFORE, BEHIND, BLOCK, BLOCK_GRADIENT, LAYER, RELU, norm, norm_gradient
from weftplan.planner.symbolic.passes.fuse_relu import ALIKE, alike
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import Key, Rewritten, followed, redirect, rewired, topological_order

Readers = dict[Key, list[Key]]
"""Of what a node makes: who reads it, as which input."""
HEAD = -1
"""The place at which it is an output of the graph."""
MEMBERS = "__block__"
"""The attribute of a node that stands for three: their names and attributes as JSON, in the order in which they ran."""
There = Callable[[Entry], Entry]
"""What stands for a given entry."""


@dataclass(frozen=True, slots=True)
class Block:
    """The six nodes that two can stand for, in the order in which they run."""

    before: Node
    layer: Node
    behind: Node
    behind_gradient: Node
    layer_gradient: Node
    before_gradient: Node

    @property
    def forward(self) -> tuple[Node, Node, Node]:
        """The nodes of the forward pass."""
        return self.before, self.layer, self.behind

    @property
    def backward(self) -> tuple[Node, Node, Node]:
        """The nodes of their gradients."""
        return self.behind_gradient, self.layer_gradient, self.before_gradient

    @property
    def has_relu(self) -> bool:
        """Whether there is a relu behind the second batch norm."""
        return self.behind.op is norm(True)

    @property
    def params(self) -> dict[str, Any]:
        """Those of the nodes that stand for it."""
        before, layer, behind = (node.params for node in self.forward)
        return {BEFORE: before, LAYER: layer, BEHIND: behind, RELU: self.has_relu}


def with_blocks(
    entries: Sequence[Entry], order: Sequence[Node], fits: Callable[[Block], bool], given: Container[Node]
) -> Rewritten:
    """The graph with such nodes joined.

    Args:
        order: the depth-first order of ``entries``.
        fits: whether nodes that may become one are worth it.
        given: nodes that must not change.
    """
    found = [block for block in _blocks(entries, order) if fits(block)]
    if not found:
        return Rewritten(list(entries), {}, {}, 0)
    last = {block.behind: block for block in found} | {block.before_gradient: block for block in found}
    inner = {node for block in found for node in (*block.forward, *block.backward)}
    moved: dict[Node, Node] = {}
    at: dict[Key, Entry] = {}
    made: dict[Node, list[Key]] = {}
    known: dict[tuple[object, ...], dict[str, Any]] = {}  # equal blocks have one dictionary

    def there(entry: Entry) -> Entry:
        now = at.get((entry[0], entry[1]))
        return followed(entry, moved) if now is None else now

    for node in order:
        block = last.get(node)
        if block is not None:
            key = (*(id(one.params) for one in block.forward), block.has_relu)
            params = known.setdefault(key, block.params)
            is_forward = node is block.behind
            one, like = (_forward if is_forward else _backward)(block, params, there, moved)
            made[one] = like
            at.update((old, Entry(one, number)) for number, old in enumerate(like))
            moved.update(dict.fromkeys(block.forward if is_forward else block.backward, one))
        elif node not in inner and node.op is not None:
            inputs = [there(entry) for entry in node.inputs]
            if inputs != node.inputs or not moved.keys().isdisjoint(node.control_deps):
                redirect(node, inputs, moved, given)
    copies = {new: old for old, new in moved.items() if new not in made}
    return Rewritten([there(entry) for entry in entries], copies, made, len(found))


def _blocks(entries: Sequence[Entry], order: Sequence[Node]) -> list[Block]:
    layers = [node for node in order if node.op is not None and node.op.name == "_backward_Convolution"]
    layers = [node for node in layers if node.params["num_group"] > 1 and node.params["no_bias"]]
    if not layers:
        return []
    near = {*layers}.union(*([entry[0] for entry in node.inputs] + node.control_deps for node in layers))
    near.update(node for node in order if node.op is norm_gradient(True))
    readers: Readers = {}
    waiting: dict[Node, list[Node]] = {}
    for node in order:
        for place, entry in enumerate(node.inputs):
            if entry[0] in near:
                readers.setdefault((entry[0], entry[1]), []).append((node, place))
        for dep in node.control_deps:
            waiting.setdefault(dep, []).append(node)
    for entry in entries:
        readers.setdefault((entry[0], entry[1]), []).append((entry[0], HEAD))
    found = [_around(node, readers) for node in layers]
    return [block for block in found if block is not None and _is_closed(block, readers, waiting)]


def _around(gradient: Node, readers: Readers) -> Block | None:
    """The nodes around ``gradient``, which is that of the convolution; None where they are of other kinds."""
    behind_gradient, (before, index, _), weight = gradient.inputs[0][0], gradient.inputs[1], gradient.inputs[2]
    layer = next((dep for dep in gradient.control_deps if dep.op is registry.get("Convolution")), None)
    if layer is None or index or before.op is not norm(True) or layer.inputs != [Entry(before), weight]:
        return None
    if gradient.inputs[0] != Entry(behind_gradient):
        return None
    behind = next((node for node, place in readers.get((layer, 0), ()) if place == 0 and _is_norm(node)), None)
    after = [node for node, place in readers.get((gradient, 0), ()) if place == 0]
    if behind is None or len(after) != 1 or after[0].op is not norm_gradient(True):
        return None
    return Block(before, layer, behind, behind_gradient, gradient, after[0])


def _is_norm(node: Node) -> bool:
    return node.op is norm(False) or node.op is norm(True)


def _is_closed(block: Block, readers: Readers, waiting: dict[Node, list[Node]]) -> bool:
    """Whether the gradients are those of the forward nodes, nobody else reads what passes between the nodes or waits
    for one of them, somebody reads the gradient of the data, in whose memory another one lies for a while, and what the
    gradients make besides is read by nobody in the graph."""
    before, layer, behind = block.forward
    last, gradient, first = block.backward

    def of_norm(node: Node, data: Entry, ograd: Entry, *, relu: bool) -> list[Entry]:
        gamma, beta = node.inputs[1:3]
        return [ograd, data, gamma, *((beta,) if relu else ()), Entry(node, 1), Entry(node, 2)]

    if last.op is not norm_gradient(block.has_relu):
        return False
    if last.inputs != of_norm(behind, Entry(layer), last.inputs[0], relu=block.has_relu):
        return False
    if first.inputs != of_norm(before, before.inputs[0], Entry(gradient), relu=True):
        return False
    inside = {*block.forward, *block.backward}
    if any(node not in inside for one in inside for node in waiting.get(one, ())):
        return False
    passed = ((before, 0), (before, 1), (before, 2), (layer, 0), (last, 0), (gradient, 0))
    if any(place == HEAD or node not in inside for key in passed for node, place in readers.get(key, ())):
        return False
    if not any(_reads(*reader) for reader in readers.get((first, 0), ())):
        return False
    made = ((last, 1), (last, 2), (gradient, 1))
    if any(place != HEAD for key in made for _, place in readers.get(key, ())):
        return False
    return all(alike(gradient, node) for node in inside if node is not gradient)


def _reads(node: Node, place: int) -> bool:
    """Whether the values of an input matter, not its shape alone."""
    return place == HEAD or node.op is None or place not in node.op.ignored(node.params)


def _controls(nodes: Sequence[Node], moved: dict[Node, Node]) -> list[Node]:
    """What these nodes wait for besides each other."""
    return list(dict.fromkeys(moved.get(dep, dep) for node in nodes for dep in node.control_deps if dep not in nodes))


def _forward(block: Block, params: dict[str, Any], there: There, moved: dict[Node, Node]) -> tuple[Node, list[Key]]:
    before, layer, behind = block.forward
    shared = {key: behind.attrs[key] for key in ALIKE if key in behind.attrs}
    node = Node(
        BLOCK,
        behind.name,
        attrs={**shared, MEMBERS: json.dumps([(node.name, node.attrs) for node in block.forward])},
        params=params,
        inputs=[there(e) for e in (*before.inputs, layer.inputs[1], *behind.inputs[1:])],
        control_deps=_controls(block.forward, moved),
        created_at=layer.created_at,
    )
    return node, [(behind, 0), (layer, 0), (before, 1), (before, 2), (behind, 1), (behind, 2)]


def _backward(block: Block, params: dict[str, Any], there: There, moved: dict[Node, Node]) -> tuple[Node, list[Key]]:
    before, layer, behind = block.forward
    last, gradient, first = block.backward
    inputs = [last.inputs[0], Entry(layer), before.inputs[0], layer.inputs[1]]
    for one in (before, behind):
        inputs += [*one.inputs[1:3], Entry(one, 1), Entry(one, 2)]
    node = Node(
        BLOCK_GRADIENT,
        first.name,
        attrs=first.attrs,
        params=params,
        inputs=[there(e) for e in inputs],
        control_deps=_controls(block.backward, moved),
        created_at=gradient.created_at,
    )
    return node, [(first, 0), (first, 1), (first, 2), (gradient, 1), (last, 1), (last, 2)]


def members(node: Node) -> list[tuple[str, dict[str, str]]]:
    """Names and attributes of the forward nodes for which this one stands; none for another node."""
    return [(name, attrs) for name, attrs in json.loads(node.attrs[MEMBERS])] if node.op is BLOCK else []


def apart(entries: Sequence[Entry]) -> list[Entry]:
    """The same forward graph with the nodes for which others stand."""
    moved: dict[Node, Node] = {}
    for node in topological_order(entries):
        inputs = [followed(entry, moved) for entry in node.inputs]
        if node.op is BLOCK:
            moved[node] = _behind(node, inputs)
        else:
            kept = rewired(node, inputs, moved)
            if kept is not node:
                moved[node] = kept
    return [followed(entry, moved) for entry in entries]


def _behind(node: Node, inputs: Sequence[Entry]) -> Node:
    """The last of the nodes for which this one stands, reading ``inputs``."""
    ops = norm(True), registry.get("Convolution"), norm(node.params[RELU])
    made: Node | None = None
    for op, (name, attrs), of, own in zip(
        ops, members(node), (BEFORE, LAYER, BEHIND), (inputs[1:5], inputs[5:6], inputs[6:]), strict=True
    ):
        data = inputs[0] if made is None else Entry(made)
        made = Node(op, name, attrs=attrs, params=node.params[of], inputs=[data, *own], created_at=node.created_at)
    assert made is not None
    return made
