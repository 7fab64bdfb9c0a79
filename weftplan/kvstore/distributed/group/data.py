"""Transfer of an exchange's data between members by MPI, and the buffers of sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weftplan.kvstore.distributed.arrays.piece_copies import Mover
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.messages import alike
from weftplan.kvstore.distributed.group.sharing import SharingMembers
from weftplan.kvstore.distributed.transport.mpi_types import Connection, JobRank
from weftplan.kvstore.distributed.transport.wire import Message, MessageKind, decode
from weftplan.kvstore.fixed_order_sums import Array
from weftplan.support.array_types import DType


class DataMembers(SharingMembers):
    """Members that can move data.

    Args:
        connection: connection to the other members.
        stall_s: seconds of waiting after which a warning is logged.
        timeout_s: seconds of waiting after which a member counts as lost.
        mover: copies and sums arrays.

    Attributes:
        joined: bytes copied so far to make the arrays of exchanges contiguous.
        shown: greatest number of bytes of shared memory used for this process's shares.
        summed: greatest number of bytes of shared memory used for this process's sums.
    """

    def __init__(self, connection: Connection, *, stall_s: float, timeout_s: float, mover: Mover) -> None:
        super().__init__(connection, stall_s=stall_s, timeout_s=timeout_s)
        self.mover = mover
        self._scratch = np.empty(0, np.uint8)
        self.joined = self.shown = self.summed = 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the buffers for other processes' data, and of shared memory for this process's shares and sums."""
        return self._scratch.nbytes + self.shown + self.summed

    def tell_summed(self, report: Message, description: str) -> Steps[None]:
        """Send ``report``, that this process has summed its range or failed, and wait for all members' reports.

        Raises:
            KVStoreError: this process or another member has failed.
        """
        message = report.encode()
        every = yield from self.swap(message, description)
        if report.kind is MessageKind.FAILED or not alike(message, every):
            self.sequence += 1
            raise self.failure(description, [decode(raw, rank) for rank, raw in zip(self.members, every, strict=True)])

    def move(
        self, outgoing: Mapping[JobRank, memoryview], incoming: Mapping[JobRank, memoryview], what: str
    ) -> Steps[None]:
        """Send ``outgoing`` and receive ``incoming`` data, by rank, concurrently; ``what`` describes the exchange."""
        # Tags: 1 for views, 2 + 2 * epoch for messages, 3 + 2 * epoch for data. The epoch keeps the messages and the
        # data of a lost exchange from matching later receives.
        byte, comm, tag = self._mpi.BYTE, self._comm, 3 + 2 * self._epoch
        with self.losses(what):
            receives = [comm.Irecv([data, byte], rank, tag) for rank, data in incoming.items()]
            sends = [comm.Issend([data, byte], rank, tag) for rank, data in outgoing.items()]
            yield from self.wait(receives, sends, [*incoming, *outgoing], what)

    def scratch(self, shape: tuple[int, int], dtype: DType) -> Array:
        """Return a buffer of this shape and dtype, whose memory later calls reuse."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(shape)
