"""Chunks that hold memory only while it is needed, for results of executors without a slab."""

from __future__ import annotations

from functools import partial

from weftplan.device.context import Context
from weftplan.ndarray.memory.release import dead, drain
from weftplan.ndarray.spill import spilling
from weftplan.ndarray.spill.spilling import SpillableChunk
from weftplan.storage.recording import address_of
from weftplan.support.array_types import RawArray


class DynamicChunk(SpillableChunk):
    """A chunk that allocates at its first use and at the first use after :meth:`drop`; var and arrays stay.

    Only operations that declared the var use it, so no two threads allocate concurrently.
    """

    __slots__ = ("_address",)

    def __init__(self, ctx: Context, nbytes: int, name: str) -> None:
        self._address = 0
        super().__init__(ctx, nbytes, delay_alloc=True, name=name)

    def _first_use(self, *, stream_ordered: bool = False) -> RawArray:
        if spilling.moving() or self._target is not None:
            raw = super()._first_use(stream_ordered=stream_ordered)
        else:  # no other thread moves the bytes
            if dead.pending:
                drain()
            resource, allocation = self._allocation = self._take()
            self._release = partial(resource.free, allocation)
            raw = self._raw = allocation.raw
        self._address = address_of(raw) if self.nbytes else 0
        return raw

    def drop(self) -> None:
        if spilling.moving() or self._target is not None:
            super().drop()
            return
        release = self._release
        self._release = self._raw = self._allocation = None
        if release is not None:
            release()

    @property
    def address(self) -> int:
        """The address of the bytes; pools may hand out several arrays over the same bytes."""
        return self._address
