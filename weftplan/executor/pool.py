"""Memory that executors share: one block per device, as large as the largest of them needs.

Executors that never need their memory at once (reshape, bucketing) share a :class:`SlabPool`. Each lays its slabs one
after another from the start of the block. The pool holds the most that any of its executors has needed, in whatever
order they were bound: when a larger one joins, the block is replaced and the others move, contents and all.

A move happens on the thread that binds, when no operation is pending on any var of the pool's executors (``_grow``).

All executors of a pool must be used by one thread at a time.

All operations of an executor *read* the pool's var; a run after another executor's, or with a plan whose storages
overlap in address, first *writes* it (see ``Executor.forward``), so the engine keeps runs apart without
blocking the caller. Users' operations read arrays of an executor (its outputs, arrays that a monitor saw) without
knowing the pool: a run that takes the memory over from another executor therefore also writes the vars of the storages
of that executor (``take_over``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from weftplan import engine
from weftplan.device.context import Context
from weftplan.device.offload_targets import OffloadTarget
from weftplan.engine.var import Var
from weftplan.errors import BindError, EngineError, OutOfMemoryError
from weftplan.executor.idle import Idleness, in_turn
from weftplan.executor.pool_memory import PoolMemory, copy_bytes, finish_deletes, settle
from weftplan.ndarray.memory.chunk import MovableChunk, lost
from weftplan.storage import offload
from weftplan.support.array_types import RawArray


class Placement:
    """The addresses of the storages of one executor in the blocks of a pool.

    Attributes:
        chunks: by storage, its bytes and its var; at first only of those that are looked at before the first run.
        needs: bytes from the start of the block, per device.
        targets: those contexts that are offload targets.
    """

    __slots__ = ("__weakref__", "_eager", "_slabs", "_storages", "chunks", "needs", "targets")

    def __init__(
        self,
        slabs: Sequence[tuple[Context, int]],
        storages: Sequence[RawArray],
        needs: Mapping[Context, int],
        targets: Mapping[Context, OffloadTarget] | None = None,
        *,
        eager: Iterable[int] = (),
    ) -> None:
        """Nothing is looked at yet but what is needed.

        Args:
            slabs: device of each slab, and its offset in the block.
            storages: three arrays: the slab of each storage, its offset there, its bytes.
            eager: storages that have a chunk from the start.
        """
        self._slabs = slabs
        self._storages = storages
        self._eager = list(eager)
        self.needs = dict(needs)
        self.targets = dict(targets or {})
        self.chunks: dict[int, MovableChunk] = {}

    def _where(self, storages: list[int]) -> list[tuple[Context, int, int]]:
        """Device, offset in the block and bytes of each of these storages."""
        if not storages:
            return []
        columns = [column[storages].tolist() for column in self._storages]
        places = [(*self._slabs[slab], offset, size) for slab, offset, size in zip(*columns, strict=True)]
        return [(ctx, start + offset, size) for ctx, start, offset, size in places]

    def put(self, blocks: Mapping[Context, PoolMemory]) -> None:
        """Point the chunks at the blocks of these devices; the first time some are made, which takes all blocks."""
        if not self.chunks:
            self.make(self._eager, blocks)
            return
        for chunk, (ctx, at, size) in zip(self.chunks.values(), self._where([*self.chunks]), strict=True):
            block = blocks.get(ctx)
            if block is not None:
                chunk.move(block.cut([(at, size)])[0], block)

    def make(self, storages: list[int], blocks: Mapping[Context, PoolMemory]) -> None:
        """Make the chunks of these storages in the blocks of all devices."""
        places = [*zip(storages, self._where(storages), strict=True)]
        chunks_by_storage = dict(self.chunks)  # other threads may be looking at those that there are
        for ctx, block in blocks.items():
            mine = [(k, at, size) for k, (where, at, size) in places if where is ctx or where == ctx]
            parts = block.cut([(at, size) for _, at, size in mine])
            chunks = MovableChunk.several(ctx, parts, owner=block, name="planned")
            chunks_by_storage.update(zip([k for k, _, _ in mine], chunks, strict=True))
        self.chunks = chunks_by_storage

    def rest(self) -> list[int]:
        """The storages that have no chunk yet."""
        count = len(self._storages[0]) if self._storages else 0
        return [k for k in range(count) if k not in self.chunks]

    def leave(self, ctx: Context) -> None:
        """The storages on ``ctx`` have no memory any more."""
        for chunk in self.chunks.values():
            if chunk.context == ctx:
                chunk.leave()


class SlabPool:
    """Blocks that executors share, and the var that keeps their runs apart. It lives as long as its executors."""

    def __init__(self) -> None:
        self._engine = engine.get()
        # Runs are kept apart by it and hand on no values, so what one operation of a run fails at is not the others'.
        self.var = self._engine.new_order("slab pool")
        self._blocks: dict[Context, PoolMemory] = {}
        self._members: list[weakref.ref[Placement]] = []
        self.idleness = Idleness(self)
        """Whether the blocks may wait elsewhere; a ``with`` block of it keeps them here."""
        self._room: offload.Reservation | None = None
        """Bytes of offload targets that its plans use."""
        weakref.finalize(self, self.idleness.close).atexit = False
        self._owner: Placement | None = None
        """Whose values are in memory: that of the last run. Held, since its arrays may be read when it is gone."""

    @property
    def nbytes(self) -> dict[Context, int]:
        """Bytes held, per device, here or in a target."""
        return {**{ctx: block.nbytes for ctx, block in self._blocks.items()}, **self.idleness.away}

    def idle(self, variables: list[Var]) -> bool:
        """Return whether no operation on these vars of the pool's engine is pending on the host."""
        try:
            return self._engine.idle(variables)
        except EngineError:  # in the middle of the engine's work
            return False

    def owned_by(self, placement: Placement) -> bool:
        """Return whether the last run in this memory was that of ``placement``'s executor."""
        return self._owner is placement

    def take_over(self, placement: Placement) -> list[MovableChunk]:
        """Make ``placement`` the owner; returns the storages of the owner before it (none: no run yet)."""
        # The run writes the vars of these storages, too. Without that:
        # 1. executor A runs; the user pushes a copy of A's output, which waits for a slow destination;
        # 2. executor B, which shares A's memory, runs, and writes over that output;
        # 3. the copy starts, and reads B's values.
        before, self._owner = self._owner, placement
        return [] if before is None else list(before.chunks.values())

    def join(self, placement: Placement) -> int:
        """Make room for ``placement`` and give it its first chunks; return by how many bytes the pool has grown.

        Raises:
            OutOfMemoryError: no room; every executor of the pool goes on as before.
            WaitInWorkerError: the pool must grow, and this is called inside an engine operation.
            BindError: the pool belongs to another engine.
        """
        if self._engine is not engine.get():
            raise BindError(
                f"shared_exec was bound under {self._engine!r}, the current engine is {engine.get()!r}; bind "
                f"without shared_exec, or under the same engine"
            )
        with in_turn(), self.idleness:
            return self._join(placement)

    def _join(self, placement: Placement) -> int:
        """As ``join``, with all blocks here."""
        self._members = [ref for ref in self._members if ref() is not None]
        others = self._placements()
        before = self.nbytes
        # A block that is missing although others need it was lost when memory ran out: all of them get it back.
        short = {
            ctx: max(nbytes, *(member.needs.get(ctx, 0) for member in others), 0)
            for ctx, nbytes in placement.needs.items()
            if nbytes > before.get(ctx, -1)
        }
        for ctx, target in placement.targets.items():
            if self._room is None:
                self._room = offload.Reservation()
                weakref.finalize(self, self._room.free).atexit = False
            self._room.hold(ctx, target, placement.needs[ctx])
        if not before.keys().isdisjoint(short):
            self._settle()
        for ctx, nbytes in short.items():
            self._grow(ctx, nbytes)
        fresh = sum(nbytes - before.get(ctx, 0) for ctx, nbytes in short.items())
        placement.put(self._blocks)
        self._take_in(placement.chunks.values())
        self._members.append(weakref.ref(placement))
        return fresh

    def complete(self, placement: Placement) -> None:
        """Make the chunks of ``placement`` that are missing; offloaded blocks have been brought back.

        Raises:
            OutOfMemoryError: a block was lost when memory ran out.
        """
        storages = placement.rest()
        if not storages:
            return
        if not self._blocks.keys() >= placement.needs.keys():
            raise lost(self)
        placement.make(storages, self._blocks)
        self._take_in(placement.chunks[k] for k in storages)

    def _take_in(self, chunks: Iterable[MovableChunk]) -> None:
        """New chunks ask the pool for bytes that are away."""
        back = weakref.WeakMethod(self.idleness.bring_back)
        for chunk in chunks:
            chunk.returned_by(back)

    def _placements(self) -> list[Placement]:
        """Return the placements that may still be in use."""
        living = [member for member in (ref() for ref in self._members) if member is not None]
        if self._owner is not None and self._owner not in living:
            living.append(self._owner)
        return living

    def _settle(self) -> None:
        """Block until no operation on the pool's memory is pending."""
        settle([self.var, *(chunk.var for member in self._placements() for chunk in member.chunks.values())])

    def _grow(self, ctx: Context, nbytes: int) -> None:
        """Make the block on ``ctx`` one of ``nbytes``; nothing is pending."""
        if ctx not in self._blocks:
            self._install(ctx, PoolMemory(ctx, nbytes))
            return
        before = self.nbytes[ctx]
        kept = None
        if self._owner is not None:
            # The results of the last run move, too: its outputs may still be read, or its backward part run.
            try:
                new = PoolMemory(ctx, nbytes)
            except OutOfMemoryError:
                # No room for both at once: the contents wait on the host.
                kept = np.empty(before, np.uint8)
                copy_bytes(ctx, kept, self._blocks[ctx].raw)
            else:
                copy_bytes(ctx, new.raw[:before], self._blocks[ctx].raw)
                self._give_back(ctx, lambda: self._install(ctx, new))
                return
        old = self._give_back(ctx, lambda: self._vacate(ctx))
        try:
            new = PoolMemory(ctx, nbytes)
        except OutOfMemoryError:
            self._restore(ctx, before, old, kept)
            raise
        self._refill(ctx, new, kept)

    def _restore(self, ctx: Context, nbytes: int, old: weakref.ref[PoolMemory], kept: RawArray | None) -> None:
        """After a failure: the old block, if an exported array keeps it, or one like it."""
        try:
            self._refill(ctx, old() or PoolMemory(ctx, nbytes), kept)
        except OutOfMemoryError:
            self._owner = None  # its values are lost; the next executor that joins brings the block back
            raise

    def _refill(self, ctx: Context, block: PoolMemory, kept: RawArray | None) -> None:
        if kept is not None:
            copy_bytes(ctx, block.raw[: kept.nbytes], kept)
        self._install(ctx, block)

    def _install(self, ctx: Context, block: PoolMemory) -> None:
        """Let the storages of all executors on ``ctx`` lie in ``block`` from now on."""
        self._blocks[ctx] = block
        # Prepared calls hold views of the old bytes: a chunk that moves drops them, and the next run makes new views.
        for member in self._placements():
            member.put({ctx: block})

    def _vacate(self, ctx: Context) -> None:
        """The storages on ``ctx`` have no memory until the next :meth:`_install`."""
        del self._blocks[ctx]
        for member in self._placements():
            member.leave(ctx)

    def _give_back(self, ctx: Context, leave: Callable[[], object]) -> weakref.ref[PoolMemory]:
        """Call ``leave``, after which no storage lies in the block on ``ctx``, and give that block back to storage.

        Where an exported array holds it, it goes back with that; the result says so.
        """
        held, chunk = weakref.ref(self._blocks[ctx]), self._blocks[ctx].chunk
        leave()
        if held() is not None:
            # Chunks of executors that are gone may hold it too, until the engine has deleted their vars.
            finish_deletes(ctx)
        if held() is None:
            chunk.close()
        return held
