"""Paddle's rules of sharing memory, if they differ from MXNet's: ``PlanOptions(compat="paddle")``, ``"paddle_pir"``.

``paddle`` is the pair of graph passes of releases 1.6 to 2.5. *In place*: an output takes the memory of an input that
only this operator can be the last to read: every other reader comes before it by data, not just by chance of the order
(:class:`InplaceRule`). *Across operators*: operators are walked breadth first, and an output takes the memory of a dead
result of exactly its size, the last to die (:class:`ExactPool`); if the two operators are not ordered by
data, that costs an order edge.

``paddle_pir`` is the pass of release 2.6 and later: in place only, by the order of the program, with equal dtypes.

Not copied: a smaller output is not put into a larger input, because kernels here compute in place element by
element; Paddle leaves that to the operator and allocates if it does not fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import count

from weftplan.planner.inplace import Assignment
from weftplan.planner.liveness import dependencies, last_needs_others, producers, scheduled
from weftplan.planner.match_range import BlockPool, Free
from weftplan.planner.program import Program

COMPAT = ("paddle", "paddle_pir")

NOT_ON_CPU = frozenset(("_backward_broadcast_add", "_backward_broadcast_sub", "_backward_elemwise_sub"))
"""Gradients of sums and differences, which ``paddle_pir`` does not compute in place on a CPU."""


def breadth_first(program: Program) -> list[int]:
    """Return the steps in the order of Paddle's pass: ready steps, first come, first served.

    The forward part stays in front. Nodes that touch one auxiliary state keep their order.
    """
    needs, arrivals = dependencies(program), count()
    parts = (program.forward, program.backward)
    return [nid for part in parts for nid in scheduled(part, needs, value=lambda nid: next(arrivals))]


class InplaceRule:
    """Whether an output may take an input's memory (``pir``: by the rules of ``paddle_pir``), node by node as they run.

    That sizes agree, that both are on one device, and that neither is the caller's is judged by the walk that asks.
    """

    def __init__(self, program: Program, *, pir: bool) -> None:
        self._program = program
        self._pir = pir
        self._fetched = frozenset(program.graph.outputs)
        self._step = {nid: step for step, nid in enumerate(program.order)}
        self._taken: set[int] = set()
        readers: list[list[int]] = [[] for _ in range(program.graph.num_entries)]
        for step, nid in enumerate(program.order):
            for e in program.reads[nid]:
                readers[e].append(step)
        self._last_reader = [steps[-1] if steps else -1 for steps in readers]
        self._ordered = [] if pir else last_needs_others(producers(program), readers)

    def __call__(self, nid: int, source: int, out: int) -> bool:
        """True when ``out`` of node ``nid`` is to take the memory of ``source``, which is then not taken again."""
        program = self._program
        place = program.contexts[program.device[nid]].device_type
        alone = program.graph.inputs[nid].count(source) == 1
        if source in self._fetched or source in self._taken or place == "cpu_pinned" or not alone:
            return False
        allowed = self._last_reader[source] == self._step[nid]
        if self._pir:
            allowed &= (
                program.dtypes[source] == program.dtypes[out]
                and out not in self._fetched
                and not (place == "cpu" and program.graph.works[nid].label in NOT_ON_CPU)
            )
        else:
            allowed = allowed and self._ordered[source]
        if allowed:
            self._taken.add(source)
        return allowed


class ExactPool(BlockPool):
    """The allocator of the walk: dead memory of exactly the size asked for, the last to die first."""

    def chosen(self, free: Sequence[Free], size: int) -> int:
        """The last released block of this size; -1: none."""
        at = bisect_left(free, (size + 1,)) - 1
        return at if at >= 0 and free[at][0] == size else -1


def order_edges(program: Program, assignment: Assignment) -> list[tuple[int, int]]:
    """Return (earlier node, later node) for edges that reuse of blocks adds to the order by data.

    The later node is the first to write a block that others used before; each of them that does not come before it, by
    data or by an edge added already, gets an edge. All edges lead forward in the order, so none closes a cycle.

    Its memory grows with the square of the number of steps: not for more than `MOST_STEPS` of them.
    """
    step_of_entry = producers(program)
    users: dict[int, list[int]] = {}
    holder: dict[int, int] = {}
    needs: list[int] = []
    edges: list[tuple[int, int]] = []
    row = program.graph.row
    for step, nid in enumerate(program.order):
        mine = 1 << step
        for source in step_of_entry[step]:
            mine |= needs[source]
        placed = [e for e in range(row[nid], row[nid + 1]) if assignment.group[e] >= 0]
        for e in placed:
            group, block = assignment.group[e], assignment.storage[e]
            before = holder.get(block)
            if before is not None and before != group:
                for user in reversed(users[before]):
                    if not mine >> user & 1:
                        edges.append((program.order[user], nid))
                        mine |= needs[user]
            holder[block] = group
        needs.append(mine)
        for e in {*program.reads[nid], *placed}:
            if assignment.group[e] >= 0:
                users.setdefault(assignment.group[e], []).append(step)
    return edges
