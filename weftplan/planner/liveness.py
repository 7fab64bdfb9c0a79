"""Liveness of entries, dependencies between nodes, ancestors of steps, and list scheduling.

An entry is alive from the step that writes it to its last reader or to the node until which it is held, both included.
An output of the graph is alive until the end.

A set of steps is one integer, bit s for step s, so that a set operation is one operation on long integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from weftplan.errors import PlanError
from weftplan.planner.program import Program, overwritten, shared_roots

MAX_STEPS = 8192
"""Maximum number of steps for which sets of steps are computed; n steps need n * n / 16 bytes, here 4 MiB."""


def dependencies(program: Program) -> list[list[int]]:
    """Return, per node, the operator nodes that it must follow in every execution order; empty for variables.

    These are the makers of its inputs and of the entries held until its end, and its control dependencies. A node that
    uses an auxiliary state also follows the previous user of that state: users of a state keep their order, because one
    of them writes it. A node that writes to a result follows all earlier readers of the result or of a view of it.
    """
    graph = program.graph
    makers = graph.entry_node
    variable = graph.is_variable
    states = {inputs[slot] for work, inputs in zip(graph.works, graph.inputs, strict=True) for slot in work.writes}
    predecessors: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    touched: dict[int, int] = {}
    root = shared_roots(program)
    written = overwritten(program)
    readers: dict[int, list[int]] = {e: [] for e in written}
    for nid in program.order:
        needed = (*graph.inputs[nid], *program.holds.get(nid, ()))
        needs = dict.fromkeys([*map(makers.__getitem__, needed), *graph.controls[nid]])
        for e in graph.inputs[nid]:
            if e in states:
                needs[touched.get(e, nid)] = None
                touched[e] = nid
        for e in graph.inputs[nid] if written else ():
            if root[e] in written:
                readers[root[e]].append(nid)
        for pair in graph.works[nid].over:
            if not pair.identity:
                needs.update(dict.fromkeys(readers[root[graph.inputs[nid][pair.input]]]))
        needs.pop(nid, None)
        predecessors[nid] = [n for n in needs if not variable[n]]
    return predecessors


def check_overwrites(program: Program) -> None:
    """Check that no step and no output reads a result after another step has overwritten it (:attr:`Work.over`).

    Raises:
        PlanError: a value is gone when it is read; names the reader and the step that has overwritten it.
    """
    graph, root, changed = program.graph, shared_roots(program), overwritten(program)
    value, writer = list(range(graph.num_entries)), dict.fromkeys(changed, -1)
    content = {e: e for e in changed}

    def check(entries: Iterable[int], reader: str) -> None:
        for e in entries:
            if root[e] in changed and content[root[e]] != value[e]:
                raise PlanError(
                    f"{reader} reads {graph.entry_name(e)!r}, but {graph.names[writer[root[e]]]!r} has overwritten it: "
                    f"read the output of that step, or move the reader before it"
                )

    for nid in program.order if changed else ():
        check((*program.reads[nid], *program.holds.get(nid, ())), repr(graph.names[nid]))
        for pair in graph.works[nid].over:
            source, out = graph.inputs[nid][pair.input], graph.row[nid] + pair.output
            if pair.identity:
                value[out] = value[source]
            else:
                content[root[out]], writer[root[out]] = out, nid
    check(graph.outputs, "the caller")


def scheduled(
    nodes: Sequence[int],
    needs: Mapping[int, Sequence[int]] | Sequence[Sequence[int]],
    *,
    value: Callable[[int], int],
    changed: Callable[[int], Iterable[int]] = lambda nid: (),
) -> list[int]:
    """Return ``nodes`` in the order of greedy list scheduling: always the ready node with the lowest value.

    Among equal values the first in the order of ``nodes`` runs.

    Args:
        nodes: the nodes to order.
        needs: per node, the nodes that it must follow; those not in ``nodes`` are ignored.
        value: returns the current value of a ready node.
        changed: called with each scheduled node; returns the nodes whose value has changed.

    >>> scheduled([0, 1, 2, 3], {0: [], 1: [0], 2: [], 3: [1, 2]}, value=lambda nid: -nid)
    [2, 0, 1, 3]
    """
    position = {nid: k for k, nid in enumerate(nodes)}
    followers: dict[int, list[int]] = {nid: [] for nid in nodes}
    waiting = dict.fromkeys(nodes, 0)
    for nid in nodes:
        for neighbour in needs[nid]:
            if neighbour in position:
                followers[neighbour].append(nid)
                waiting[nid] += 1
    current: dict[int, int] = {}
    # Lazy deletion: an item with an outdated value is skipped when it is popped.
    heap: list[tuple[int, int, int]] = []

    def offer(nid: int) -> None:
        current[nid] = value(nid)
        heappush(heap, (current[nid], position[nid], nid))

    for nid in nodes:
        if not waiting[nid]:
            offer(nid)
    order: list[int] = []
    while heap:
        worth, _, nid = heappop(heap)
        if current.get(nid) != worth:
            continue
        order.append(nid)
        del current[nid]
        for neighbour in changed(nid):
            if neighbour in current:
                offer(neighbour)
        for neighbour in followers[nid]:
            waiting[neighbour] -= 1
            if not waiting[neighbour]:
                offer(neighbour)
    return order


def deferred(nodes: Sequence[int], rank: Mapping[int, int], *, needs: Callable[[int], Iterable[int]]) -> list[int]:
    """Return ``nodes`` with each ranked node moved just before the first unranked node that needs it.

    Ranked nodes at one position are sorted by rank. A ranked node that is needed is added if ``nodes`` lacks it; one
    that no unranked node needs comes last.

    >>> deferred([0, 1, 2, 3], {0: 0, 1: 1}, needs={0: [], 1: [0], 2: [], 3: [1]}.__getitem__)
    [2, 0, 1, 3]
    """
    order: list[int] = []
    placed: set[int] = set()
    for nid in nodes:
        ahead: set[int] = set()
        stack = [] if nid in rank else [nid]
        while stack:
            fresh = [n for n in needs(stack.pop()) if n in rank and n not in placed and n not in ahead]
            ahead.update(fresh)
            stack += fresh
        placed |= ahead
        order += sorted(ahead, key=rank.__getitem__)
        order += [] if nid in rank else [nid]
    return [*order, *(nid for nid in nodes if nid in rank and nid not in placed)]


def lifetimes(program: Program) -> tuple[list[int], list[int]]:
    """Return the half-open lifetimes of all entries, as the lists (first steps, last steps).

    External entries are included, although they need no planned memory. A variable starts at 0. An entry without a
    reader is alive during the step that makes it.
    """
    graph, row = program.graph, program.graph.row
    end = len(program.order)
    births = [0] * graph.num_entries
    deaths = [0] * graph.num_entries
    for step, nid in enumerate(program.order):
        for e in program.reads[nid]:
            deaths[e] = step + 1
        for e in range(row[nid], row[nid + 1]):
            births[e] = step
            deaths[e] = step + 1
        for e in program.holds.get(nid, ()):
            deaths[e] = max(deaths[e], step + 1)
    for e in graph.outputs:
        deaths[e] = end
    return births, deaths


def ancestors(producers: Sequence[Iterable[int]], first_step: int = 0) -> list[int]:
    """Return, for each step from ``first_step`` on, the set of its ancestors and itself.

    An ancestor is a step whose result is needed directly or indirectly. The sets cover the `MAX_STEPS` steps from
    ``first_step`` on; bit 0 stands for step ``first_step``.

    Args:
        producers: for each step, the earlier steps whose results it reads.
        first_step: first step of the window.

    >>> [bin(found) for found in ancestors([(), (), (0,), (2, 0)])]
    ['0b1', '0b10', '0b101', '0b1101']
    """
    sets: list[int] = []
    for step in range(first_step, len(producers)):
        mine = 1 << (step - first_step) if step < first_step + MAX_STEPS else 0
        for source in producers[step]:
            if source >= first_step:
                mine |= sets[source - first_step]
        sets.append(mine)
    return sets


def last_step_depends(producers: Sequence[Iterable[int]], steps: Sequence[Sequence[int]]) -> list[bool]:
    """Return, for each ascending list of steps, whether all its steps are ancestors of its last step.

    The result is true for a list of at most one step. Sets are computed for `MAX_STEPS` steps at a time, so that their
    memory is linear in the number of steps, not quadratic.

    >>> last_step_depends([(), (), (0,), (2, 0)], [[0, 3], [1, 3], [1]])
    [True, False, True]
    """
    ordered = [True] * len(steps)
    queries: dict[int, list[tuple[int, int]]] = {}
    for k, row in enumerate(steps):
        for step in row[:-1]:
            if step != row[-1]:
                queries.setdefault(step // MAX_STEPS, []).append((k, step))
    for block, questions in queries.items():
        first_step = block * MAX_STEPS
        sets = ancestors(producers[: max(steps[k][-1] for k, _ in questions) + 1], first_step)
        for k, step in questions:
            ordered[k] = ordered[k] and bool(sets[steps[k][-1] - first_step] >> (step - first_step) & 1)
    return ordered


def producers(program: Program) -> list[list[int]]:
    """Return, for each step, the steps whose results it reads."""
    row = program.graph.row
    step_of = [-1] * program.graph.num_entries
    sources: list[list[int]] = []
    for step, nid in enumerate(program.order):
        sources.append([step_of[e] for e in program.reads[nid] if step_of[e] >= 0])
        for e in range(row[nid], row[nid + 1]):
            step_of[e] = step
    return sources
