"""Exchanges between the processes that share a store: sums and broadcasts.

Before data moves all have said what they are about to do (``messages.py``). Who they are, and what happens when one is
lost, is in ``membership.py``; so is what :data:`Steps` are.

A sum is made in rank order for every element, so its bits depend neither on who comes first nor on how gradients are
cut or joined: each process receives everybody's part of one range, adds them from left to right, and sends the result
to all. Arrays that fit into a message are sent to everybody at once.

All waiting is bounded: after ``stall_s`` a warning names the ranks that have not come, after ``timeout_s`` an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from weftplan.kvstore.distributed.arrays.contiguous import pieces, side_by_side
from weftplan.kvstore.distributed.arrays.piece_copies import Known, Mover
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.shared_memory_sum import Sharing
from weftplan.kvstore.distributed.transport.mpi_types import Communicator
from weftplan.kvstore.distributed.transport.shared_memory import Area
from weftplan.kvstore.distributed.transport.wire import INLINE, Kind
from weftplan.kvstore.reduce import Array, sum_as_one_block, sum_sequential_block
from weftplan.ops.compiled.exchange.rendezvous import BEGUN, DONE, NEW
from weftplan.support.array_types import DType


class Group(Sharing):
    """The members of a store, and what they exchange.

    ``mover`` copies and adds.
    """

    def __init__(self, mpi: ModuleType, comm: Communicator, *, stall_s: float, timeout_s: float, mover: Mover) -> None:
        super().__init__(mpi, comm, stall_s=stall_s, timeout_s=timeout_s, mover=mover)
        self._scratch = np.empty(0, np.uint8)
        self.joined = 0
        """Bytes copied so far to join arrays of one exchange."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept for parts of other processes' arrays, and for what they read of this one's."""
        return self._scratch.nbytes + self._shown + self._summed

    @property
    def whole(self) -> bool:
        """True where a sum changes its result only once nothing can fail any more."""
        return self._shared is not None or len(self.members) == 1

    # -- exchanges ------------------------------------------------------------------------------------------------

    def again(self, known: Known) -> int:
        """Begin a sum whose arrays have come again, as far as nobody has to wait for long; returns how far it has come.

        ``NEW``: nothing is done. ``DONE``: it is over. Otherwise :meth:`sum` is to go on.
        """
        shared, work = self._shared, known.work
        if shared is None or work is None or not known.stays((self.members, Area.maps)):
            return NEW
        late = known.late
        if self._last is known and late is not None and late.may_wait(self.sequence % 2):
            work = known.short or work
        else:
            self.settle()
        known.begun = work
        stage = shared.make(work, self.sequence)
        if stage == DONE:
            self._over(known)
        return stage

    def _over(self, known: Known | None) -> None:
        """An exchange is over; what is known of it may be begun again by the next one."""
        if known is not None and known.late is not None and known.begun is known.short:
            self._late = known.late
            known.late.withhold(self.sequence % 2)
        self._last = known
        self.sequence += 1

    def sum(
        self,
        shares: Sequence[Array],
        totals: Sequence[Array],
        description: str,
        failure: str | None = None,
        also: Sequence[Sequence[Array]] = (),
        begun: Known | None = None,
        kind: Kind = Kind.READY,
    ) -> Steps[Known | None]:
        """Make ``totals`` the sums of all members' ``shares``; all are contiguous, of one dtype, and may be the same.

        Args:
            shares: of this process.
            totals: their values are undefined after an error, unless this group is :attr:`whole`.
            description: what is summed; must be the same everywhere.
            failure: why this process has no share. Everybody's call raises then.
            also: rows of arrays that become like ``totals``, and may be ``shares``; looked at when the sums are there.
            begun: what :meth:`again` has begun.
            kind: of the first message.

        Returns:
            How all this was moved, if it can be moved so again.

        Raises:
            KVStoreError: a member failed, exchanges something else, or did not come in time.
            WorkerLostError: a member died.
            Apart: see :meth:`agreed`.
        """
        nbytes, count, shared, payload = 0, len(self.members), None, b""
        known, shown, whole = begun, None, False
        for share in shares:
            nbytes += share.nbytes
        small = nbytes <= INLINE
        if failure is None and self._shared is not None and count > 1 and nbytes:
            shared = self._shared
            if begun is None:
                known = self._known.get((description, len(also)))
                if known is not None and not known.holds((shares, totals, *also), (self.members, Area.maps)):
                    known = None
                if known is not None:
                    known.work = known.work or self._message_sum(
                        shared, description, shares, (totals, *also), nbytes, kind
                    )
                    if known.work is not None:
                        if self.again(known) == DONE:
                            return known
                        begun = known
        work = None if begun is None else begun.begun
        if shared is not None and work is None and not small:
            shown = self._show(shared, shares, nbytes, whole=False)
        if work is None or work.stage == BEGUN:
            if failure is None and small:
                payload = shares[0].tobytes() if len(shares) == 1 else b"".join(share.tobytes() for share in shares)
            sent = work is not None
            payloads = yield from self.agreed(description, failure, nbytes, payload, kind=kind, sent=sent)
            if work and shared and (len(self.members) < count or shared.make(work, None) == BEGUN):
                work = None  # somebody has left, or counts exchanges otherwise
                self.settle()
        if shared is not None and not small and 1 < len(self.members) < count:  # ranges have become other ones
            shown, whole = None, True
            self._show(shared, shares, nbytes, whole=True)
            yield from self.agreed(description, None, nbytes)
        if len(self.members) == 1 or not nbytes:
            known = None
            for share, total in zip(shares, totals, strict=True):
                if total is not share:
                    total[...] = share
        elif shared is not None and known is not None and work is not None:
            if work.stage != DONE:
                yield from self._sum_again(shared, work, nbytes, description)
            also = also[known.rows - 2 :]  # those that a pull has added meanwhile
            if also and known.late is not None and work is known.short:
                known.late.withhold(self.sequence % 2)
                known.late.settle()
        elif small:
            if shared is not None and known is None:
                known = self._remember(description, Known((shares, totals, *also), (self.members, Area.maps), None))
            self._add_up([np.frombuffer(payload, shares[0].dtype) for payload in payloads], totals)
        elif shared is not None:
            known = yield from self._sum_shared(
                shared, shares, nbytes, totals, description, also, shown, kind=kind, whole=whole
            )
            also = ()
        else:
            yield from self._sum_joined(shares, totals, description)
        for copies in also:
            for total, copy in zip(totals, copies, strict=True):
                if copy is not total:
                    copy[...] = total
        self._over(known)
        return known

    def broadcast(self, array: Array, root: int, description: str, failure: str | None = None) -> Steps[None]:
        """Replace a contiguous ``array`` by that of rank ``root``; raises as :meth:`sum` does.

        Where that rank has left meanwhile, the first member's array is taken.
        """
        data = _bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self.agreed(description, failure, data.nbytes, bytes(data) if inline else b"")
        place = self.members.index(root) if root in self.members else 0
        source = self.members[place]
        if self.rank == source:
            if not inline:
                yield from self._move(dict.fromkeys(self.others(), data), {}, description)
        elif not inline:
            yield from self._move({}, {source: data}, description)
        else:
            data[:] = payloads[place]
        self.sequence += 1

    def gather(self, array: Array, description: str, failure: str | None = None) -> Steps[list[Array]]:
        """Every member's ``array``, by position; they are valid until the next exchange. Raises as :meth:`sum` does."""
        data = _bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self.agreed(description, failure, data.nbytes, bytes(data) if inline else b"")
        self.sequence += 1
        if inline:
            return [np.frombuffer(payload, array.dtype) for payload in payloads]
        rows = dict(zip(self.members, self._room((len(self.members), array.size), array.dtype), strict=True))
        others = self.others()
        yield from self._move(dict.fromkeys(others, data), {rank: _bytes(rows[rank]) for rank in others}, description)
        return [array if rank == self.rank else rows[rank] for rank in self.members]

    # -- data -----------------------------------------------------------------------------------------------------

    def _add_up(self, rows: list[Array], totals: Sequence[Array]) -> None:
        """Make ``totals`` the sums of what came in messages."""
        if len(totals) == 1:
            sum_as_one_block(rows, totals[0].reshape(-1), sum_sequential_block)
            return
        total = np.empty(rows[0].size, rows[0].dtype)
        sum_as_one_block(rows, total, sum_sequential_block)
        for place, piece in pieces(totals, 0, total.size):
            piece[...] = total[place : place + piece.size]

    def _sum_joined(self, shares: Sequence[Array], totals: Sequence[Array], description: str) -> Steps[None]:
        """Sums by MPI, which needs one range of memory: the arrays' own where they lie side by side, else a copy."""
        total = side_by_side(totals)
        if total is None:
            joined = np.concatenate([share.reshape(-1) for share in shares])
            self.joined += joined.nbytes
            yield from self._sum_ranges(joined, joined, description)
            for place, piece in pieces(totals, 0, joined.size):
                piece[...] = joined[place : place + piece.size]
            return
        share = side_by_side(shares)
        if share is None:
            for source, array in zip(shares, totals, strict=True):
                if source is not array:
                    array[...] = source
                    self.joined += array.nbytes
            share = total
        yield from self._sum_ranges(share, total, description)

    def _sum_ranges(self, share: Array, total: Array, description: str) -> Steps[None]:
        members, others, me = self.members, self.others(), self.rank
        ranges = self._ranges(share.size)

        def part(array: Array, rank: int) -> Array:
            first, end = ranges[rank]
            return array[first:end]

        rows = dict(zip(members, self._room((len(members), part(share, me).size), share.dtype), strict=True))
        yield from self._move(
            {rank: _bytes(part(share, rank)) for rank in others},
            {rank: _bytes(rows[rank]) for rank in others},
            description,
        )
        # Rank order. What is summed in place must be whole until all is added, so that sum goes into the row that
        # nobody sent.
        mine = rows[me] if total is share or np.may_share_memory(total, share) else part(total, me)
        self._mover.add([([part(share, me) if rank == me else rows[rank] for rank in members], mine)])
        yield from self._move(
            dict.fromkeys(others, _bytes(mine)),
            {rank: _bytes(part(total, rank)) for rank in others},
            description,
        )
        if mine is rows[me]:
            part(total, me)[...] = mine

    def _move(self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview], what: str) -> Steps[None]:
        """Send and receive data, all at once."""
        byte, comm, tag = self._mpi.BYTE, self._comm, 3 + 2 * self._epoch
        with self.losses(what):
            receives = [comm.Irecv([data, byte], rank, tag) for rank, data in incoming.items()]
            sends = [comm.Issend([data, byte], rank, tag) for rank, data in outgoing.items()]
            yield from self.wait(receives, sends, [*incoming, *outgoing], what)

    def _room(self, shape: tuple[int, int], dtype: DType) -> Array:
        """Scratch for that many elements, kept for the next time."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(shape)


def _bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
