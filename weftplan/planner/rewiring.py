"""What rewrites of a graph share: nodes that read something else, and the sizes that they keep.

Nodes are shared between graphs and never changed in place, so a node that is to read something else is copied. A
rewrite keeps such copies in a dictionary, *moved*: the node of the given graph, the node in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weftplan.device.context import Context
from weftplan.planner.graph import IndexedGraph
from weftplan.planner.liveness import PlacedGraph, references
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


def carried_over(
    facts: PlacedGraph,
    graph: IndexedGraph,
    source: Sequence[int],
    origin: Sequence[int | None],
    *,
    order: list[int],
    contexts: Sequence[Context],
    device: list[int],
) -> PlacedGraph:
    """``facts`` about a rewritten graph.

    Args:
        facts: about the given graph.
        graph: the rewritten one.
        source: for each of its entries the entry of the given graph that has the same shape and dtype.
        origin: for each of its nodes the node of the given graph whose work it does; None for a new kind of work,
            which computes nothing in place, needs no scratch, and writes nothing that the caller brought.
        order, contexts, device: as in the facts.
    """
    reads = []
    for node, inputs in zip(graph.nodes, graph.inputs, strict=True):
        ignored = () if node.op is None else node.op.ignored(node.params)
        reads.append([e for slot, e in enumerate(inputs) if slot not in ignored] if ignored else inputs)
    makers: list[int] = graph.entry_node.tolist()
    external = bytearray(facts.external[e] and origin[nid] is not None for e, nid in zip(source, makers, strict=True))
    return replace(
        facts,
        graph=graph,
        order=order,
        contexts=tuple(contexts),
        device=device,
        shapes=[facts.shapes[e] for e in source],
        dtypes=[facts.dtypes[e] for e in source],
        elements=[facts.elements[e] for e in source],
        nbytes=[facts.nbytes[e] for e in source],
        reads=reads,
        refs=references(graph, reads),
        external=external,
        added=frozenset(e for e, was in enumerate(source) if external[e] and was in facts.added),
        pairs=[() if was is None else facts.pairs[was] for was in origin],
        workspaces={
            nid: facts.workspaces[was] for nid, was in enumerate(origin) if was is not None and was in facts.workspaces
        },
    )
