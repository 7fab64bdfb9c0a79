"""Orders of execution: the candidate with the smallest lower bound, and orders that suit recomputation.

A node follows its dependencies; the forward part stays in front, so that it can run alone; nodes that touch one
auxiliary state keep their given order, because one of them writes it. No function keeps state.

:func:`choose_order` is never worse than the given order. Its candidates are that, greedy scheduling forwards (next is
the ready node after which least is alive), and backwards (last is the node before which least is alive). The planner's
own figure chooses, part by part.

For recomputation the forward part has every node next to its readers. Depth-first order by the number of the input may
run a whole family of branches before the chain that they feed (all projections of the inputs of an unrolled recurrent
network). No cut of such an order separates early from late steps, and backward nodes sorted by it come at the wrong
time. The backward part has gradients in the reverse order of the forward part. The given order follows single gradients
down to their variables and may leave other readers of an intermediate gradient (four gate gradients of every step of an
unrolled LSTM, say) for much later. These would be most of the live bytes once the forward results are repeated in
segments, and the twins of a segment would have to wait for them, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from weftplan.planner.buffers import Buffers
from weftplan.planner.inplace import assign
from weftplan.planner.liveness import deferred, dependencies, scheduled
from weftplan.planner.match_range import BlockPool
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.support.post_order import deepest_first


def choose_order(program: Program, options: PlanOptions) -> list[int]:
    """The best order found; ``program.order`` itself when nothing better was found."""
    graph = _Dependencies(program)
    best, least = program.order, lower_bound(program, program.order, options=options)
    for start, end in ((0, program.num_forward), (program.num_forward, len(program.order))):
        if end - start < 3:
            continue
        for candidate in (_greedy_forwards, _greedy_backwards):
            order = best[:start] + candidate(graph, best[start:end]) + best[end:]
            if order == best:
                continue
            bound = lower_bound(program, order, options=options)
            if bound < least:
                best, least = order, bound
    return best


def lower_bound(program: Program, order: list[int], *, options: PlanOptions) -> int:
    """Most bytes alive at once when ``program`` runs in ``order``, with in-place merging and scratch."""
    ordered = program.in_order(order)
    assignment = assign(ordered, BlockPool(program.nbytes, 0), enable_inplace=options.enable_inplace)
    return Buffers(ordered, assignment, options=options).lower_bound


class _Dependencies:
    """The dependencies of nodes, and the bytes that each allocates."""

    def __init__(self, program: Program) -> None:
        graph = program.graph
        self.before = dependencies(program)
        # Bytes of each entry that count: not the caller's, and with a reader.
        self.size = [0 if program.external[e] else program.nbytes[e] for e in range(graph.num_entries)]
        self.reads = [[e for e in dict.fromkeys(reads) if self.size[e]] for reads in program.reads]
        self.readers: list[list[int]] = [[] for _ in range(graph.num_entries)]
        for nid, reads in enumerate(self.reads):
            for e in reads:
                self.readers[e].append(nid)
        self.forever = set(graph.outputs)
        self.outputs = [range(start, end) for start, end in pairwise(graph.row)]
        """Entries that each node makes."""


def _greedy_forwards(graph: _Dependencies, nodes: list[int]) -> list[int]:
    """Always run the ready node after which least is alive (allocated minus freed); ties by the given order."""
    size, reads, readers, forever = graph.size, graph.reads, graph.readers, graph.forever
    inside = set(nodes)
    # Readers still to come per entry; an entry that a later part reads is never freed here.
    own = {e for nid in nodes for e in graph.outputs[nid]}
    left: dict[int, int] = {}
    for nid in nodes:
        for e in reads[nid]:
            if e not in left:
                here = sum(1 for r in readers[e] if r in inside)
                kept = e in forever or (e in own and here < len(readers[e]))
                left[e] = -1 if kept else here

    def growth(nid: int) -> int:
        gained = sum(size[e] for e in graph.outputs[nid] if readers[e] or e in forever)
        return gained - sum(size[e] for e in reads[nid] if left[e] == 1)

    def changed(nid: int) -> Iterator[int]:
        for e in reads[nid]:
            if left[e] > 0:
                left[e] -= 1
                if left[e] == 1:
                    yield from readers[e]

    return scheduled(nodes, graph.before, value=growth, changed=changed)


def _greedy_backwards(graph: _Dependencies, nodes: list[int]) -> list[int]:
    """From the end: last is the node before which least is alive; ties keep the given order."""
    size, reads, readers, forever = graph.size, graph.reads, graph.readers, graph.forever
    inside = set(nodes)
    followers: dict[int, list[int]] = {nid: [] for nid in nodes}
    for nid in nodes:
        for n in graph.before[nid]:
            if n in inside:
                followers[n].append(nid)
    # Going backwards an entry becomes alive with the first reader met; those that a later part reads are alive.
    alive = {e for nid in nodes for e in graph.outputs[nid] if e in forever or any(r not in inside for r in readers[e])}

    def growth(nid: int) -> int:
        gained = sum(size[e] for e in reads[nid] if e not in alive)
        return gained - sum(size[e] for e in graph.outputs[nid] if e in alive)

    def changed(nid: int) -> Iterator[int]:
        for e in reads[nid]:
            if e not in alive:
                alive.add(e)
                yield from readers[e]

    return scheduled(nodes[::-1], followers, value=growth, changed=changed)[::-1]


def stepwise_forward(program: Program) -> Program:
    """``program`` with the forward part in depth-first order, deepest input first.

    Nodes that touch one auxiliary state keep their given order. Returns ``program`` itself if that is its order.
    """
    order = deepest_first(program.forward, dependencies(program))
    return program.in_order([*order, *program.backward])


def lazy_backward(program: Program) -> Program:
    """``program`` with backward nodes that need no tangent placed just before their first reader.

    Nodes that write, that run for their effect or that make an output stay. Returns ``program`` itself where no
    tangents are declared or nothing moves.
    """
    if not program.tangents:
        return program
    graph = program.graph
    late = set(program.tangents)
    stays = {*graph.effects, *(graph.entry_node[e] for e in graph.outputs), *program.held.values()}
    free: dict[int, int] = {}
    for step, nid in enumerate(program.backward):
        work = graph.works[nid]
        bound = nid in stays or work.writes or any(not pair.identity for pair in work.over)
        if bound or not late.isdisjoint(graph.inputs[nid]) or graph.controls[nid]:
            late.update(range(graph.row[nid], graph.row[nid + 1]))
        else:
            free[nid] = step
    needs = dependencies(program)
    return program.in_order([*program.forward, *deferred(program.backward, free, needs=needs.__getitem__)])


def reversed_backward(program: Program) -> Program:
    """``program`` with the backward part sorted by the forward nodes it belongs to, the last node first.

    A node that belongs to none (a sum of gradients) runs as soon as its inputs are there. Returns ``program`` itself
    when that is the given order.
    """
    graph = program.graph
    part = program.backward
    if any(graph.works[nid].writes for nid in part):
        return program  # this function never moves writes of states
    place = {nid: step for step, nid in enumerate(program.forward)}
    needs = dependencies(program)
    urgency: dict[int, int] = {}
    for nid in part:
        controls = graph.controls[nid]
        if controls and controls[0] in place:
            urgency[nid] = -place[controls[0]]
        else:
            urgency[nid] = max((urgency[m] for m in needs[nid] if m in urgency), default=-program.num_forward)
    return program.in_order([*program.forward, *scheduled(part, needs, value=urgency.__getitem__)])
