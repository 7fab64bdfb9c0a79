"""The buffers of a plan and their lifetimes, as data for pictures, tables and texts.

Every function reads a finished plan; any thread may call it. A *run* is a maximal interval of a storage's use: by
entries computed in place of each other, or by the scratch of one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.memory_plan import CALLER, NOBODY, Bar, MemoryPlan
from weftplan.planner.program import IntArray
from weftplan.planner.storage_assignment import Kind

REPEATED = "_mirror"
"""Suffix of nodes that recompute a forward result."""
SPILLED = ("_spill", "_fetch")
"""Suffixes of nodes that copy to the host and back."""


def last_reader(plan: MemoryPlan, eid: int) -> str:
    """Return the node that reads an entry last; :data:`CALLER` for an output, :data:`NOBODY` if there is none."""
    if eid in plan.outputs:
        return CALLER
    labels = plan.labels
    node = labels.steps[int(plan.entry_last[eid]) - 1]
    return NOBODY if node == labels.makers[eid] else labels.node_names[node]


def scratch(plan: MemoryPlan) -> tuple[IntArray, IntArray]:
    """Return (nodes with scratch, their steps)."""
    steps = np.array(plan.labels.steps, dtype=np.int64)
    position = np.full(len(plan.workspace_nbytes), -1, dtype=np.int64)
    position[steps] = np.arange(len(steps))
    nodes = np.flatnonzero((plan.workspace_nbytes > 0) & (position >= 0))
    return nodes, position[nodes]


def bars(plan: MemoryPlan, device: int | None = None) -> list[Bar]:
    """Return one bar per entry and per node's scratch, on one device (an index of ``plan.contexts``) or on all.

    Entries come first, ordered by number; then scratch, ordered by use.
    """
    rows = _Rows(plan)
    nodes, steps = scratch(plan)
    entries = np.flatnonzero(plan.entry_storage >= 0)
    if device is not None:
        devices = plan.slab_device[plan.storage_slab]
        entries = entries[devices[plan.entry_storage[entries]] == device]
        mine = devices[plan.workspace_storage[nodes]] == device
        nodes, steps = nodes[mine], steps[mine]
    return [
        *map(rows.of_entry, entries.tolist()),
        *(rows.of_scratch(nid, step) for nid, step in zip(nodes.tolist(), steps.tolist(), strict=True)),
    ]


class _Location(TypedDict):
    """The location of a storage."""

    device: str
    address: int
    storage: int


class _Rows:
    """Builder of the bars of one plan."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._base = _bases(plan)

    def of_entry(self, eid: int) -> Bar:
        """Return the bar of an entry that has memory."""
        plan, labels = self._plan, self._plan.labels
        maker = labels.makers[eid]
        name, begin = labels.node_names[maker], int(plan.entry_first[eid])
        return Bar(
            name=labels.name(eid),
            kind=Kind(int(plan.entry_kind[eid])).name.lower(),
            first=begin,
            last=int(plan.entry_last[eid]),
            nbytes=int(plan.entry_nbytes[eid]),
            shape=tuple(labels.shapes[eid]),
            dtype=str(labels.dtypes[eid]),
            op=labels.node_op(maker),
            maker=name,
            last_reader=last_reader(plan, eid),
            use=use_of(plan, name, begin),
            **self._location(int(plan.entry_storage[eid])),
        )

    def of_scratch(self, nid: int, step: int) -> Bar:
        """Return the bar of the scratch of a node, which runs at ``step``."""
        plan, labels = self._plan, self._plan.labels
        name, nbytes = labels.node_names[nid], int(plan.workspace_nbytes[nid])
        return Bar(
            name=f"{name} (workspace)",
            kind="workspace",
            first=step,
            last=step + 1,
            nbytes=nbytes,
            shape=(nbytes,),
            dtype="uint8",
            op=labels.node_op(nid),
            maker=name,
            last_reader=name,
            use="scratch",
            **self._location(int(plan.workspace_storage[nid])),
        )

    def _location(self, storage: int) -> _Location:
        """Return the location of a storage as fields of a bar."""
        plan, slab = self._plan, int(self._plan.storage_slab[storage])
        return {
            "device": str(plan.contexts[int(plan.slab_device[slab])]),
            "address": int(self._base[slab] + plan.storage_offset[storage]),
            "storage": storage,
        }


def use_of(plan: MemoryPlan, maker: str, step: int) -> str:
    """Return the use of a result that the node ``maker`` writes at a step."""
    if maker.endswith(SPILLED):
        return "spilled"
    if plan.num_forward is None or step < plan.num_forward:
        return "activations"
    return "recomputed" if maker.endswith(REPEATED) else "gradients"


def _bases(plan: MemoryPlan) -> IntArray:
    """Return the base address of each slab in the picture of its device."""
    base = np.zeros(plan.num_slabs, dtype=np.int64)
    for device in range(len(plan.contexts)):
        mine = np.flatnonzero(plan.slab_device == device)
        if len(mine):
            base[mine[1:]] = np.cumsum(plan.slab_nbytes[mine])[:-1]
    return base


@dataclass(frozen=True, slots=True)
class BufferRuns:
    """All runs of a plan as arrays."""

    storage: IntArray
    first: IntArray
    last: IntArray
    nbytes: IntArray
    device: IntArray


def runs(plan: MemoryPlan) -> BufferRuns:
    """Return the runs of ``plan``: runs of entries (by storage, then time), then runs of scratch."""
    held = np.flatnonzero(plan.entry_storage >= 0)
    held = held[np.lexsort((plan.entry_first[held], plan.entry_storage[held]))]
    storage = plan.entry_storage[held].astype(np.int64)
    first = plan.entry_first[held].astype(np.int64)
    ends = plan.entry_last[held].astype(np.int64)
    # A run ends when every earlier entry of the storage is dead. Lifetimes of different storages are made disjoint, so
    # that a single running maximum serves all storages.
    span = int(ends.max(initial=0)) + 1
    reach = np.maximum.accumulate(ends + storage * span) if len(held) else ends
    begins = np.ones(len(held), dtype=bool)
    begins[1:] = (first + storage * span)[1:] >= reach[:-1]
    starts = np.flatnonzero(begins)
    if len(held):
        run_last = np.maximum.reduceat(ends, starts)
        run_bytes = np.maximum.reduceat(plan.entry_nbytes[held], starts)
    else:
        run_last = run_bytes = np.zeros(0, dtype=np.int64)
    nodes, moment = scratch(plan)
    storages = np.concatenate([storage[starts], plan.workspace_storage[nodes].astype(np.int64)])
    return BufferRuns(
        storage=storages,
        first=np.concatenate([first[starts], moment]),
        last=np.concatenate([run_last, moment + 1]),
        nbytes=np.concatenate([run_bytes, plan.workspace_nbytes[nodes]]),
        device=plan.slab_device[plan.storage_slab[storages]].astype(np.int64),
    )


def timeline(plan: MemoryPlan, device: int | None = None) -> NDArray[np.int64]:
    """Return the bytes alive at each step, on device number ``device`` of the plan or on all devices."""
    spans = runs(plan)
    chosen = slice(None) if device is None else spans.device == device
    change = np.zeros(len(plan.labels.steps) + 1, dtype=np.int64)
    np.add.at(change, spans.first[chosen], spans.nbytes[chosen])
    np.subtract.at(change, spans.last[chosen], spans.nbytes[chosen])
    return np.cumsum(change)[:-1]


def alive_at(plan: MemoryPlan, step: int, limit: int | None = None) -> list[Bar]:
    """Return the buffers alive at ``step``, the largest first; entries that share memory count as the latest."""
    alive = np.flatnonzero((plan.entry_storage >= 0) & (plan.entry_first <= step) & (step < plan.entry_last))
    newest: dict[int, int] = {}
    for eid in alive[np.argsort(plan.entry_first[alive], kind="stable")].tolist():
        newest[int(plan.entry_storage[eid])] = eid
    make = _Rows(plan)
    rows = list(map(make.of_entry, newest.values()))
    steps = plan.labels.steps
    if 0 <= step < len(steps) and plan.workspace_nbytes[steps[step]]:
        rows.append(make.of_scratch(steps[step], step))
    rows.sort(key=lambda row: (-row.nbytes, row.name))
    return rows[:limit]


def peak_step(plan: MemoryPlan) -> int:
    """Return the first step with the most bytes alive; 0 for an empty plan."""
    alive = timeline(plan)
    return int(alive.argmax()) if len(alive) else 0


def alive_at_peak(plan: MemoryPlan, limit: int | None = None) -> list[Bar]:
    """Return the buffers alive at the peak, the largest first."""
    return alive_at(plan, peak_step(plan), limit)
