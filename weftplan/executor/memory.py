"""Planned memory made real: slabs from storage, one engine var per planned storage, typed views per entry.

A :class:`SlabPool` may be shared by executors that never need their memory at once (reshape, bucketing): each takes
what fits and adds what is missing. All operations of an executor *read* the pool's var; whoever starts a run after
another executor's, or with a plan whose storages overlap in address, first *writes* it (see ``Executor.forward``), so
the engine keeps runs apart without blocking the caller.

Users' operations read arrays of an executor (its outputs, what a monitor saw) without knowing the pool: a run that
takes the memory over from another executor therefore also writes the vars of that one's storages. Without that:

1. executor A runs; the user pushes a copy of A's output, which waits for a slow destination;
2. executor B, which shares A's memory, runs, and writes over that output;
3. the copy starts, and reads B's values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from weftplan.device.context import Context, cpu
from weftplan.ndarray import Chunk, NDArray
from weftplan.planner.plan import PlannedGraph


class SlabPool:
    """Slabs that executors share, and the var that keeps their runs apart.

    The pool keeps no slab alive, its executors do: one that grows by :meth:`Executor.reshape`, step by step, does not
    collect a slab for every size it ever had.
    """

    def __init__(self) -> None:
        self._slabs: list[weakref.ref[Chunk]] = []
        # A chunk, because the engine must delete the var when the last executor is gone.
        self._gate = Chunk(cpu(0), 0, name="slab pool")
        self.var = self._gate.var
        self._owner: int = 0
        self._chunks: Sequence[Chunk] = ()

    @property
    def slabs(self) -> list[Chunk]:
        """The slabs that some executor still uses."""
        return [slab for slab in (ref() for ref in self._slabs) if slab is not None]

    def owned_by(self, memory: PlannedMemory) -> bool:
        """True when the last run in this memory was one of ``memory``'s executor."""
        return self._owner == memory.serial

    def take_over(self, memory: PlannedMemory) -> list[Any]:
        """Make ``memory`` the owner; returns the vars of the storages of the owner before it (none: no run yet)."""
        before, self._owner, self._chunks = self._chunks, memory.serial, memory.chunks
        return [chunk.var for chunk in before]

    def take(self, needs: list[tuple[Context, int]]) -> tuple[list[Chunk], int]:
        """One slab per need, each at least that large and on that device; (slabs, bytes newly allocated).

        Largest need first; of the slabs that fit, the smallest. A slab serves one need of a call.
        """
        free = self.slabs
        self._slabs = [weakref.ref(slab) for slab in free]
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
                self._slabs.append(weakref.ref(best))
            taken[i] = best
        return [taken[i] for i in range(len(needs))], fresh


class PlannedMemory:
    """Chunks of every planned storage of one executor.

    Attributes:
        pool: the slab pool.
        allocated_bytes: bytes that this executor took from storage (0 when the pool had everything).
        chunks: per storage id, the chunk with its var.
        serial: a number that no other planned memory of this process has.
    """

    _serials = itertools.count(1)

    def __init__(self, planned: PlannedGraph, pool: SlabPool | None = None) -> None:
        self.serial = next(self._serials)
        self.pool = SlabPool() if pool is None else pool
        plan = planned.memory
        needs = [(plan.contexts[plan.slab_device[i]], int(n)) for i, n in enumerate(plan.slab_nbytes)]
        slabs, self.allocated_bytes = self.pool.take(needs)
        self._slabs = slabs
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
