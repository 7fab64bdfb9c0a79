"""What rewrites of a graph share: nodes that read something else, and the sizes that they keep.

Nodes are shared between graphs and never changed in place, so a node that is to read something else is copied. A
rewrite keeps such copies in a dictionary, *moved*: the node of the given graph, the node in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weftplan.planner.graph import IndexedGraph
from weftplan.planner.liveness import Facts, references
from weftplan.symbol.node import Entry, Node


def followed(entry: Entry, moved: Mapping[Node, Node]) -> Entry:
    """The same output of the node in its node's place."""
    node = moved.get(entry[0])
    return entry if node is None else Entry(node, entry[1], entry[2])


def rewired(node: Node, inputs: list[Entry], moved: Mapping[Node, Node]) -> Node:
    """``node`` with these inputs and whatever moved into the place of its control dependencies.

    Returns ``node`` itself when it has these anyway, else a copy with its name, attributes and place in the code.
    """
    controls = [moved.get(dep, dep) for dep in node.control_deps]
    if inputs == node.inputs and controls == node.control_deps:
        return node
    return Node(
        node.op,
        node.name,
        attrs=node.attrs,
        params=node.params,
        inputs=inputs,
        control_deps=controls,
        created_at=node.created_at,
        mirror_of=None if node.mirror_of is None else moved.get(node.mirror_of, node.mirror_of),
    )


def moved_heads(graph: IndexedGraph, moved: Mapping[Node, Node]) -> list[Entry]:
    """The heads of ``graph`` after a rewrite."""
    return [followed(graph.entry(e), moved) for e in graph.outputs.tolist()]


def resized(facts: Facts, graph: IndexedGraph, source: Sequence[int]) -> Facts:
    """``facts`` about a rewritten graph, as far as sizes and reads go; order, places and the rest are the caller's.

    Args:
        facts: about the given graph.
        graph: the rewritten one.
        source: for each of its entries the entry of the given graph that has the same shape and dtype.
    """
    reads = []
    for node, inputs in zip(graph.nodes, graph.inputs, strict=True):
        ignored = () if node.op is None else node.op.ignored(node.params)
        reads.append([e for slot, e in enumerate(inputs) if slot not in ignored] if ignored else inputs)
    return replace(
        facts,
        graph=graph,
        shapes=[facts.shapes[e] for e in source],
        dtypes=[facts.dtypes[e] for e in source],
        elements=[facts.elements[e] for e in source],
        nbytes=[facts.nbytes[e] for e in source],
        reads=reads,
        refs=references(graph, reads),
    )
