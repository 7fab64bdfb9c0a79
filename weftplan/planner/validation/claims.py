"""Static checks of a plan: recompute its order, sizes, kinds, devices, lifetimes and totals from the graph.

A plan from a file has no graph. :func:`check_layout` replays its entries and scratch in the order of their first steps
on a model of memory. A write may overwrite only dead contents, or the content that it replaces in place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import prod

import numpy as np

from weftplan.errors import PlanError
from weftplan.planner.drafts import PlannedSteps
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.storage_assignment import Kind
from weftplan.support.tensor_types import Req


def check_layout(plan: MemoryPlan) -> None:
    """Check that the layout of a plan agrees with the sizes and lifetimes that it states.

    Raises:
        PlanError: it contradicts them.
    """
    _check_bounds(plan)
    _check_sizes(plan)
    _check_clashes(plan)
    total = sum(plan.peak_by_device.values())
    if total < plan.lower_bound:
        raise PlanError(f"the plan claims a peak of {total} bytes, below its lower bound of {plan.lower_bound}")


def _check_bounds(plan: MemoryPlan) -> None:
    """Check that every storage is aligned and inside its slab."""
    for storage in range(plan.num_storages):
        slab = int(plan.storage_slab[storage])
        offset, nbytes = int(plan.storage_offset[storage]), int(plan.storage_nbytes[storage])
        if not 0 <= slab < plan.num_slabs:
            raise PlanError(f"storage {storage} is in slab {slab}, but there are {plan.num_slabs}")
        if offset < 0 or nbytes < 0 or offset + nbytes > plan.slab_nbytes[slab]:
            raise PlanError(
                f"storage {storage} at bytes {offset} to {offset + nbytes} is outside slab {slab} of "
                f"{int(plan.slab_nbytes[slab])} bytes"
            )
        context = plan.contexts[int(plan.slab_device[slab])]
        alignment = plan.options.alignment or (64 if context.is_host else 256)
        if offset % alignment:
            raise PlanError(f"storage {storage} at offset {offset} on {context} is not aligned to {alignment} bytes")


def _check_sizes(plan: MemoryPlan) -> None:
    """Check that every entry fits its storage and has a lifetime within the steps."""
    labels, steps = plan.labels, len(plan.labels.steps)
    for eid in range(len(plan.entry_nbytes)):
        nbytes = prod(labels.shapes[eid]) * labels.dtypes[eid].itemsize
        if nbytes > plan.entry_nbytes[eid]:
            raise PlanError(
                f"entry {labels.name(eid)!r} is planned with {int(plan.entry_nbytes[eid])} bytes, but shape "
                f"{labels.shapes[eid]} of {labels.dtypes[eid]} has {nbytes}"
            )
        storage = int(plan.entry_storage[eid])
        if storage < 0:
            continue
        if not storage < plan.num_storages:
            raise PlanError(f"entry {labels.name(eid)!r} is in storage {storage}, but there are {plan.num_storages}")
        if nbytes > plan.storage_nbytes[storage]:
            raise PlanError(
                f"entry {labels.name(eid)!r} of {nbytes} bytes does not fit storage {storage} of "
                f"{int(plan.storage_nbytes[storage])}"
            )
        birth, death = int(plan.entry_first[eid]), int(plan.entry_last[eid])
        if not 0 <= birth < death <= steps:
            raise PlanError(f"entry {labels.name(eid)!r} lives from step {birth} to {death}, of {steps} steps")


def _families(plan: MemoryPlan) -> list[int]:
    """Return, for each entry, the first entry of its in-place chain; entries of one chain may share live memory."""
    root = list(range(len(plan.entry_nbytes)))
    for eid, kind in enumerate(plan.entry_kind.tolist()):
        source = plan.labels.source(eid) if kind in (Kind.INPLACE, Kind.ADDTO) else -1
        if source >= 0 and plan.entry_storage[source] == plan.entry_storage[eid]:
            root[eid] = source

    def find(eid: int) -> int:
        while root[eid] != eid:
            root[eid] = root[root[eid]]
            eid = root[eid]
        return eid

    return [find(eid) for eid in range(len(root))]


def _check_clashes(plan: MemoryPlan) -> None:
    """Replay all writes in time order and check that none overwrites a live content.

    A content is (family, storage); the scratch of node n has family -1 - n.

    Raises:
        PlanError: two live contents overlap, or scratch has no storage that is large enough.
    """
    labels = plan.labels
    family = _families(plan)
    until: dict[int, int] = {}
    newest: dict[int, int] = {}
    for eid, storage in enumerate(plan.entry_storage.tolist()):
        if storage >= 0:
            until[family[eid]] = max(until.get(family[eid], 0), int(plan.entry_last[eid]))
    events = [
        (int(plan.entry_first[eid]), 0, eid) for eid, storage in enumerate(plan.entry_storage.tolist()) if storage >= 0
    ]
    for step, nid in enumerate(labels.steps):
        if plan.workspace_nbytes[nid]:
            until[-1 - nid] = step + 1
            events.append((step, 1, nid))
    slabs = [ByteMap() for _ in range(plan.num_slabs)]
    for step, is_scratch, index in sorted(events):
        if is_scratch:
            storage, nbytes, owner = int(plan.workspace_storage[index]), int(plan.workspace_nbytes[index]), -1 - index
            if not 0 <= storage < plan.num_storages or nbytes > plan.storage_nbytes[storage]:
                raise PlanError(
                    f"node {labels.node_names[index]!r} needs {nbytes} bytes of workspace; its storage {storage} is "
                    f"smaller or missing"
                )
        else:
            storage, nbytes, owner = int(plan.entry_storage[index]), int(plan.entry_nbytes[index]), family[index]
        start = int(plan.storage_offset[storage])
        slab = int(plan.storage_slab[storage])
        for _, _, (content, older) in slabs[slab].overlapping(start, start + nbytes):
            if content != owner and until[content] > step:
                raise PlanError(
                    f"step {step}: {_title(plan, owner, index)} in storage {storage} is written over "
                    f"{_title(plan, content, newest.get(content, content))} in storage {older}, which is alive until "
                    f"step {until[content]} (slab {slab}, bytes {start} to {start + nbytes})"
                )
        slabs[slab].write(start, start + nbytes, (owner, storage))
        newest[owner] = index


def _title(plan: MemoryPlan, owner: int, eid: int) -> str:
    """Return a description of a content for error messages."""
    if owner < 0:
        return f"scratch of {plan.labels.node_names[-1 - owner]!r}"
    return f"entry {plan.labels.name(eid)!r}"


class ByteMap:
    """A map from byte ranges of one slab to their contents.

    Invariant: ranges ascend and are disjoint; unwritten bytes are in no range.
    """

    __slots__ = ("contents", "ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.contents: list[tuple[int, int]] = []

    def overlapping(self, start: int, end: int) -> list[tuple[int, int, tuple[int, int]]]:
        """Return (start, end, content) of the ranges that overlap [start, end), clipped to it."""
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        ranges = zip(self.starts[low:high], self.ends[low:high], self.contents[low:high], strict=True)
        return [(max(start, first), min(end, last), content) for first, last, content in ranges]

    def write(self, start: int, end: int, content: tuple[int, int]) -> None:
        """Set the content of [start, end)."""
        if start >= end:
            return
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        pieces = [(start, end, content)]
        if low < high and self.starts[low] < start:
            pieces.insert(0, (self.starts[low], start, self.contents[low]))
        if low < high and self.ends[high - 1] > end:
            pieces.append((end, self.ends[high - 1], self.contents[high - 1]))
        self.starts[low:high] = [piece_start for piece_start, _, _ in pieces]
        self.ends[low:high] = [piece_end for _, piece_end, _ in pieces]
        self.contents[low:high] = [held for _, _, held in pieces]


class Claims:
    """The checks of a planned graph that need no replay.

    Every check raises PlanError if the plan contradicts the graph.
    """

    def __init__(self, planned: PlannedSteps) -> None:
        self.planned = planned
        self.graph = planned.graph
        self.plan: MemoryPlan = planned.memory
        self.gradients = set(planned.gradients.values())
        self.external = {int(self.graph.row[n]) for n in self.graph.variables()} | self.gradients
        for nid, work in enumerate(self.graph.works):
            for pair in work.over:
                if self.graph.inputs[nid][pair.input] in self.external:
                    self.external.add(self.graph.row[nid] + pair.output)
        self.storage_of = self.plan.entry_storage.tolist()

    def check_arrays(self) -> None:
        """Check the lengths of the plan's arrays."""
        plan, graph = self.plan, self.graph
        counts = {"entry": graph.num_entries, "workspace": graph.num_nodes, "storage": plan.num_storages}
        counts |= {"slab": plan.num_slabs, "after": plan.num_storages + 1}
        for name, value in vars(plan).items():
            if isinstance(value, np.ndarray) and name != "after_storages":
                expected = counts[name.partition("_")[0]]
                if len(value) != expected:
                    raise PlanError(f"plan field {name} has {len(value)} items, expected {expected}")

    def check_order(self) -> None:
        """Check that every operator node runs once, after its inputs and control dependencies."""
        graph, order, boundary = self.graph, self.planned.order, self.planned.num_forward_nodes
        position = {nid: step for step, nid in enumerate(order)}
        operators = [n for n in range(graph.num_nodes) if not graph.is_variable[n]]
        if len(position) != len(order) or sorted(order) != operators:
            raise PlanError(f"the order has {len(order)} steps; expected each of {len(operators)} operator nodes once")
        for step, nid in enumerate(order):
            needs = [graph.entry_node[e] for e in graph.inputs[nid]] + graph.controls[nid]
            for needed in needs:
                position_needed = position.get(needed, -1)
                if position_needed >= step:
                    raise PlanError(
                        f"step {step}: {graph.names[nid]!r} runs before {graph.names[needed]!r} "
                        f"(step {position_needed}), which it needs"
                    )
        for eid in self.planned.outputs:
            if position.get(graph.entry_node[eid], -1) >= boundary:
                raise PlanError(f"output {graph.entry_name(eid)!r} is made after the forward part of {boundary} steps")

    def reads(self, nid: int) -> list[int]:
        """Return the entries whose values a node reads, one per input."""
        ignored = self.graph.works[nid].ignored
        return [e for i, e in enumerate(self.graph.inputs[nid]) if i not in ignored]

    def check_entries(self) -> None:
        """Check sizes, kinds, devices and lifetimes of entries, and the devices of scratch."""
        plan, graph, planned = self.plan, self.graph, self.planned
        heads = set(planned.outputs) | self.gradients
        sizes = planned.nbytes or [
            prod(shape) * dtype.itemsize for shape, dtype in zip(planned.shapes, planned.dtypes, strict=True)
        ]
        end = len(planned.order)
        position = {nid: step for step, nid in enumerate(planned.order)}
        last_read = {e: step for step, nid in enumerate(planned.order) for e in self.reads(nid)}
        for eid, nid in planned.held.items():
            last_read[eid] = max(last_read.get(eid, -1), position[nid])
        for eid in range(graph.num_entries):
            name, storage = graph.entry_name(eid), self.storage_of[eid]
            if int(plan.entry_nbytes[eid]) != sizes[eid]:
                raise PlanError(
                    f"entry {name!r} is planned with {int(plan.entry_nbytes[eid])} bytes, but shape "
                    f"{planned.shapes[eid]} of {planned.dtypes[eid]} has {sizes[eid]}"
                )
            kind, request = Kind(int(plan.entry_kind[eid])), planned.requests[eid]
            if (eid in self.external) != (kind is Kind.EXTERNAL):
                raise PlanError(f"entry {name!r} has kind {kind.name}, but only variables and gradients are external")
            is_used = eid in last_read or eid in heads
            if kind is Kind.EXTERNAL:
                if storage >= 0:
                    raise PlanError(f"entry {name!r} is the caller's, but the plan puts it into storage {storage}")
            elif storage < 0:
                if is_used:
                    raise PlanError(f"entry {name!r} is read, but has no memory")
                if request != Req.NULL:
                    raise PlanError(f"entry {name!r} has no memory, but its request is {request.name}")
            if kind is Kind.UNUSED and is_used:
                raise PlanError(f"entry {name!r} is marked unused, but it is read")
            if storage >= 0:
                if plan.storage_context(storage) != planned.entry_device(eid):
                    raise PlanError(
                        f"entry {name!r} is made on {planned.entry_device(eid)}, but its storage {storage} is on "
                        f"{plan.storage_context(storage)}"
                    )
                birth = position[graph.entry_node[eid]]
                death = end if eid in heads else last_read.get(eid, birth) + 1
                if (int(plan.entry_first[eid]), int(plan.entry_last[eid])) != (birth, death):
                    raise PlanError(
                        f"entry {name!r} lives from step {birth} to {death}, but the plan says "
                        f"{int(plan.entry_first[eid])} to {int(plan.entry_last[eid])}"
                    )
        for nid in position:
            storage = int(plan.workspace_storage[nid])
            if plan.workspace_nbytes[nid] and plan.storage_context(storage) != planned.devices[nid]:
                name = graph.names[nid]
                raise PlanError(f"node {name!r} is on {planned.devices[nid]}, its workspace storage {storage} is not")

    def check_lower_bound(self) -> None:
        """Check the lower bound, the sum of the devices' peaks of live bytes.

        Entries of one storage with overlapping lifetimes are one buffer, as large as the largest of them.
        """
        plan, steps = self.plan, len(self.planned.order)
        in_storage: dict[int, list[tuple[int, int, int]]] = {}
        for eid, storage in enumerate(self.storage_of):
            if storage >= 0 and plan.entry_kind[eid] != Kind.UNUSED:
                life = (int(plan.entry_first[eid]), int(plan.entry_last[eid]), int(plan.entry_nbytes[eid]))
                in_storage.setdefault(storage, []).append(life)
        change = [[0] * (steps + 1) for _ in plan.contexts]
        for storage, lives in in_storage.items():
            lives.sort()
            row = change[int(plan.slab_device[plan.storage_slab[storage]])]
            birth, death, nbytes = lives[0]
            for start, end, size in [*lives[1:], (steps + 1, steps + 1, 0)]:
                if start < death:
                    death, nbytes = max(death, end), max(nbytes, size)
                else:
                    row[birth] += nbytes
                    row[death] -= nbytes
                    birth, death, nbytes = start, end, size
        for step, nid in enumerate(self.planned.order):
            scratch = int(plan.workspace_nbytes[nid])
            if scratch:
                row = change[plan.contexts.index(self.planned.devices[nid])]
                row[step] += scratch
                row[step + 1] -= scratch
        bound = sum(max(accumulate(row)) for row in change)
        if plan.lower_bound != bound:
            raise PlanError(f"the plan claims a lower bound of {plan.lower_bound} bytes, but {bound} are alive at once")
