"""Checks before a backward run: did forward compute all that it reads, and has a backward run overwritten some of it?

Questions about prepared steps and their plan; nothing here is changed or kept, and any thread may ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from weftplan.executor.schedule import Step
from weftplan.planner import PlannedGraph
from weftplan.planner.symbolic.translate import MARK as SPILL_MARK

_Range = tuple[int, int, int]
"""(slab, first byte, end)."""


def needs_training(forward: Iterable[Step]) -> str:
    """Return why the backward part cannot follow a forward run outside training, in words; empty if it can."""
    for step in forward:
        op = step.node.op
        assert op is not None
        if op.needs_training is not None and op.needs_training(step.node.params):
            return f"{op.name} {step.node.name!r} keeps what its gradient needs in training only"
        if SPILL_MARK in step.node.attrs:
            return "results wait in host memory in training only"
    return ""


def reads_forward(planned: PlannedGraph, backward: Sequence[Step]) -> bool:
    """Return whether ``backward`` reads results of the forward part; else it may run without it."""
    graph = planned.graph
    own = {step.nid for step in backward}
    return any(
        array is not None and graph.nodes[node := graph.entry_node[e]].op is not None and node not in own
        for step in backward
        for e, array in zip(graph.inputs[step.nid], step.inputs, strict=True)
    )


def keeps_forward(planned: PlannedGraph, backward: Sequence[Step]) -> bool:
    """Return whether ``backward`` may run twice after one forward: it overwrites no result of forward that it reads.

    Args:
        planned: graph and plan.
        backward: the steps of the backward part, in order.
    """
    plan, graph = planned.memory, planned.graph
    own = {e for step in backward for e in range(graph.row[step.nid], graph.row[step.nid + 1])}
    read: set[int] = set()
    written: set[int] = set()
    for step in backward:
        read.update(
            e
            for e, array in zip(graph.inputs[step.nid], step.inputs, strict=True)
            if array is not None and e not in own
        )
        if step.bind is None:
            continue  # an identity in place: the bytes stay what they are
        outputs = range(graph.row[step.nid], graph.row[step.nid + 1])
        written.update(
            int(plan.entry_storage[e]) for e, array in zip(outputs, step.outputs, strict=True) if array is not None
        )
        written.add(int(plan.workspace_storage[step.nid]))

    def ranges(storages: Iterable[int]) -> list[_Range]:
        sized = [s for s in storages if s >= 0 and plan.storage_nbytes[s]]
        starts, sizes = plan.storage_offset, plan.storage_nbytes
        return [(int(plan.storage_slab[s]), int(starts[s]), int(starts[s] + sizes[s])) for s in sized]

    return not _meet(ranges({int(plan.entry_storage[e]) for e in read}), ranges(written))


def _meet(kept: Sequence[_Range], changed: Sequence[_Range]) -> bool:
    """Return whether a range of one list overlaps a range of the other."""
    for slab in {r[0] for r in kept} & {r[0] for r in changed}:
        mine = [r for r in kept if r[0] == slab]
        # Marks per byte boundary: sums of both lists that are above 0 at once.
        points = np.unique([bound for r in (*mine, *(c for c in changed if c[0] == slab)) for bound in r[1:]])
        cover = np.zeros((2, len(points)), dtype=np.int64)
        for row, ranges in enumerate((mine, [c for c in changed if c[0] == slab])):
            np.add.at(cover[row], np.searchsorted(points, [r[1] for r in ranges]), 1)
            np.add.at(cover[row], np.searchsorted(points, [r[2] for r in ranges]), -1)
        if (np.cumsum(cover, axis=1) > 0).all(axis=0).any():
            return True
    return False
