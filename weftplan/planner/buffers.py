"""Buffers: the units of placement. A buffer is a group of entries or the scratch of a node, with size and lifetime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from weftplan.device.context import Context
from weftplan.planner.liveness import MAX_STEPS, lifetimes
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing.reuse import Precedence
from weftplan.planner.program import IntArray, Program, scratch_of
from weftplan.planner.storage_assignment import Assignment, Kind


class Buffers:
    """The buffers of one assignment: groups of entries first, then the scratch of nodes.

    Invariant: every buffer has a first writer that runs (the README says why). So an output without a reader is no
    buffer, even if MXNet's walk assigned a block to it; neither is the scratch of a skipped node.
    """

    def __init__(
        self, program: Program, assignment: Assignment, *, options: PlanOptions, like: Buffers | None = None
    ) -> None:
        """Collect the buffers of ``assignment``.

        ``like`` holds the buffers of the same program under another assignment; their lifetimes of entries are reused.
        """
        self.program = program
        self.assignment = assignment
        self.options = options
        self._lifetimes: tuple[list[int], list[int]] = lifetimes(program) if like is None else like._lifetimes
        self.entry_first, self.entry_last = births, deaths = self._lifetimes
        counted = options.workspaces
        self.workspace = scratch_of(program, added=assignment.added, skipped=assignment.skipped) if counted else {}
        """Scratch bytes of each node that runs and needs any."""
        step_of = {nid: step for step, nid in enumerate(program.order) if nid in self.workspace}
        self.workspace_nodes = list(step_of)
        # Lists are faster than arrays for a few dozen buffers, as most graphs have.
        unused = int(Kind.UNUSED)
        group = [-1 if kind == unused else k for k, kind in zip(assignment.group, assignment.kind, strict=True)]
        self.entry_group, count = renumbered(group)
        self.num_groups = count
        first_steps, end_steps, nbytes, device = [len(program.order)] * count, [0] * count, [0] * count, [0] * count
        sizes, devices, makers = program.nbytes, program.device, program.graph.entry_node
        for e, k in enumerate(self.entry_group):
            if k >= 0:
                if births[e] < first_steps[k]:
                    first_steps[k] = births[e]
                if deaths[e] > end_steps[k]:
                    end_steps[k] = deaths[e]
                if sizes[e] > nbytes[k]:
                    nbytes[k] = sizes[e]
                device[k] = devices[makers[e]]
        moments = list(step_of.values())
        self.first = np.array(first_steps + moments, dtype=np.int64)
        """First step at which each buffer is alive."""
        self.last = np.array(end_steps + [moment + 1 for moment in moments], dtype=np.int64)
        """First step at which each buffer is dead."""
        self.nbytes = np.array(nbytes + [self.workspace[nid] for nid in step_of], dtype=np.int64)
        self.device = np.array(device + [devices[nid] for nid in step_of], dtype=np.int64)

    def live(self, nbytes: IntArray | None = None) -> IntArray:
        """Return live bytes per (device, step); ``nbytes`` replaces the sizes of the buffers."""
        nbytes = self.nbytes if nbytes is None else nbytes
        steps = len(self.program.order) + 1
        row, change = self.device * steps, np.zeros(len(self.program.contexts) * steps, dtype=np.int64)
        np.add.at(change, row + self.first, nbytes)
        np.subtract.at(change, row + self.last, nbytes)
        return np.cumsum(change.reshape(-1, steps), axis=1)[:, :-1]

    @cached_property
    def lower_bound(self) -> int:
        """Sum of the devices' peaks of live bytes."""
        return _max_live(self.live())

    def least_peak(self) -> int:
        """Return the lower bound with sizes rounded up to the alignment, as in every plan with slabs.

        With ``compat="mxnet"`` blocks may be separate allocations, which are not rounded; then return
        :attr:`lower_bound`.
        """
        if self.options.compat == "mxnet":
            return self.lower_bound
        return _max_live(self.live(np.array(self.rounded(self.nbytes.tolist(), self.device.tolist()), dtype=np.int64)))

    def order(self) -> Precedence | None:
        """Return the users and the ancestors of each buffer, or None for more than `MAX_STEPS` steps."""
        program, row = self.program, self.program.graph.row
        if len(program.order) > MAX_STEPS:
            return None
        births, group = self.first.tolist(), self.entry_group
        # A set of steps is one integer, as in liveness.py. The last item collects the users of entries without a group.
        users = [0] * self.num_groups + [1 << step for step in births[self.num_groups :]] + [0]
        skipped, all_reads = self.assignment.skipped, program.reads
        needs_of = [0] * program.graph.num_entries
        needs = []
        bit = 1
        for nid in program.order:
            mine, reads, outputs = bit, all_reads[nid], range(row[nid], row[nid + 1])
            for e in reads:
                mine |= needs_of[e]
            needs.append(mine)
            for e in outputs:
                needs_of[e] = mine
            if nid not in skipped:  # a skipped sum touches nothing
                for e in (*reads, *outputs):
                    users[group[e]] |= bit
            bit <<= 1
        return Precedence(users[:-1], [needs[step] for step in births])

    @cached_property
    def _units(self) -> list[int]:
        """Alignment of each device in bytes."""
        return [self.options.alignment or alignment_of(context) for context in self.program.contexts]

    def rounded(self, nbytes: Sequence[int], device: Sequence[int]) -> list[int]:
        """Return the sizes rounded up to the alignment of their devices."""
        units = self._units
        return [
            -(-size // units[device_number]) * units[device_number]
            for size, device_number in zip(nbytes, device, strict=True)
        ]

    def unshared(self) -> int:
        """Return the bytes without sharing: one buffer per entry, and per device its largest scratch."""
        program = self.program
        devices, makers, sizes = program.device, program.graph.entry_node, program.nbytes
        placed = [e for e, group in enumerate(self.assignment.group) if group >= 0]
        largest = [0] * len(program.contexts)
        for nid, nbytes in self.workspace.items():
            largest[devices[nid]] = max(largest[devices[nid]], nbytes)
        return sum(self.rounded([sizes[e] for e in placed], [devices[makers[e]] for e in placed])) + sum(largest)


def renumbered(numbers: Sequence[int]) -> tuple[list[int], int]:
    """Return ``numbers`` mapped to 0, 1, … in ascending order without gaps, and their count; -1 is kept.

    >>> renumbered([4, -1, 2, 4])
    ([1, -1, 0, 1], 2)
    """
    new_number = {number: k for k, number in enumerate(sorted({*numbers, -1}), -1)}
    return [new_number[number] for number in numbers], len(new_number) - 1


def _max_live(live: IntArray) -> int:
    """Return the sum over rows of the maximum of each row."""
    return int(live.max(axis=1).sum()) if live.shape[1] else 0


def alignment_of(context: Context) -> int:
    """Return the alignment of offsets on a device, in bytes."""
    return 64 if context.is_host else 256
