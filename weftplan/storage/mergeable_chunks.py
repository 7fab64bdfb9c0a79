"""Chunks cut into blocks: base of both Paddle strategies.

A chunk is one allocation of the device. Contiguous blocks cover it; each is free or in use. Two neighbours are never
both free, because a free merges. One list holds the free blocks of all chunks, sorted by size and position, so best fit
is a bisection.

Positions are ordered by the age of the chunk, not its address. Placement thus depends only on the sequence of calls,
not on the system. All code here runs under the lock of the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import islice, takewhile
from operator import itemgetter

from weftplan.device.base import Device
from weftplan.storage import recording
from weftplan.storage.base import Allocation, Segment
from weftplan.storage.ledger import Ledger
from weftplan.storage.recording import address_of
from weftplan.support.array_types import RawArray

_ORDER_SHIFT = 64
"""Bits of an offset within a chunk."""


class PoolChunk:
    """One allocation of the device."""

    __slots__ = ("first", "nbytes", "number", "raw")

    def __init__(self, raw: RawArray, nbytes: int, number: int) -> None:
        self.raw = raw
        self.nbytes = nbytes
        self.number = number
        self.first = ChunkBlock(self, 0, nbytes)


class ChunkBlock:
    """A range of a chunk; ``left`` and ``right`` are its neighbours."""

    __slots__ = ("chunk", "free", "left", "offset", "right", "size")

    def __init__(self, chunk: PoolChunk, offset: int, size: int) -> None:
        self.chunk = chunk
        self.offset = offset
        self.size = size
        self.free = False
        self.left: ChunkBlock | None = None
        self.right: ChunkBlock | None = None

    @property
    def key(self) -> tuple[int, int, ChunkBlock]:
        """Sort key among free blocks. The first two elements are unique, so the third is never compared."""
        return self.size, (self.chunk.number << _ORDER_SHIFT) | self.offset, self


class ChunkPool(Ledger):
    """Base class of pools that cut chunks.

    Args:
        device: the source of chunks.
        unit: every block size is a multiple of it.
    """

    def __init__(self, device: Device, *, unit: int) -> None:
        super().__init__(device)
        self.unit = unit
        self._chunks: dict[int, PoolChunk] = {}
        self._free: list[tuple[int, int, ChunkBlock]] = []
        self._chunk_count = 0

    # -- chunks ---------------------------------------------------------------------------------------------------

    def _grow(self, nbytes: int) -> ChunkBlock:
        """Allocate a chunk as one block, neither free nor in use; raise OutOfMemoryError."""
        raw = self.device.allocate(nbytes)
        self.count_taken(raw)
        chunk = PoolChunk(raw, nbytes, self._chunk_count)
        self._chunk_count += 1
        self._chunks[chunk.number] = chunk
        return chunk.first

    def _release_all(self) -> int:
        """Return all chunks without a block in use to the device; return the bytes."""
        freed = 0
        for chunk in [chunk for chunk in self._chunks.values() if chunk.first.free and chunk.first.right is None]:
            if not self._remove(chunk.first):
                continue
            del self._chunks[chunk.number]
            self.count_given(chunk.raw)
            self.device.free(chunk.raw)
            freed += chunk.nbytes
        return freed

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _best_fit(self, size: int) -> ChunkBlock | None:
        """Take the smallest free block of at least ``size`` bytes, the first position among equals.

        If streams still work on free blocks, a block that the current stream need not wait for comes first.
        """
        at = bisect_left(self._free, (size,))
        if at == len(self._free):
            return None
        if self._streams:
            smallest = self._free[at][0]
            equal = takewhile(lambda entry: entry[0] == smallest, islice(self._free, at, None))
            at += self._streams.choose((address_of(block.chunk.raw) + block.offset, size) for _, _, block in equal)
        block = self._free[at][2]
        block.free = False
        del self._free[at]
        return block

    def _split(self, block: ChunkBlock, size: int, *, high: bool) -> ChunkBlock:
        """Cut ``size`` bytes off the high or low end of a block; the remainder becomes free."""
        remainder = block.size - size
        new = ChunkBlock(block.chunk, block.offset + (remainder if high else size), size if high else remainder)
        block.size -= new.size
        new.left, new.right, block.right = block, block.right, new
        if new.right is not None:
            new.right.left = new
        cut, free_part = (new, block) if high else (block, new)
        free_part.free = True
        insort(self._free, free_part.key)
        return cut

    def _remove(self, block: ChunkBlock) -> bool:
        """Remove a free block from the list. Return False if it is missing, which means that it is lost."""
        block.free = False
        at = bisect_left(self._free, block.key[:2])
        if at == len(self._free) or self._free[at][2] is not block:
            return False
        del self._free[at]
        return True

    def _merge(self, block: ChunkBlock) -> None:
        """Free a block and merge it with its free neighbours."""
        right = block.right
        if right is not None and right.free and self._remove(right):
            block.size += right.size
            block.right = right.right
            if block.right is not None:
                block.right.left = block
        left = block.left
        if left is not None and left.free and self._remove(left):
            left.size += block.size
            left.right = block.right
            if left.right is not None:
                left.right.left = left
            block = left
        block.free = True
        insort(self._free, block.key)

    def _view(self, block: ChunkBlock, nbytes: int) -> RawArray:
        """Return the user's bytes of a block."""
        return block.chunk.raw[block.offset : block.offset + nbytes]

    def relocate(self, allocation: Allocation) -> int:
        with self._lock:
            self._drain()
            old, size = allocation.block, allocation.size
            if old.__class__ is not ChunkBlock or self._live.get(id(allocation)) is not allocation:
                return 0
            # The lowest position among all blocks that fit, not the best fit: arrays move towards the start.
            fitting = self._free[bisect_left(self._free, (size,)) :]
            address, block = min(((entry[1], entry[2]) for entry in fitting), default=(0, old), key=itemgetter(0))
            if block is old or address > old.key[1]:
                return 0
            self._remove(block)
            block.free = False
            if block.size > size:
                self._split(block, size, high=False)
            raw = self._view(block, allocation.nbytes)
            self.device.copy(raw, allocation.raw)
            if (recorder := recording.recorder) is not None:
                recorder.freed(allocation, allocation.raw)
            allocation.block, allocation.raw = block, raw
            if (recorder := recording.recorder) is not None:
                recorder.allocated(allocation)
            self._merge(old)
            return allocation.nbytes

    def _direct(self, nbytes: int, size: int) -> tuple[object, RawArray, int]:
        """Allocate from the device, outside all chunks."""
        raw = self.device.allocate(size)
        self.count_taken(raw)
        return raw, raw[:nbytes] if size != nbytes else raw, size

    def give_block(self, block: ChunkBlock | RawArray, size: int) -> None:
        if isinstance(block, ChunkBlock):
            self._merge(block)
            return
        self.count_given(block)
        self.device.free(block)

    def _largest_cached(self) -> int:
        return self._free[-1][0] if self._free else 0

    def segments_of(self, live: Mapping[int, Allocation]) -> list[Segment]:
        direct = [held for held in live.values() if held.block.__class__ is not ChunkBlock]
        segments = [Segment(held.block, ((0, held.size, held),)) for held in direct]
        for chunk in self._chunks.values():
            parts: list[tuple[int, int, Allocation | None]] = []
            block: ChunkBlock | None = chunk.first
            while block is not None:
                parts.append((block.offset, block.size, live.get(id(block))))
                block = block.right
            segments.append(Segment(chunk.raw, tuple(parts)))
        return segments


def up(nbytes: int, unit: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``unit``."""
    return -(-nbytes // unit) * unit
