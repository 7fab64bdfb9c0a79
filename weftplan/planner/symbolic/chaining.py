"""Which elementwise nodes of a sized graph become one: those on a host whose arrays are worth it.

Small arrays stay in the cache between two nodes anyway, and a graph of them is bound in less time as it is. Nothing is
kept; any thread may call this.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from weftplan.ops import chains
from weftplan.ops.schema import DType, Shape, TensorSpec
from weftplan.planner.symbolic.differentiate import Differentiated
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.passes import joined_chains
from weftplan.symbol.chaining import chained
from weftplan.symbol.joining import alike
from weftplan.symbol.node import Node

LEAST = 1 << 14
"""Elements of an array: smaller ones are not worth joining."""


def with_chains(
    found: Differentiated, *, shapes: list[Shape], dtypes: list[DType]
) -> tuple[Differentiated, list[Shape], list[DType]]:
    """The same with such nodes joined, and shapes and dtypes of its entries; what is given where there are none."""
    graph, devices = found.graph, found.devices
    nid, row = graph.nid, graph.row

    def is_large(node: Node) -> bool:
        if not chains.is_elementwise(node.op):
            return False
        number = nid[node]
        if not devices[number].is_host or prod(shapes[row[number]]) < LEAST:
            return False
        ins = [TensorSpec(shapes[e], dtypes[e]) for e in graph.inputs[number]]
        outs = [TensorSpec(shapes[e], dtypes[e]) for e in range(row[number], row[number + 1])]
        assert node.op is not None
        return chains.may_be_link(node.op, node.params, ins, outs)

    heads = [graph.entry(eid) for eid in graph.outputs]
    entries, moved = chained(
        heads, graph.nodes, is_large, lambda a, b: devices[nid[a]] == devices[nid[b]] and alike(a, b)
    )
    if not moved:
        return replace(found, passes=(*found.passes, joined_chains(0))), shapes, dtypes
    joined = IndexedGraph(entries)
    before = {new: old for old, new in moved.items()}  # of a chain the last node, whose output it makes
    numbers = [nid[before.get(node, node)] for node in joined.nodes]
    kept = [e for number in numbers for e in range(row[number], row[number + 1])]
    less = len(graph.nodes) - len(joined.nodes)
    made = replace(
        found,
        graph=joined,
        devices=[devices[number] for number in numbers],
        joined=found.joined + less,
        passes=(*found.passes, joined_chains(less)),
    )
    return made, [shapes[e] for e in kept], [dtypes[e] for e in kept]
