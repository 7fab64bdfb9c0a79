"""From the core's numbers back to nodes: the symbol's graph after the core has rewritten it.

Nodes are shared between graphs, so a node that is to read something else is copied, never changed.
"""

from __future__ import annotations

from weftplan.ops.core import registry
from weftplan.planner.graph import Graph
from weftplan.planner.spill.rewrite import COPY_OUT
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import rewired

MARK = "__spill__"
"""Attribute of copies of results that wait on the host: ``out`` or ``back``."""


def realised(base: IndexedGraph, graph: Graph) -> IndexedGraph:
    """The nodes of ``graph``, which the core made of ``base`` (or which is ``base``)."""
    if graph is base:
        return base
    copy_op = registry.get("_CrossDeviceCopy")
    copy_params = registry.parse_params(copy_op, {})
    nodes: list[Node] = []
    moved: dict[Node, Node] = {}
    makers = graph.entry_node
    for nid, (origin, reads) in enumerate(zip(graph.origin, graph.inputs, strict=True)):
        entries = [Entry(nodes[makers[e]], e - graph.row[makers[e]]) for e in reads]
        if origin < 0:
            mark = {MARK: "out" if graph.works[nid] is COPY_OUT else "back"}
            nodes.append(Node(copy_op, graph.names[nid], attrs=mark, params=copy_params, inputs=entries))
            continue
        node = base.nodes[origin]
        # A version counts writes to a variable. What a rewrite puts in another node's place keeps that node's.
        entries = [
            entry if graph.origin[makers[e]] < 0 else Entry(entry[0], entry[1], given[2])
            for e, entry, given in zip(reads, entries, node.inputs, strict=True)
        ]
        if nid in graph.again:
            nodes.append(
                Node(
                    node.op,
                    graph.names[nid],
                    attrs=node.attrs,
                    params=node.params,
                    inputs=entries,
                    created_at=node.created_at,
                    mirror_of=node,
                )
            )
            continue
        made = rewired(node, entries, moved)
        if made is not node:
            moved[node] = made
        nodes.append(made)
    found = IndexedGraph(Entry(nodes[makers[e]], e - graph.row[makers[e]]) for e in graph.outputs)
    assert found.nodes == nodes, "the core numbers a rewritten graph as IndexedGraph does"
    return found
