"""Which gradients of FullyConnected layers with one weight are gathered, before the graph is numbered.

Layers of few rows are worth it: their products are small, and each has a sum behind it. How many rows a layer has
follows from the forward part, of which shapes and dtypes are found here where a graph has such sums. Nothing is kept;
any thread may call this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.ops.core.schema import DType, Shape
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.infer import complete_graph
from weftplan.planner.symbolic.passes.batch_weight_gradients import Gathered, gathered
from weftplan.planner.symbolic.passes.fuse_relu import alike
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import positions

ROWS = 256
"""Rows of the layers of one node, and no more than a weight has columns: what waits for the last of these layers, and
the scratch beside each other, are about as large as the weight then."""
MOST_LAYERS = 32
"""Layers of one node, however few rows each has."""
FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
"""Dtypes whose products need no wider copies."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The forward part of a graph, which is its first nodes; numbered and sized once somebody asks."""

    outputs: Sequence[Entry]
    nodes: list[Node]
    shapes: Mapping[str, Shape]
    """Given ones, by name."""
    dtypes: Mapping[str, Any]

    @cached_property
    def graph(self) -> IndexedGraph:
        """The part in numbers, which are those of these nodes in the whole graph."""
        return IndexedGraph(self.outputs, positions(self.nodes))

    @cached_property
    def facts(self) -> tuple[list[Shape], list[DType]]:
        """Shapes and dtypes of all its entries."""
        graph = self.graph
        return complete_graph(graph, graph.outputs, head_grads=(), shapes=self.shapes, dtypes=self.dtypes)


def gather(
    entries: Sequence[Entry], order: Sequence[Node], *, forward: Forward, device: Callable[[Node], Context]
) -> Gathered:
    """The graph of these entries, whose depth-first order is given, with shared gradients gathered."""

    def inputs(layer: Node) -> list[Shape]:
        graph, shapes = forward.graph, forward.facts[0]
        return [shapes[e] for e in graph.inputs[graph.nid[layer.control_deps[0]]]]

    def most(node: Node) -> int:
        layer = node.control_deps[0]
        graph, (shapes, dtypes) = forward.graph, forward.facts
        number = graph.nid[layer]
        output, (data, weight) = graph.row[number], graph.inputs[number][:2]
        rows = prod(shapes[output]) // shapes[weight][0]
        kinds = {dtypes[e] for e in (output, data, weight)}
        if not device(node).is_host or not rows or len(kinds) > 1 or kinds.pop() not in FLOATS:
            return 0
        return min(-(-min(ROWS, shapes[weight][1]) // rows), MOST_LAYERS)

    def together(a: Node, b: Node) -> bool:
        return device(a) == device(b) and a.params == b.params and alike(a, b) and inputs(a) == inputs(b)

    return gathered(entries, order[len(forward.nodes) :], most, together)
