"""Chunks that hold memory only while somebody needs it: under results of executors without a slab."""

from __future__ import annotations

from functools import partial
from typing import Any

from weftplan import storage
from weftplan.device.context import Context
from weftplan.ndarray.chunk import Chunk


class DynamicChunk(Chunk):
    """A chunk that takes memory at its first use, and after each :meth:`drop` again; var and arrays stay.

    Only operations that declared the var use it, so no two threads take the memory at once.
    """

    __slots__ = ()
    movable = True

    def __init__(self, ctx: Context, nbytes: int, name: str) -> None:
        super().__init__(ctx, nbytes, delay_alloc=True, name=name)

    @property
    def raw(self) -> Any:
        """Flat uint8 array, whose contents are undefined after a :meth:`drop`."""
        if self._raw is None:
            resource = storage.get(self.context)
            allocation = resource.allocate(self.nbytes, name=self.name)
            self._release, self._raw = partial(resource.free, allocation), allocation.raw
        return self._raw

    def drop(self) -> None:
        """Give the memory back; without any, do nothing."""
        release, self._release, self._raw = self._release, None, None
        if release is not None:
            release()
