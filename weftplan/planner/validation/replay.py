"""An independent checker of plans, which replays the schedule on a model of memory and detects overwrites.

It shares no code with the strategies. For each slab it tracks the content of each byte range. A node's inputs must be
intact when it reads them, and its writes must not overlap its own inputs. All other facts that a plan states (sizes,
lifetimes, devices, alignment, write modes, order edges, totals) are recomputed from the graph.
"""

from __future__ import annotations

from weftplan.errors import PlanError
from weftplan.planner.drafts import PlannedSteps
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.storage_assignment import Kind
from weftplan.planner.validation.claims import ByteMap, Claims, check_layout
from weftplan.support.tensor_types import Req


def validate(planned: PlannedSteps | MemoryPlan) -> None:
    """Check a plan completely.

    A planned graph is replayed node by node. A plan from a file does not list reads, so its layout is checked against
    the lifetimes that it states.

    Raises:
        PlanError: the plan is wrong; the message names the conflicting entries, their storage and the step.
    """
    if isinstance(planned, MemoryPlan):
        check_layout(planned)
    else:
        check_layout(planned.memory)
        _Replay(planned).run()


class _Replay(Claims):
    """One replay of a planned graph.

    A content is (value, storage). The value is the number of an entry, or -1 - node for scratch; entries with the same
    bytes (in-place identities) share a value.
    """

    def __init__(self, planned: PlannedSteps) -> None:
        super().__init__(planned)
        self.slabs = [ByteMap() for _ in range(self.plan.num_slabs)]
        self.value = list(range(self.graph.num_entries))
        self.started: set[int] = set()
        self.sums = {self.graph.inputs[n][1]: n for n in planned.skipped if len(self.graph.inputs[n]) == 2}

    def run(self) -> None:
        """Run all checks; raise PlanError at the first failure."""
        self.check_arrays()
        self.check_order()
        self.check_entries()
        boundary = self.planned.num_forward_nodes
        held: dict[int, list[int]] = {}
        for eid, nid in self.planned.held.items():
            held.setdefault(nid, []).append(eid)
        for step, nid in enumerate(self.planned.order):
            if step == boundary:
                self._check_outputs(step)
            self._run_node(step, nid)
            for eid in held.get(nid, ()):
                self._expect(eid, step, "its holder")
        self._check_outputs(len(self.planned.order))
        self.check_lower_bound()

    def _range(self, storage: int, nbytes: int) -> tuple[int, int, int]:
        """Return (slab, start, end) of the first ``nbytes`` bytes of a storage."""
        offset = int(self.plan.storage_offset[storage])
        return int(self.plan.storage_slab[storage]), offset, offset + nbytes

    def _of_entry(self, eid: int) -> tuple[int, int, int]:
        """Return (slab, start, end) of an entry."""
        return self._range(self.storage_of[eid], int(self.plan.entry_nbytes[eid]))

    def _expect(self, eid: int, step: int, reader: str) -> None:
        """Check that all bytes of entry ``eid`` are intact."""
        if self.storage_of[eid] < 0:
            return
        slab, start, end = self._of_entry(eid)
        at = start
        for low, high, (value, storage) in self.slabs[slab].overlapping(start, end):
            if value != self.value[eid] or low != at:
                culprit = self._content_name(value) if value != self.value[eid] else "nothing"
                raise PlanError(
                    f"step {step}: {reader} reads {self.graph.entry_name(eid)!r} in storage {self.storage_of[eid]} "
                    f"(slab {slab}, bytes {start} to {end}), but bytes {low} to {high} hold {culprit} "
                    f"(storage {storage})"
                )
            at = high
        if at < end:
            raise PlanError(
                f"step {step}: {reader} reads {self.graph.entry_name(eid)!r} in storage {self.storage_of[eid]}, but "
                f"nobody wrote bytes {at} to {end} of slab {slab}"
            )

    def _content_name(self, value: int) -> str:
        """Return the name of a value for error messages."""
        return repr(self.graph.entry_name(value)) if value >= 0 else f"scratch of {self.graph.names[-1 - value]!r}"

    def _run_node(self, step: int, nid: int) -> None:
        """Check the reads of a node and apply its writes to the model."""
        planned, graph, row = self.planned, self.graph, self.graph.row
        work = graph.works[nid]
        outs = range(row[nid], row[nid + 1])
        who = f"{work.label} ({graph.names[nid]!r})"
        if nid in planned.skipped:
            self._skip(step, nid)
            return
        reads = self.reads(nid)
        for e in reads:
            self._expect(e, step, who)
        written: list[tuple[str, int, int, int]] = []
        for e in outs:
            kind, request = Kind(int(self.plan.entry_kind[e])), planned.requests[e]
            if self.storage_of[e] < 0 or request == Req.NULL:
                continue
            allowed = None
            asked = {Kind.INPLACE: Req.INPLACE, Kind.ADDTO: Req.ADD}.get(kind, Req.WRITE)
            if request != asked:
                raise PlanError(
                    f"step {step}: entry {graph.entry_name(e)!r} has kind {kind.name} but request {request.name}"
                )
            if kind is Kind.INPLACE:
                allowed = self._inplace_source(e, nid, step)
            slab, start, end = self._of_entry(e)
            # A view writes no bytes: it has those of its base, which other inputs may share.
            view = kind is Kind.INPLACE and any(p.identity and p.output == e - row[nid] for p in work.over)
            if view:
                continue
            if kind is not Kind.ADDTO:
                name, range_of_entry = graph.entry_name(e), (slab, start, end)
                self._must_be_free(
                    step, who, what=name, byte_range=range_of_entry, reads=reads, allowed=allowed, written=written
                )
            written.append((graph.entry_name(e), slab, start, end))
        scratch = int(self.plan.workspace_nbytes[nid])
        if scratch:
            range_of_entry = self._range(int(self.plan.workspace_storage[nid]), scratch)
            self._must_be_free(
                step, who, what="its workspace", byte_range=range_of_entry, reads=reads, allowed=None, written=written
            )
            self._claim(step, int(self.plan.workspace_storage[nid]))
            self.slabs[range_of_entry[0]].write(
                range_of_entry[1], range_of_entry[2], (-1 - nid, int(self.plan.workspace_storage[nid]))
            )
        self._scratch_for_sums(nid, outs, scratch)
        for e in outs:
            if self.storage_of[e] >= 0 and planned.requests[e] != Req.NULL:
                self._write(step, e)

    def _inplace_source(self, eid: int, nid: int, step: int) -> int:
        """Return the input entry that an in-place output replaces; check that the operator allows it."""
        plan, graph, planned = self.plan, self.graph, self.planned
        work = graph.works[nid]
        index = int(plan.entry_inplace[eid])
        name = graph.entry_name(eid)
        pairs = (*work.over, *work.inplace)
        pair = next((p for p in pairs if p.input == index and p.output == eid - graph.row[nid]), None)
        if pair is None or index in work.ignored:
            raise PlanError(f"step {step}: {work.label} cannot compute {name!r} in place of its input {index}")
        source = graph.inputs[nid][index]
        if self.storage_of[source] != self.storage_of[eid]:
            raise PlanError(
                f"step {step}: {name!r} claims to be in place of {graph.entry_name(source)!r}, but they are in "
                f"storages {self.storage_of[eid]} and {self.storage_of[source]}"
            )
        if plan.entry_nbytes[source] != plan.entry_nbytes[eid] and pair not in work.over:
            raise PlanError(f"step {step}: {name!r} and {graph.entry_name(source)!r} share memory but differ in size")
        if pair.identity and (pair in work.over or planned.dtypes[source] == planned.dtypes[eid]):
            self.value[eid] = self.value[source]
        return source

    def _must_be_free(
        self,
        step: int,
        who: str,
        *,
        what: str,
        byte_range: tuple[int, int, int],
        reads: list[int],
        allowed: int | None,
        written: list[tuple[str, int, int, int]],
    ) -> None:
        """Check that a write overlaps no other write of the node, and no input except the one that it replaces."""
        slab, start, end = byte_range
        slots = 0
        for e in reads:
            if self.storage_of[e] < 0:
                continue
            written_slab, low, high = self._of_entry(e)
            if written_slab == slab and low < end and start < high:
                slots += 1
                if e != allowed or (slots > 1 and (low, high) == (start, end)):
                    raise PlanError(
                        f"step {step}: {who} writes {what} over its own input {self.graph.entry_name(e)!r} "
                        f"(slab {slab}, storage {self.storage_of[e]})"
                    )
        for name, written_slab, low, high in written:
            if written_slab == slab and low < end and start < high:
                raise PlanError(f"step {step}: {who} writes {what} and {name!r} to overlapping bytes of slab {slab}")

    def _scratch_for_sums(self, nid: int, outs: range, scratch: int) -> None:
        """Check that a node can add, and that its scratch has a buffer for each added output."""
        if self.graph.works[nid].only_overwrites and self.planned.requests[outs[0]] == Req.ADD:
            raise PlanError(f"node {self.graph.names[nid]!r} is to add, but a copy between devices overwrites")
        if not self.plan.options.workspaces:
            return
        need = sum(-(-int(self.plan.entry_nbytes[e]) // 64) * 64 for e in outs if self.planned.requests[e] == Req.ADD)
        if need > scratch:
            raise PlanError(
                f"node {self.graph.names[nid]!r} adds {need} bytes to its destinations, but has {scratch} "
                f"bytes of workspace"
            )

    def _write(self, step: int, eid: int) -> None:
        """Apply the write of an output to the model."""
        storage = self.storage_of[eid]
        slab, start, end = self._of_entry(eid)
        if Kind(int(self.plan.entry_kind[eid])) is Kind.ADDTO:
            total, out = self._sum_of(eid, step)
            self._expect(total, step, f"the sum into {self.graph.entry_name(eid)!r}")
            self.value[eid] = self.value[out]
        else:
            self._claim(step, storage)
        self.slabs[slab].write(start, end, (self.value[eid], storage))

    def _sum_of(self, term: int, step: int) -> tuple[int, int]:
        """Return (input, output) partial sums of the skipped sum node whose addition the maker of ``term`` performs."""
        nid = self.sums.get(term)
        if nid is None or self.storage_of[self.graph.inputs[nid][0]] != self.storage_of[term]:
            raise PlanError(
                f"step {step}: {self.graph.entry_name(term)!r} is added to a sum, but no skipped _grad_add in its "
                f"storage reads it"
            )
        return self.graph.inputs[nid][0], self.graph.row[nid]

    def _skip(self, step: int, nid: int) -> None:
        """Check that a skipped node is a sum whose second input was added in place by the node that computes it."""
        graph = self.graph
        if not graph.works[nid].is_sum:
            raise PlanError(f"step {step}: {graph.names[nid]!r} is skipped, but only _grad_add may be")
        term = graph.inputs[nid][1]
        if Kind(int(self.plan.entry_kind[term])) is not Kind.ADDTO:
            raise PlanError(f"step {step}: {graph.names[nid]!r} is skipped, but nobody added its second input")

    def _claim(self, step: int, storage: int) -> None:
        """Check that the first write to a storage is ordered after all earlier users of its bytes."""
        if storage in self.started:
            return
        self.started.add(storage)
        slab, start, end = self._range(storage, int(self.plan.storage_nbytes[storage]))
        for _, _, (value, older) in self.slabs[slab].overlapping(start, end):
            if older != storage and not self._ordered(older, storage):
                raise PlanError(
                    f"step {step}: storage {storage} reuses bytes of storage {older}, which held "
                    f"{self._content_name(value)}, but no order edge keeps them apart"
                )

    def _ordered(self, earlier: int, later: int) -> bool:
        """Return whether the first writer of ``later``, the next to run, waits for all previous users of ``earlier``.

        It waits for the users of each storage in ``after(later)``. Waiting is transitive through the first writer of
        such a storage, provided that it has run.
        """
        stack, seen = [later], {later}
        while stack:
            for predecessor in self.plan.after(stack.pop()).tolist():
                if predecessor == earlier:
                    return True
                if predecessor not in seen and predecessor in self.started:
                    seen.add(predecessor)
                    stack.append(predecessor)
        return False

    def _check_outputs(self, step: int) -> None:
        """Check that all outputs are intact."""
        for eid in self.planned.outputs:
            if eid not in self.external:
                self._expect(eid, step, "the caller")
