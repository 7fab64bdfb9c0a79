"""The memory of a plan: an address in a pool and an engine var for each storage, and typed arrays for entries.

Calls of nodes are bound to this memory and to a :class:`RunState`. The thread that pushes a run sets this state and
workers only read it, so results do not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan import config
from weftplan.device.context import Context
from weftplan.device.offload_targets import OffloadTarget
from weftplan.engine.var import Var
from weftplan.executor.pool import Placement, SlabPool
from weftplan.ndarray import NDArray
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.planner import PlannedGraph
from weftplan.planner.buffers import alignment_of


@dataclass(slots=True)
class RunState:
    """The mode and random state of one run, set by the thread that pushes it."""

    is_train: bool
    seed: int = 0
    counter: int = 0


Call = Callable[[], Any]
"""A function that computes one step in one run."""
Bind = Callable[[RunState], Call]
"""A function that returns the call of a step for a run."""


_WIDEST = 8
"""Bytes of the widest element; workspaces are aligned to it."""


def place(planned: PlannedGraph) -> Placement:
    """Return a placement of the slabs of the plan one after another on each device.

    Sizes that are not multiples of the alignment (``compat="mxnet"``) come last, in descending order of the largest
    power of two that divides them. So elements are aligned to their sizes nearly always without padding. Padding is
    needed only if the size of a slab is not a multiple of the size of its widest element.
    """
    plan = planned.memory
    contexts = [plan.contexts[int(device)] for device in plan.slab_device]
    sizes = plan.slab_nbytes.tolist()
    units = [plan.options.alignment or alignment_of(ctx) for ctx in contexts]
    divisors = [min(size & -size or unit, unit) for size, unit in zip(sizes, units, strict=True)]
    aligned_to = list(divisors)
    if divisors != units:
        for eid in np.flatnonzero(plan.entry_storage >= 0).tolist():
            slab = int(plan.storage_slab[plan.entry_storage[eid]])
            aligned_to[slab] = max(aligned_to[slab], planned.dtypes[eid].itemsize)
        for storage in np.unique(plan.workspace_storage[plan.workspace_storage >= 0]).tolist():
            slab = int(plan.storage_slab[storage])
            aligned_to[slab] = max(aligned_to[slab], _WIDEST)
    needs: dict[Context, int] = dict.fromkeys(contexts, 0)
    start = [0] * plan.num_slabs
    for slab in sorted(range(plan.num_slabs), key=lambda slab: -divisors[slab]):
        ctx = contexts[slab]
        start[slab] = -(-needs[ctx] // aligned_to[slab]) * aligned_to[slab]
        needs[ctx] = start[slab] + sizes[slab]
    return Placement(
        [*zip(contexts, start, strict=True)],
        (plan.storage_slab, plan.storage_offset, plan.storage_nbytes),
        needs,
        _targets(planned),
        eager=[s for s in plan.entry_storage[planned.outputs].tolist() if s >= 0],
    )


def _targets(planned: PlannedGraph) -> dict[Context, OffloadTarget]:
    """Return the offload targets that the plan uses, by their contexts."""
    plan = planned.memory
    if len(plan.contexts) == 1:  # the device that computes
        return {}
    listed = {target.kind: target for target in plan.options.targets}
    folders = [target for target in plan.options.targets if target.kind == "file"]
    targets: dict[Context, OffloadTarget] = {}
    if plan.offloaded:
        for ctx, nbytes in plan.peak_by_device.items():
            if nbytes and ctx.device_type == "file" and ctx.device_id < len(folders):
                targets[ctx] = folders[ctx.device_id]
            elif nbytes and ctx.device_type == "cpu_pinned" and plan.on_host and "host" in listed:
                targets[ctx] = listed["host"]
            elif nbytes and ctx in plan.options.peer_contexts and "peer" in listed:
                targets[ctx] = listed["peer"]
    return targets


class PlannedMemory:
    """The planned storages of one executor.

    Args:
        planned: graph and plan.
        pool: the pool to join; None: a new pool.

    Attributes:
        pool: the pool.
        placement: the addresses of the storages in the pool.
        allocated_bytes: growth of the pool for these storages; 0 if it was large enough.
        graphs: None if segments may be captured as CUDA graphs; otherwise the reason why not.
    """

    def __init__(self, planned: PlannedGraph, pool: SlabPool | None = None) -> None:
        self.pool = SlabPool() if pool is None else pool
        self.placement = place(planned)
        self.allocated_bytes = self.pool.join(self.placement)
        self._planned = planned
        setting = config.get("MXNET_ENABLE_CUDA_GRAPHS")
        self.graphs: str | None = None if setting else "MXNET_ENABLE_CUDA_GRAPHS is off"

    @property
    def chunks(self) -> Mapping[int, Chunk]:
        """The chunks by storage: those of outputs, and all after :meth:`complete`."""
        return self.placement.chunks

    def complete(self) -> None:
        """Make the missing chunks of all storages; the caller has brought all blocks of the pool back."""
        self.pool.complete(self.placement)

    def entry(self, eid: int) -> NDArray:
        """Return an array over the chunk of entry ``eid``, with the planned shape and dtype."""
        planned = self._planned
        storage = int(planned.memory.entry_storage[eid])
        return NDArray(self.chunks[storage], planned.shapes[eid], planned.dtypes[eid])

    def workspace(self, node: int) -> tuple[Chunk, int] | None:
        """Return the chunk and the number of bytes of a node's workspace, or None if it has none."""
        plan = self._planned.memory
        nbytes = int(plan.workspace_nbytes[node])
        if nbytes == 0:
            return None
        return self.chunks[int(plan.workspace_storage[node])], nbytes

    def bound(self, nid: int, make: Callable[[], Bind]) -> Bind:
        """Return the function that makes the calls of node ``nid``: the result of ``make``, called now."""
        return make()

    def after(self, storage: int) -> list[Var]:
        """Return the vars of the storages whose memory ``storage`` reuses; its first writer waits for their users."""
        return [self.chunks[r].var for r in self._planned.memory.after(storage)]
