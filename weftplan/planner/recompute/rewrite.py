"""The one rewrite behind every policy: forward nodes that are computed a second time for the backward part.

Given the set of forward nodes whose results are not kept, every backward node that reads such a result reads the
output of a twin ``<name>_mirror`` instead. A twin reads twins where these exist and kept results elsewhere. Slots of
which only the shape matters (ignored inputs) go on naming the first node: they keep nothing alive, and must not cause
work. Twins run just before their first reader, in the order of their originals.

Forward nodes are shared with the given graph, backward nodes are copied where something they need has changed; the
given graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from weftplan.planner.graph import IndexedGraph
from weftplan.planner.liveness import PlacedGraph
from weftplan.planner.rewiring import carried_over, followed, moved_heads, rewired
from weftplan.symbol.node import Entry, Node

SUFFIX = "_mirror"


def repeatable(facts: PlacedGraph, num_forward: int) -> list[int]:
    """Forward nodes that may be computed twice, in execution order.

    Losses and makers of the graph's outputs are left out: their results stay alive to the end in any case.
    """
    graph = facts.graph
    kept = {int(graph.entry_node[e]) for e in graph.outputs.tolist()}
    found = []
    for nid in facts.order[:num_forward]:
        op = graph.nodes[nid].op
        if op is not None and not op.loss and nid not in kept:
            found.append(nid)
    return found


def needed_twins(facts: PlacedGraph, num_forward: int, chosen: Collection[int]) -> list[int]:
    """Nodes of ``chosen`` that some backward node needs, directly or through other twins; in execution order."""
    reads = facts.reads
    maker = facts.graph.entry_node
    wanted: set[int] = set()
    chosen = frozenset(chosen)
    for nid in facts.order[num_forward:]:
        for e in reads[nid]:
            source = int(maker[e])
            if source in chosen:
                wanted.add(source)
    for nid in reversed(facts.order[:num_forward]):
        if nid in wanted:
            for e in reads[nid]:
                source = int(maker[e])
                if source in chosen:
                    wanted.add(source)
    return [nid for nid in facts.order[:num_forward] if nid in wanted]


def repeat(facts: PlacedGraph, num_forward: int, chosen: Collection[int]) -> PlacedGraph:
    """The facts of the graph in which the backward part recomputes the nodes ``chosen``.

    Args:
        facts: a training graph in execution order.
        num_forward: how many steps of ``facts.order`` are the forward part.
        chosen: node ids out of :func:`repeatable`; those that nothing backward needs get no twin.

    Returns:
        New facts; ``facts`` itself when nothing is repeated. The first ``num_forward`` steps are the same nodes.
    """
    twins = needed_twins(facts, num_forward, chosen)
    if not twins:
        return facts
    graph = facts.graph
    made: dict[Node, Node] = {}
    origin: dict[Node, int] = {node: nid for nid, node in enumerate(graph.nodes)}

    def redirected(node: Node, moved: dict[Node, Node]) -> list[Entry]:
        """Inputs of a node with twins in slots that are read, and ``moved`` nodes in all slots."""
        assert node.op is not None
        ignored = node.op.ignored(node.params)
        return [
            followed(entry, moved if slot in ignored or entry[0] in moved else made)
            for slot, entry in enumerate(node.inputs)
        ]

    for nid in twins:
        node = graph.nodes[nid]
        twin = Node(
            node.op,
            node.name + SUFFIX,
            attrs=node.attrs,
            params=node.params,
            inputs=redirected(node, {}),
            control_deps=[],
            created_at=node.created_at,
            mirror_of=node,
        )
        made[node] = twin
        origin[twin] = nid

    moved: dict[Node, Node] = {}
    for nid in facts.order[num_forward:]:
        node = graph.nodes[nid]
        copy = rewired(node, redirected(node, moved), moved)
        if copy is not node:
            moved[node] = copy
            origin[copy] = nid
    # Number the new graph: entry k of a node corresponds to entry k of the node that it stands for.
    new = IndexedGraph(moved_heads(graph, moved))
    numbers = np.array([origin[node] for node in new.nodes], dtype=np.int64)
    shift = graph.row_ptr[numbers] - new.row_ptr[:-1]
    source: list[int] = (np.arange(new.num_entries, dtype=np.int64) + shift[new.entry_node]).tolist()
    stands_for: list[int] = numbers.tolist()
    return carried_over(
        facts,
        new,
        source,
        stands_for,
        order=_schedule(new, facts, num_forward, made, moved),
        contexts=facts.contexts,
        device=[facts.device[n] for n in stands_for],
    )


def _schedule(
    graph: IndexedGraph, facts: PlacedGraph, num_forward: int, made: dict[Node, Node], moved: dict[Node, Node]
) -> list[int]:
    """The given order with every twin just before its first reader."""
    number = graph.nid
    order = [number[facts.graph.nodes[nid]] for nid in facts.order[:num_forward]]
    place = {facts.graph.nodes[nid]: step for step, nid in enumerate(facts.order[:num_forward])}
    rank = {number[twin]: place[node] for node, twin in made.items()}
    makers: list[int] = graph.entry_node.tolist()
    done: set[int] = set()

    def missing(nid: int) -> Sequence[int]:
        """Twins that ``nid`` needs and that have not run, in the order of their originals."""
        found: set[int] = set()
        stack = [nid]
        while stack:
            for e in graph.inputs[stack.pop()]:
                twin = makers[e]
                if twin in rank and twin not in done and twin not in found:
                    found.add(twin)
                    stack.append(twin)
        return sorted(found, key=rank.__getitem__)

    for nid in facts.order[num_forward:]:
        node = facts.graph.nodes[nid]
        new = number[moved.get(node, node)]
        twins = missing(new)
        done.update(twins)
        order.extend(twins)
        order.append(new)
    return order
