"""The rewrite of every policy: forward nodes that are computed a second time for the backward part.

Given the set of forward nodes whose results are not kept, every backward node that reads such a result reads the output
of a twin ``<name>_mirror`` instead. A twin reads twins where these exist and kept results elsewhere. Slots whose
shape alone matters (ignored inputs) go on naming the first node: they keep nothing alive, and must not cause work.
Twins run just before their first reader, in the order of their originals. The given graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection

from weftplan.planner.liveness import overwritten, shared_roots
from weftplan.planner.program import Program
from weftplan.planner.rewiring import Rewrite

SUFFIX = "_mirror"


def repeatable(program: Program) -> list[int]:
    """Forward nodes that may be computed twice, in execution order.

    Losses and makers of the graph's outputs and of held results are left out: these stay alive in any case. So are
    writes to results, and readers of results that are written to later: they would read something else.
    """
    graph = program.graph
    kept = {graph.entry_node[e] for e in (*graph.outputs, *program.held)}
    able = [nid for nid in program.forward if graph.works[nid].may_repeat and nid not in kept]
    changed = overwritten(program)
    if not changed:
        return able
    root = shared_roots(program)
    pure = [nid for nid in able if all(pair.identity for pair in graph.works[nid].over)]
    return [nid for nid in pure if changed.isdisjoint(root[e] for e in program.reads[nid])]


def needed_twins(program: Program, chosen: Collection[int]) -> list[int]:
    """Nodes of ``chosen`` that some backward node needs, directly or through other twins; in execution order."""
    reads = program.reads
    maker = program.graph.entry_node
    wanted: set[int] = set()
    chosen = frozenset(chosen)
    for step in range(len(program.order) - 1, -1, -1):
        nid = program.order[step]
        if step >= program.num_forward or nid in wanted:
            wanted.update(source for e in reads[nid] if (source := int(maker[e])) in chosen)
    return [nid for nid in program.forward if nid in wanted]


def repeat(program: Program, chosen: Collection[int]) -> Program:
    """Return the program whose backward part recomputes the nodes ``chosen``, out of :func:`repeatable`.

    Those that nothing backward needs get no twin; ``program`` itself is returned when nothing is repeated.
    """
    twins = needed_twins(program, chosen)
    if not twins:
        return program
    graph = program.graph
    makers = graph.entry_node
    changed = Rewrite(program)
    twin_of: dict[int, int] = {}
    first: dict[int, int] = {}

    def redirected(nid: int) -> list[int]:
        """Inputs of a node, with twins in slots that are read."""
        ignored = graph.works[nid].ignored
        return [
            e if slot in ignored or (maker := makers[e]) not in twin_of else first[maker] + e - graph.row[maker]
            for slot, e in enumerate(graph.inputs[nid])
        ]

    for nid in twins:
        twin_of[nid], first[nid] = changed.twin(nid, graph.names[nid] + SUFFIX, inputs=redirected(nid))
    for nid in program.backward:
        changed.inputs[nid] = redirected(nid)
    return changed.done([*program.forward, *_scheduled(changed, program, twin_of)])


def _scheduled(changed: Rewrite, program: Program, twin_of: dict[int, int]) -> list[int]:
    """The backward part in the given order, with every twin just before its first reader."""
    place = {nid: step for step, nid in enumerate(program.forward)}
    rank = {twin: place[nid] for nid, twin in twin_of.items()}
    makers = changed.makers
    done: set[int] = set()
    order: list[int] = []

    def missing(nid: int) -> list[int]:
        """Twins that ``nid`` needs and that have not run, in the order of their originals."""
        needed: set[int] = set()
        stack = [nid]
        while stack:
            for e in changed.inputs[stack.pop()]:
                twin = makers[e]
                if twin in rank and twin not in done and twin not in needed:
                    needed.add(twin)
                    stack.append(twin)
        return sorted(needed, key=rank.__getitem__)

    for nid in program.backward:
        twins = missing(nid)
        done.update(twins)
        order.extend(twins)
        order.append(nid)
    return order
