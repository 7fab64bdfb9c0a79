"""A device with a memory limit for this process, like a smaller device."""

from __future__ import annotations

from typing import Any

from weftplan.device.base import Device
from weftplan.errors import OutOfMemoryError
from weftplan.locks import Lock, consistent_in_children
from weftplan.support.array_types import RawArray


class LimitedDevice:
    """Wrapper of ``device`` for pools: it refuses to exceed ``limit`` bytes, and reports memory accordingly.

    The limit counts the bytes that a pool reserves, cached blocks included. A pool that hits it releases its cache and
    retries, as on a full device. (:class:`~weftplan.storage.LimitResource` wraps a pool and counts requested bytes.)
    """

    def __init__(self, device: Device, limit: int, reason: str) -> None:
        self._device = device
        self.limit = limit
        self.reason = reason
        self.used = 0
        self._lock = consistent_in_children(Lock())  # guards `used`: test and increase are one step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, nbytes: int) -> RawArray:
        """Allocate on the device; raise OutOfMemoryError beyond the limit."""
        # Reserve under the lock, allocate outside: the device may take long.
        with self._lock:
            if self.used + nbytes > self.limit:
                raise OutOfMemoryError(
                    f"{self.reason} allows {self.limit:,} bytes, of which {self.used:,} are taken and {nbytes:,} more "
                    f"are needed."
                )
            self.used += nbytes
        try:
            raw: RawArray = self._device.allocate(nbytes)
            return raw
        except BaseException:
            with self._lock:
                self.used -= nbytes
            raise

    def free(self, raw: RawArray) -> None:
        """Free on the device."""
        nbytes = raw.nbytes
        self._device.free(raw)
        with self._lock:
            self.used -= nbytes

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes, those of the limit if lower."""
        free, total = self._device.memory_info()
        return min(free, max(self.limit - self.used, 0)), min(total, self.limit)

    def __repr__(self) -> str:
        return f"<{self._device!r} limited to {self.limit:,} bytes>"
