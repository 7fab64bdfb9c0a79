"""Uncached device memory: one system allocation per request, freed immediately. MXNet's ``Unpooled``."""

from __future__ import annotations

from collections.abc import Mapping

from weftplan.storage.base import Allocation, Segment
from weftplan.storage.ledger import Ledger
from weftplan.support.array_types import RawArray


class RawResource(Ledger):
    """Allocates each request from the device.

    Args:
        device: the source of the memory.
    """

    def keeps(self, nbytes: int) -> bool:
        return False

    def take_block(self, nbytes: int) -> tuple[object, RawArray, int]:
        raw = self.device.allocate(nbytes)
        self.count_taken(raw)
        return raw, raw, nbytes

    def give_block(self, block: RawArray, size: int) -> None:
        self.count_given(block)
        self.device.free(block)

    def segments_of(self, live: Mapping[int, Allocation]) -> list[Segment]:
        return [Segment(held.block, ((0, held.size, held),)) for held in live.values()]
