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
from dataclasses import replace

import numpy as np

from weftplan.planner.graph import IndexedGraph
from weftplan.planner.liveness import Facts
from weftplan.symbol.node import Entry, Node

SUFFIX = "_mirror"


def repeatable(facts: Facts, num_forward: int) -> list[int]:
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


def needed_twins(facts: Facts, num_forward: int, chosen: Collection[int]) -> list[int]:
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


def repeat(facts: Facts, num_forward: int, chosen: Collection[int]) -> Facts:
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
    makers: list[int] = graph.entry_node.tolist()
    made: dict[int, Node] = {}
    origin: dict[Node, int] = {node: nid for nid, node in enumerate(graph.nodes)}

    def redirected(nid: int, moved: dict[int, Node]) -> list[Entry]:
        """Inputs of a node with twins in slots that are read, and ``moved`` nodes in all slots."""
        node = graph.nodes[nid]
        op = node.op
        assert op is not None
        ignored = op.ignored(node.params)
        result = []
        for slot, (e, entry) in enumerate(zip(graph.inputs[nid], node.inputs, strict=True)):
            source = makers[e]
            target = moved.get(source)
            if target is None and slot not in ignored:
                target = made.get(source)
            result.append(entry if target is None else Entry(target, entry[1], entry[2]))
        return result

    for nid in twins:
        node = graph.nodes[nid]
        twin = Node(
            node.op,
            node.name + SUFFIX,
            attrs=node.attrs,
            params=node.params,
            inputs=redirected(nid, {}),
            control_deps=[],
            created_at=node.created_at,
            mirror_of=node,
        )
        made[nid] = twin
        origin[twin] = nid

    moved: dict[int, Node] = {}
    for nid in facts.order[num_forward:]:
        node = graph.nodes[nid]
        inputs = redirected(nid, moved)
        if inputs == node.inputs and not any(dep in moved for dep in graph.controls[nid]):
            continue
        copy = Node(
            node.op,
            node.name,
            attrs=node.attrs,
            params=node.params,
            inputs=inputs,
            control_deps=[moved.get(dep, graph.nodes[dep]) for dep in graph.controls[nid]],
            created_at=node.created_at,
            mirror_of=node.mirror_of,
        )
        moved[nid] = copy
        origin[copy] = nid
    return _rebuilt(facts, num_forward, made, moved, origin)


def _rebuilt(
    facts: Facts, num_forward: int, made: dict[int, Node], moved: dict[int, Node], origin: dict[Node, int]
) -> Facts:
    """Number the new graph, carry sizes and places over, and schedule the twins."""
    old = facts.graph
    heads = []
    for e in old.outputs.tolist():
        node, index, version = old.entry(e)
        heads.append(Entry(moved.get(old.nid[node], node), index, version))
    graph = IndexedGraph(heads)
    source = np.array([origin[node] for node in graph.nodes], dtype=np.int64)
    # Entry k of a node corresponds to entry k of the node it stands for.
    shift = old.row_ptr[source] - graph.row_ptr[:-1]
    entry = np.arange(graph.num_entries, dtype=np.int64) + shift[graph.entry_node]
    entries = entry.tolist()
    numbers = source.tolist()
    external = np.frombuffer(facts.external, dtype=np.uint8)[entry]
    # A twin of the maker of a gradient does not exist (only forward nodes have twins), so this stays one to one.
    gradients = np.flatnonzero(external.astype(bool) & ~graph.is_variable[graph.entry_node]).tolist()
    reads: list[list[int]] = []
    refs = [0] * graph.num_entries
    for nid, node in enumerate(graph.nodes):
        inputs = graph.inputs[nid]
        ignored = () if node.op is None else node.op.ignored(node.params)
        read = [e for slot, e in enumerate(inputs) if slot not in ignored] if ignored else inputs
        reads.append(read)
        for e in read:
            refs[e] += 1
    for e in graph.outputs.tolist():
        refs[e] += 1
    return replace(
        facts,
        graph=graph,
        order=_schedule(graph, facts, num_forward, made, moved),
        shapes=[facts.shapes[e] for e in entries],
        dtypes=[facts.dtypes[e] for e in entries],
        elements=[facts.elements[e] for e in entries],
        nbytes=[facts.nbytes[e] for e in entries],
        device=[facts.device[n] for n in numbers],
        external=bytearray(external.tobytes()),
        added=frozenset(e for e in gradients if entries[e] in facts.added),
        reads=reads,
        refs=refs,
        pairs=[facts.pairs[n] for n in numbers],
        workspaces={n: facts.workspaces[o] for n, o in enumerate(numbers) if o in facts.workspaces},
    )


def _schedule(
    graph: IndexedGraph, facts: Facts, num_forward: int, made: dict[int, Node], moved: dict[int, Node]
) -> list[int]:
    """The given order with every twin just before its first reader."""
    number = graph.nid
    order = [number[facts.graph.nodes[nid]] for nid in facts.order[:num_forward]]
    rank = {number[twin]: nid for nid, twin in made.items()}
    place = {nid: step for step, nid in enumerate(facts.order[:num_forward])}
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
        return sorted(found, key=lambda twin: place[rank[twin]])

    for nid in facts.order[num_forward:]:
        new = number[moved.get(nid, facts.graph.nodes[nid])]
        twins = missing(new)
        done.update(twins)
        order.extend(twins)
        order.append(new)
    return order
