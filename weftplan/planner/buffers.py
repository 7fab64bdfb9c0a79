"""Buffers, the units of placement: groups of entries and the scratch of nodes, with sizes and lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from weftplan.device.context import Context
from weftplan.planner.inplace import Assignment, Kind
from weftplan.planner.liveness import MOST_STEPS, lifetimes
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing.reuse import Precedence
from weftplan.planner.program import IntArray, Program, scratch_of


class Buffers:
    """Groups and workspaces as buffers with lifetimes.

    Invariant: every buffer has a first writer that runs (the README says why). So outputs without a reader are no
    buffers, even where MXNet's walk gave them a block, and neither is the scratch of nodes that do not run.
    """

    def __init__(
        self, program: Program, assignment: Assignment, *, options: PlanOptions, like: Buffers | None = None
    ) -> None:
        """``like``: buffers of the same program under another assignment."""
        self.program = program
        self.assignment = assignment
        self.options = options
        self._lifetimes: tuple[list[int], list[int]] = lifetimes(program) if like is None else like._lifetimes
        self.entry_first, self.entry_last = births, deaths = self._lifetimes
        counted = options.workspaces
        self.workspace = scratch_of(program, added=assignment.added, skipped=assignment.skipped) if counted else {}
        """Scratch bytes per node that runs."""
        where = {nid: step for step, nid in enumerate(program.order) if nid in self.workspace}
        self.workspace_nodes = list(where)
        # Lists: most graphs have a few dozen buffers, and arrays take longer for these.
        unused = int(Kind.UNUSED)
        group = [-1 if kind == unused else k for k, kind in zip(assignment.group, assignment.kind, strict=True)]
        self.entry_group, count = renumbered(group)
        self.num_groups = count
        first, last, nbytes, device = [len(program.order)] * count, [0] * count, [0] * count, [0] * count
        sizes, places, makers = program.nbytes, program.device, program.graph.entry_node
        for e, k in enumerate(self.entry_group):
            if k >= 0:
                if births[e] < first[k]:
                    first[k] = births[e]
                if deaths[e] > last[k]:
                    last[k] = deaths[e]
                if sizes[e] > nbytes[k]:
                    nbytes[k] = sizes[e]
                device[k] = places[makers[e]]
        moments = list(where.values())
        self.first = np.array(first + moments, dtype=np.int64)
        """Per buffer: the groups that have entries, then one per node with scratch."""
        self.last = np.array(last + [moment + 1 for moment in moments], dtype=np.int64)
        self.nbytes = np.array(nbytes + [self.workspace[nid] for nid in where], dtype=np.int64)
        self.device = np.array(device + [places[nid] for nid in where], dtype=np.int64)

    def live(self, nbytes: IntArray | None = None) -> IntArray:
        """Bytes alive at each step, one row per device, of buffers of these sizes (default: as they are)."""
        nbytes = self.nbytes if nbytes is None else nbytes
        steps = len(self.program.order) + 1
        row, change = self.device * steps, np.zeros(len(self.program.contexts) * steps, dtype=np.int64)
        np.add.at(change, row + self.first, nbytes)
        np.subtract.at(change, row + self.last, nbytes)
        return np.cumsum(change.reshape(-1, steps), axis=1)[:, :-1]

    @cached_property
    def lower_bound(self) -> int:
        """Most bytes alive at once, summed over devices."""
        return _most(self.live())

    def least_peak(self) -> int:
        """As :attr:`lower_bound`, of sizes in whole multiples of the alignment, as every plan in slabs takes them.

        Whole blocks of their own (``compat="mxnet"``) may take less.
        """
        if self.options.compat == "mxnet":
            return self.lower_bound
        return _most(self.live(np.array(self.rounded(self.nbytes.tolist(), self.device.tolist()), dtype=np.int64)))

    def order(self) -> Precedence | None:
        """Which nodes use each buffer, and which its first writer waits for anyway.

        None for orders of more than `MOST_STEPS` steps, which are not worth the memory.
        """
        program, row = self.program, self.program.graph.row
        if len(program.order) > MOST_STEPS:
            return None
        first, group = self.first.tolist(), self.entry_group
        # A set of steps is one integer, as in liveness.py; the last of the users is for entries of no group.
        users = [0] * self.num_groups + [1 << step for step in first[self.num_groups :]] + [0]
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
        return Precedence(users[:-1], [needs[step] for step in first])

    @cached_property
    def _units(self) -> list[int]:
        """Alignment of each device."""
        return [self.options.alignment or alignment_of(context) for context in self.program.contexts]

    def rounded(self, nbytes: Sequence[int], device: Sequence[int]) -> list[int]:
        """These sizes as whole multiples of the device's alignment."""
        units = self._units
        return [-(-size // units[place]) * units[place] for size, place in zip(nbytes, device, strict=True)]

    def unshared(self) -> int:
        """Bytes with a buffer for every entry that is made and one workspace per device as large as its largest."""
        program = self.program
        places, makers, sizes = program.device, program.graph.entry_node, program.nbytes
        placed = [e for e, group in enumerate(self.assignment.group) if group >= 0]
        largest = [0] * len(program.contexts)
        for nid, nbytes in self.workspace.items():
            largest[places[nid]] = max(largest[places[nid]], nbytes)
        return sum(self.rounded([sizes[e] for e in placed], [places[makers[e]] for e in placed])) + sum(largest)


def renumbered(numbers: Sequence[int]) -> tuple[list[int], int]:
    """The numbers from 0 on with the places 0, 1, … in their order, without gaps, and how many there are; -1 stays.

    >>> renumbered([4, -1, 2, 4])
    ([1, -1, 0, 1], 2)
    """
    place = {number: k for k, number in enumerate(sorted({*numbers, -1}), -1)}
    return [place[number] for number in numbers], len(place) - 1


def _most(live: IntArray) -> int:
    """The most of each row, summed."""
    return int(live.max(axis=1).sum()) if live.shape[1] else 0


def alignment_of(context: Context) -> int:
    """Bytes to which offsets on a device are aligned."""
    return 64 if context.is_host else 256
