"""A model of PyTorch's caching allocator for CUDA: the bytes that it reserves for a sequence of requests.

Rules, as PyTorch's notes on CUDA semantics (*Memory management*) describe them and
``c10/cuda/CUDACachingAllocator.cpp`` implements them. They were compared with published
runs, not with that file line by line:

* A request is rounded up to 512 bytes. One of at most 1 MiB comes from the small pool, whose segments have 2 MiB.
  Others come from the large pool: below 10 MiB from segments of 20 MiB, above from a segment of its own, in units of
  2 MiB.
* The smallest free block that fits is taken; among equals, that with the lowest address. It is split if the rest is
  at least 512 bytes (small pool) or more than 1 MiB (large pool). A freed block merges with its free neighbours.
* If the device has no memory left, all segments without a used block are released, and the request is repeated.
* ``max_split_size_mb``: blocks above it are not split, requests below it do not take such blocks, and one above it
  takes a block only if less than 20 MiB are left over. ``garbage_collection_threshold``: before a new segment is made,
  free segments are released, the oldest first, until less than that share of the limit is reserved.
* ``expandable_segments``: each pool grows in pages of 2 MiB (small) or 20 MiB (large), and pages without a used byte
  are unmapped on release.

Pools are separate for each stream. The driver's own rounding of segments is 2 MiB, which is part of the rules above.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import cast

from weftplan.errors import BudgetError, PlanError, did_you_mean

MIB = 1 << 20
UNIT, SMALL, SMALL_SEGMENT, LARGE_REQUEST, LARGE_SEGMENT, ROUNDING = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB
GAP = 1 << 50
"""Distance of the addresses of segments, so that blocks of two segments never touch."""
IGNORED: tuple[str, ...] = (
    "backend",
    "roundup_power2_divisions",
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
)
IGNORED += ("pinned_num_register_threads", "pinned_use_background_threads", "graph_capture_record_stream_reuse")
"""Keys of ``PYTORCH_CUDA_ALLOC_CONF`` that are not modelled. Only their defaults are accepted."""


@dataclass(frozen=True)
class AllocatorSettings:
    """The modelled settings of ``PYTORCH_CUDA_ALLOC_CONF``."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    garbage_collection_threshold: float = 0.0

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings of a value of ``PYTORCH_CUDA_ALLOC_CONF``.

        Raises:
            PlanError: a key is unknown or not modelled, or a value is invalid.

        >>> AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:128").max_split_size
        134217728
        """
        values: dict[str, str] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            key, _, value = part.partition(":")
            values[key] = value
        known = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold")
        for key in values.keys() - set(known):
            why = "is not modelled: " if key in IGNORED else f"is unknown: {did_you_mean(key, known)}"
            raise PlanError(f"PYTORCH_CUDA_ALLOC_CONF: {key!r} {why}leave it out, or use {', '.join(known)}")
        try:
            split = int(values["max_split_size_mb"]) * MIB if "max_split_size_mb" in values else None
            threshold = float(values.get("garbage_collection_threshold", "0"))
            expandable = {"True": True, "False": False}[values.get("expandable_segments", "False")]
        except (ValueError, KeyError):
            split, threshold, expandable = 0, 0.0, False
        if (split is not None and split <= LARGE_SEGMENT) or not 0 <= threshold < 1:
            raise PlanError(
                f"PYTORCH_CUDA_ALLOC_CONF: expected max_split_size_mb above 20, garbage_collection_threshold between 0 "
                f"and 1, and expandable_segments True or False, got {text!r}"
            )
        return cls(expandable, split, threshold)


@dataclass(slots=True, eq=False)
class Range:
    """A range of a segment: used, free and listed in its pool, or without memory (in an expandable segment)."""

    address: int
    size: int
    pool: Pool
    before: Range | None = None
    after: Range | None = None
    used: bool = False
    mapped: bool = True
    freed: int = 0
    """Number of the last request before the block was freed."""

    def is_free(self) -> bool:
        """Return whether the block has memory and is not used."""
        return self.mapped and not self.used

    def cut(self, size: int) -> Range:
        """Shorten the block to ``size`` and return the rest, a new block after it."""
        rest = Range(self.address + size, self.size - size, self.pool, self, self.after, mapped=self.mapped)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Merge the next block, which is in no list, into this block."""
        rest = self.after
        assert rest is not None
        self.size, self.after = self.size + rest.size, rest.after
        if rest.after is not None:
            rest.after.before = self


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of one kind and stream, sorted by size and address."""

    is_small: bool
    free: list[tuple[int, int, Range]] = field(default_factory=list)
    first: Range | None = None
    """The first block of the expandable segment."""

    def add(self, block: Range) -> None:
        """List a free block."""
        bisect.insort(self.free, (block.size, block.address, block))

    def remove(self, block: Range) -> None:
        """Take a block from the list."""
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]


class Allocator:
    """The state of the allocator of one device, with the bytes that it has allocated and reserved.

    Args:
        limit: bytes of the device that may be reserved; None: no limit.
        settings: the settings of the allocator.
    """

    def __init__(self, limit: int | None = None, settings: AllocatorSettings | None = None) -> None:
        self.limit, self.settings = limit, settings or AllocatorSettings()
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._segments = self._requests = 0

    def allocate(self, nbytes: int, stream: int = 0) -> Range | None:
        """Return a block of at least ``nbytes``; None for 0 bytes, which take no memory.

        Raises:
            BudgetError: the limit is too small, also after the release of all free segments.
        """
        if nbytes <= 0:
            return None
        self._requests += 1
        size = _up(nbytes, UNIT)
        pool = self._pools.setdefault((size <= SMALL, stream), Pool(size <= SMALL))
        block = self._take(pool, size)
        if block is None:
            block = self._expand(pool, size) if self.settings.expandable_segments else self._new_segment(pool, size)
        if self._splits(pool, block.size - size, size):
            pool.add(block.cut(size))
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Range | None) -> None:
        """Free a block and merge it with its free neighbours."""
        if block is None:
            return
        block.used, block.freed = False, self._requests
        self.allocated -= block.size
        self._list(block)

    def release(self) -> None:
        """Return all segments, or pages of an expandable segment, without a used byte to the device."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                self._release(block)

    def _list(self, block: Range) -> None:
        """Merge a block with its free neighbours, and list it."""
        if block.after is not None and block.after.is_free():
            block.pool.remove(block.after)
            block.absorb_next()
        before = block.before
        if before is not None and before.is_free():
            block.pool.remove(before)
            before.absorb_next()
            before.freed = max(before.freed, block.freed)
            block = before
        block.pool.add(block)

    def _splits(self, pool: Pool, rest: int, size: int) -> bool:
        if pool.is_small or self.settings.expandable_segments:
            return rest >= UNIT
        return rest > SMALL and (self.settings.max_split_size is None or size < self.settings.max_split_size)

    def _take(self, pool: Pool, size: int) -> Range | None:
        """Return the smallest free block that may be used for a request, out of its list."""
        k = bisect.bisect_left(pool.free, (size,))
        if k == len(pool.free):
            return None
        if self.settings.expandable_segments:
            # A block at the border of memory counts with the bytes to which it can grow.
            while k + 1 < len(pool.free) and _growable(pool.free[k + 1][2]) < _growable(pool.free[k][2]):
                k += 1
        block, most = pool.free[k][2], self.settings.max_split_size
        if most is not None and not pool.is_small:  # a block above the limit is not split
            too_large = block.size >= most if size < most else block.size >= size + LARGE_SEGMENT
            if too_large:
                return None
        del pool.free[k]
        return block

    def _new_segment(self, pool: Pool, size: int) -> Range:
        need = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT if size < LARGE_REQUEST else _up(size, ROUNDING)
        if not pool.is_small:
            self._collect()
        self._reserve(need, size)
        self._segments += 1
        return Range(self._segments * GAP, need, pool)

    def _expand(self, pool: Pool, size: int) -> Range:
        """Return a block of an expandable segment at the first gap that has room, with pages mapped into it."""
        page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
        block = _gap(pool, size)
        if block is None:
            self._segments += 1
            block = pool.first = Range(self._segments * GAP, GAP >> 1, pool, mapped=False)
        if block.is_free():
            pool.remove(block)
        else:
            block = self._map(block, min(block.size, _up(size, page)), size)
        while block.size < size:
            gap = block.after
            assert gap is not None
            if gap.mapped:
                pool.remove(gap)
            else:
                block.used = True  # a release must not unmap it
                self._map(gap, min(gap.size, _up(size - block.size, page)), size)
                block.used = False
            block.absorb_next()
        return block

    def _map(self, gap: Range, need: int, size: int) -> Range:
        """Map ``need`` bytes at the begin of a block without memory; return them as a block in no list."""
        self._reserve(need, size)
        if need < gap.size:
            gap.cut(need)
        gap.mapped = True
        return gap

    def _reserve(self, need: int, size: int) -> None:
        """Count ``need`` more bytes of the device, after a release if the limit requires it."""
        if self._lacks(need):
            self.retries += 1
            self._release_oversize(size)
            if self._lacks(need):
                self.release()
        if self._lacks(need):
            raise BudgetError(
                f"a request of {size:,} bytes needs a segment of {need:,}, and {self.reserved:,} of {self.limit:,} are "
                f"reserved",
                smallest=self.reserved + need,
            )
        self.reserved += need
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _lacks(self, need: int) -> bool:
        return self.limit is not None and self.reserved + need > self.limit

    def _release(self, block: Range) -> None:
        """Return a free block that is a whole segment, or the whole pages inside it, to the device."""
        pool = block.pool
        if not self.settings.expandable_segments:
            if block.before is None and block.after is None:
                pool.remove(block)
                self.reserved -= block.size
            return
        page, base = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT, block.address // GAP * GAP
        first, last = base + _up(block.address - base, page), base + (block.address + block.size - base) // page * page
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            rest = block.cut(first - block.address)
            pool.add(block)
            block = rest
        if last < block.address + block.size:
            pool.add(block.cut(last - block.address))
        block.mapped = False
        self.reserved -= block.size
        if block.after is not None and not block.after.mapped:
            block.absorb_next()
        if block.before is not None and not block.before.mapped:
            block.before.absorb_next()

    def _release_oversize(self, size: int) -> None:
        """With ``max_split_size``, release the smallest oversize segment that suffices, or the largest of them."""
        most = self.settings.max_split_size
        if most is None or size < most or self.settings.expandable_segments:
            return
        blocks = [b for p in self._pools.values() if not p.is_small for _, _, b in p.free if b.size >= most]
        blocks = [b for b in blocks if b.before is None and b.after is None]
        enough = [b for b in blocks if b.size >= size]
        if enough:
            self._release(min(enough, key=lambda b: b.size))
        elif sum(b.size for b in blocks) >= size:
            total = 0
            for block in sorted(blocks, key=lambda b: -b.size):
                if total < size:
                    total += block.size
                    self._release(block)

    def _collect(self) -> None:
        """Release segments of the large pools that are older than average until the threshold is met."""
        threshold = self.settings.garbage_collection_threshold
        if not threshold or self.limit is None or self.settings.expandable_segments:
            return
        excess = self.reserved - int(threshold * self.limit)
        while excess > 0:
            blocks = [b for p in self._pools.values() if not p.is_small for _, _, b in p.free]
            blocks = [b for b in blocks if b.before is None and b.after is None]
            if not blocks:
                return
            average = sum(self._requests - b.freed for b in blocks) / len(blocks)
            for block in [b for b in blocks if self._requests - b.freed >= average]:
                if excess > 0:
                    excess -= block.size
                    self._release(block)


def _up(size: int, unit: int) -> int:
    """Return ``size`` rounded up to a multiple of ``unit``."""
    return -(-size // unit) * unit


def _growable(block: Range) -> int:
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def _gap(pool: Pool, size: int) -> Range | None:
    """Return the first block of a run of free and unmapped blocks, one of them unmapped, that has ``size`` bytes."""
    block = pool.first
    while block is not None:
        if not block.mapped:
            start = block.before if block.before is not None and block.before.is_free() else block
            total, end = 0, cast("Range | None", start)
            while end is not None and total < size and not end.used:
                total, end = total + end.size, end.after
            if total >= size:
                return start
        block = block.after
    return None
