"""Adaptors: resources that add a feature to another resource (a limit, per-user statistics, poisoning).

Stack them: ``LimitResource(PoisonResource(pool), nbytes)``. An adaptor passes allocations through unchanged, so every
resource of a stack can report on them, but each must be freed at the top.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from weftplan import device
from weftplan.device.stream import current_stream
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.locks import ReentrantLock, consistent_in_children
from weftplan.storage import relief
from weftplan.storage.base import Allocation, Resource, Segment, Statistics, checked_size, wrong_free
from weftplan.storage.report import report
from weftplan.support.array_types import RawArray


class Adaptor(Resource):
    """Base class that forwards every call to ``upstream``."""

    def __init__(self, upstream: Resource) -> None:
        self.upstream = upstream
        self.context = upstream.context

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        return self.upstream.allocate(nbytes, name=name)

    def free(self, allocation: Allocation) -> None:
        self.upstream.free(allocation)

    def free_behind(self, allocation: Allocation) -> None:
        self.upstream.free_behind(allocation)

    def statistics(self) -> Statistics:
        return self.upstream.statistics()

    def reset_peaks(self) -> None:
        self.upstream.reset_peaks()

    def empty_cache(self) -> int:
        return self.upstream.empty_cache()

    def relocate(self, allocation: Allocation) -> int:
        return self.upstream.relocate(allocation)

    def segments(self) -> list[Segment]:
        return self.upstream.segments()

    def holders(self) -> list[Allocation]:
        return self.upstream.holders()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.upstream!r}>"


class PoisonResource(Adaptor):
    """Fills memory with a byte at allocation and at free.

    Reads of uninitialised or freed memory then always yield the poison (0xFF: NaN, -1). Freed memory is overwritten
    immediately, even if a simulated device has pending work on it: this exposes early frees. In stream-ordered calls
    the stream fills it.
    """

    def __init__(self, upstream: Resource, byte: int = 0xFF) -> None:
        super().__init__(upstream)
        self.byte = byte
        self._live: dict[int, Allocation] = {}

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        allocation = self.upstream.allocate(nbytes, name=name)
        self._fill(allocation.raw, immediate=current_stream() is None)
        self._live[id(allocation)] = allocation
        return allocation

    def free(self, allocation: Allocation) -> None:
        self._spoil(allocation, immediate=True)
        self.upstream.free(allocation)

    def free_behind(self, allocation: Allocation) -> None:
        if self.context.has_streams:
            self._spoil(allocation, immediate=False)
            self.upstream.free_behind(allocation)
        else:  # no stream can fill host memory
            super(Adaptor, self).free_behind(allocation)

    def _spoil(self, allocation: Allocation, *, immediate: bool) -> None:
        """Fill memory that is about to be freed; afterwards its bytes may have another owner."""
        # Check first: a caller that must not free it must not overwrite it.
        if self._live.pop(id(allocation), None) is None:
            raise wrong_free(allocation, self)
        self._fill(allocation.raw, immediate=immediate)

    def _fill(self, raw: RawArray, *, immediate: bool) -> None:
        if self.context.is_host and (immediate or not self.context.has_streams):
            raw.fill(self.byte)
        else:  # fill on the GPU's current stream; without a stream, wait for the fill
            device.get(self.context).launch(partial(raw.fill, self.byte), None)


class StatisticsResource(Adaptor):
    """Counts its own allocations apart from other users of the upstream; reserved bytes equal allocated bytes."""

    def __init__(self, upstream: Resource) -> None:
        super().__init__(upstream)
        # Guards the counters and `_live`. Reentrant, because a collection under it may run a finalizer that allocates.
        self._lock = consistent_in_children(ReentrantLock())
        self._live: dict[int, Allocation] = {}
        self._freed: deque[tuple[int, int]] = deque()
        self._requested = self._allocated = self._peak_requested = self._peak_allocated = 0
        self._allocations = self._failures = 0

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        try:
            allocation = self.upstream.allocate(nbytes, name=name)
        except BaseException as error:
            with self._lock:
                self._fail(nbytes, error)
            raise
        with self._lock:
            self._count(allocation)
        return allocation

    def _count(self, allocation: Allocation) -> None:
        """Count an allocation of the upstream, under the lock."""
        self._live[id(allocation)] = allocation
        if self._freed:
            self._settle()
        self._allocations += 1
        total = self._requested = self._requested + allocation.nbytes
        if total > self._peak_requested:
            self._peak_requested = total
        total = self._allocated = self._allocated + allocation.size
        if total > self._peak_allocated:
            self._peak_allocated = total

    def _fail(self, nbytes: int, error: BaseException) -> None:
        """Count an ``error`` of the upstream, under the lock."""
        del nbytes
        if isinstance(error, OutOfMemoryError):
            self._failures += 1

    def free(self, allocation: Allocation) -> None:
        self._free(allocation, self.upstream.free)

    def free_behind(self, allocation: Allocation) -> None:
        self._free(allocation, self.upstream.free_behind)

    def _free(self, allocation: Allocation, give: Callable[[Allocation], None]) -> None:
        if self._live.pop(id(allocation), None) is None:
            raise wrong_free(allocation, self)
        size = (allocation.nbytes, allocation.size)
        try:
            give(allocation)
        finally:  # a guard raises only after it has freed the memory
            self._freed.append(size)

    def _settle(self) -> None:
        """Subtract everything freed, under the lock."""
        while self._freed:
            nbytes, size = self._freed.popleft()
            self._requested -= nbytes
            self._allocated -= size

    def reset_peaks(self) -> None:
        super().reset_peaks()
        with self._lock:
            self._settle()
            self._peak_requested, self._peak_allocated = self._requested, self._allocated

    def statistics(self) -> Statistics:
        with self._lock:
            self._settle()
            return Statistics(
                requested_bytes=self._requested,
                allocated_bytes=self._allocated,
                reserved_bytes=self._allocated,
                peak_requested_bytes=self._peak_requested,
                peak_allocated_bytes=self._peak_allocated,
                peak_reserved_bytes=self._peak_allocated,
                live=len(self._live),
                allocations=self._allocations,
                hits=0,
                system_allocations=0,
                system_frees=0,
                failures=self._failures,
            )

    def holders(self) -> list[Allocation]:
        return list(self._live.values())

    def _refusal(self, nbytes: int, cause: str) -> OutOfMemoryError:
        """Return the error of a refused request, with the figures of this resource."""
        statistics = self.statistics()
        return OutOfMemoryError(
            report(
                nbytes,
                context=self.context,
                requested=statistics.requested_bytes,
                allocated=statistics.allocated_bytes,
                reserved=statistics.reserved_bytes,
                largest_free=0,
                holders=self.holders(),
                cause=cause,
            )
        )


class LimitResource(StatisticsResource):
    """Refuses to hold more than ``limit`` requested bytes.

    Raises:
        MXNetError: a negative limit.
    """

    def __init__(self, upstream: Resource, limit: int) -> None:
        if limit < 0:
            raise MXNetError(f"{upstream.context}: the limit must be at least 0 bytes, got {limit!r}")
        super().__init__(upstream)
        self.limit = limit
        self._promised = 0

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        nbytes = checked_size(nbytes, self.context)
        try:
            self._promise(nbytes)
        except OutOfMemoryError as error:
            if nbytes > self.limit:
                raise self._refused(nbytes, error) from None
            try:
                relief.again(partial(self._promise, nbytes), relief.climb(self.context, nbytes))
            except OutOfMemoryError as last:
                raise self._refused(nbytes, last) from None
        return super().allocate(nbytes, name=name)

    def _promise(self, nbytes: int) -> None:
        """Reserve bytes until the upstream's allocation is counted. Raise OutOfMemoryError beyond the limit."""
        with self._lock:
            self._settle()
            if nbytes > 0 and self._requested + self._promised + nbytes > self.limit:
                raise OutOfMemoryError(f"The limit of this resource is {self.limit:,} bytes.")
            self._promised += nbytes

    def _refused(self, nbytes: int, cause: OutOfMemoryError) -> OutOfMemoryError:
        """Return the error of a request that the relief ladder could not help."""
        with self._lock:
            self._failures += 1
            return self._refusal(nbytes, f"{cause} {relief.explanation()}".rstrip())

    # A reservation ends in the step that counts the bytes: counted twice, they could make another thread fail.

    def _count(self, allocation: Allocation) -> None:
        self._promised -= allocation.nbytes
        super()._count(allocation)

    def _fail(self, nbytes: int, error: BaseException) -> None:
        self._promised -= nbytes
        super()._fail(nbytes, error)
