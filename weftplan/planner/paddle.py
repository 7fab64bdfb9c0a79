"""Paddle's rules of memory sharing that differ from MXNet's: ``PlanOptions(compat="paddle")`` and ``"paddle_pir"``.

``paddle`` stands for the two graph passes of releases 1.6 to 2.5. *In place*: an output takes the memory of an input if
every other reader of that input precedes this operator by data, not only in the chosen order (:class:`InplaceRule`).
*Across operators*: operators are visited breadth first, and an output takes the memory of a dead result of exactly its
size, the last to die (:class:`ExactPool`). If data does not order the two operators, the reuse adds an order edge.

``paddle_pir`` stands for the pass of release 2.6 and later: in place only, by program order, with equal dtypes.

One difference remains: a smaller output is never placed in a larger input, because kernels here compute in place
element by element. Paddle leaves that to the operator and allocates if it does not fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import count

from weftplan.planner.liveness import dependencies, last_step_depends, producers, scheduled
from weftplan.planner.match_range import BlockPool, Free
from weftplan.planner.program import Program
from weftplan.planner.storage_assignment import Assignment

COMPAT = ("paddle", "paddle_pir")

NOT_ON_CPU = frozenset(("_backward_broadcast_add", "_backward_broadcast_sub", "_backward_elemwise_sub"))
"""Gradient operators that ``paddle_pir`` does not compute in place on a CPU."""


def breadth_first(program: Program) -> list[int]:
    """Return the nodes in the breadth-first order of Paddle's pass: ready nodes, first in, first out.

    The forward part comes first. Nodes that use one auxiliary state keep their order.
    """
    needs, arrivals = dependencies(program), count()
    parts = (program.forward, program.backward)
    return [nid for part in parts for nid in scheduled(part, needs, value=lambda nid: next(arrivals))]


class InplaceRule:
    """A stateful in-place rule for :func:`~weftplan.planner.storage_assignment.assign`, called for nodes in execution
    order.

    With ``pir`` it follows ``paddle_pir``. The caller has already checked sizes and devices and excluded external
    entries.
    """

    def __init__(self, program: Program, *, pir: bool) -> None:
        self._program = program
        self._pir = pir
        self._fetched = frozenset(program.graph.outputs)
        self._step = {nid: step for step, nid in enumerate(program.order)}
        self._used_inputs: set[int] = set()
        readers: list[list[int]] = [[] for _ in range(program.graph.num_entries)]
        for step, nid in enumerate(program.order):
            for e in program.reads[nid]:
                readers[e].append(step)
        self._last_reader = [steps[-1] if steps else -1 for steps in readers]
        self._ordered = [] if pir else last_step_depends(producers(program), readers)

    def __call__(self, nid: int, source: int, out: int) -> bool:
        """Return whether ``out`` of node ``nid`` takes the memory of ``source``; each source is taken at most once."""
        program = self._program
        device_type = program.contexts[program.device[nid]].device_type
        read_once = program.graph.inputs[nid].count(source) == 1
        if source in self._fetched or source in self._used_inputs or device_type == "cpu_pinned" or not read_once:
            return False
        allowed = self._last_reader[source] == self._step[nid]
        if self._pir:
            allowed &= (
                program.dtypes[source] == program.dtypes[out]
                and out not in self._fetched
                and not (device_type == "cpu" and program.graph.works[nid].label in NOT_ON_CPU)
            )
        else:
            allowed = allowed and self._ordered[source]
        if allowed:
            self._used_inputs.add(source)
        return allowed


class ExactPool(BlockPool):
    """An allocator that reuses only free blocks of exactly the allocated size, the last released first."""

    def chosen(self, free: Sequence[Free], size: int) -> int:
        """Return the index of the last released block of this size; -1 if there is none."""
        at = bisect_left(free, (size + 1,)) - 1
        return at if at >= 0 and free[at][0] == size else -1


def order_edges(program: Program, assignment: Assignment) -> list[tuple[int, int]]:
    """Return the edges (earlier node, later node) that reuse of blocks adds to the data dependencies.

    The later node is the first writer of a reused block. It gets an edge from each previous user of the block that does
    not already precede it, by data or by an added edge. All edges lead forward in the order, so they form no cycle.

    Memory is quadratic in the number of steps, so do not call this for more than `MAX_STEPS` steps.
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
            previous = holder.get(block)
            if previous is not None and previous != group:
                for user in reversed(users[previous]):
                    if not mine >> user & 1:
                        edges.append((program.order[user], nid))
                        mine |= needs[user]
            holder[block] = group
        needs.append(mine)
        for e in {*program.reads[nid], *placed}:
            if assignment.group[e] >= 0:
                users.setdefault(assignment.group[e], []).append(step)
    return edges
