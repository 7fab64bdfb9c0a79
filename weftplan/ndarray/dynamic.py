"""Chunks that hold memory only while somebody needs it: under results of executors without a slab."""

from __future__ import annotations

from typing import Any

from weftplan import storage
from weftplan.device.context import Context
from weftplan.ndarray import stream_order
from weftplan.ndarray.spilling import SpillableChunk
from weftplan.storage import Allocation, Resource
from weftplan.storage.recording import address_of


class DynamicChunk(SpillableChunk):
    """A chunk that takes memory at its first use, and after each :meth:`drop` again; var and arrays stay.

    Only operations that declared the var use it, so no two threads take the memory at once.
    """

    __slots__ = ("_address",)

    def __init__(self, ctx: Context, nbytes: int, name: str) -> None:
        self._address = 0
        super().__init__(ctx, nbytes, delay_alloc=True, name=name)

    def _first_use(self) -> Any:
        raw = super()._first_use()
        self._address = address_of(raw) if self.nbytes else 0
        return raw

    def _take(self) -> tuple[Resource, Allocation]:
        if stream_order.waiting:
            resource = self._resource or storage.get(self.context)
            allocation = stream_order.take(resource, self.context, self.nbytes)
            if allocation is not None:
                return resource, allocation
        return super()._take()

    @property
    def address(self) -> int:
        """Where the bytes lie: pools cut new arrays of the same bytes."""
        return self._address
