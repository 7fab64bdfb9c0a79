"""The ledger of resources that own memory: live bytes, free lists, statistics and peaks.

``free`` appends to a deque, then empties the deque only if the lock happens to be free; otherwise whoever allocates
next does. ``allocate`` inside another call of the same thread takes memory past the cache, which is counted when that
call goes on. Any thread may call anything here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from weftplan.device.base import Device
from weftplan.device.stream import current_stream
from weftplan.errors import OutOfMemoryError
from weftplan.locks import ReentrantLock, whole_in_children
from weftplan.storage import recording, relief
from weftplan.storage.base import Allocation, Resource, Segment, Statistics, checked_size, wrong_free
from weftplan.storage.recording import address_of
from weftplan.storage.report import report
from weftplan.storage.shelves import MOST_ON_ONE, Entry, Shelf, Shelves, by_order
from weftplan.storage.stream_order import StreamOrder, free_after
from weftplan.support.array_types import RawArray


class Ledger(Resource):
    """Base of resources that own memory: subclasses say where a block comes from and where it goes.

    A subclass implements ``take_block``, ``give_block`` and ``segments_of``, which run under the lock. They call
    ``count_taken`` and ``count_given`` for each block from and to the system, and count ``_hits`` of a cache.

    What is freed lies on a shelf of its requested size until somebody asks for as many bytes, or until a request that
    neither a shelf nor the cache serves, which first takes all of it back into the ledger. So the pair that programs
    repeat most, a free and an allocation of one size, takes no lock and counts nothing: what is on a shelf is still
    counted as live, and whoever takes it from there stands in for whoever put it there. For that reason no peak can be
    missed either. A request that the cache serves leaves the shelves as they are and only writes off what lies there.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.context = device.context
        self._lock = whole_in_children(ReentrantLock())
        self._shelves = Shelves()
        self._returned: deque[Entry] = deque()
        self._aside: deque[Allocation] = deque()
        """Made while this very thread was in the middle of a change, and not yet counted. Invariant: what is in both is
        in this one first."""
        # Invariant: holds exactly the allocations that nobody freed. dict.pop decides, atomically, who frees first.
        self._live: dict[int, Allocation] = {}
        self._requested = self._allocated = self._reserved = 0
        self._peak_requested = self._peak_allocated = self._peak_reserved = 0
        self._allocations = self._hits = self._system_allocations = self._system_frees = self._failures = 0
        self._order = count().__next__
        self._shelf_hits = count().__next__
        """Counts in one step on every interpreter; :meth:`_drain` reads it, which counts one more."""
        self._readings = 0
        self._nothing: RawArray | None = None
        self._streams: StreamOrder | None = None
        """What streams still work on; None until memory comes back that way."""

    @abstractmethod
    def take_block(self, nbytes: int) -> tuple[object, RawArray, int]:
        """(block, ``nbytes`` > 0 raw bytes of it, its size >= nbytes); raises OutOfMemoryError unchanged."""

    @abstractmethod
    def give_block(self, block: Any, size: int) -> None:
        """Take a block back."""

    def segments(self) -> list[Segment]:
        if self._lock.owned():  # in the middle of a change
            return []
        with self._lock:
            self._drain()
            return self.segments_of({id(held.block): held for held in self.holders() if held.nbytes})

    @abstractmethod
    def segments_of(self, live: Mapping[int, Allocation]) -> list[Segment]:
        """As ``segments``, under the lock; ``live`` are the allocations by the id of their block."""

    def keeps(self, nbytes: int) -> bool:
        """True when memory of so many requested bytes stays here once it is freed, so that a shelf may hold it; False
        when it goes back to the system at once."""
        return True

    def _largest_cached(self) -> int:
        """Bytes of the largest block in the cache."""
        return 0

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        if nbytes.__class__ is int:
            shelf = self._shelves.get(nbytes)
            if shelf:
                try:
                    entry = shelf.pop() if self._streams is None else self._pop(shelf, self._streams)
                except IndexError:  # another thread took the last one
                    pass
                else:
                    order, _, raw, block, size = entry
                    if order < 0:
                        allocation = self._allocate_written_off(entry, shelf, name)
                        return allocation if self._streams is None else self._ordered(allocation, self._streams)
                    allocation = Allocation(raw, nbytes, self.context, name, block, size)
                    self._live[id(allocation)] = allocation
                    self._shelf_hits()
                    if (recorder := recording.recorder) is not None:
                        recorder.allocated(allocation)
                    return allocation if self._streams is None else self._ordered(allocation, self._streams)
        allocation = self._allocate(nbytes, name)
        return allocation if self._streams is None else self._ordered(allocation, self._streams)

    def _pop(self, shelf: Shelf, streams: StreamOrder) -> Entry:
        """Take memory from a shelf, if possible some that the current stream need not wait for.

        Another thread may take some meanwhile; any other entry serves as well.
        """
        if not streams:
            return shelf.pop()
        newest_first = ((address_of(entry[2]), entry[1]) for entry in reversed(shelf))
        return shelf.pop(-1 - streams.choose(newest_first))

    def _ordered(self, allocation: Allocation, streams: StreamOrder) -> Allocation:
        """An allocation whose bytes are used after what streams still do with them."""
        if streams and allocation.nbytes:
            streams.order(address_of(allocation.raw), allocation.nbytes)
        return allocation

    def _allocate_written_off(self, entry: Entry, shelf: Shelf, name: object) -> Allocation:
        """As ``allocate``, with memory from a shelf that is not counted as live."""
        _, nbytes, raw, block, size = entry
        if self._lock.owned():  # in the middle of a change
            shelf.append(entry)
            return self._allocate_aside(nbytes, name)
        with self._lock:
            self._write_off()  # or what was freed before would count beside this in the peak
            allocation = Allocation(raw, nbytes, self.context, name, block, size)
            self._live[id(allocation)] = allocation
            self._hits += 1
            self._count(nbytes, size)
            if (recorder := recording.recorder) is not None:
                recorder.allocated(allocation)
            return allocation

    def _allocate(self, nbytes: int, name: object) -> Allocation:
        """As ``allocate``, where no shelf serves."""
        if nbytes.__class__ is not int or nbytes < 0:
            nbytes = checked_size(nbytes, self.context)
        if self._lock.owned():
            return self._allocate_aside(nbytes, name)
        try:
            return self._allocate_now(nbytes, name)
        except OutOfMemoryError as error:
            cause = error
        try:
            if nbytes <= self._room():
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
            del cause  # by its traceback it keeps this frame, and those that called, with all that they have

    def _allocate_now(self, nbytes: int, name: object) -> Allocation:
        """As ``_allocate``, without any rung of the ladder."""
        with self._lock:
            if self._shelves or self._returned or self._aside:
                self._drain(shelves=False)
                if nbytes and self._serves(nbytes):
                    self._write_off()
                else:
                    self._drain()
            if nbytes:
                try:
                    block, raw, size = self.take_block(nbytes)
                except OutOfMemoryError as error:
                    block, raw, size = self._take_again(nbytes, error)
            else:
                block, raw, size = None, self._empty(), 0
            allocation = Allocation(raw, nbytes, self.context, name, block, size)
            self._live[id(allocation)] = allocation
            self._count(nbytes, size)
            if (recorder := recording.recorder) is not None:
                recorder.allocated(allocation)
            return allocation

    def _serves(self, nbytes: int) -> bool:
        """True when ``nbytes`` > 0 can be had without looking at what lies on shelves for requests of other sizes,
        which goes on lying there: or each of several sizes in turn would empty the shelves of the others."""
        return False

    def _room(self) -> int:
        """Bytes beyond which no request can ever be served."""
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
        """As ``allocate``, under the lock in the middle of a change: touches nothing that the change may touch."""
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
        """Bytes of a block for ``nbytes`` > 0 that comes from the device past the cache."""
        return nbytes

    def _take_again(self, nbytes: int, cause: OutOfMemoryError) -> tuple[object, RawArray, int]:
        """As ``take_block``, which raised ``cause``: memory that came back meanwhile may make it fit.

        Finalizers and other threads free while the lock is taken, and a refusal must be true when it is made.
        """
        try:
            while self._drain():
                try:
                    return self.take_block(nbytes)
                except OutOfMemoryError as error:
                    cause = error
            raise cause
        finally:
            del cause

    def free(self, allocation: Allocation) -> None:
        if self._live.pop(id(allocation), None) is None:
            raise wrong_free(allocation, self)
        raw, allocation.raw = allocation.raw, None
        if (recorder := recording.recorder) is not None:
            recorder.freed(allocation, raw)
        nbytes = allocation.nbytes
        shelf = self._shelves.get(nbytes)
        if shelf is None or len(shelf) >= MOST_ON_ONE:
            self._take_back((self._order(), nbytes, raw, allocation.block, allocation.size))
            return
        shelf.append((self._order(), nbytes, raw, allocation.block, allocation.size))
        if not shelf.listed:
            # Who drains forgets the shelf first and empties it then, so what lies there is seen now or later.
            shelf.listed = True
            self._shelves.touched.append(shelf)

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
        # Listed first: once it is free, another thread may get it.
        self._streams.add(address_of(allocation.raw), allocation.nbytes, stream, stream.record())
        self.free(allocation)

    def _take_back(self, entry: Entry) -> None:
        """As ``free``, where there is no room on a shelf."""
        self._returned.append(entry)
        nbytes = entry[1]
        if self.keeps(nbytes):
            self._shelves.add(nbytes)
        if not self._lock.owned() and self._lock.acquire(blocking=False):
            # Not in the middle of a change of this thread: nothing to fear from draining here.
            try:
                self._drain(shelves=False)
            finally:
                self._lock.release()

    def _drain(self, *, shelves: bool = True, size: int | None = None) -> bool:
        """Count what was made aside and take back everything freed, in its order; True if there was any. Under the
        lock.

        What lies on shelves is taken back only if ``shelves``, and if it occupies ``size`` bytes (None: any number).
        """
        any_returned = False
        while True:
            while self._aside:
                allocation = self._aside.popleft()
                self._count(allocation.nbytes, allocation.size)
                if allocation.size:
                    self.count_taken(allocation.block)
            entries = self._freed(shelves, size)
            if not entries:
                break
            any_returned = True
            try:
                while entries:
                    order, nbytes, _, block, size = entries.pop()
                    if order >= 0:
                        self._requested -= nbytes
                        self._allocated -= size
                    if block is not None:
                        self.give_block(block, size)
            except BaseException:  # Ctrl-C: the others must not be lost
                self._returned.extend(entries)
                raise
        hits = self._shelf_hits() - self._readings
        self._readings += 1 + hits
        self._hits += hits
        self._allocations += hits
        return any_returned

    def _freed(self, shelves: bool, size: int | None) -> list[Entry]:
        """Everything freed that nobody has taken, oldest last; from shelves as :meth:`_drain` says."""
        entries: list[Entry] = []
        while self._returned:
            entries.append(self._returned.popleft())
        if shelves:
            entries += self._shelves.emptied(size)
        entries.sort(key=by_order, reverse=True)
        return entries

    def _write_off(self) -> None:
        """Count what lies on shelves as live no more, where it goes on lying; under the lock. Who takes it from there
        counts it again, so that peaks are exact though not every request empties the shelves."""
        for _ in range(len(self._shelves.touched)):
            requested, allocated = self._shelves.write_off()
            self._requested -= requested
            self._allocated -= allocated

    def count_taken(self, raw: RawArray) -> None:
        """Count a block that came from the system."""
        self._system_allocations += 1
        total = self._reserved = self._reserved + int(raw.nbytes)
        if total > self._peak_reserved:
            self._peak_reserved = total
        if (recorder := recording.recorder) is not None:
            recorder.grown(self.context, raw)

    def count_given(self, raw: RawArray) -> None:
        """Count a block that is about to go back to the system, once no stream works on it."""
        if self._streams:
            self._streams.settle(address_of(raw), int(raw.nbytes))
        self._system_frees += 1
        self._reserved -= int(raw.nbytes)
        if (recorder := recording.recorder) is not None:
            recorder.shrunk(self.context, raw)

    def _empty(self) -> RawArray:
        """The zero bytes of every empty allocation."""
        if self._nothing is None:
            from weftplan.device.registry import get

            self._nothing = get(self.context).xp.empty(0, np.uint8)
        return self._nothing

    def statistics(self) -> Statistics:
        if self._lock.owned():  # in the middle of a change: as far as it has got
            return self._figures()
        with self._lock:
            self._drain(shelves=False)  # what lies there goes on serving: who looks does not slow down who works
            return self._figures(*self._shelves.counted())

    def reset_peaks(self) -> None:
        with self._lock:
            self._drain()
            self._peak_requested, self._peak_allocated = self._requested, self._allocated
            self._peak_reserved = self._reserved

    def _figures(self, requested: int = 0, allocated: int = 0) -> Statistics:
        """The figures without so many bytes, which lie on shelves."""
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
        """Give every cached block back; returns the bytes. Under the lock."""
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
