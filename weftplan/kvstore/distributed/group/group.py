"""Exchanges between the processes that share a store: sums and broadcasts.

Before data moves all have said what they are about to do (``messages.py``). Who they are, and what happens when one is
lost, is in ``membership.py``; so is what :data:`Steps` are. How a sum is made is in ``ways.py``.

A sum is made in rank order for every element, so its bits depend neither on who comes first nor on how gradients are
cut or joined: each process receives everybody's part of one range, adds them from left to right, and sends the result
to all. Arrays that fit into a message are sent to everybody at once.

All waiting is bounded: after ``stall_s`` a warning names the ranks that have not come, after ``timeout_s`` an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np

from weftplan.kvstore.distributed.arrays.piece_copies import Mover
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.messages import Meeting, alike
from weftplan.kvstore.distributed.group.ways import Alone, as_bytes, choose
from weftplan.kvstore.distributed.transport.mpi_types import Communicator
from weftplan.kvstore.distributed.transport.wire import INLINE, Kind, Message, decode
from weftplan.kvstore.reduce import Array
from weftplan.support.array_types import DType


class Group(Meeting):
    """The members of a store, and what they exchange.

    ``mover`` copies and adds.

    Attributes:
        joined: bytes copied so far to make arrays of one exchange contiguous.
        shown, summed: bytes of shared memory that this process has used for shares, and for sums.
    """

    def __init__(self, mpi: ModuleType, comm: Communicator, *, stall_s: float, timeout_s: float, mover: Mover) -> None:
        super().__init__(mpi, comm, stall_s=stall_s, timeout_s=timeout_s)
        self.mover = mover
        self._scratch = np.empty(0, np.uint8)
        self.joined = self.shown = self.summed = 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept for parts of other processes' arrays, and for what they read of this one's."""
        return self._scratch.nbytes + self.shown + self.summed

    @property
    def whole(self) -> bool:
        """True where a sum changes its result only once nothing can fail any more."""
        return self._shared is not None or len(self.members) == 1

    # -- exchanges ------------------------------------------------------------------------------------------------

    def sum(
        self, shares: Sequence[Array], totals: Sequence[Array], description: str, failure: str | None = None
    ) -> Steps[None]:
        """Make ``totals`` the sums of all members' ``shares``; all are contiguous, of one dtype, and may be the same.

        Args:
            shares: of this process.
            totals: their values are undefined after an error, unless this group is :attr:`whole`.
            description: what is summed; must be the same everywhere.
            failure: why this process has no share. Everybody's call raises then.

        Raises:
            KVStoreError: a member failed, exchanges something else, or did not come in time.
            WorkerLostError: a member died.
        """
        way = choose(self, shares, totals, description, shared=self._shared, failed=failure is not None)
        payloads = yield from self.agreed(description, failure, way.nbytes, way.begin())
        if len(self.members) == 1:
            way = Alone(self, shares, totals, description)
        yield from way.end(payloads)
        self.sequence += 1

    def broadcast(self, array: Array, root: int, description: str, failure: str | None = None) -> Steps[None]:
        """Replace a contiguous ``array`` by that of rank ``root``; raises as :meth:`sum` does.

        Where that rank has left meanwhile, the first member's array is taken.
        """
        data = as_bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self.agreed(description, failure, data.nbytes, bytes(data) if inline else b"")
        place = self.members.index(root) if root in self.members else 0
        source = self.members[place]
        if self.rank == source:
            if not inline:
                yield from self.move(dict.fromkeys(self.others(), data), {}, description)
        elif not inline:
            yield from self.move({}, {source: data}, description)
        else:
            data[:] = payloads[place]
        self.sequence += 1

    def gather(self, array: Array, description: str, failure: str | None = None) -> Steps[list[Array]]:
        """Every member's ``array``, by position; they are valid until the next exchange. Raises as :meth:`sum` does."""
        data = as_bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self.agreed(description, failure, data.nbytes, bytes(data) if inline else b"")
        self.sequence += 1
        if inline:
            return [np.frombuffer(payload, array.dtype) for payload in payloads]
        rows = dict(zip(self.members, self.room((len(self.members), array.size), array.dtype), strict=True))
        others = self.others()
        yield from self.move(dict.fromkeys(others, data), {rank: as_bytes(rows[rank]) for rank in others}, description)
        return [array if rank == self.rank else rows[rank] for rank in self.members]

    # -- data -----------------------------------------------------------------------------------------------------

    def tell_summed(self, told: Message, description: str) -> Steps[None]:
        """Swap the messages of who has added up its range; raises if a member could not."""
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
        """Scratch for that many elements, kept for the next time."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(shape)
