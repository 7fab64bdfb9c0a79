"""Lifetimes of bytes, the buffers that have to be placed, and the orders of execution that a program allows.

An entry is alive from the step that writes it up to, not including, the step after its last reader, or after the node
until which it is held; an output of the graph stays alive to the end.

A set of steps is one integer, bit s for step s: a question about many steps is one operation on long integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from weftplan.planner.program import Program

MOST_STEPS = 8192
"""For more steps than this the sets (together steps * steps / 16 bytes, here 4 MiB) are not worth their memory."""


def dependencies(program: Program) -> list[list[int]]:
    """Per node the operator nodes that it must follow in any order of execution; empty for variables.

    These are the makers of its inputs, its control dependencies, and of the nodes that touch the same auxiliary state
    the node before it in the given order: nodes that touch a state keep their order, since one of them writes it. A
    write to a result follows all nodes that read the result, or a view of it, before.
    """
    graph = program.graph
    makers = graph.entry_node
    variable = graph.is_variable
    states = {inputs[slot] for work, inputs in zip(graph.works, graph.inputs, strict=True) for slot in work.writes}
    before: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    touched: dict[int, int] = {}
    root = shared_roots(program)
    written = overwritten(program)
    readers: dict[int, list[int]] = {e: [] for e in written}
    for nid in program.order:
        needs = dict.fromkeys([*(makers[e] for e in graph.inputs[nid]), *graph.controls[nid]])
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
        before[nid] = [n for n in needs if not variable[n]]
    return before


def shared_roots(program: Program) -> list[int]:
    """Return per entry the entry whose memory it must share (:attr:`Work.over`); itself for most."""
    graph = program.graph
    root = list(range(graph.num_entries))
    for nid, work in enumerate(graph.works):
        for pair in work.over:
            root[graph.row[nid] + pair.output] = root[graph.inputs[nid][pair.input]]
    return root


def overwritten(program: Program) -> set[int]:
    """Roots (:func:`shared_roots`) of results that some node writes to after they are made."""
    root, inputs = shared_roots(program), program.graph.inputs
    writes = ((nid, pair) for nid, work in enumerate(program.graph.works) for pair in work.over if not pair.identity)
    return {root[inputs[nid][pair.input]] for nid, pair in writes}


def scheduled(
    nodes: Sequence[int],
    needs: Mapping[int, Sequence[int]] | Sequence[Sequence[int]],
    *,
    value: Callable[[int], int],
    changed: Callable[[int], Iterable[int]] = lambda nid: (),
) -> list[int]:
    """Return ``nodes`` in another order: always the ready node of least value, of these the first in the given order.

    ``needs`` says by number what each node must follow; numbers that are not in ``nodes`` are passed over. ``changed``
    is told each step and names the nodes whose value it has changed.

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
    # Items are never removed: one whose value is out of date is passed over when it comes up.
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
    """Return ``nodes``, with those that have a rank just before the first other node that needs them, by rank.

    They may be missing in ``nodes``; those that no other node needs come last.

    >>> deferred([0, 1, 2, 3], {0: 0, 1: 1}, needs={0: [], 1: [0], 2: [], 3: [1]}.__getitem__)
    [2, 0, 1, 3]
    """
    order: list[int] = []
    done: set[int] = set()
    for nid in nodes:
        ahead: set[int] = set()
        stack = [] if nid in rank else [nid]
        while stack:
            fresh = [n for n in needs(stack.pop()) if n in rank and n not in done and n not in ahead]
            ahead.update(fresh)
            stack += fresh
        done |= ahead
        order += sorted(ahead, key=rank.__getitem__)
        order += [] if nid in rank else [nid]
    return [*order, *(nid for nid in nodes if nid in rank and nid not in done)]


def lifetimes(program: Program) -> tuple[list[int], list[int]]:
    """(first, last) step per entry, half-open; variables and gradient arrays too, though they need no planned memory.

    A variable starts at 0. An entry without a reader lives for the step that makes it.
    """
    graph, row = program.graph, program.graph.row
    end = len(program.order)
    first = [0] * graph.num_entries
    last = [0] * graph.num_entries
    for step, nid in enumerate(program.order):
        for e in program.reads[nid]:
            last[e] = step + 1
        for e in range(row[nid], row[nid + 1]):
            first[e] = step
            last[e] = step + 1
        for e in program.holds.get(nid, ()):
            last[e] = max(last[e], step + 1)
    for e in graph.outputs:
        last[e] = end
    return first, last


def ancestors(producers: Sequence[Iterable[int]], first: int = 0) -> list[int]:
    """For each step the set of steps whose results it needs, directly or through others, and itself.

    Sets hold at most `MOST_STEPS` steps from ``first`` on, as bits from 0 on, and begin with that of step ``first``.

    Args:
        producers: for each step the earlier steps whose results it reads.

    >>> [bin(found) for found in ancestors([(), (), (0,), (2, 0)])]
    ['0b1', '0b10', '0b101', '0b1101']
    """
    sets: list[int] = []
    for step in range(first, len(producers)):
        mine = 1 << (step - first) if step < first + MOST_STEPS else 0
        for source in producers[step]:
            if source >= first:
                mine |= sets[source - first]
        sets.append(mine)
    return sets


def last_needs_others(producers: Sequence[Iterable[int]], steps: Sequence[Sequence[int]]) -> list[bool]:
    """Return for each ascending list of steps whether its last step needs all others, directly or through others.

    Sets hold `MOST_STEPS` steps at a time, so that their memory grows with the number of steps, not with its square. A
    list of at most one step is ordered.

    >>> last_needs_others([(), (), (0,), (2, 0)], [[0, 3], [1, 3], [1]])
    [True, False, True]
    """
    ordered = [True] * len(steps)
    asked: dict[int, list[tuple[int, int]]] = {}
    for k, row in enumerate(steps):
        for step in row[:-1]:
            if step != row[-1]:
                asked.setdefault(step // MOST_STEPS, []).append((k, step))
    for block, questions in asked.items():
        first = block * MOST_STEPS
        sets = ancestors(producers[: max(steps[k][-1] for k, _ in questions) + 1], first)
        for k, step in questions:
            ordered[k] = ordered[k] and bool(sets[steps[k][-1] - first] >> (step - first) & 1)
    return ordered


def producers(program: Program) -> list[list[int]]:
    """For each step the steps whose results it reads."""
    row = program.graph.row
    step_of = [-1] * program.graph.num_entries
    sources: list[list[int]] = []
    for step, nid in enumerate(program.order):
        sources.append([step_of[e] for e in program.reads[nid] if step_of[e] >= 0])
        for e in range(row[nid], row[nid + 1]):
            step_of[e] = step
    return sources
