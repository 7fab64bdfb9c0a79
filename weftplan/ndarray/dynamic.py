"""Chunks that hold memory only while somebody needs it: under results of executors without a slab."""

from __future__ import annotations

from weftplan.device.context import Context
from weftplan.ndarray.spilling import SpillableChunk


class DynamicChunk(SpillableChunk):
    """A chunk that takes memory at its first use, and after each :meth:`drop` again; var and arrays stay.

    Only operations that declared the var use it, so no two threads take the memory at once.
    """

    __slots__ = ()

    def __init__(self, ctx: Context, nbytes: int, name: str) -> None:
        super().__init__(ctx, nbytes, delay_alloc=True, name=name)
