"""Pools of planned memory: one block per device, which executors share and which is as large as the largest needs.

Executors that do not need their memory at the same time (reshape, bucketing) share a :class:`SlabPool`. Each places its
slabs one after another from the start of the block. If a larger executor joins, the pool replaces the block by a larger
block and moves the contents. So its size does not depend on the order of the binds.

The move runs on the thread that binds, while no operation is pending on any var of the pool's executors (``_join``).
All executors of a pool must be used by one thread at a time.

The engine orders the runs on a pool by the pool's var: all operations of an executor read it, and a run that reuses
memory of an earlier run writes it first (``Executor._fence``).
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
from weftplan.executor.idle import Idleness, hold_all_devices
from weftplan.executor.pool_memory import PoolMemory, copy_bytes, finish_deletes, settle
from weftplan.ndarray.memory.chunk import MovableChunk, lost
from weftplan.storage import offload
from weftplan.support.array_types import RawArray


class Placement:
    """The addresses of the storages of one executor in the blocks of a pool.

    Attributes:
        chunks: chunk by storage; until the first run only the eager chunks.
        needs: by device, the bytes that the executor needs from the start of the block.
        targets: the offload target of each context that is one.
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
        """
        Args:
            slabs: for each slab, its device and its offset in the block.
            storages: three arrays: the slab of each storage, its offset in the slab, and its bytes.
            needs: see the attribute.
            targets: see the attribute.
            eager: storages that get a chunk when the placement joins a pool, because callers see their arrays.
        """
        self._slabs = slabs
        self._storages = storages
        self._eager = list(eager)
        self.needs = dict(needs)
        self.targets = dict(targets or {})
        self.chunks: dict[int, MovableChunk] = {}

    def _locations(self, storages: list[int]) -> list[tuple[Context, int, int]]:
        """Return (device, offset in the block, bytes) of each of ``storages``."""
        if not storages:
            return []
        columns = [column[storages].tolist() for column in self._storages]
        locations = [(*self._slabs[slab], offset, size) for slab, offset, size in zip(*columns, strict=True)]
        return [(ctx, start + offset, size) for ctx, start, offset, size in locations]

    def put(self, blocks: Mapping[Context, PoolMemory]) -> None:
        """Move the chunks to new blocks. The first call makes the eager chunks, and needs the blocks of all devices."""
        if not self.chunks:
            self.make(self._eager, blocks)
            return
        for chunk, (ctx, at, size) in zip(self.chunks.values(), self._locations([*self.chunks]), strict=True):
            block = blocks.get(ctx)
            if block is not None:
                chunk.move(block.cut([(at, size)])[0], block)

    def make(self, storages: list[int], blocks: Mapping[Context, PoolMemory]) -> None:
        """Make the chunks of ``storages``, given the blocks of all devices."""
        locations = [*zip(storages, self._locations(storages), strict=True)]
        chunks_by_storage = dict(self.chunks)  # a new table, as other threads may iterate over the old table
        for ctx, block in blocks.items():
            mine = [(k, at, size) for k, (context, at, size) in locations if context is ctx or context == ctx]
            parts = block.cut([(at, size) for _, at, size in mine])
            chunks = MovableChunk.several(ctx, parts, owner=block, name="planned")
            chunks_by_storage.update(zip([k for k, _, _ in mine], chunks, strict=True))
        self.chunks = chunks_by_storage

    def missing(self) -> list[int]:
        """Return the storages that have no chunk yet."""
        count = len(self._storages[0]) if self._storages else 0
        return [k for k in range(count) if k not in self.chunks]

    def leave(self, ctx: Context) -> None:
        """Take the memory away from the chunks on ``ctx``."""
        for chunk in self.chunks.values():
            if chunk.context == ctx:
                chunk.leave()


class SlabPool:
    """The blocks that executors share, one per device, and the var that orders their runs."""

    def __init__(self) -> None:
        self._engine = engine.get()
        # An order, which carries no failures: a failed operation must not fail all later operations of the pool.
        self.var = self._engine.new_order("slab pool")
        self._blocks: dict[Context, PoolMemory] = {}
        self._members: list[weakref.ref[Placement]] = []
        self.idleness = Idleness(self)
        """The offloaded blocks; ``with pool.idleness`` brings them back and keeps all blocks in memory."""
        self._reservation: offload.Reservation | None = None
        """The bytes of offload targets that are reserved for the plans of the pool."""
        weakref.finalize(self, self.idleness.close).atexit = False
        self._owner: Placement | None = None
        """The placement of the last run, whose values are in memory. A strong reference, because its arrays may be read
        after its executor has been deleted."""

    @property
    def nbytes(self) -> dict[Context, int]:
        """Bytes of the block on each device, in memory or offloaded."""
        return {**{ctx: block.nbytes for ctx, block in list(self._blocks.items())}, **self.idleness.away}

    def idle(self, variables: list[Var]) -> bool:
        """Return whether no operation on ``variables`` is pending on the host; False if the engine cannot tell now."""
        try:
            return self._engine.idle(variables)
        except EngineError:  # this thread is inside the engine, for example in a destructor
            return False

    def owned_by(self, placement: Placement) -> bool:
        """Return whether the last run on this pool was a run of ``placement``'s executor."""
        return self._owner is placement

    def take_over(self, placement: Placement) -> list[MovableChunk]:
        """Make ``placement`` the owner; return the chunks of the previous owner, empty before the first run."""
        # The fence of the run writes the vars of these chunks, too. Without that:
        # 1. executor A runs; the user pushes a copy of A's output, which waits for a slow destination;
        # 2. executor B, which shares A's memory, runs, and overwrites that output;
        # 3. the copy starts, and reads B's values.
        # The copy does not read the pool's var, because users' operations do not know the pool.
        previous_owner, self._owner = self._owner, placement
        return [] if previous_owner is None else list(previous_owner.chunks.values())

    def join(self, placement: Placement) -> int:
        """Make room for ``placement`` and make its eager chunks; return by how many bytes the pool has grown.

        Raises:
            OutOfMemoryError: no room for a larger block. The pool keeps its old blocks and their contents, unless an
                old block was freed for the attempt and cannot be allocated again.
            WaitInWorkerError: a block must be replaced, and the caller is inside an engine operation.
            BindError: the pool belongs to another engine.
        """
        if self._engine is not engine.get():
            raise BindError(
                f"shared_exec was bound under {self._engine!r}, the current engine is {engine.get()!r}; bind "
                f"without shared_exec, or under the same engine"
            )
        with hold_all_devices(), self.idleness:
            return self._join(placement)

    def _join(self, placement: Placement) -> int:
        """Do the work of :meth:`join`, with all blocks in memory."""
        self._members = [ref for ref in self._members if ref() is not None]
        other_placements = self._placements()
        old_nbytes = self.nbytes
        # If another executor needs a block that is missing, it was lost when memory ran out. A new block serves both.
        short = {
            ctx: max(nbytes, *(member.needs.get(ctx, 0) for member in other_placements), 0)
            for ctx, nbytes in placement.needs.items()
            if nbytes > old_nbytes.get(ctx, -1)
        }
        for ctx, target in placement.targets.items():
            if self._reservation is None:
                self._reservation = offload.Reservation()
                weakref.finalize(self, self._reservation.free).atexit = False
            self._reservation.hold(ctx, target, placement.needs[ctx])
        if not old_nbytes.keys().isdisjoint(short):
            self._settle()
        for ctx, nbytes in short.items():
            self._grow(ctx, nbytes)
        fresh = sum(nbytes - old_nbytes.get(ctx, 0) for ctx, nbytes in short.items())
        placement.put(self._blocks)
        self._set_bring_back(placement.chunks.values())
        self._members.append(weakref.ref(placement))
        return fresh

    def complete(self, placement: Placement) -> None:
        """Make the missing chunks of ``placement``; the caller has brought all blocks back.

        Raises:
            OutOfMemoryError: a block was lost when memory ran out.
        """
        storages = placement.missing()
        if not storages:
            return
        if not self._blocks.keys() >= placement.needs.keys():
            raise lost(self)
        placement.make(storages, self._blocks)
        self._set_bring_back(placement.chunks[k] for k in storages)

    def _set_bring_back(self, chunks: Iterable[MovableChunk]) -> None:
        """Let new chunks bring their block back if they are used while it is offloaded."""
        bring_back = weakref.WeakMethod(self.idleness.bring_back)
        for chunk in chunks:
            chunk.returned_by(bring_back)

    def _placements(self) -> list[Placement]:
        """Return the placements of existing executors, and the owner."""
        living = [member for member in (ref() for ref in self._members) if member is not None]
        if self._owner is not None and self._owner not in living:
            living.append(self._owner)
        return living

    def _settle(self) -> None:
        """Block until no operation on the pool's memory is pending."""
        settle([self.var, *(chunk.var for member in self._placements() for chunk in member.chunks.values())])

    def _grow(self, ctx: Context, nbytes: int) -> None:
        """Allocate the block on ``ctx``, or replace it by one of ``nbytes`` bytes that has the owner's contents.

        Invariant: no operation is pending on a block that is replaced, as ``_join`` has waited for all.
        """
        if ctx not in self._blocks:
            self._install(ctx, PoolMemory(ctx, nbytes))
            return
        old_nbytes = self.nbytes[ctx]
        saved_bytes = None
        if self._owner is not None:
            # Keep the results of the last run: a caller may read its outputs or run its backward part.
            try:
                new = PoolMemory(ctx, nbytes)
            except OutOfMemoryError:
                # No room for both blocks: copy the contents to the host meanwhile.
                saved_bytes = np.empty(old_nbytes, np.uint8)
                copy_bytes(ctx, saved_bytes, self._blocks[ctx].raw)
            else:
                copy_bytes(ctx, new.raw[:old_nbytes], self._blocks[ctx].raw)
                self._give_back(ctx, lambda: self._install(ctx, new))
                return
        old = self._give_back(ctx, lambda: self._vacate(ctx))
        try:
            new = PoolMemory(ctx, nbytes)
        except OutOfMemoryError:
            self._restore(ctx, old_nbytes, old, saved_bytes)
            raise
        self._refill(ctx, new, saved_bytes)

    def _restore(self, ctx: Context, nbytes: int, old: weakref.ref[PoolMemory], saved_bytes: RawArray | None) -> None:
        """After a failed allocation, install the old block, if exported arrays keep it alive, or a block of its size.

        Raises:
            OutOfMemoryError: the pool now has no block on ``ctx``, and its values are lost.
        """
        try:
            self._refill(ctx, old() or PoolMemory(ctx, nbytes), saved_bytes)
        except OutOfMemoryError:
            self._owner = None  # the next executor that joins allocates the block again
            raise

    def _refill(self, ctx: Context, block: PoolMemory, saved_bytes: RawArray | None) -> None:
        """Copy the contents ``saved_bytes`` (None: none) into ``block``, and install it."""
        if saved_bytes is not None:
            copy_bytes(ctx, block.raw[: saved_bytes.nbytes], saved_bytes)
        self._install(ctx, block)

    def _install(self, ctx: Context, block: PoolMemory) -> None:
        """Make ``block`` the block on ``ctx``, and move the chunks of all placements into it."""
        self._blocks[ctx] = block
        # A chunk that moves makes its executors drop their prepared calls, which have views of the old bytes.
        for member in self._placements():
            member.put({ctx: block})

    def _vacate(self, ctx: Context) -> None:
        """Remove the block on ``ctx``; the chunks there have no memory until the next :meth:`_install`."""
        del self._blocks[ctx]
        for member in self._placements():
            member.leave(ctx)

    def _give_back(self, ctx: Context, leave: Callable[[], object]) -> weakref.ref[PoolMemory]:
        """Free the block on ``ctx`` after a call of ``leave``, which moves all chunks out of it.

        An exported array keeps the block alive; the block is then freed when the array is deleted. The returned weak
        reference is dead unless there is such an array.
        """
        held, chunk = weakref.ref(self._blocks[ctx]), self._blocks[ctx].chunk
        leave()
        if held() is not None:
            # Chunks of deleted executors also refer to the block until the engine has deleted their vars.
            finish_deletes(ctx)
        if held() is None:
            chunk.close()
        return held
