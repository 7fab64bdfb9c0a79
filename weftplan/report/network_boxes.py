"""Boxes of a picture of a network: a box for each operator, or for several collapsed operators of a large network.

The module owns the choice of shown nodes and of nodes that share a box. Parameters and labels are not shown. It is
stateless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weftplan.errors import ShapeError
from weftplan.ops.core.rules import is_known
from weftplan.ops.core.schema import Shape
from weftplan.symbol import Entry, Node, Symbol, topological_order
from weftplan.symbol.inference import solver as infer

T = TypeVar("T")

MAX_BOXES = 60
"""Maximum number of boxes in a picture before layers are collapsed."""
_LAYERS = frozenset({"Convolution", "Deconvolution", "FullyConnected", "RNN", "Embedding", "dot", "batch_dot"})
"""Operators that begin a new box when a chain of operators is collapsed."""


@dataclass(slots=True)
class Box:
    """Nodes that one box of the picture stands for, in execution order, and the boxes that it reads."""

    nodes: list[Node]
    inputs: list[int]
    repeats: int = 1
    """Number of equal groups of nodes that the box stands for."""

    @property
    def kinds(self) -> Counter[str]:
        """Return the operators and how often the box has each."""
        return Counter(node.op.name for node in self.nodes if node.op is not None)

    @property
    def kind(self) -> str:
        """Return the operator that decides the colour."""
        named = [node.op.name for node in self.nodes if node.op is not None]
        return next((name for name in named if name in _LAYERS), named[0] if named else "null")


def boxes_of(symbol: Symbol, *, max_boxes: int = MAX_BOXES) -> list[Box]:
    """Return the boxes of a network in execution order; more than ``max_boxes`` are collapsed, step by step.

    First a layer takes the operators after it that nothing else reads; then the branches between two boxes that every
    path passes become a box; then equal neighbours; at last neighbours in the order of execution, until
    ``max_boxes`` are left.
    """
    boxes = _every_node(shown_nodes(symbol))
    for collapse in (_chains, _branches, _repeats):
        if len(boxes) <= max_boxes:
            return boxes
        boxes = collapse(boxes)
    return boxes if len(boxes) <= max_boxes else _slices(boxes, max_boxes)


def known_shapes(symbol: Symbol, shapes: Mapping[str, Shape] | None) -> dict[Entry, Shape]:
    """Return the shapes of all entries that follow from the shapes of inputs."""
    if not shapes:
        return {}
    try:
        values = infer.infer_shapes(topological_order(symbol.entries), shapes)
    except ShapeError:
        return {}
    return {entry: shape for entry, shape in by_entry(symbol, values).items() if shape is not None and is_known(shape)}


def by_entry(symbol: Symbol, values: Sequence[T]) -> dict[Entry, T]:
    """Return the entries of a network with ``values``, which are in the order of inference."""
    nodes = topological_order(symbol.entries)
    return {
        Entry(node, k): values[start + k]
        for node, start in zip(nodes, infer.entry_rows(nodes), strict=False)
        for k in range(node.num_outputs)
    }


def data_of(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes that are the first input of a node: the data that flows through the network."""
    return {node.inputs[0].node for node in nodes if node.inputs}


def shown_nodes(symbol: Symbol) -> list[Node]:
    """Return the operators, and the variables that are an operator's data or an output, in execution order."""
    nodes = topological_order(symbol.entries)
    data = data_of(nodes) | {entry.node for entry in symbol.entries}
    return [node for node in nodes if node.op is not None or node in data]


def _every_node(nodes: Sequence[Node]) -> list[Box]:
    """Return a box for each of these nodes."""
    index = {node: k for k, node in enumerate(nodes)}
    return [
        Box([node], list(dict.fromkeys(index[entry.node] for entry in node.inputs if entry.node in index)))
        for node in nodes
    ]


def _merged(boxes: Sequence[Box], group: Sequence[int]) -> list[Box]:
    """Return the boxes with each group merged; ``group`` holds the number of the group of each box."""
    number = {key: k for k, key in enumerate(dict.fromkeys(sorted(group)))}
    result = [Box([], []) for _ in number]
    for box, key in zip(boxes, group, strict=True):
        target = result[number[key]]
        target.nodes += box.nodes
        read = (number[group[source]] for source in box.inputs)
        target.inputs += [source for source in read if source != number[key] and source not in target.inputs]
    return result


def _readers(boxes: Iterable[Box]) -> Counter[int]:
    return Counter(source for box in boxes for source in box.inputs)


def _chains(boxes: list[Box]) -> list[Box]:
    """Merge each operator that is the only reader of its only input into the input's box, unless it is a layer."""
    readers, group = _readers(boxes), list(range(len(boxes)))
    for k, box in enumerate(boxes):
        node = box.nodes[0]
        if len(box.inputs) != 1 or node.op is None or node.op.name in _LAYERS:
            continue
        source = box.inputs[0]
        if readers[source] == 1 and boxes[source].nodes[0].op is not None:
            group[k] = group[source]
    return _merged(boxes, group)


def _branches(boxes: list[Box]) -> list[Box]:
    """Merge all boxes between two boxes that every path passes, together with the second of these."""
    last_reader = [0] * len(boxes)
    for k, box in enumerate(boxes):
        for source in box.inputs:
            last_reader[source] = k
    group, current, furthest = [], 0, 0
    for k in range(len(boxes)):
        group.append(current)
        if furthest <= k:  # no edge passes this box by
            current = k + 1
        furthest = max(furthest, last_reader[k])
    return _merged(boxes, group)


def _repeats(boxes: list[Box]) -> list[Box]:
    """Collapse neighbours in a chain that hold the same operators."""
    group = list(range(len(boxes)))
    for k in range(1, len(boxes)):
        if boxes[k].kinds == boxes[k - 1].kinds and boxes[k].inputs == [k - 1]:
            group[k] = group[k - 1]
    sizes = Counter(group)
    result = _merged(boxes, group)
    for box, key in zip(result, sorted(sizes), strict=True):
        box.repeats = sizes[key]
    return result


def _slices(boxes: list[Box], limit: int) -> list[Box]:
    """Collapse neighbours in the order of execution into at most ``limit`` boxes."""
    return _merged(boxes, [k * limit // len(boxes) for k in range(len(boxes))])
