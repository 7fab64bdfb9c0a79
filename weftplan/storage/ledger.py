"""Ledger of resources that own memory: live bytes, free lists, statistics and peaks.

``free`` appends to a deque and drains it only if the lock is free; otherwise the next ``allocate`` drains it. An
``allocate`` nested in another call of the same thread takes memory from the device directly and is counted later. Any
thread may call any method.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import count

import numpy as np

from weftplan.device.base import Device
from weftplan.device.stream import current_stream
from weftplan.errors import OutOfMemoryError
from weftplan.locks import ReentrantLock, consistent_in_children
from weftplan.storage import recording, relief
from weftplan.storage.base import Allocation, Resource, Segment, Statistics, checked_size, wrong_free
from weftplan.storage.exact_size_lists import LIST_LIMIT, Entry, FreeList, FreeLists, by_order
from weftplan.storage.recording import address_of
from weftplan.storage.report import report
from weftplan.storage.stream_order import StreamOrder, free_after
from weftplan.support.array_types import RawArray


class Ledger(Resource):
    """Base class of resources that own memory. A subclass decides where blocks come from.

    A subclass implements ``take_block``, ``give_block`` and ``segments_of``, which run under the lock. They call
    ``count_taken`` and ``count_given`` for each block from and to the system, and count cache ``_hits``.

    Freed memory stays on the free list of its requested size until a request of that size takes it. A free and an
    allocation of one size, the most frequent pair, therefore take no lock and change no count: listed memory still
    counts as live, so no peak is missed. A request that neither a free list nor the cache serves first drains all free
    lists.
    A request that the cache serves leaves the free lists filled and only writes off their bytes.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.context = device.context
        # Guards the pool's blocks and counters. Reentrant, because a finalizer may allocate or free under it.
        self._lock = consistent_in_children(ReentrantLock())
        self._free_lists = FreeLists()
        self._returned: deque[Entry] = deque()
        self._aside: deque[Allocation] = deque()
        """Allocations made during a change of this thread, not yet counted. Their frees come later in ``_returned``."""
        # Invariant: holds exactly the allocations that are not freed. `dict.pop` decides atomically which thread frees
        # first.
        self._live: dict[int, Allocation] = {}
        self._requested = self._allocated = self._reserved = 0
        self._peak_requested = self._peak_allocated = self._peak_reserved = 0
        self._allocations = self._hits = self._system_allocations = self._system_frees = self._failures = 0
        self._order = count().__next__
        self._free_list_hits = count().__next__
        """An atomic counter on every interpreter. :meth:`_drain` reads it, which increments it."""
        self._readings = 0
        self._nothing: RawArray | None = None
        self._streams: StreamOrder | None = None
        """Pending stream work on freed memory; None until memory is freed in stream order."""

    @abstractmethod
    def take_block(self, nbytes: int) -> tuple[object, RawArray, int]:
        """Return (block, ``nbytes`` > 0 raw bytes of it, its size >= nbytes), or raise OutOfMemoryError."""

    @abstractmethod
    def give_block(self, block: RawArray, size: int) -> None:
        """Take a block back."""

    def segments(self) -> list[Segment]:
        if self._lock.owned():  # called during a change of the ledger
            return []
        with self._lock:
            self._drain()
            return self.segments_of({id(held.block): held for held in self.holders() if held.nbytes})

    @abstractmethod
    def segments_of(self, live: Mapping[int, Allocation]) -> list[Segment]:
        """Return the segments, under the lock; ``live`` are the allocations by the id of their block."""

    def keeps(self, nbytes: int) -> bool:
        """Return whether freed memory of ``nbytes`` requested bytes stays here, so that a free list may hold it."""
        return True

    def _largest_cached(self) -> int:
        """Return the bytes of the largest cached block."""
        return 0

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        if nbytes.__class__ is int:
            free_list = self._free_lists.get(nbytes)
            # No lock: taking an entry is one list operation, and the entry already counts as live.
            if free_list:
                try:
                    entry = free_list.pop() if self._streams is None else self._pop(free_list, self._streams)
                except IndexError:  # another thread took the last entry
                    pass
                else:
                    order, _, raw, block, size = entry
                    if order < 0:
                        allocation = self._allocate_written_off(entry, free_list, name)
                        return allocation if self._streams is None else self._ordered(allocation, self._streams)
                    allocation = Allocation(raw, nbytes, self.context, name, block, size)
                    self._live[id(allocation)] = allocation
                    # A counter instead of `+=`, which is not atomic; `_drain` adds it to the hits.
                    self._free_list_hits()
                    if (recorder := recording.recorder) is not None:
                        recorder.allocated(allocation)
                    return allocation if self._streams is None else self._ordered(allocation, self._streams)
        allocation = self._allocate(nbytes, name)
        return allocation if self._streams is None else self._ordered(allocation, self._streams)

    def _pop(self, free_list: FreeList, streams: StreamOrder) -> Entry:
        """Take memory from a free list, if possible some that the current stream need not wait for.

        Another thread may take some meanwhile; any other entry serves as well.
        """
        if not streams:
            return free_list.pop()
        newest_first = ((address_of(entry[2]), entry[1]) for entry in reversed(free_list))
        return free_list.pop(-1 - streams.choose(newest_first))

    def _ordered(self, allocation: Allocation, streams: StreamOrder) -> Allocation:
        """Order later use of an allocation's bytes after pending stream work on them, and return it."""
        if streams and allocation.nbytes:
            streams.order(address_of(allocation.raw), allocation.nbytes)
        return allocation

    def _allocate_written_off(self, entry: Entry, free_list: FreeList, name: object) -> Allocation:
        """Allocate from a free list whose memory no longer counts as live."""
        _, nbytes, raw, block, size = entry
        if self._lock.owned():  # called during a change of the ledger
            free_list.append(entry)
            return self._allocate_aside(nbytes, name)
        with self._lock:
            self._write_off()  # otherwise memory freed earlier would also count in the peak
            allocation = Allocation(raw, nbytes, self.context, name, block, size)
            self._live[id(allocation)] = allocation
            self._hits += 1
            self._count(nbytes, size)
            if (recorder := recording.recorder) is not None:
                recorder.allocated(allocation)
            return allocation

    def _allocate(self, nbytes: int, name: object) -> Allocation:
        """Allocate when no free list can serve."""
        if nbytes.__class__ is not int or nbytes < 0:
            nbytes = checked_size(nbytes, self.context)
        if self._lock.owned():
            return self._allocate_aside(nbytes, name)
        try:
            return self._allocate_now(nbytes, name)
        except OutOfMemoryError as error:
            cause = error
        try:
            if nbytes <= self._headroom():
                try:
                    return relief.again(partial(self._allocate_now, nbytes, name), relief.climb(self.context, nbytes))
                except OutOfMemoryError as error:
                    cause = error
            with self._lock:
                self._failures += 1
                if (recorder := recording.recorder) is not None:
                    recorder.refused(self.context, nbytes, self.device.memory_info()[0], name)
                raise OutOfMemoryError(self._report(nbytes, cause)) from cause
        finally:
            del cause  # its traceback holds this frame and its callers' frames, with all their objects

    def _allocate_now(self, nbytes: int, name: object) -> Allocation:
        """Allocate once, without the relief ladder."""
        with self._lock:
            # Drain only if nothing cached fits: else requests of several sizes would empty each other's free lists.
            if self._free_lists or self._returned or self._aside:
                self._drain(free_lists=False)
                if nbytes and self._cache_serves(nbytes):
                    self._write_off()
                else:
                    self._drain()
            if nbytes:
                try:
                    block, raw, size = self.take_block(nbytes)
                except OutOfMemoryError as error:
                    block, raw, size = self._retry_take(nbytes, error)
            else:
                block, raw, size = None, self._empty(), 0
            allocation = Allocation(raw, nbytes, self.context, name, block, size)
            self._live[id(allocation)] = allocation
            self._count(nbytes, size)
            if (recorder := recording.recorder) is not None:
                recorder.allocated(allocation)
            return allocation

    def _cache_serves(self, nbytes: int) -> bool:
        """Return whether the cache can serve ``nbytes`` > 0 without draining the free lists of other sizes."""
        return False

    def _headroom(self) -> int:
        """Return the size beyond which no request can ever be served."""
        return self.device.memory_info()[1]

    def _count(self, nbytes: int, size: int) -> None:
        self._allocations += 1
        total = self._requested = self._requested + nbytes
        if total > self._peak_requested:
            self._peak_requested = total
        total = self._allocated = self._allocated + size
        if total > self._peak_allocated:
            self._peak_allocated = total

    def _allocate_aside(self, nbytes: int, name: object) -> Allocation:
        """Allocate under the lock during a change of the ledger, without touching any state of that change."""
        block, raw, size = None, self._empty(), 0
        if nbytes:
            size = self._size(nbytes)
            try:
                block = self.device.allocate(size)
            except OutOfMemoryError as error:
                self._failures += 1
                raise OutOfMemoryError(self._report(nbytes, error)) from error
            raw = block[:nbytes]
        allocation = Allocation(raw, nbytes, self.context, name, block, size)
        self._live[id(allocation)] = allocation
        self._aside.append(allocation)
        if (recorder := recording.recorder) is not None:
            recorder.allocated(allocation)
        return allocation

    def _size(self, nbytes: int) -> int:
        """Return the size of a block for ``nbytes`` > 0 that bypasses the cache."""
        return nbytes

    def _retry_take(self, nbytes: int, cause: OutOfMemoryError) -> tuple[object, RawArray, int]:
        """Retry ``take_block``, which raised ``cause``, after draining freed memory."""
        try:
            # Finalizers and other threads free while the lock is held, and a refusal must be true when it is raised.
            while self._drain():
                try:
                    return self.take_block(nbytes)
                except OutOfMemoryError as error:
                    cause = error
            raise cause
        finally:
            del cause

    def free(self, allocation: Allocation) -> None:
        # The dictionary decides atomically which of two frees comes first.
        if self._live.pop(id(allocation), None) is None:
            raise wrong_free(allocation, self)
        raw, allocation.raw = allocation.raw, None
        if (recorder := recording.recorder) is not None:
            recorder.freed(allocation, raw)
        nbytes = allocation.nbytes
        free_list = self._free_lists.get(nbytes)
        if free_list is None or len(free_list) >= LIST_LIMIT:
            self._take_back((self._order(), nbytes, raw, allocation.block, allocation.size))
            return
        free_list.append((self._order(), nbytes, raw, allocation.block, allocation.size))
        if not free_list.listed:
            # A drain clears `listed` first and empties the free list then, so this entry is seen now or later.
            free_list.listed = True
            self._free_lists.touched.append(free_list)

    def free_behind(self, allocation: Allocation) -> None:
        stream = current_stream()
        if stream is None or not allocation.nbytes or not self.keeps(allocation.nbytes):
            super().free_behind(allocation)
            return
        if id(allocation) not in self._live:
            raise wrong_free(allocation, self)
        if not self.context.has_streams:
            free_after(stream.record(), self.context, partial(self.free, allocation))
            return
        if self._streams is None:
            with self._lock:
                self._streams = self._streams or StreamOrder()
        # Record the range first: once it is free, another thread may get it.
        self._streams.add(address_of(allocation.raw), allocation.nbytes, stream, stream.record())
        self.free(allocation)

    def _take_back(self, entry: Entry) -> None:
        """Free an allocation when its free list is missing or full."""
        self._returned.append(entry)
        nbytes = entry[1]
        if self.keeps(nbytes):
            self._free_lists.add(nbytes)
        if not self._lock.owned() and self._lock.acquire(blocking=False):
            # not during a change of this thread, so draining is safe
            try:
                self._drain(free_lists=False)
            finally:
                self._lock.release()

    def _drain(self, *, free_lists: bool = True, size: int | None = None) -> bool:
        """Count allocations made aside and take back freed memory in its order, under the lock.

        Args:
            free lists: take memory back from free lists, too.
            size: only from free lists whose entries occupy this number of bytes; None: from all.

        Returns:
            Whether there was any freed memory.
        """
        any_returned = False
        while True:
            while self._aside:
                allocation = self._aside.popleft()
                self._count(allocation.nbytes, allocation.size)
                if allocation.size:
                    self.count_taken(allocation.block)
            entries = self._freed(free_lists, size)
            if not entries:
                break
            any_returned = True
            try:
                # Oldest first, so that the last freed block is the first reused.
                while entries:
                    order, nbytes, _, block, size = entries.pop()
                    if order >= 0:
                        self._requested -= nbytes
                        self._allocated -= size
                    if block is not None:
                        self.give_block(block, size)
            except BaseException:  # Ctrl-C: keep the remaining entries
                self._returned.extend(entries)
                raise
        hits = self._free_list_hits() - self._readings
        self._readings += 1 + hits
        self._hits += hits
        self._allocations += hits
        return any_returned

    def _freed(self, free_lists: bool, size: int | None) -> list[Entry]:
        """Return all freed entries, oldest last; from free lists as :meth:`_drain` specifies."""
        entries: list[Entry] = []
        while self._returned:
            entries.append(self._returned.popleft())
        if free_lists:
            entries += self._free_lists.emptied(size)
        entries.sort(key=by_order, reverse=True)
        return entries

    def _write_off(self) -> None:
        """Stop counting listed memory as live but leave it in place, under the lock."""
        # Taking an entry counts it again, so peaks are exact although not every request drains the free lists.
        for _ in range(len(self._free_lists.touched)):
            requested, allocated = self._free_lists.write_off()
            self._requested -= requested
            self._allocated -= allocated

    def count_taken(self, raw: RawArray) -> None:
        """Count a block from the system."""
        self._system_allocations += 1
        total = self._reserved = self._reserved + int(raw.nbytes)
        if total > self._peak_reserved:
            self._peak_reserved = total
        if (recorder := recording.recorder) is not None:
            recorder.grown(self.context, raw)

    def count_given(self, raw: RawArray) -> None:
        """Count a block that is about to be returned to the system, once no stream uses it."""
        if self._streams:
            self._streams.settle(address_of(raw), int(raw.nbytes))
        self._system_frees += 1
        self._reserved -= int(raw.nbytes)
        if (recorder := recording.recorder) is not None:
            recorder.shrunk(self.context, raw)

    def _empty(self) -> RawArray:
        """Return the shared array of all empty allocations."""
        if self._nothing is None:
            from weftplan.device.registry import get

            self._nothing = get(self.context).xp.empty(0, np.uint8)
        return self._nothing

    def statistics(self) -> Statistics:
        if self._lock.owned():  # called during a change of the ledger: report the intermediate state
            return self._figures()
        with self._lock:
            self._drain(
                free_lists=False
            )  # free lists stay filled, so that reading statistics does not slow down allocations
            return self._figures(*self._free_lists.counted())

    def reset_peaks(self) -> None:
        with self._lock:
            self._drain()
            self._peak_requested, self._peak_allocated = self._requested, self._allocated
            self._peak_reserved = self._reserved

    def _figures(self, requested: int = 0, allocated: int = 0) -> Statistics:
        """Return the statistics, less ``requested`` and ``allocated`` bytes, which are on free lists."""
        return Statistics(
            requested_bytes=self._requested - requested,
            allocated_bytes=self._allocated - allocated,
            reserved_bytes=self._reserved,
            peak_requested_bytes=self._peak_requested,
            peak_allocated_bytes=self._peak_allocated,
            peak_reserved_bytes=self._peak_reserved,
            live=len(self._live),
            allocations=self._allocations,
            hits=self._hits,
            system_allocations=self._system_allocations,
            system_frees=self._system_frees,
            failures=self._failures,
        )

    def empty_cache(self) -> int:
        if self._lock.owned():
            return 0
        with self._lock:
            self._drain()
            return self._release_all()

    def _release_all(self) -> int:
        """Return all cached blocks to the system, under the lock, and return their bytes."""
        return 0

    def holders(self) -> list[Allocation]:
        return list(self._live.values())

    def _report(self, nbytes: int, cause: BaseException) -> str:
        return report(
            nbytes,
            context=self.context,
            requested=self._requested,
            allocated=self._allocated,
            reserved=self._reserved,
            largest_free=self._largest_cached(),
            holders=self.holders(),
            cause=f"{cause} {relief.explanation()}".rstrip(),
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.context}: {len(self._live)} live, {self._allocated:,} bytes in use, "
            f"{self._reserved:,} reserved>"
        )
