"""Exchanges between the processes that share a store: sums, broadcasts and gathers.

Before data moves, all members announce the exchange (``messages.py``). ``membership.py`` handles lost members and
defines :data:`Steps`; ``ways.py`` has the ways of summing.

Each element is summed in rank order, so its bits depend neither on the order of arrival nor on the division of
gradients into buckets. For a large sum, each process gets all members' parts of one range, adds them, and gives the
result to all. Arrays that fit into a message are sent to all members, and each member sums them.

Every wait is bounded: after ``stall_s`` a warning, and after ``timeout_s`` an error names the missing ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.errors import WorkerLostError
from weftplan.kvstore.distributed.group.data import DataMembers
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.ways import WithoutPeers, as_bytes, choose
from weftplan.kvstore.distributed.transport.mpi_types import Connection, JobRank
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.fixed_order_sums import Array


class RankGroup(DataMembers):
    """The group of processes that share a store, with the exchanges between its members."""

    @property
    def is_atomic(self) -> bool:
        """True if a sum changes its totals only when it can no longer fail: in shared memory, or with one member."""
        return self._shared is not None or len(self.members) == 1

    def begin_again(self, connection: Connection, array: Array) -> Steps[list[Array]]:
        """Form the group again over a new connection, and :meth:`gather` a small array; every member calls this."""
        self.stop_listening()
        self._join(connection)
        yield from self.share_memory()
        return (yield from self.gather(array, "begin again after a loss"))

    # -- exchanges ------------------------------------------------------------------------------------------------

    def sum(
        self, shares: Sequence[Array], totals: Sequence[Array], description: str, failure: str | None = None
    ) -> Steps[None]:
        """Write the sums of all members' ``shares`` to ``totals``.

        Args:
            shares: this process's summands, contiguous and of one dtype.
            totals: arrays that receive the sums; may be the shares. Their values are undefined after an error, unless
                the group is :attr:`is_atomic`.
            description: names the exchange; must be the same on all members.
            failure: why this process has no shares, or None; with a failure the calls of all members raise.

        Raises:
            KVStoreError: a member failed, or makes another exchange.
            WorkerLostError: a member was lost, or is too late.
        """
        method = choose(self, shares, totals, description, shared=self._shared, failed=failure is not None)
        payloads = yield from self.agreed(description, failure, method.nbytes, method.begin())
        if len(self.members) == 1:
            method = WithoutPeers(self, shares, totals, description)
        yield from method.end(payloads)
        self.sequence += 1

    def broadcast(
        self, array: Array, root: JobRank | None, description: str, failure: str | None = None
    ) -> Steps[None]:
        """Copy the ``array`` of rank ``root`` (None: of the first member) into this process's contiguous ``array``.

        Raises:
            KVStoreError: as :meth:`sum` does.
            WorkerLostError: as :meth:`sum` does, or the root has left.
        """
        data = as_bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self.agreed(description, failure, data.nbytes, bytes(data) if inline else b"")
        source = self.members[0] if root is None else root
        if source not in self.members:
            self.sequence += 1
            raise WorkerLostError(f"{description}: rank {source} has left; {self.advice}")
        if self.rank == source:
            if not inline:
                yield from self.move(dict.fromkeys(self.peers(), data), {}, description)
        elif not inline:
            yield from self.move({}, {source: data}, description)
        else:
            data[:] = payloads[self.members.index(source)]
        self.sequence += 1

    def broadcast_bytes(self, data: bytes, root: JobRank, description: str) -> Steps[bytes]:
        """Return the ``data`` of rank ``root``, of any length; raises as :meth:`broadcast` does."""
        size = np.array([len(data)], np.int64)
        yield from self.broadcast(size, root, f"{description}: their size")
        array = np.zeros(int(size[0]), np.uint8)
        if self.rank == root:
            array[:] = np.frombuffer(data, np.uint8)
        yield from self.broadcast(array, root, description)
        return array.tobytes()

    def gather(self, array: Array, description: str, failure: str | None = None) -> Steps[list[Array]]:
        """Return the ``array`` of each member, by position; raises as :meth:`sum` does.

        The arrays are valid until the next exchange.
        """
        data = as_bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self.agreed(description, failure, data.nbytes, bytes(data) if inline else b"")
        self.sequence += 1
        if inline:
            return [np.frombuffer(payload, array.dtype) for payload in payloads]
        rows = dict(zip(self.members, self.scratch((len(self.members), array.size), array.dtype), strict=True))
        peers = self.peers()
        yield from self.move(dict.fromkeys(peers, data), {rank: as_bytes(rows[rank]) for rank in peers}, description)
        return [array if rank == self.rank else rows[rank] for rank in self.members]
