"""MXNet's pools: one last-in-first-out free list per rounded size.

The pools differ in their rounding. Both return all cached blocks before a system allocation that would leave less than
``reserve`` percent of the device's memory free, and again if the system refuses.

MXNet's pools never shrink. With ``slack``, a pool returns cached blocks, least recently used sizes first, before it
would hold more than the slack and the peak of live bytes of the last 1024 to 2048 allocations. Its peak then stays near
that of a process without a pool, loops find their blocks in the cache, and blocks of an earlier phase are released.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping

from weftplan.device.base import Device
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage.base import Allocation, Segment
from weftplan.storage.ledger import Ledger
from weftplan.storage.recording import address_of
from weftplan.support.array_types import RawArray

_WINDOW = 1024
"""Length of the window, in allocations, after which a pool with slack forgets its peak."""
_GRANTED_S = 0.02
"""Lifetime in seconds of the system's answer about free memory: other programs allocate, too."""


class _Pool(Ledger):
    hands_over = True

    def __init__(self, device: Device, *, reserve: float, slack: int | None) -> None:
        super().__init__(device)
        if slack is not None and slack < 0:
            raise ConfigError(f"{device.context}: the pool's slack must be at least 0 bytes, got {slack!r}")
        if not 0 <= reserve <= 100:
            raise ConfigError(f"{device.context}: the pool's reserve must be 0 to 100 percent, got {reserve!r}")
        self.reserve = reserve
        self.slack = slack
        self._free: dict[int, list[RawArray]] = {}
        """Free blocks by size, ordered by when a size was last emptied and refilled."""
        self._granted = 0
        """Bytes that may be allocated before the system is asked for its free memory again."""
        self._granted_until = 0.0
        self._window = _WINDOW
        """Allocations left in this window."""
        self._recent = self._previous = 0
        """Peaks of live bytes in this window and the previous one."""
        self._rounded: dict[int, int] = {}
        """Bounded cache of rounded sizes for the fast path."""

    @abstractmethod
    def rounded(self, nbytes: int) -> int:
        """Return the block size for a request of ``nbytes`` > 0."""

    def _size(self, nbytes: int) -> int:
        return self.rounded(nbytes)

    def _cache_serves(self, nbytes: int) -> bool:
        size = self._block_size(nbytes)
        return size in self._free or (self._drain(size=size) and size in self._free)

    def _block_size(self, nbytes: int) -> int:
        """Return :meth:`rounded`, cached."""
        size = self._rounded.get(nbytes)
        if size is None:
            size = self.rounded(nbytes)
            if len(self._rounded) >= 4096:
                self._rounded.clear()
            self._rounded[nbytes] = size
        return size

    def take_block(self, nbytes: int) -> tuple[object, RawArray, int]:
        size = self._block_size(nbytes)
        if self.slack is not None:
            self._note_peak(size)
        stack = self._free.get(size)
        if stack:
            self._hits += 1
            number = (
                self._streams.choose((address_of(block), size) for block in reversed(stack)) if self._streams else 0
            )
            raw = stack.pop(-1 - number)
            if not stack:
                del self._free[size]
            return raw, raw[:nbytes], size
        # Release before growing, so that the pool does not exceed the recent peak and the slack.
        if self.slack is not None:
            self._release(self._reserved + size - max(self._recent, self._previous) - self.slack)
        if self._reserved > self._allocated and not self._leaves_reserve(size):
            self._release_all()
        try:
            raw = self.device.allocate(size)
        except OutOfMemoryError:
            if not self._release_all():
                raise
            raw = self.device.allocate(size)
        self.count_taken(raw)
        return raw, raw[:nbytes], size

    def _leaves_reserve(self, size: int) -> bool:
        """Return whether a block from the system leaves the reserve free."""
        time_s = time.monotonic()
        # Ask the system once per 64th part of its free memory and 20 ms: with 10,000 small arrays the queries would
        # dominate.
        if size > self._granted or time_s > self._granted_until:
            free, total = self.device.memory_info()
            above_reserve = free - total * self.reserve // 100
            if above_reserve <= 0 or size > above_reserve:
                self._granted = 0
                return False
            self._granted = max(size, int(above_reserve) >> 6)
            self._granted_until = time_s + _GRANTED_S
        self._granted -= size
        return True

    def _note_peak(self, size: int) -> None:
        """Update the peak for ``size`` bytes about to be live."""
        live = self._allocated + size
        if live > self._recent:
            self._recent = live
        self._window -= 1
        if self._window <= 0:
            self._window = _WINDOW
            self._previous, self._recent = self._recent, live
            self._release(self._reserved - self._previous - (self.slack or 0))

    def give_block(self, block: RawArray, size: int) -> None:
        stack = self._free.get(size)
        if stack is None:
            stack = self._free[size] = []
        stack.append(block)

    def _release(self, nbytes: int) -> int:
        """Return cached blocks to the system until ``nbytes`` or all are freed, under the lock; return the bytes."""
        freed = 0
        while freed < nbytes and self._free:
            size, stack = next(iter(self._free.items()))
            while stack and freed < nbytes:
                raw = stack.pop()
                self.count_given(raw)
                self.device.free(raw)
                freed += size
            if not stack:
                del self._free[size]
        return freed

    def _release_all(self) -> int:
        return self._release(self._reserved)

    def segments_of(self, live: Mapping[int, Allocation]) -> list[Segment]:
        segments = [Segment(held.block, ((0, held.size, held),)) for held in live.values()]
        return segments + [Segment(raw, ((0, size, None),)) for size, stack in self._free.items() for raw in stack]

    def _largest_cached(self) -> int:
        return max(self._free, default=0)


class NaivePool(_Pool):
    """Pool with sizes rounded to pages, and above ``large`` to multiples of ``large``.

    Args:
        device: the source of blocks.
        page: bytes of a page, at least 32.
        large: size above which sizes are multiples of it.
        reserve: percent of the device's memory that cached blocks must leave free.
        slack: bytes that the pool may hold beyond the recent peak of live bytes; None: no limit.

    >>> from weftplan.device import cpu, get
    >>> pool = NaivePool(get(cpu()))
    >>> pool.rounded(4095), pool.rounded(4097), pool.rounded(2 * 2**20 + 1)
    (4096, 8192, 4194304)
    """

    def __init__(
        self, device: Device, *, page: int = 4096, large: int = 2 << 20, reserve: float = 5, slack: int | None = None
    ) -> None:
        super().__init__(device, reserve=reserve, slack=slack)
        if page < 32:
            raise ConfigError(f"{device.context}: the pool's page size must be at least 32 bytes, got {page!r}")
        if large <= 0:
            raise ConfigError(f"{device.context}: the pool's large round size must be above 0 bytes, got {large!r}")
        self.page = page
        self.large = large

    def rounded(self, nbytes: int) -> int:
        size = -(-nbytes // self.page) * self.page
        if size > self.large:
            size = -(-size // self.large) * self.large
        return size


class RoundPool(_Pool):
    """Pool with sizes rounded to powers of two up to 2**cutoff, above it to multiples of 2**cutoff.

    Args:
        device: the source of blocks.
        page: smallest size in bytes, a power of two of at least 32.
        cutoff: 20 to 34, and not below log2 of the page size.
        reserve: percent of the device's memory that cached blocks must leave free.
        slack: bytes that the pool may hold beyond the recent peak of live bytes; None: no limit.

    >>> from weftplan.device import cpu, get
    >>> pool = RoundPool(get(cpu()), cutoff=20)
    >>> pool.rounded(32), pool.rounded(4095), pool.rounded(5000), pool.rounded(2097153), pool.rounded(3145728)
    (4096, 4096, 8192, 3145728, 3145728)
    """

    def __init__(
        self, device: Device, *, page: int = 4096, cutoff: int = 24, reserve: float = 5, slack: int | None = None
    ) -> None:
        super().__init__(device, reserve=reserve, slack=slack)
        if page < 32 or page & (page - 1):
            raise ConfigError(
                f"{device.context}: the Round pool's page size must be a power of two >= 32, got {page!r}"
            )
        if not 20 <= cutoff <= 34 or 1 << cutoff < page:
            raise ConfigError(
                f"{device.context}: the Round pool's linear cutoff must be 20 to 34 and at least log2 of the page size "
                f"({page.bit_length() - 1}), got {cutoff!r}"
            )
        self.page = page
        self.cutoff = cutoff

    def rounded(self, nbytes: int) -> int:
        if nbytes > 1 << self.cutoff:
            return -(-nbytes >> self.cutoff) << self.cutoff
        return max(self.page, 1 << (nbytes - 1).bit_length())
