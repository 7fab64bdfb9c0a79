"""From the core's numbers back to a symbol's graph: the nodes of a graph that the core has rewritten.

A node that runs a second time, and a copy of a result to another device, get objects of their own.
"""

from __future__ import annotations

from itertools import pairwise

from weftplan.ops.core import registry
from weftplan.planner.graph import Graph
from weftplan.planner.spill.rewrite import COPY_OUT
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.symbol.node import Node

MARK = "__spill__"
"""Attribute of copies of results that wait on the host: ``out`` or ``back``."""


def realised(base: IndexedGraph, graph: Graph) -> IndexedGraph:
    """The nodes of ``graph``, which the core made of ``base`` (or which is ``base``)."""
    if graph is base:
        return base
    copy_op = registry.get("_CrossDeviceCopy")
    copy_params = registry.parse_params(copy_op, {})
    nodes: list[Node] = []
    for nid, origin in enumerate(graph.origin):
        name = graph.names[nid]
        if origin < 0:
            mark = {MARK: "out" if graph.works[nid] is COPY_OUT else "back"}
            nodes.append(Node(copy_op, name, attrs=mark, params=copy_params))
            continue
        node = base.nodes[origin]
        if nid in graph.again:
            node = Node(node.op, name, attrs=node.attrs, params=node.params, created_at=node.created_at, mirror_of=node)
        nodes.append(node)
    row = graph.row
    return IndexedGraph(
        nodes,
        works=graph.works,
        inputs=graph.inputs,
        controls=graph.controls,
        counts=[end - begin for begin, end in pairwise(row)],
        heads=graph.outputs,
        names=graph.names,
        again=graph.again,
    )
