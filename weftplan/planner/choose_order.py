"""Execution orders: the candidate with the lowest bound of memory, and orders that suit recomputation.

In every order a node follows its dependencies, the forward part comes first, so that it can run alone, and nodes that
use one auxiliary state keep their order, because one of them writes it. No function keeps state.

Nodes with effects that may not be repeated, such as draws from a generator with state, keep their order as well.

:func:`choose_order` is never worse than the original order. For the forward and the backward part in turn, its
candidates are depth-first order with the deepest input first, greedy scheduling forwards (the next node leaves the
fewest live bytes after it), greedy scheduling backwards (the last node leaves the fewest live bytes before it), and the
result of a search (``exact_order_search.py``) from the best of these. Before that, a short search may prove that the
original order is optimal.

For recomputation, each forward node should run close to its readers. A depth-first order by input number may run many
branches before the chain that reads them, such as all input projections of an unrolled recurrent network. No cut of
such an order separates early from late time steps, and sorting backward nodes by it would place them badly.
Gradients should run in the reverse order of the forward part. The original order follows single gradients down to their
variables and may defer other readers of an intermediate gradient, such as the four gate gradients of each time step of
an unrolled LSTM. These gradients would be most of the live bytes once the forward results are recomputed in segments,
and would delay the release of recomputed results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from weftplan.planner.buffers import Buffers
from weftplan.planner.exact_order_search import MAX_WORK, PartModel
from weftplan.planner.liveness import deferred, dependencies, scheduled
from weftplan.planner.match_range import BlockPool
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.storage_assignment import assign
from weftplan.support.post_order import deepest_first

QUICK_WORK = 100_000
"""Work of the search from the original order, before other candidates are tried; less than a tenth of a second."""


@dataclass(frozen=True, slots=True)
class ChosenOrder:
    """An execution order with its bound.

    Attributes:
        nodes: operator nodes in execution order.
        bound: peak of live bytes (:func:`lower_bound`).
        proved: whether no order has a lower bound. Gradient sums in place are not considered.
    """

    nodes: list[int]
    bound: int
    proved: bool


def choose_order(program: Program, options: PlanOptions, *, work: int = MAX_WORK) -> ChosenOrder:
    """Return the candidate order with the lowest bound; that of ``program`` itself if no candidate is lower.

    A program of several devices is not searched, and nothing is proved about it. ``work`` is the maximum number of
    touched groups of each search (:data:`~weftplan.planner.exact_order_search.MAX_WORK`).
    """
    graph = _Dependencies(program)
    best = ChosenOrder(program.order, lower_bound(program, program.order, options=options), proved=False)
    cuts = program.num_forward, len(program.order)
    parts = [(start, end) for start, end in ((0, cuts[0]), cuts) if start < end]
    one_device = len({program.device[nid] for nid in program.order}) == 1
    if not one_device:
        for start, end in parts:
            best = _greedy(program, graph, (start, end), best, options=options)
        return best
    models = [
        PartModel(program, program.order[start:end], predecessors=graph.predecessors, options=options)
        for start, end in parts
    ]
    # The part with the higher peak first: if that is proved, the other part cannot matter.
    for rank in sorted(range(len(parts)), key=lambda k: -models[k].peak):
        start, end = parts[rank]
        improved = models[rank].search(QUICK_WORK)
        best = _lower(program, [*best.nodes[:start], *improved.nodes, *best.nodes[end:]], best, options=options)
        if not improved.proved:
            best = _greedy(program, graph, (start, end), best, options=options)
            model = PartModel(program, best.nodes[start:end], predecessors=graph.predecessors, options=options)
            improved = model.search(work)
            best = _lower(program, [*best.nodes[:start], *improved.nodes, *best.nodes[end:]], best, options=options)
        # The model's peak of an order is never above its bound, so an order whose bound is a proved peak is optimal.
        if improved.proved and improved.peak == best.bound:
            return replace(best, proved=True)
    return best


def _greedy(
    program: Program, graph: _Dependencies, part: tuple[int, int], best: ChosenOrder, *, options: PlanOptions
) -> ChosenOrder:
    """Return the best of ``best`` and the depth-first and greedy orders of a part (its first step, its end)."""
    start, end = part
    for candidate in (_deepest_first, _greedy_forwards, _greedy_backwards):
        order = [*best.nodes[:start], *candidate(graph, program.order[start:end]), *best.nodes[end:]]
        best = _lower(program, order, best, options=options)
    return best


def _lower(program: Program, order: list[int], best: ChosenOrder, *, options: PlanOptions) -> ChosenOrder:
    """Return ``order`` with its bound if that is lower than the best one's, else ``best``."""
    if order == best.nodes:
        return best
    bound = lower_bound(program, order, options=options)
    return ChosenOrder(order, bound, proved=False) if bound < best.bound else best


def lower_bound(program: Program, order: list[int], *, options: PlanOptions) -> int:
    """Return the peak of live bytes when ``program`` runs in ``order``, with in-place merging and scratch."""
    ordered = program.in_order(order)
    assignment = assign(ordered, BlockPool(program.nbytes, 0), enable_inplace=options.enable_inplace)
    return Buffers(ordered, assignment, options=options).lower_bound


class _Dependencies:
    """The dependencies of all nodes, and the bytes of their entries."""

    def __init__(self, program: Program) -> None:
        graph = program.graph
        self.predecessors = dependencies(program)
        effects = set(graph.effects)
        fixed = [nid for nid in program.order if nid in effects and not graph.works[nid].may_repeat]
        for earlier, later in pairwise(fixed):
            self.predecessors[later].append(earlier)
        # External entries need no planned memory, so they count 0 bytes.
        self.size = [0 if program.external[e] else program.nbytes[e] for e in range(graph.num_entries)]
        self.reads = [[e for e in dict.fromkeys(reads) if self.size[e]] for reads in program.reads]
        self.readers: list[list[int]] = [[] for _ in range(graph.num_entries)]
        for nid, reads in enumerate(self.reads):
            for e in reads:
                self.readers[e].append(nid)
        self.forever = set(graph.outputs)
        self.outputs = [range(start, end) for start, end in pairwise(graph.row)]
        """Output entries of each node."""


def _deepest_first(graph: _Dependencies, nodes: list[int]) -> list[int]:
    """Return ``nodes`` in depth-first order, the deepest input first."""
    return deepest_first(nodes, graph.predecessors)


def _greedy_forwards(graph: _Dependencies, nodes: list[int]) -> list[int]:
    """Return ``nodes`` scheduled greedily: next runs the ready node that adds the fewest live bytes.

    A node adds the bytes of its outputs minus those of inputs that it reads last. Ties keep the order of ``nodes``.
    """
    size, reads, readers, forever = graph.size, graph.reads, graph.readers, graph.forever
    inside = set(nodes)
    # Remaining readers of each entry; -1 if it outlives this part.
    outputs = {e for nid in nodes for e in graph.outputs[nid]}
    readers_left: dict[int, int] = {}
    for nid in nodes:
        for e in reads[nid]:
            if e not in readers_left:
                inside_readers = sum(1 for r in readers[e] if r in inside)
                stays = e in forever or (e in outputs and inside_readers < len(readers[e]))
                readers_left[e] = -1 if stays else inside_readers

    def growth(nid: int) -> int:
        gained = sum(size[e] for e in graph.outputs[nid] if readers[e] or e in forever)
        return gained - sum(size[e] for e in reads[nid] if readers_left[e] == 1)

    def changed(nid: int) -> Iterator[int]:
        for e in reads[nid]:
            if readers_left[e] > 0:
                readers_left[e] -= 1
                if readers_left[e] == 1:
                    yield from readers[e]

    return scheduled(nodes, graph.predecessors, value=growth, changed=changed)


def _greedy_backwards(graph: _Dependencies, nodes: list[int]) -> list[int]:
    """Return ``nodes`` scheduled greedily from the end: last runs the node that leaves the fewest live bytes before it.

    Ties keep the order of ``nodes``.
    """
    size, reads, readers, forever = graph.size, graph.reads, graph.readers, graph.forever
    inside = set(nodes)
    followers: dict[int, list[int]] = {nid: [] for nid in nodes}
    for nid in nodes:
        for n in graph.predecessors[nid]:
            if n in inside:
                followers[n].append(nid)
    # Backwards in time, an entry becomes alive at its last reader; an entry that outlives this part is alive already.
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
    """Return ``program`` with the forward part in depth-first order, the deepest input first.

    Nodes that use one auxiliary state keep their order. Returns ``program`` itself if its order does not change.
    """
    order = deepest_first(program.forward, dependencies(program))
    return program.in_order([*order, *program.backward])


def lazy_backward(program: Program) -> Program:
    """Return ``program`` with backward nodes that depend on no tangent moved just before their first reader.

    Nodes that write, have effects or control dependencies, or make an output are not moved, and neither are nodes that
    read them. Returns ``program`` itself if it declares no tangents or its order does not change.
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
    """Return ``program`` with the backward part in the reverse order of the forward nodes that it differentiates.

    A backward node that belongs to no forward node, such as a sum of gradients, runs as soon as its inputs are ready.
    Returns ``program`` itself if its order does not change.
    """
    graph = program.graph
    part = program.backward
    if any(graph.works[nid].writes for nid in part):
        return program  # a backward part that writes states keeps its order
    position = {nid: step for step, nid in enumerate(program.forward)}
    needs = dependencies(program)
    urgency: dict[int, int] = {}
    for nid in part:
        controls = graph.controls[nid]
        if controls and controls[0] in position:
            urgency[nid] = -position[controls[0]]
        else:
            urgency[nid] = max((urgency[m] for m in needs[nid] if m in urgency), default=-program.num_forward)
    return program.in_order([*program.forward, *scheduled(part, needs, value=urgency.__getitem__)])
