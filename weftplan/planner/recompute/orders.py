"""Orders of execution that suit recomputation; each function gives another program and keeps no state.

Forward: every node next to its readers. Depth-first order by the number of the input may run a whole family of
branches before the chain that they feed (all projections of the inputs of an unrolled recurrent network). No cut of
such an order separates early from late steps, and backward nodes sorted by it come at the wrong time.

Backward: gradients in the reverse order of the forward part. The given order follows single gradients down to their
variables and may leave other readers of an intermediate gradient for much later. That costs little while the forward
results fill the memory anyway. Once these are repeated in segments, such waiting gradients (four gate gradients of
every step of an unrolled LSTM, say) would be most of the live bytes, and the twins of a segment would have to wait for
them, too.
"""

from __future__ import annotations

from weftplan.planner.liveness import dependencies, scheduled
from weftplan.planner.program import Program
from weftplan.support.post_order import deepest_first


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
    order: list[int] = []
    done: set[int] = set()
    for nid in program.backward:
        if nid in free:
            continue
        ahead: set[int] = set()
        stack = [nid]
        while stack:
            fresh = [n for n in needs[stack.pop()] if n in free and n not in done and n not in ahead]
            ahead.update(fresh)
            stack += fresh
        order += sorted(ahead, key=free.__getitem__)
        done |= ahead
        order.append(nid)
    # A free node that no other reads has nothing to wait for.
    order += [nid for nid in free if nid not in done]
    return program.in_order([*program.forward, *order])


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
