"""Checks of a plan without its graph, for plans that come from a file: sizes, bounds, and live bytes at each step.

Entries and scratch are replayed in the order of their first steps on a model of
memory: a write may only meet bytes of dead contents, or of the content that it replaces in place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import prod

from weftplan.errors import PlanError
from weftplan.planner.inplace import Kind
from weftplan.planner.memory_plan import MemoryPlan


def check_layout(plan: MemoryPlan) -> None:
    """Raise PlanError when the layout of ``plan`` contradicts the sizes or lifetimes that it states."""
    _check_bounds(plan)
    _check_sizes(plan)
    _check_clashes(plan)
    total = sum(plan.peak_by_device.values())
    if total < plan.lower_bound:
        raise PlanError(f"the plan claims a peak of {total} bytes, below its lower bound of {plan.lower_bound}")


def _check_bounds(plan: MemoryPlan) -> None:
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
        first, last = int(plan.entry_first[eid]), int(plan.entry_last[eid])
        if not 0 <= first < last <= steps:
            raise PlanError(f"entry {labels.name(eid)!r} lives from step {first} to {last}, of {steps} steps")


def _families(plan: MemoryPlan) -> list[int]:
    """Return for every entry the first entry of its in-place chain; entries of one family may share live memory."""
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
    """Replay: (family, storage) is a content, scratch of node n is family -1 - n."""
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
        for _, _, (content, before) in slabs[slab].overlapping(start, start + nbytes):
            if content != owner and until[content] > step:
                raise PlanError(
                    f"step {step}: {_title(plan, owner, index)} in storage {storage} is written over "
                    f"{_title(plan, content, newest.get(content, content))} in storage {before}, which is alive until "
                    f"step {until[content]} (slab {slab}, bytes {start} to {start + nbytes})"
                )
        slabs[slab].write(start, start + nbytes, (owner, storage))
        newest[owner] = index


def _title(plan: MemoryPlan, owner: int, eid: int) -> str:
    if owner < 0:
        return f"scratch of {plan.labels.node_names[-1 - owner]!r}"
    return f"entry {plan.labels.name(eid)!r}"


class ByteMap:
    """Which content each byte range of one slab holds: disjoint ascending ranges, no content in unwritten ranges."""

    __slots__ = ("contents", "ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.contents: list[tuple[int, int]] = []

    def overlapping(self, start: int, end: int) -> list[tuple[int, int, tuple[int, int]]]:
        """(start, end, content) of the ranges that meet [start, end), clipped to it."""
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        ranges = zip(self.starts[low:high], self.ends[low:high], self.contents[low:high], strict=True)
        return [(max(start, first), min(end, last), content) for first, last, content in ranges]

    def write(self, start: int, end: int, content: tuple[int, int]) -> None:
        """Put ``content`` into [start, end)."""
        if start >= end:
            return
        low, high = bisect_right(self.ends, start), bisect_left(self.starts, end)
        pieces = [(start, end, content)]
        if low < high and self.starts[low] < start:
            pieces.insert(0, (self.starts[low], start, self.contents[low]))
        if low < high and self.ends[high - 1] > end:
            pieces.append((end, self.ends[high - 1], self.contents[high - 1]))
        self.starts[low:high] = [first for first, _, _ in pieces]
        self.ends[low:high] = [last for _, last, _ in pieces]
        self.contents[low:high] = [held for _, _, held in pieces]
