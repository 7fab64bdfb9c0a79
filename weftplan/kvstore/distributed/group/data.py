"""Data of an exchange: how it moves between members, and the memory that sums need."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weftplan.kvstore.distributed.arrays.piece_copies import Mover
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.messages import Meeting, alike
from weftplan.kvstore.distributed.transport.mpi_types import Connection
from weftplan.kvstore.distributed.transport.wire import Kind, Message, decode
from weftplan.kvstore.reduce import Array
from weftplan.support.array_types import DType


class DataMembers(Meeting):
    """Members that move data.

    Args:
        mover: copies and adds.

    Attributes:
        joined: bytes copied so far to make arrays of one exchange contiguous.
        shown, summed: bytes of shared memory that this process has used for shares, and for sums.
    """

    def __init__(self, connection: Connection, *, stall_s: float, timeout_s: float, mover: Mover) -> None:
        super().__init__(connection, stall_s=stall_s, timeout_s=timeout_s)
        self.mover = mover
        self._scratch = np.empty(0, np.uint8)
        self.joined = self.shown = self.summed = 0

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes kept for parts of other processes' arrays, and for their reads of this process's arrays."""
        return self._scratch.nbytes + self.shown + self.summed

    def tell_summed(self, told: Message, description: str) -> Steps[None]:
        """Swap the messages that report finished ranges; raise if a member failed."""
        own = told.encode()
        every = yield from self.swap(own, description)
        if told.kind is Kind.FAILED or not alike(own, every):
            self.sequence += 1
            raise self.failure(description, [decode(raw, rank) for rank, raw in zip(self.members, every, strict=True)])

    def move(self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview], what: str) -> Steps[None]:
        """Send and receive data, all at once."""
        byte, comm, tag = self._mpi.BYTE, self._comm, 3 + 2 * self._epoch
        with self.losses(what):
            receives = [comm.Irecv([data, byte], rank, tag) for rank, data in incoming.items()]
            sends = [comm.Issend([data, byte], rank, tag) for rank, data in outgoing.items()]
            yield from self.wait(receives, sends, [*incoming, *outgoing], what)

    def room(self, shape: tuple[int, int], dtype: DType) -> Array:
        """Return the scratch for that many elements, kept for the next time."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(shape)
