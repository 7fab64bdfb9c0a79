"""The buffers of a plan one by one, with everything that a picture or a table says about them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weftplan.ops.schema import Shape
from weftplan.planner.graph import IntArray
from weftplan.planner.inplace import Kind
from weftplan.planner.layout import Layout

REPEATED = "_mirror"
"""What names of nodes that compute a forward result again end in."""
SPILLED = ("_spill", "_fetch")
"""What names of the copies to the host and back end in."""
CALLER = "(caller)"
"""Last reader of an output of the graph."""
USES = ("activations", "gradients", "scratch", "recomputed", "spilled")
"""What planned memory is for: results of the forward part, of the backward part, scratch of one operator, forward
results computed again, results that wait on the host or came back from it."""
NOBODY = "(nobody)"
"""Last reader of an entry that is made but never read."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One buffer: an entry with planned memory, or a node's scratch. A rectangle of time and address."""

    name: str
    kind: str
    """Name of its :class:`~weftplan.planner.inplace.Kind` in small letters, or ``workspace``."""
    device: str
    first: int
    """Alive during steps [first, last)."""
    last: int
    address: int
    """Bytes from the start of the device's planned memory, its slabs one after the other."""
    nbytes: int
    shape: Shape
    dtype: str
    op: str
    """Operator that makes it."""
    maker: str
    """Name of the node that makes it."""
    last_reader: str
    """Name of the node that reads it last, :data:`CALLER` or :data:`NOBODY`."""
    storage: int
    use: str
    """What it is for: one of :data:`USES`."""

    @property
    def label(self) -> str:
        """What a picture writes on it."""
        return self.name

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def last_reader(plan: Layout, eid: int) -> str:
    """Name of the node that reads an entry last; :data:`CALLER` for an output, :data:`NOBODY` when there is none."""
    if eid in plan.outputs:
        return CALLER
    labels = plan.labels
    node = labels.steps[int(plan.entry_last[eid]) - 1]
    return NOBODY if node == labels.maker(eid) else labels.node_name(node)


def scratch(plan: Layout) -> tuple[IntArray, IntArray]:
    """(nodes with scratch, their steps)."""
    steps = np.array(plan.labels.steps, dtype=np.int64)
    position = np.full(len(plan.workspace_nbytes), -1, dtype=np.int64)
    position[steps] = np.arange(len(steps))
    nodes = np.flatnonzero((plan.workspace_nbytes > 0) & (position >= 0))
    return nodes, position[nodes]


def bars(plan: Layout, device: int | None = None) -> list[Bar]:
    """One bar per entry and per node's scratch, on one device (an index of ``plan.contexts``) or on all.

    Entries come first, in the order of their numbers; then scratch, in the order of its use.
    """
    labels = plan.labels
    base = _bases(plan)
    found = []

    def place(storage: int) -> tuple[int, int]:
        """(device, address) of a storage."""
        slab = int(plan.storage_slab[storage])
        return int(plan.slab_device[slab]), int(base[slab] + plan.storage_offset[storage])

    for eid in np.flatnonzero(plan.entry_storage >= 0).tolist():
        storage = int(plan.entry_storage[eid])
        where, address = place(storage)
        if device is not None and where != device:
            continue
        maker = labels.maker(eid)
        found.append(
            Bar(
                name=labels.name(eid),
                kind=Kind(int(plan.entry_kind[eid])).name.lower(),
                device=str(plan.contexts[where]),
                first=int(plan.entry_first[eid]),
                last=int(plan.entry_last[eid]),
                address=address,
                nbytes=int(plan.entry_nbytes[eid]),
                shape=tuple(labels.shape(eid)),
                dtype=str(labels.dtype(eid)),
                op=labels.node_op(maker),
                maker=labels.node_name(maker),
                last_reader=last_reader(plan, eid),
                storage=storage,
                use=use_of(plan, labels.node_name(maker), int(plan.entry_first[eid])),
            )
        )
    for nid, step in zip(*(a.tolist() for a in scratch(plan)), strict=True):
        storage = int(plan.workspace_storage[nid])
        where, address = place(storage)
        if device is not None and where != device:
            continue
        name, nbytes = labels.node_name(nid), int(plan.workspace_nbytes[nid])
        found.append(
            Bar(
                name=f"{name} (workspace)",
                kind="workspace",
                device=str(plan.contexts[where]),
                first=step,
                last=step + 1,
                address=address,
                nbytes=nbytes,
                shape=(nbytes,),
                dtype="uint8",
                op=labels.node_op(nid),
                maker=name,
                last_reader=name,
                storage=storage,
                use="scratch",
            )
        )
    return found


def use_of(plan: Layout, maker: str, step: int) -> str:
    """What the result that the node ``maker`` writes at a step is for."""
    if maker.endswith(SPILLED):
        return "spilled"
    if plan.num_forward is None or step < plan.num_forward:
        return "activations"
    return "recomputed" if maker.endswith(REPEATED) else "gradients"


def _bases(plan: Layout) -> IntArray:
    """Where each slab begins in the picture of its device."""
    base = np.zeros(plan.num_slabs, dtype=np.int64)
    for device in range(len(plan.contexts)):
        mine = np.flatnonzero(plan.slab_device == device)
        if len(mine):
            base[mine[1:]] = np.cumsum(plan.slab_nbytes[mine])[:-1]
    return base
