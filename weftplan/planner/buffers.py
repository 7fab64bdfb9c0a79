"""What has to be placed: groups of entries and the scratch of nodes, as buffers with sizes and lifetimes.

They are made of an assignment of storages; ``slabs.py`` gives them their places.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from weftplan.device.context import Context
from weftplan.planner.graph import IntArray
from weftplan.planner.inplace import Assignment, Kind
from weftplan.planner.liveness import lifetimes
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing.reuse import Precedence
from weftplan.planner.program import Program, scratch_of
from weftplan.planner.reachability import MOST_STEPS


class Buffers:
    """Groups and workspaces as buffers with lifetimes: what has to be placed.

    Invariant: every buffer has a first writer that runs (the README says why). So outputs that nobody reads are no
    buffers, even where MXNet's walk gave them a block, and neither is the scratch of nodes that do not run.
    """

    def __init__(
        self, program: Program, assignment: Assignment, *, options: PlanOptions, like: Buffers | None = None
    ) -> None:
        """``like``: buffers of the same program under another assignment."""
        self.program = program
        self.assignment = assignment
        self.options = options
        self._entries: list[IntArray] = _entries(program) if like is None else like._entries
        self.entry_first, self.entry_last, self.entry_nbytes, self.entry_device = self._entries
        group = np.array(assignment.group, dtype=np.int64)
        group[np.frombuffer(assignment.kind, dtype=np.uint8) == Kind.UNUSED] = -1
        held = np.flatnonzero(group >= 0)
        self.num_groups = renumber(group, held)
        members = group[held]
        self.entry_group = group
        counted = options.workspaces
        self.workspace = scratch_of(program, added=assignment.added, skipped=assignment.skipped) if counted else {}
        """Scratch bytes per node that runs."""
        where = {nid: step for step, nid in enumerate(program.order) if nid in self.workspace}
        self.workspace_nodes = list(where)
        moments = np.array(list(where.values()), dtype=np.int64)
        scratch = np.array([self.workspace[nid] for nid in where], dtype=np.int64)
        first = np.full(self.num_groups, len(program.order), dtype=np.int64)
        last, nbytes, device = np.zeros((3, self.num_groups), dtype=np.int64)
        np.minimum.at(first, members, self.entry_first[held])
        np.maximum.at(last, members, self.entry_last[held])
        np.maximum.at(nbytes, members, self.entry_nbytes[held])
        device[members] = self.entry_device[held]
        self.first = np.concatenate([first, moments])
        """Per buffer: the groups that have entries, then one per node with scratch."""
        self.last = np.concatenate([last, moments + 1])
        self.nbytes = np.concatenate([nbytes, scratch])
        scratch_device = np.array([program.device[nid] for nid in where], dtype=np.int64)
        self.device = np.concatenate([device, scratch_device])

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

        What whole blocks of their own take (``compat="mxnet"``) may be less.
        """
        if self.options.compat == "mxnet":
            return self.lower_bound
        return _most(self.live(self.rounded(self.nbytes, self.device)))

    def order(self) -> Precedence | None:
        """Which nodes use each buffer, and which its first writer waits for anyway.

        None for orders of more than `MOST_STEPS` steps, for which this is not worth its memory.
        """
        program, row = self.program, self.program.graph.row
        if len(program.order) > MOST_STEPS:
            return None
        first, group = self.first.tolist(), self.entry_group.tolist()
        # A set of steps is one integer, as in reachability.py; the last of the users is for entries of no group.
        users = [0] * self.num_groups + [1 << step for step in first[self.num_groups :]] + [0]
        skipped, all_reads = self.assignment.skipped, program.reads
        made = [0] * program.graph.num_entries
        needs = []
        bit = 1
        for nid in program.order:
            mine, reads, outputs = bit, all_reads[nid], range(row[nid], row[nid + 1])
            for e in reads:
                mine |= made[e]
            needs.append(mine)
            for e in outputs:
                made[e] = mine
            if nid not in skipped:  # a skipped sum touches nothing
                for e in (*reads, *outputs):
                    users[group[e]] |= bit
            bit <<= 1
        return Precedence(users[:-1], [needs[step] for step in first])

    def rounded(self, nbytes: IntArray, device: IntArray) -> IntArray:
        """These sizes as whole multiples of the device's alignment."""
        units = np.array([self.options.alignment or alignment_of(c) for c in self.program.contexts], dtype=np.int64)
        unit = units[device]
        return (nbytes + unit - 1) // unit * unit

    def unshared(self) -> int:
        """Bytes with a buffer for every entry that is made and one workspace per device as large as its largest."""
        program = self.program
        planned = np.flatnonzero(np.array(self.assignment.group, dtype=np.int64) >= 0)
        largest = [0] * len(program.contexts)
        for nid, nbytes in self.workspace.items():
            largest[program.device[nid]] = max(largest[program.device[nid]], nbytes)
        return int(self.rounded(self.entry_nbytes[planned], self.entry_device[planned]).sum()) + sum(largest)


def _entries(program: Program) -> list[IntArray]:
    """First and last step, bytes and device of each entry."""
    first, last, nbytes = (np.array(facts, dtype=np.int64) for facts in (*lifetimes(program), program.nbytes))
    return [first, last, nbytes, np.array(program.device, dtype=np.int64)[program.graph.entry_node]]


def renumber(numbers: IntArray, held: IntArray) -> int:
    """Give the numbers at ``held`` the places 0, 1, … in their order, without gaps; returns how many there are."""
    used = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
    used[numbers[held]] = 1
    numbers[held] = np.cumsum(used)[numbers[held]] - 1
    return int(used.sum())


def _most(live: IntArray) -> int:
    """The most of each row, summed."""
    return int(live.max(axis=1).sum()) if live.shape[1] else 0


def alignment_of(context: Context) -> int:
    """Bytes to which offsets on a device are aligned."""
    return 64 if context.is_host else 256
