"""Planned memory made real: slabs from storage, one engine var per planned storage, typed views per entry.

A :class:`SlabPool` may be shared by executors that never need their memory at once (reshape, bucketing): each takes
what fits and adds what is missing. All operations of an executor *read* the pool's var; whoever starts a run after
another executor's, or with a plan whose storages overlap in address, first *writes* it (see ``Executor.forward``), so
the engine keeps runs apart without blocking the caller.
"""

from __future__ import annotations

from typing import Any

from weftplan.device.context import Context
from weftplan.engine import get as get_engine
from weftplan.ndarray import Chunk, NDArray
from weftplan.planner.plan import PlannedGraph


class SlabPool:
    """Slabs that executors share, and the var that keeps their runs apart."""

    def __init__(self) -> None:
        self.slabs: list[Chunk] = []
        self.var = get_engine().new_variable("slab pool")
        self.last_owner: object | None = None

    def take(self, needs: list[tuple[Context, int]]) -> tuple[list[Chunk], int]:
        """One slab per need, each at least that large and on that device; (slabs, bytes newly allocated).

        Largest need first; of the slabs that fit, the smallest. A slab serves one need of a call.
        """
        free = list(self.slabs)
        taken: dict[int, Chunk] = {}
        fresh = 0
        for i in sorted(range(len(needs)), key=lambda k: -needs[k][1]):
            ctx, nbytes = needs[i]
            fitting = [slab for slab in free if slab.context == ctx and slab.nbytes >= nbytes]
            if fitting:
                best = min(fitting, key=lambda slab: slab.nbytes)
                free.remove(best)
            else:
                best = Chunk(ctx, nbytes, name="planned")
                fresh += best.nbytes
                self.slabs.append(best)
            taken[i] = best
        return [taken[i] for i in range(len(needs))], fresh


class PlannedMemory:
    """Chunks of every planned storage of one executor.

    Attributes:
        pool: the slab pool.
        allocated_bytes: bytes that this executor took from storage (0 when the pool had everything).
        chunks: per storage id, the chunk with its var.
    """

    def __init__(self, planned: PlannedGraph, pool: SlabPool | None = None) -> None:
        self.pool = SlabPool() if pool is None else pool
        plan = planned.memory
        needs = [(plan.contexts[plan.slab_device[i]], int(n)) for i, n in enumerate(plan.slab_nbytes)]
        slabs, self.allocated_bytes = self.pool.take(needs)
        whole = pool is None
        self.chunks: list[Chunk] = []
        for s in range(plan.num_storages):
            slab = slabs[plan.storage_slab[s]]
            offset, nbytes = int(plan.storage_offset[s]), int(plan.storage_nbytes[s])
            alone = whole and offset == 0 and nbytes == slab.nbytes
            self.chunks.append(slab if alone else slab.part(offset, nbytes))
        self._planned = planned

    def entry(self, eid: int) -> NDArray:
        """The array of a planned entry."""
        planned = self._planned
        storage = int(planned.memory.entry_storage[eid])
        return NDArray(self.chunks[storage], planned.shapes[eid], planned.dtypes[eid])

    def workspace(self, node: int) -> Any:
        """(chunk, bytes) of a node's workspace, or None when it has none."""
        plan = self._planned.memory
        nbytes = int(plan.workspace_nbytes[node])
        if nbytes == 0:
            return None
        return self.chunks[int(plan.workspace_storage[node])], nbytes

    def after(self, storage: int) -> list[Any]:
        """Vars of the storages whose memory this one reuses: its first writer must wait for their readers."""
        return [self.chunks[r].var for r in self._planned.memory.after(storage)]
