"""Ways of summing over processes; :func:`choose` selects the same way on all members before the first message.

A process's *shares* are its summands; *totals* receive the sums. :class:`InMessages` sends small arrays in the messages
at the start of each exchange. With :class:`InSharedMemory`, each process sums one range of all shares in shared memory;
with :class:`OverMPI`, it receives and sends ranges by MPI. :class:`WithoutPeers` is for a single process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.kvstore.distributed.arrays.contiguous import flat, pieces, side_by_side
from weftplan.kvstore.distributed.arrays.piece_copies import OffsetRow, Operand, Span
from weftplan.kvstore.distributed.group.data import DataMembers
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.messages import mark_of
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.kvstore.distributed.transport.shared_memory import SharedMemory
from weftplan.kvstore.distributed.transport.wire import INLINE, Message, MessageKind, clip
from weftplan.kvstore.fixed_order_sums import Array, sum_sequential_block, sum_single_block
from weftplan.kvstore.partition import even_range
from weftplan.support.array_types import DType


class Sum:
    """Base class of the ways: the sum of one exchange.

    Args:
        group: the members.
        shares: this process's summands, contiguous and of one dtype; empty if the process failed.
        totals: arrays that receive the sums; may be the shares.
        description: names the sum in messages.
    """

    def __init__(self, group: DataMembers, shares: Sequence[Array], totals: Sequence[Array], description: str) -> None:
        self.group, self.shares, self.totals, self.description = group, shares, totals, description
        self.nbytes = sum([share.nbytes for share in shares])

    def begin(self) -> bytes:
        """Prepare the exchange before the first message, and return the payload of this message."""
        return b""

    def end(self, payloads: Sequence[memoryview]) -> Steps[None]:
        """Compute the totals after all members have agreed; ``payloads`` are those of their messages, by position."""
        raise NotImplementedError

    def _ranges(self) -> dict[JobRank, tuple[int, int]]:
        """Return the range of elements (first, end) that each member sums, by rank."""
        members, size = self.group.members, self.nbytes // self.shares[0].itemsize
        return {rank: even_range(size, len(members), position) for position, rank in enumerate(members)}


class WithoutPeers(Sum):
    """The sum of a group with a single member."""

    def end(self, payloads: Sequence[memoryview]) -> Steps[None]:
        """Copy the shares to the totals."""
        del payloads
        for share, total in zip(self.shares, self.totals, strict=True):
            if total is not share:
                total[...] = share
        yield from ()


class InMessages(Sum):
    """A sum of shares that are sent within the first message."""

    def begin(self) -> bytes:
        """Return the bytes of the shares."""
        if len(self.shares) == 1:
            return self.shares[0].tobytes()
        return b"".join([share.tobytes() for share in self.shares])

    def end(self, payloads: Sequence[memoryview]) -> Steps[None]:
        """Sum the shares in the payloads into the totals, in rank order."""
        rows = [np.frombuffer(payload, self.shares[0].dtype) for payload in payloads]
        if len(self.totals) == 1:
            sum_single_block(rows, self.totals[0].reshape(-1), sum_sequential_block)
        else:
            total = np.empty(rows[0].size, rows[0].dtype)
            sum_single_block(rows, total, sum_sequential_block)
            for offset, piece in pieces(self.totals, 0, total.size):
                piece[...] = total[offset : offset + piece.size]
        yield from ()


class OverMPI(Sum):
    """A sum by messages of MPI, which need contiguous memory: the arrays themselves if adjacent, else a copy."""

    def end(self, payloads: Sequence[memoryview]) -> Steps[None]:
        """Receive all members' parts of one range, sum them, and send the result to all members."""
        del payloads
        group, total = self.group, side_by_side(self.totals)
        if total is None:
            joined = np.concatenate([share.reshape(-1) for share in self.shares])
            group.joined += joined.nbytes
            yield from self._sum_ranges(joined, joined)
            for offset, piece in pieces(self.totals, 0, joined.size):
                piece[...] = joined[offset : offset + piece.size]
            return
        share = side_by_side(self.shares)
        if share is None:
            for source, array in zip(self.shares, self.totals, strict=True):
                if source is not array:
                    array[...] = source
                    group.joined += array.nbytes
            share = total
        yield from self._sum_ranges(share, total)

    def _sum_ranges(self, share: Array, total: Array) -> Steps[None]:
        group = self.group
        members, peers, me, ranges = group.members, group.peers(), group.rank, self._ranges()

        def part(array: Array, rank: JobRank) -> Array:
            begin, end = ranges[rank]
            return array[begin:end]

        scratch = group.scratch((len(members), part(share, me).size), share.dtype)
        rows = dict(zip(members, scratch, strict=True))
        outgoing = {rank: as_bytes(part(share, rank)) for rank in peers}
        yield from group.move(outgoing, {rank: as_bytes(rows[rank]) for rank in peers}, self.description)
        # Add in rank order. If the total shares memory with this process's share, sum into the row that no rank sends,
        # and copy from there at the end: the share must stay unchanged until it has been added and sent.
        mine = rows[me] if total is share or np.may_share_memory(total, share) else part(total, me)
        group.mover.add([([part(share, me) if rank == me else rows[rank] for rank in members], mine)])
        incoming: Mapping[JobRank, memoryview] = {rank: as_bytes(part(total, rank)) for rank in peers}
        yield from group.move(dict.fromkeys(peers, as_bytes(mine)), incoming, self.description)
        if mine is rows[me]:
            part(total, me)[...] = mine


class InSharedMemory(Sum):
    """A sum in memory that all members share.

    Each process publishes its shares, sums one range of all members' shares, publishes this sum, and copies the sums of
    all ranges to its totals.

    Invariant: no process overwrites data that another process still reads. Shares are published again only after all
    members have reported their sums. Sums alternate between two places: a sum is overwritten two exchanges later, when
    all members have begun the exchange in between. Totals change last, when no step can fail any more.
    """

    def __init__(
        self,
        group: DataMembers,
        shares: Sequence[Array],
        totals: Sequence[Array],
        description: str,
        shared: SharedMemory,
    ) -> None:
        super().__init__(group, shares, totals, description)
        self._shared, self._count = shared, len(group.members)

    def begin(self) -> bytes:
        """Publish the shares, except the range that this process sums itself; return no payload."""
        self._show(complete=False)
        return b""

    def end(self, payloads: Sequence[memoryview]) -> Steps[None]:
        """Sum one range, report it to all members, and copy the sums of all ranges to the totals."""
        del payloads
        group, is_smaller = self.group, len(self.group.members) < self._count
        if is_smaller:  # members have left since `begin`, so the ranges differ: publish whole shares, and meet again
            self._show(complete=True)
            yield from group.agreed(self.description, None, self.nbytes)
        mark, turn = mark_of(self.description), group.sequence % 2
        report = Message(MessageKind.SUMMED, group.sequence, mark, self.nbytes)
        sizes, dtype = tuple([share.size for share in self.shares]), self.shares[0].dtype
        try:
            group.mover.move(sizes, dtype, [self._sum_span(turn, complete=is_smaller)])
        except Exception as error:  # the others wait for this range: notify them of the failure
            report = report._replace(kind=MessageKind.FAILED, payload=clip(f"{type(error).__name__}: {error}"))
        yield from group.tell_summed(report, self.description)
        group.mover.move(sizes, dtype, self._result_spans(turn))

    def _show(self, *, complete: bool) -> None:
        """Publish the concatenated shares; unless ``complete``, leave out the range that this process sums itself."""
        area, sources, dtype = self._shared.mine.shares, flat(self.shares), self.shares[0].dtype
        begin, end = (0, 0) if complete else self._ranges()[self.group.rank]
        used = self.nbytes - (end - begin) * dtype.itemsize
        area.reach(used)
        row: Array = area.payload[:used].view(dtype)
        spans = [
            Span(*edges, (sources,), (OffsetRow(row, edges[0] and end - begin),))
            for edges in ((0, begin), (end, self.nbytes // dtype.itemsize))
        ]
        self.group.shown = max(self.group.shown, used)
        self.group.mover.move(tuple([source.size for source in sources]), dtype, spans)

    def _sum_span(self, turn: int, *, complete: bool) -> Span:
        """Return the span that sums this process's range of all members' shares; its own shares are read in place.

        Args:
            turn: index of the place of the sum, 0 or 1.
            complete: whether the other members have published whole shares, including the range that each sums itself.
        """
        dtype, ranges, terms = self.shares[0].dtype, self._ranges(), list[Operand]()
        begin, end = ranges[self.group.rank]
        for rank, (low, high) in ranges.items():
            if rank == self.group.rank:
                terms.append(flat(self.shares))
                continue
            omitted = 0 if complete else high - low
            nbytes = self.nbytes - omitted * dtype.itemsize
            row = self._shared.shares(rank, nbytes)[:nbytes].view(dtype)
            terms.append(OffsetRow(row, omitted if begin >= high else 0))
        area, length = self._shared.mine.sums, (end - begin) * dtype.itemsize
        area.reach(2 * length)
        self.group.summed = max(self.group.summed, 2 * length)
        return Span(begin, end, terms, (OffsetRow(_sum_area(area.payload, turn, length, dtype), begin),))

    def _result_spans(self, turn: int) -> list[Span]:
        """Return the spans that copy the sums of all ranges, from place ``turn``, to the totals."""
        dtype, results, spans = self.totals[0].dtype, flat(self.totals), []
        for rank, (begin, end) in self._ranges().items():
            length = (end - begin) * dtype.itemsize
            mine = rank == self.group.rank
            buffer = self._shared.mine.sums.payload if mine else self._shared.sums(rank, 2 * length)
            spans.append(Span(begin, end, (OffsetRow(_sum_area(buffer, turn, length, dtype), begin),), (results,)))
        return spans


def choose(
    group: DataMembers,
    shares: Sequence[Array],
    totals: Sequence[Array],
    description: str,
    *,
    shared: SharedMemory | None,
    failed: bool,
) -> Sum:
    """Return the way of a sum; all members that have not failed choose the same way.

    The choice depends only on the members, the bytes of the shares and shared memory, which are equal on all members.

    Args:
        group: the members.
        shares: as for :class:`Sum`.
        totals: as for :class:`Sum`.
        description: as for :class:`Sum`.
        shared: the group's shared memory; None if the members do not share memory.
        failed: whether this process has failed, so that it only reports its failure to the other members.
    """
    if failed:
        return Sum(group, (), (), description)
    nbytes = sum([share.nbytes for share in shares])
    if len(group.members) == 1 or not nbytes:
        return WithoutPeers(group, shares, totals, description)
    if nbytes <= INLINE:
        return InMessages(group, shares, totals, description)
    if shared is not None:
        return InSharedMemory(group, shares, totals, description, shared)
    return OverMPI(group, shares, totals, description)


def as_bytes(array: Array) -> memoryview:
    """Return a view of the bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _sum_area(buffer: Array, turn: int, length: int, dtype: DType) -> Array:
    """Return the first (``turn`` 0) or second (1) range of ``length`` bytes of ``buffer``, as an array of ``dtype``."""
    return buffer[turn * length : (turn + 1) * length].view(dtype)
