"""Exchanges between the processes that share a store: sums, broadcasts, and what they say to each other before.

Every exchange begins with a message from each process to each other; as all of them see the same messages, all of them
decide the same: to exchange the data, to fail with the same error, or to go on without those who leave. Only then does
data move. Who they are, and what happens when one is lost, is in ``membership.py``; so is what :data:`Steps` are.

A sum is made in rank order for every element, so its bits depend neither on who comes first nor on how gradients are
cut or joined: each process receives everybody's part of one range, adds them from left to right, and sends the result
to all. Arrays that fit into a message are sent to everybody at once.

All waiting is bounded: after ``stall_s`` a warning names the ranks that have not come, after ``timeout_s`` an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.joining import pieces, side_by_side
from weftplan.kvstore.distributed.membership import Members, Steps, Watch
from weftplan.kvstore.distributed.shared import Areas, SharedMemory
from weftplan.kvstore.distributed.wire import HEADER, INLINE, SIZE, Kind, Message, clip, decode, digest
from weftplan.kvstore.reduce import Array

_mark = lru_cache(1024)(digest)
"""Descriptions come again at every step."""


class Group(Members):
    """The members of a store, and what they exchange.

    ``add(shares, total)`` makes ``total`` the sum of arrays from left to right.
    """

    def __init__(self, mpi: Any, comm: Any, *, stall_s: float, timeout_s: float, add: Callable[..., None]) -> None:
        super().__init__(mpi, comm, stall_s=stall_s, timeout_s=timeout_s)
        self._add = add
        self._scratch = np.empty(0, np.uint8)
        self.joined = 0
        """Bytes copied so far to join arrays of one exchange."""
        self._rooms: dict[int, bytearray] = {}
        """Where the message of each rank arrives, while no request of a lost exchange may write there."""
        self._shared: SharedMemory | None = None
        self._shown = self._summed = 0
        """Bytes of shared memory that this process has used for shares, and for sums."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept for parts of other processes' arrays, and for what they read of this one's."""
        return self._scratch.nbytes + self._shown + self._summed

    @property
    def shares_memory(self) -> bool:
        """True where messages and sums go through memory that all members share."""
        return self._shared is not None

    @property
    def whole(self) -> bool:
        """True where a sum changes its result only once nothing can fail any more."""
        return self._shared is not None or len(self.members) == 1

    def share_memory(self) -> Steps[None]:
        """Use memory that all members share, where all run on one host and are willing; every member calls this."""
        areas = Areas.new() if len(self.members) > 1 else None
        offer = Message(Kind.TEXT, self.sequence, bytes(8), 0, areas.offer() if areas else b"")
        offers = [decode(raw, rank).payload for rank, raw in (yield from self._named(offer, "offer memory"))]
        others: dict[int, Areas] = {}
        reason = b"" if areas else b"no"
        try:
            for rank, words in zip(self.members, offers, strict=True):
                if rank != self.rank:
                    others[rank] = Areas.accept(words)
        except (OSError, ValueError):
            reason = b"no"
        answer = Message(Kind.TEXT, self.sequence, bytes(8), 0, reason)
        answers = [decode(raw, rank).payload for rank, raw in (yield from self._named(answer, "share memory"))]
        if areas is not None and not any(answers):
            self._shared = SharedMemory(areas, others)
            return
        for one in (*others.values(), *([areas] if areas else [])):
            one.close()

    def stop_listening(self) -> None:
        """Let go of what stands for messages of others; nothing is exchanged afterwards."""
        super().stop_listening()
        if self._shared is not None:
            self._shared.close()

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
        nbytes, row, payload = 0, None, b""
        for share in shares:
            nbytes += share.nbytes
        if failure is None and nbytes <= INLINE:
            payload = shares[0].tobytes() if len(shares) == 1 else b"".join(share.tobytes() for share in shares)
        elif failure is None and self._shared is not None and len(self.members) > 1:
            row = self._show(shares, nbytes)
        payloads = yield from self._meet(description, failure, nbytes, payload)
        if len(self.members) == 1 or not nbytes:
            for share, total in zip(shares, totals, strict=True):
                if total is not share:
                    total[...] = share
        elif nbytes <= INLINE:
            self._add_up([np.frombuffer(payload, shares[0].dtype) for payload in payloads], totals)
        elif row is not None and self._shared is not None:
            yield from self._sum_shared(self._shared, row, totals, description)
        else:
            yield from self._sum_joined(shares, totals, description)
        self.sequence += 1

    def broadcast(self, array: Array, root: int, description: str, failure: str | None = None) -> Steps[None]:
        """Replace a contiguous ``array`` by that of rank ``root``; raises as :meth:`sum` does.

        Where that rank has left meanwhile, the first member's array is taken.
        """
        data = _bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self._meet(description, failure, data.nbytes, bytes(data) if inline else b"")
        place = self.members.index(root) if root in self.members else 0
        source = self.members[place]
        if self.rank == source:
            if not inline:
                yield from self._move(dict.fromkeys(self._others(), data), {}, description)
        elif not inline:
            yield from self._move({}, {source: data}, description)
        else:
            data[:] = payloads[place]
        self.sequence += 1

    def gather(self, array: Array, description: str, failure: str | None = None) -> Steps[list[Array]]:
        """Every member's ``array``, by position; they are valid until the next exchange. Raises as :meth:`sum` does."""
        data = _bytes(array)
        inline = data.nbytes <= INLINE
        payloads = yield from self._meet(description, failure, data.nbytes, bytes(data) if inline else b"")
        self.sequence += 1
        if inline:
            return [np.frombuffer(payload, array.dtype) for payload in payloads]
        rows = dict(zip(self.members, self._room((len(self.members), array.size), array.dtype), strict=True))
        others = self._others()
        yield from self._move(dict.fromkeys(others, data), {rank: _bytes(rows[rank]) for rank in others}, description)
        return [array if rank == self.rank else rows[rank] for rank in self.members]

    def meet(self, description: str) -> Steps[None]:
        """Return when every member is here; raises as :meth:`sum` does."""
        yield from self._meet(description, None, 0)
        self.sequence += 1

    def leave(self) -> Steps[None]:
        """Take part in nothing any more; the others go on without this process at their next exchange."""
        yield from self._swap(Message(Kind.LEAVE, self.sequence, bytes(8)).encode(), "the end of its work")

    def regroup(self) -> Steps[int]:
        """See :meth:`Members.regroup`; messages in shared memory begin anew."""
        leader = yield from super().regroup()
        if self._shared is not None:
            self._shared.begin(self._epoch)
        return leader

    # -- messages -------------------------------------------------------------------------------------------------

    def _meet(
        self, description: str, failure: str | None, nbytes: int, payload: bytes = b""
    ) -> Steps[list[memoryview]]:
        """Exchange messages until all who are left want the same; returns payloads by position, one's own included.

        They are valid until the next exchange.
        """
        mark = _mark(description)
        if failure is None:
            own = Message(Kind.READY, self.sequence, mark, nbytes, payload).encode()
        else:
            own = Message(Kind.FAILED, self.sequence, mark, nbytes, clip(failure)).encode()
        while True:
            every = yield from self._swap(own, description)
            if failure is None and _alike(own, every):
                return [raw[HEADER:] for raw in every]
            messages = [decode(raw, rank) for rank, raw in zip(self.members, every, strict=True)]
            for other in messages:
                if other.kind is not Kind.READY or other.digest != mark or other.nbytes != nbytes:
                    break
            else:
                return [raw[HEADER:] for raw in every]
            leaving = {rank for rank, other in zip(self.members, messages, strict=True) if other.kind is Kind.LEAVE}
            if not leaving:
                break
            self.without(leaving)
        sizes = {message.nbytes for message in messages if message.kind is Kind.READY}
        self.sequence += 1
        if len({message.digest for message in messages}) > 1 or len(sizes) > 1:
            raise (yield from self._difference(description))
        raise self._failure(description, messages)

    def _failure(self, description: str, messages: Sequence[Message]) -> KVStoreError:
        """What the first member that failed says of it."""
        for rank, message in zip(self.members, messages, strict=True):
            if message.kind is Kind.FAILED:
                return KVStoreError(f"{description}: rank {rank} has no value for it: {message.text}")
        return KVStoreError(f"{description}: the processes are not at the same place of their programs")

    def _named(self, own: Message, what: str) -> Steps[list[tuple[int, memoryview]]]:
        """:meth:`_swap`, with the ranks of the members."""
        every = yield from self._swap(own.encode(), what)
        return list(zip(self.members, every, strict=True))

    def _swap(self, own: bytes, what: str) -> Steps[list[memoryview]]:
        """Send one message to every member, receive one from each; they are returned by position.

        They are valid until the next call; those in shared memory until the one after it.
        """
        if len(self.members) == 1:
            return [memoryview(own)]
        shared = self._shared
        if shared is None:
            found = yield from self._swap_by_mpi(own, what)
            return [found[rank] for rank in self.members]
        shared.send(own)
        others = self._others()
        missing = shared.missing(others)
        if missing:
            watch = Watch(self, what)
            with self.losses(what):
                while missing:
                    watch.in_vain(missing)
                    yield
                    missing = shared.missing(missing)
        return [memoryview(own) if rank == self.rank else shared.received(rank) for rank in self.members]

    def _swap_by_mpi(self, own: bytes, what: str) -> Steps[dict[int, memoryview]]:
        """The same, by rank; valid until the next call.

        Sends are synchronous. A small one would otherwise be complete before it has left this process, and what
        :meth:`_is_done` avoids could happen to it.
        """
        byte, comm, others, tag = self._mpi.BYTE, self._comm, self._others(), 2 + 2 * self._epoch
        found = {self.rank: memoryview(own)}
        rooms, self._rooms = self._rooms, {}

        def arrived(rank: int, status: Any) -> None:
            found[rank] = memoryview(rooms[rank])[: status.Get_count(byte)]

        for rank in others:
            if rank not in rooms:
                rooms[rank] = bytearray(SIZE)
        with self.losses(what):
            receives = [comm.Irecv([rooms[rank], byte], rank, tag) for rank in others]
            sends = [comm.Issend([own, byte], rank, tag) for rank in others]
            yield from self.wait(receives, sends, [*others, *others], what, arrived)
        self._rooms = rooms
        return found

    def _difference(self, description: str) -> Steps[KVStoreError]:
        """What the members wanted instead of the same."""
        own = Message(Kind.TEXT, self.sequence, bytes(8), payload=clip(description))
        texts = [decode(raw, rank).text for rank, raw in (yield from self._named(own, description))]
        rank, other = next(
            ((self.members[p], text) for p, text in enumerate(texts) if text != description),
            (self.members[0], "arrays of other sizes"),
        )
        return KVStoreError(
            f"the processes do not do the same: rank {self.rank} wants to {description}, rank {rank} "
            f"to {other}. Make the same calls of the store, in the same order, on every rank"
        )

    def _others(self) -> list[int]:
        """Every other member, beginning behind oneself, so that not everybody sends to the same one first."""
        members, place = self.members, self.position
        return members[place + 1 :] + members[:place]

    # -- data -----------------------------------------------------------------------------------------------------

    def _show(self, shares: Sequence[Array], nbytes: int) -> Array:
        """Put ``shares`` in a row where the others read them; returns them as one array."""
        assert self._shared is not None
        area = self._shared.own.shares
        area.reach(nbytes)
        row: Array = area.room[:nbytes].view(shares[0].dtype)
        for place, piece in pieces(shares, 0, row.size):
            row[place : place + piece.size] = piece
        self._shown = max(self._shown, nbytes)
        return row

    def _sum_shared(self, shared: SharedMemory, mine: Array, totals: Sequence[Array], description: str) -> Steps[None]:
        """Each member adds up a range of what all have shown and shows the result, which all then take.

        Nobody writes over what another still reads: shares are shown again only after all have said that they have
        added, sums only after all have come to the next exchange. ``totals`` change when nothing can fail any more.
        """
        dtype, nbytes = mine.dtype, mine.nbytes
        bounds = [mine.size * place // len(self.members) for place in range(len(self.members) + 1)]
        ranges = dict(zip(self.members, pairwise(bounds), strict=True))
        first, end = ranges[self.rank]
        told = Message(Kind.SUMMED, self.sequence, _mark(description), nbytes)
        try:
            rows = [
                mine if rank == self.rank else shared.shares(rank, nbytes)[:nbytes].view(dtype) for rank in self.members
            ]
            area, length = shared.own.sums, (end - first) * dtype.itemsize
            area.reach(length)
            self._summed = max(self._summed, length)
            self._add([row[first:end] for row in rows], area.room[:length].view(dtype))
        except Exception as error:  # the others wait for this range, and must be told
            told = told._replace(kind=Kind.FAILED, payload=clip(f"{type(error).__name__}: {error}"))
        own = told.encode()
        every = yield from self._swap(own, description)
        if told.kind is Kind.FAILED or not _alike(own, every):
            self.sequence += 1
            raise self._failure(description, [decode(raw, rank) for rank, raw in zip(self.members, every, strict=True)])
        for rank, (start, end) in ranges.items():
            length = (end - start) * dtype.itemsize
            room = shared.own.sums.room if rank == self.rank else shared.sums(rank, length)
            summed = room[:length].view(dtype)
            for place, piece in pieces(totals, start, end):
                piece[...] = summed[place - start : place - start + piece.size]

    def _add_up(self, rows: list[Array], totals: Sequence[Array]) -> None:
        if len(totals) == 1:
            self._add(rows, totals[0].reshape(-1))
            return
        total = np.empty(rows[0].size, rows[0].dtype)
        self._add(rows, total)
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
        members, others, me, size = self.members, self._others(), self.rank, len(self.members)
        bounds = [share.size * place // size for place in range(size + 1)]
        ranges = dict(zip(members, pairwise(bounds), strict=True))

        def part(array: Array, rank: int) -> Array:
            first, end = ranges[rank]
            return array[first:end]

        rows = dict(zip(members, self._room((size, part(share, me).size), share.dtype), strict=True))
        yield from self._move(
            {rank: _bytes(part(share, rank)) for rank in others},
            {rank: _bytes(rows[rank]) for rank in others},
            description,
        )
        # Rank order. What is summed in place must be whole until all is added, so that sum goes into the row that
        # nobody sent.
        mine = rows[me] if total is share or np.may_share_memory(total, share) else part(total, me)
        self._add([part(share, me) if rank == me else rows[rank] for rank in members], mine)
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

    def _room(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        """Scratch for that many elements, kept for the next time."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(shape)


def _alike(own: bytes, every: Sequence[memoryview]) -> bool:
    """Whether all messages have the same header."""
    head = own[:HEADER]
    return all(raw[:HEADER] == head for raw in every)


def _bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
