"""The rows of a plan's pictures: one per planned buffer, with everything a reader may ask about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from weftplan.planner.plan import Kind, PlannedGraph


@dataclass(frozen=True, slots=True)
class BufferRow:
    """One buffer: an entry with planned memory, or a node's workspace.

    ``first`` and ``last`` are steps of the execution order, half-open; ``address`` is bytes from the start of the
    device's planned memory, slabs one after the other.
    """

    name: str
    kind: str
    device: str
    address: int
    nbytes: int
    first: int
    last: int
    shape: tuple[int, ...]
    dtype: str
    maker: str
    operator: str
    last_reader: str
    storage: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def buffer_rows(planned: PlannedGraph) -> list[BufferRow]:
    """All buffers of a plan, in execution order of their makers."""
    plan, graph = planned.memory, planned.graph
    base = _slab_bases(planned)
    readers = _last_readers(planned)
    rows: list[BufferRow] = []
    for step, nid in enumerate(planned.order):
        node = graph.nodes[nid]
        operator = "" if node.op is None else node.op.name
        for eid in range(graph.row[nid], graph.row[nid + 1]):
            storage = int(plan.entry_storage[eid])
            if storage < 0:
                continue
            slab = int(plan.storage_slab[storage])
            rows.append(
                BufferRow(
                    name=graph.entry_name(eid),
                    kind=Kind(int(plan.entry_kind[eid])).name.lower(),
                    device=str(plan.contexts[int(plan.slab_device[slab])]),
                    address=base[slab] + int(plan.storage_offset[storage]),
                    nbytes=int(plan.entry_nbytes[eid]),
                    first=int(plan.entry_first[eid]),
                    last=int(plan.entry_last[eid]),
                    shape=tuple(planned.shapes[eid]),
                    dtype=str(planned.dtypes[eid]),
                    maker=node.name,
                    operator=operator,
                    last_reader=readers.get(eid, "output of the graph" if eid in planned.outputs else "nobody"),
                    storage=storage,
                )
            )
        storage = int(plan.workspace_storage[nid])
        if storage >= 0 and plan.workspace_nbytes[nid]:
            slab = int(plan.storage_slab[storage])
            rows.append(
                BufferRow(
                    name=f"{node.name} (workspace)",
                    kind="workspace",
                    device=str(plan.contexts[int(plan.slab_device[slab])]),
                    address=base[slab] + int(plan.storage_offset[storage]),
                    nbytes=int(plan.workspace_nbytes[nid]),
                    first=step,
                    last=step + 1,
                    shape=(int(plan.workspace_nbytes[nid]),),
                    dtype="uint8",
                    maker=node.name,
                    operator=operator,
                    last_reader=node.name,
                    storage=storage,
                )
            )
    return rows


def live_bytes(rows: list[BufferRow], steps: int, device: str | None = None) -> list[int]:
    """Bytes alive at each step; buffers of one storage that are alive together (in place) count once, the largest."""
    change = np.zeros(steps + 1, dtype=np.int64)
    spans: dict[int, list[BufferRow]] = {}
    for row in rows:
        if device is None or row.device == device:
            spans.setdefault(row.storage, []).append(row)
    for group in spans.values():
        if len(group) == 1:
            change[group[0].first] += group[0].nbytes
            change[min(group[0].last, steps)] -= group[0].nbytes
            continue
        # A storage's alive bytes at a step are those of its largest alive member.
        edges = sorted({e for row in group for e in (row.first, min(row.last, steps))})
        for lo, hi in pairwise(edges):
            most = max((row.nbytes for row in group if row.first <= lo < row.last), default=0)
            change[lo] += most
            change[hi] -= most
    return [int(x) for x in np.cumsum(change)[:steps]]


def _slab_bases(planned: PlannedGraph) -> list[int]:
    """Where each slab begins in its device's picture."""
    plan = planned.memory
    used: dict[int, int] = {}
    base = []
    for slab in range(plan.num_slabs):
        device = int(plan.slab_device[slab])
        base.append(used.get(device, 0))
        used[device] = base[-1] + int(plan.slab_nbytes[slab])
    return base


def _last_readers(planned: PlannedGraph) -> dict[int, str]:
    readers: dict[int, str] = {}
    for nid in planned.order:
        node = planned.graph.nodes[nid]
        assert node.op is not None
        ignored = node.op.ignored(node.params)
        for i, eid in enumerate(planned.graph.inputs[nid]):
            if i not in ignored:
                readers[eid] = node.name
    return readers
