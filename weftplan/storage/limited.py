"""A device whose memory is limited for this process, as on a smaller device."""

from __future__ import annotations

from typing import Any

from weftplan.device.base import Device
from weftplan.errors import OutOfMemoryError
from weftplan.locks import Lock, whole_in_children
from weftplan.support.array_types import RawArray


class LimitedDevice:
    """``device`` as a pool sees it: it refuses what would exceed ``limit`` bytes, and reports memory accordingly.

    A limit below the pool counts what the pool reserves, cached blocks included, and a pool that meets it gives its
    cache back and asks again, as with a device that is full. (:class:`~weftplan.storage.LimitResource` stands above a
    pool and counts what users ask for.)
    """

    def __init__(self, device: Device, limit: int, reason: str) -> None:
        self._device = device
        self.limit = limit
        self.reason = reason
        self.used = 0
        self._lock = whole_in_children(Lock())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, nbytes: int) -> RawArray:
        """As the device; raises OutOfMemoryError beyond the limit."""
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
        """As the device."""
        nbytes = raw.nbytes
        self._device.free(raw)
        with self._lock:
            self.used -= nbytes

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes, of the limit if that is less."""
        free, total = self._device.memory_info()
        return min(free, max(self.limit - self.used, 0)), min(total, self.limit)

    def __repr__(self) -> str:
        return f"<{self._device!r} limited to {self.limit:,} bytes>"
