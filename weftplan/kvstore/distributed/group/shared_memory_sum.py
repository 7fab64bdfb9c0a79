"""Sums through memory shared by the processes of a host, and their cached layout.

Each process shows what it has, adds up a range of what all have shown, shows the result, and takes those of all.
Everything here belongs to whoever drives the exchanges (``sequencer.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

from weftplan.kvstore.buckets import even_range
from weftplan.kvstore.distributed.arrays.contiguous import flat
from weftplan.kvstore.distributed.arrays.lazy_values import Late
from weftplan.kvstore.distributed.arrays.piece_copies import Known, Mover, Operand, Row, Span
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.messages import Meeting, alike, mark_of
from weftplan.kvstore.distributed.transport.mpi_types import Communicator
from weftplan.kvstore.distributed.transport.shared_memory import Area, SharedMemory
from weftplan.kvstore.distributed.transport.wire import Kind, Message, clip, decode, head
from weftplan.kvstore.reduce import Array
from weftplan.ops.compiled.exchange.rendezvous import MeetingSum
from weftplan.ops.compiled.exchange.sums import Pieces
from weftplan.support.array_types import DType

_SUMMED = int(Kind.SUMMED)
_MOST = 1024
"""Sums of which a group knows how they were moved."""


class Sharing(Meeting):
    """Members that sum in memory that all of them share.

    ``mover`` copies and adds.
    """

    def __init__(self, mpi: ModuleType, comm: Communicator, *, stall_s: float, timeout_s: float, mover: Mover) -> None:
        super().__init__(mpi, comm, stall_s=stall_s, timeout_s=timeout_s)
        self._mover = mover
        self._known: dict[tuple[str, int], Known] = {}
        """By what is summed, and the number of rows that become like the totals: how it was moved the last time. The
        same exchange has one more when it begins after it was pulled."""
        self._shown = self._summed = 0
        """Bytes of shared memory that this process has used for shares, and for sums."""

    def _ranges(self, size: int) -> dict[int, tuple[int, int]]:
        """Which of so many elements each member adds up: (first, the one behind the last), by rank."""
        count = len(self.members)
        return {rank: even_range(size, count, place) for place, rank in enumerate(self.members)}

    def _show(self, shared: SharedMemory, shares: Sequence[Array], nbytes: int, *, whole: bool) -> Pieces | None:
        """Put ``shares`` in a row where the others read them, but for the range that this process adds up itself:
        unless the row is ``whole`` it has no room for that."""
        area, sources, dtype = shared.own.shares, flat(shares), shares[0].dtype
        first, end = (0, 0) if whole else self._ranges(nbytes // dtype.itemsize)[self.rank]
        used = nbytes - (end - first) * dtype.itemsize
        area.reach(used)
        row: Array = area.room[:used].view(dtype)
        spans = [
            Span(*edges, (sources,), (Row(row, edges[0] and end - first),))
            for edges in ((0, first), (end, nbytes // dtype.itemsize))
        ]
        self._shown = max(self._shown, used)
        return self._mover.move(_sizes(sources), dtype, spans)

    def _added(
        self,
        shared: SharedMemory,
        shares: Sequence[Array],
        nbytes: int,
        turn: int,
        *,
        whole: bool = False,
        rows: Sequence[Sequence[Array]] = (),
    ) -> list[Span]:
        """What adds up a range of what all have shown; of its own one a process reads the arrays themselves.

        ``turn``: at which of two places; ``whole``: the rows of others are; ``rows``: of arrays that get the sums, too.
        """
        dtype, ranges, terms = shares[0].dtype, self._ranges(nbytes // shares[0].itemsize), list[Operand]()
        first, end = ranges[self.rank]
        for rank, (low, high) in ranges.items():
            if rank == self.rank:
                terms.append(flat(shares))
                continue
            left = 0 if whole else high - low
            row = shared.shares(rank, nbytes - left * dtype.itemsize)[: nbytes - left * dtype.itemsize].view(dtype)
            terms.append(Row(row, left if first >= high else 0))
        area, length = shared.own.sums, (end - first) * dtype.itemsize
        area.reach(2 * length)
        self._summed = max(self._summed, 2 * length)
        return [Span(first, end, terms, (Row(_place(area.room, turn, length, dtype), first), *map(flat, rows)))]

    def _taken(
        self, shared: SharedMemory, rows: Sequence[Sequence[Array]], nbytes: int, turn: int, *, own: bool = True
    ) -> list[Span]:
        """What copies the sums of all, at one of two places, to every row; ``own``: those of this process, too."""
        dtype, spans = rows[0][0].dtype, []
        results = [flat(row) for row in rows]
        for rank, (first, end) in self._ranges(nbytes // dtype.itemsize).items():
            if rank == self.rank and not own:
                continue
            length = (end - first) * dtype.itemsize
            sums = _place(self._sums(shared, rank, 2 * length), turn, length, dtype)
            spans.append(Span(first, end, (Row(sums, first),), results))
        return spans

    def _sums(self, shared: SharedMemory, rank: int, nbytes: int) -> Array:
        return shared.own.sums.room if rank == self.rank else shared.sums(rank, nbytes)

    def _sum_again(self, shared: SharedMemory, work: MeetingSum, nbytes: int, description: str) -> Steps[None]:
        """End a sum that one call makes as far as nobody has to wait for long, where all are told that this process has
        added its range."""
        yield from self._tell_summed(
            Message(Kind.SUMMED, self.sequence, mark_of(description), nbytes), description, sent=True
        )
        shared.make(work, None)

    def _tell_summed(self, told: Message, description: str, *, sent: bool = False) -> Steps[None]:
        """Swap the messages of who has added up its range; raises where somebody could not."""
        own = told.encode()
        every = yield from self.swap(own, description, sent=sent)
        if told.kind is Kind.FAILED or not alike(own, every):
            self.sequence += 1
            raise self.failure(description, [decode(raw, rank) for rank, raw in zip(self.members, every, strict=True)])

    def _sum_shared(
        self,
        shared: SharedMemory,
        shares: Sequence[Array],
        nbytes: int,
        totals: Sequence[Array],
        description: str,
        also: Sequence[Sequence[Array]],
        shown: Pieces | None,
        *,
        kind: Kind,
        whole: bool,
    ) -> Steps[Known | None]:
        """Each member adds up a range of what all have shown and shows the result, which all then take.

        Nobody writes over what another still reads: shares are shown again only after all have said that they have
        added, sums only after all have come to the next exchange. ``totals`` and ``also`` change when nothing can fail
        any more. ``shown``: what has shown the shares, and ``whole``, if it has done so for all ranges;
        ``kind``: of the first message.
        """
        told = Message(Kind.SUMMED, self.sequence, mark_of(description), nbytes)
        dtype, sizes, turn = shares[0].dtype, _sizes(shares), self.sequence % 2
        added: Pieces | None = None
        try:
            added = self._mover.move(sizes, dtype, self._added(shared, shares, nbytes, turn, whole=whole))
        except Exception as error:  # the others wait for this range, and must be told
            told = told._replace(kind=Kind.FAILED, payload=clip(f"{type(error).__name__}: {error}"))
        yield from self._tell_summed(told, description)
        rows = (totals, *also)
        taken = self._mover.move(sizes, dtype, self._taken(shared, rows, nbytes, turn))
        if shown is None or added is None or taken is None:
            return None
        mark = mark_of(description)
        heads = head(int(kind), 0, mark, nbytes) + head(_SUMMED, 0, mark, nbytes)

        def each(make: Callable[[int], list[Span]]) -> list[Pieces]:
            found = [self._mover.pieces(sizes, dtype, make(turn)) for turn in range(2)]
            return [one for one in found if one is not None]

        def work(rows: Sequence[Sequence[Array]], *, early: bool) -> MeetingSum:
            adds = each(lambda turn: self._added(shared, shares, nbytes, turn, rows=rows if early else ()))
            takes = each(lambda turn: self._taken(shared, rows, nbytes, turn, own=not early))
            return shared.sum_of(self.others(), shown, adds, takes, heads)

        known = Known((shares, *rows), (self.members, Area.maps), work(rows, early=False))
        if also:
            rooms = [self._sums(shared, rank, 0) for rank in self.members]
            known.short = work(also, early=True)
            known.late = Late(shared, each(lambda turn: self._taken(shared, (totals,), nbytes, turn)), rooms)
        return self._remember(description, known)

    def _remember(self, description: str, known: Known) -> Known:
        if len(self._known) == _MOST:
            self._known.clear()
        self._known[description, known.rows - 2] = known
        return known

    def _message_sum(
        self,
        shared: SharedMemory,
        description: str,
        shares: Sequence[Array],
        rows: Sequence[Sequence[Array]],
        nbytes: int,
        kind: Kind,
    ) -> MeetingSum | None:
        """What makes a small sum, whose arrays have come again, in one call; None where NumPy is to do it."""
        dtype, sources, targets = shares[0].dtype, flat(shares), [flat(row) for row in rows]
        sizes, shows, adds = _sizes(sources), [], []
        for number in range(2):
            places = {rank: Row(shared.payload(rank, number, nbytes).view(dtype)) for rank in self.members}
            terms: list[Operand] = [sources if rank == self.rank else places[rank] for rank in self.members]
            show = self._mover.pieces(sizes, dtype, [Span(0, sum(sizes), (sources,), (places[self.rank],))])
            add = self._mover.pieces(sizes, dtype, [Span(0, sum(sizes), terms, targets)])
            if show is None or add is None:
                return None
            shows.append(show)
            adds.append(add)
        heads = head(int(kind), 0, mark_of(description), nbytes, nbytes)
        return shared.message_sum_of(self.others(), shows, adds, heads, nbytes)


def _sizes(arrays: Sequence[Array]) -> tuple[int, ...]:
    return tuple([array.size for array in arrays])


def _place(room: Array, turn: int, length: int, dtype: DType) -> Array:
    """Where a range of so many bytes is added up: two exchanges that follow one another do it at different places."""
    return room[turn * length : (turn + 1) * length].view(dtype)
