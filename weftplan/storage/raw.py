"""Memory straight from a device: one system allocation per request, given back at once. MXNet's ``Unpooled``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftplan.storage.base import Allocation, Segment
from weftplan.storage.ledger import Ledger


class RawResource(Ledger):
    """Asks the device for every allocation.

    Args:
        device: where the memory comes from.
    """

    def _keeps(self, nbytes: int) -> bool:
        return False

    def _take(self, nbytes: int) -> tuple[Any, Any, int]:
        raw = self.device.allocate(nbytes)
        self._reserve(raw)
        return raw, raw, nbytes

    def _give(self, block: Any, size: int) -> None:
        self._unreserve(block)
        self.device.free(block)

    def _segments(self, live: Mapping[int, Allocation]) -> list[Segment]:
        return [Segment(held.block, ((0, held.size, held),)) for held in live.values()]
