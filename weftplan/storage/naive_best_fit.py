"""Paddle's strategy ``naive_best_fit``: a large initial chunk from which every block is cut.

A :class:`.ChunkPool` with Paddle's sizes and headers. Any thread may allocate and free.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.device.base import Device
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage.mergeable_chunks import ChunkBlock, ChunkPool, up
from weftplan.support.array_types import RawArray

HEADER = 64
"""Bytes of Paddle's header before the user's memory in each block."""


class NaiveBestFit(ChunkPool):
    """Takes ``first`` bytes from the device at the first request, and ``refill`` bytes whenever they are used up.

    A request takes the low end of the smallest free block that holds it. A request larger than a chunk is allocated
    from the device directly; so is every request if chunks have 0 bytes, or if the device refuses a chunk.
    ``empty_cache`` returns unused chunks.

    Args:
        device: the source of chunks.
        first: bytes of the first chunk, or a function that returns them on first use.
        refill: bytes of each later chunk, or such a function; default: as the first.
        unit: requests are rounded to a multiple of it; default: the alignment of the device.
        header: unused bytes before each request. Paddle has 64.
        insist: raise if the device refuses a chunk, as in Paddle.
        cap: maximum number of bytes to hold; None: no limit.

    >>> from weftplan.device import cpu, get
    >>> pool = NaiveBestFit(get(cpu()), first=1 << 20, unit=256, header=HEADER)
    >>> pool.allocate(10).size, pool.allocate(1000).size, pool.statistics().reserved_bytes
    (256, 1280, 1048576)
    """

    def __init__(
        self,
        device: Device,
        *,
        first: int | Callable[[], int] = 500 << 20,
        refill: int | Callable[[], int] | None = None,
        unit: int | None = None,
        header: int = 0,
        insist: bool = False,
        cap: int | None = None,
    ) -> None:
        unit = device.alignment if unit is None else unit
        for name, value, low in (("first", first, 0), ("refill", refill, 0), ("unit", unit, 1), ("header", header, 0)):
            if isinstance(value, int) and value < low:
                raise ConfigError(f"{device.context}: {name} of naive_best_fit must be at least {low}, got {value!r}")
        super().__init__(device, unit=unit)
        self.header = header
        self.insist = insist
        self.cap = cap
        self._first, self._refill = first, refill
        self._settled = -1

    @property
    def largest(self) -> int:
        """Largest size, header included, that is cut from chunks. Computed on first use."""
        if self._settled < 0:
            self._settled = self._bytes(self._first)
            if self._refill is not None:
                self._settled = max(self._settled, self._bytes(self._refill))
        return self._settled

    def _next_chunk(self) -> int:
        """Return the bytes of the next chunk."""
        if self._refill is None:
            return self.largest
        return self._bytes(self._refill if self._chunks else self._first)

    def _bytes(self, value: int | Callable[[], int]) -> int:
        return (value() if callable(value) else value) // self.unit * self.unit

    def take_block(self, nbytes: int) -> tuple[object, RawArray, int]:
        size = up(nbytes + self.header, self.unit)
        if size > self.largest:
            return self._past_chunks(nbytes, size)
        block = self._best_fit(size)
        if block is not None:
            self._hits += 1
        else:
            try:
                block = self._capped(max(self._next_chunk(), size))
            except OutOfMemoryError:
                if self.insist:
                    raise
                return self._past_chunks(nbytes, size)
        if block.size - size > self.header:
            block = self._split(block, size, high=False)
        return block, self._view(block, nbytes), block.size

    def keeps(self, nbytes: int) -> bool:
        return up(nbytes + self.header, self.unit) <= self.largest

    def _view(self, block: ChunkBlock, nbytes: int) -> RawArray:
        begin = block.offset + self.header
        return block.chunk.raw[begin : begin + nbytes]

    def _past_chunks(self, nbytes: int, size: int) -> tuple[object, RawArray, int]:
        """Allocate one request from the device; release unused chunks if necessary."""
        if not self.insist:
            # Without a header the device's own rounding suffices.
            size = nbytes
        self._check_cap(size)
        try:
            return self._direct(nbytes, size)
        except OutOfMemoryError:
            if not self._release_all():
                raise
        return self._direct(nbytes, size)

    def _capped(self, nbytes: int) -> ChunkBlock:
        self._check_cap(nbytes)
        return self._grow(nbytes)

    def _check_cap(self, nbytes: int) -> None:
        if self.cap is not None and self._reserved + nbytes > self.cap:
            raise OutOfMemoryError(
                f"{self.context}: {self._reserved:,} bytes are held and {nbytes:,} more are needed, but "
                f"FLAGS_fraction_of_cuda_pinned_memory_to_use allows {self.cap:,}"
            )
