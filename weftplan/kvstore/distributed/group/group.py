"""Exchanges between the processes that share a store: sums and broadcasts.

Before data moves, all members announce the exchange (``messages.py``). ``membership.py`` has the members, lost members,
and :data:`Steps`. ``ways.py`` has the ways of summing.

Every element is summed in rank order, so its bits depend neither on the order of arrival nor on how gradients are cut
or concatenated: each process receives all parts of one range, adds them from left to right, and sends the result to
all. Arrays that fit into a message are sent to all members at once.

All waits are bounded: after ``stall_s`` a warning names the missing ranks, after ``timeout_s`` an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.kvstore.distributed.group.data import DataMembers
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.ways import Alone, as_bytes, choose
from weftplan.kvstore.distributed.transport.mpi_types import Connection
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.reduce import Array


class Group(DataMembers):
    """The members of a store, and their exchanges."""

    @property
    def whole(self) -> bool:
        """True where a sum changes its result only once nothing can fail any more."""
        return self._shared is not None or len(self.members) == 1

    def begin_again(self, connection: Connection, array: Array) -> Steps[list[Array]]:
        """Become a member of a new connection, and :meth:`gather` a small array; every member calls this."""
        self.stop_listening()
        self._join(connection)
        yield from self.share_memory()
        return (yield from self.gather(array, "begin again after a loss"))

    # -- exchanges ------------------------------------------------------------------------------------------------

    def sum(
        self, shares: Sequence[Array], totals: Sequence[Array], description: str, failure: str | None = None
    ) -> Steps[None]:
        """Make ``totals`` the sums of all members' ``shares``; all are contiguous, of one dtype, and may be the same.

        Args:
            shares: of this process.
            totals: their values are undefined after an error, unless this group is :attr:`whole`.
            description: names the summed arrays; must be the same everywhere.
            failure: why this process has no share. The calls of all members then raise.

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

        If that rank has left meanwhile, the first member's array is used.
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
        """Return every member's ``array``, by position; they are valid until the next exchange. Raises as :meth:`sum`
        does."""
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
