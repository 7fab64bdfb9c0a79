"""Memory straight from a device: one system allocation per request, given back at once. MXNet's ``Unpooled``."""

from __future__ import annotations

from typing import Any

from weftplan.storage.ledger import Ledger


class RawResource(Ledger):
    """Asks the device for every allocation.

    Args:
        device: where the memory comes from.
    """

    _shelved = 0

    def _take(self, nbytes: int) -> tuple[Any, Any, int]:
        raw = self.device.allocate(nbytes)
        self._reserve(nbytes)
        return raw, raw, nbytes

    def _give(self, block: Any, size: int) -> None:
        self.device.free(block)
        self._unreserve(size)
