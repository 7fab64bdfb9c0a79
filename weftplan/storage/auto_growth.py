"""Paddle's strategy ``auto_growth``: chunks allocated on demand, split, merged and cached."""

from __future__ import annotations

from weftplan.device.base import Device
from weftplan.errors import ConfigError, OutOfMemoryError
from weftplan.storage.mergeable_chunks import ChunkPool, up
from weftplan.support.array_types import RawArray


class AutoGrowth(ChunkPool):
    """Grows by the size of a request, or by ``chunk`` bytes if that is more.

    A request takes the high end of the smallest free block that holds it. Unused chunks return to the device when it
    refuses a new chunk, and with ``empty_cache``.

    Args:
        device: the source of chunks.
        chunk: minimum growth in bytes; 0: the size of the request.
        unit: requests are rounded to a multiple of it; default: the alignment of the device.
        release_idle: also return unused chunks before growing. The pool holds less and asks the device more often.
        spare: return unused chunks before the pool would exceed its peak in use by more than this share; None (Paddle's
            rule): only when the device refuses.

    >>> from weftplan.device import cpu, get
    >>> pool = AutoGrowth(get(cpu()), chunk=1 << 20, unit=256)
    >>> held = pool.allocate(1000)
    >>> pool.statistics().allocated_bytes, pool.statistics().reserved_bytes
    (1024, 1048576)
    """

    def __init__(
        self,
        device: Device,
        *,
        chunk: int = 0,
        unit: int | None = None,
        release_idle: bool = False,
        spare: float | None = None,
    ) -> None:
        unit = device.alignment if unit is None else unit
        if unit < 1 or chunk < 0:
            raise ConfigError(
                f"{device.context}: auto_growth needs a chunk of at least 0 bytes and a unit of at least 1, got "
                f"{chunk!r} and {unit!r}"
            )
        super().__init__(device, unit=unit)
        self.release_idle = release_idle
        self.spare = spare
        self.chunk = max(up(chunk, unit), unit)

    def take_block(self, nbytes: int) -> tuple[object, RawArray, int]:
        size = up(nbytes, self.unit)
        block = self._best_fit(size)
        if block is None:
            growth = max(size, self.chunk)
            if self.release_idle or self._too_much(size, growth):
                self._release_all()
            try:
                block = self._grow(growth)
            except OutOfMemoryError:
                if not self._release_all():
                    raise
                block = self._grow(growth)
        else:
            self._hits += 1
        if block.size > size:
            block = self._split(block, size, high=True)
        return block, self._view(block, nbytes), size

    def _too_much(self, size: int, growth: int) -> bool:
        """Return whether growing by ``growth`` bytes, for ``size`` in use, exceeds the spare share."""
        if self.spare is None:
            return False
        peak = max(self._peak_allocated, self._allocated + size)
        return self._reserved + growth > max(int(peak * (1 + self.spare)), self.chunk)
