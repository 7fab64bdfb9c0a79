"""Fused nodes as the nodes that they stand for: for readers, and for files, which know no fused operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.passes import PASSES
from weftplan.planner.symbolic.passes.graph_pass import GraphPass
from weftplan.support.post_order import post_order
from weftplan.symbol.node import Entry, Node


def _pass_of(node: Node) -> GraphPass | None:
    """The fusion that made a node."""
    return next((one for one in PASSES if any(node.op is op for op in one.fused)), None)


def hidden_members(nodes: Iterable[Node]) -> list[str]:
    """Return the names of nodes that became part of others, which do not make their outputs."""
    return [name for node in nodes if (one := _pass_of(node)) is not None for name in one.members(node)]


def unfused(graph: IndexedGraph, heads: Sequence[int]) -> list[Entry]:
    """Return new symbol nodes for everything that these entries of a forward part need, without fused nodes."""
    makers, row = graph.entry_node, graph.row
    outputs_of: dict[int, Sequence[Entry]] = {}

    def at(entry: int, version: int = 0) -> Entry:
        outputs = outputs_of[makers[entry]]
        return outputs[entry - row[makers[entry]]]._replace(version=version)

    needs = [[makers[e] for e in inputs] + deps for inputs, deps in zip(graph.inputs, graph.controls, strict=True)]
    for nid in post_order([makers[e] for e in heads], needs):
        node = graph.nodes[nid]
        inputs = [at(e, graph.version(nid, slot)) for slot, e in enumerate(graph.inputs[nid])]
        fusion = _pass_of(node)
        if fusion is not None and fusion.unfuse is not None:
            outputs_of[nid] = fusion.unfuse(node, inputs)
            continue
        copy = Node(
            node.op,
            node.name,
            attrs=dict(node.attrs),
            params=node.params,
            inputs=inputs,
            control_deps=[outputs_of[dep][0].node for dep in graph.controls[nid]],
            created_at=node.created_at,
        )
        copy.version = node.version
        outputs_of[nid] = [Entry(copy, k) for k in range(row[nid + 1] - row[nid])]
    return [at(e) for e in heads]
