"""Paddle's strategy ``naive_best_fit``: a large initial chunk from which every block is cut.

It is a :class:`.ChunkPool` with Paddle's sizes and headers; any thread may allocate and free.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.device.base import Device
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage.chunks import Block, ChunkPool, up
from weftplan.support.array_types import RawArray

HEADER = 64
"""Bytes that Paddle spends on each block: the user's memory begins behind them."""


class NaiveBestFit(ChunkPool):
    """Takes ``first`` bytes from the device at the first request, and ``refill`` bytes whenever they are used up.

    A request for more than a chunk goes to the device, and back to it when it is freed; so does every request where
    chunks are of 0 bytes. Of others, each takes the low end of the smallest free block that holds it. Chunks go back
    with ``empty_cache``. A chunk that the device refuses is left out: the request goes to the device alone.

    Args:
        device: where chunks come from.
        first: bytes of the first chunk, or a function that says how many when it is needed.
        refill: bytes of each later one, or such a function; default: as many as the first.
        unit: bytes to a multiple of which requests are rounded; default: the alignment of the device.
        header: bytes in front of each request that nobody uses. Paddle has 64.
        insist: a chunk that the device refuses is an error, as in Paddle.
        cap: most bytes to hold; None: no limit.

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
        """Most bytes, header included, that are cut from chunks: settled when first asked for, and kept then."""
        if self._settled < 0:
            self._settled = self._bytes(self._first)
            if self._refill is not None:
                self._settled = max(self._settled, self._bytes(self._refill))
        return self._settled

    def _next_chunk(self) -> int:
        """Bytes of the next chunk."""
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

    def _view(self, block: Block, nbytes: int) -> RawArray:
        begin = block.offset + self.header
        return block.chunk.raw[begin : begin + nbytes]

    def _past_chunks(self, nbytes: int, size: int) -> tuple[object, RawArray, int]:
        """Memory of the device for one request; chunks that nobody uses make room for it."""
        if not self.insist:
            # Without a header the device's own rounding will do.
            size = nbytes
        self._check_cap(size)
        try:
            return self._direct(nbytes, size)
        except OutOfMemoryError:
            if not self._release_all():
                raise
        return self._direct(nbytes, size)

    def _capped(self, nbytes: int) -> Block:
        self._check_cap(nbytes)
        return self._grow(nbytes)

    def _check_cap(self, nbytes: int) -> None:
        if self.cap is not None and self._reserved + nbytes > self.cap:
            raise OutOfMemoryError(
                f"{self.context}: {self._reserved:,} bytes are held and {nbytes:,} more are needed, but "
                f"FLAGS_fraction_of_cuda_pinned_memory_to_use allows {self.cap:,}"
            )
