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

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.membership import Members, Steps
from weftplan.kvstore.distributed.wire import INLINE, SIZE, Kind, Message, clip, decode, digest
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

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept for parts of other processes' arrays."""
        return self._scratch.nbytes

    # -- exchanges ------------------------------------------------------------------------------------------------

    def sum(self, share: Array, total: Array, description: str, failure: str | None = None) -> Steps[None]:
        """Make ``total`` the sum of all members' ``share``; both are contiguous, and may be the same array.

        Args:
            share: of this process.
            total: its values are undefined after an error.
            description: what is summed; must be the same everywhere.
            failure: why this process has no share. Everybody's call raises then.

        Raises:
            KVStoreError: a member failed, exchanges something else, or did not come in time.
            WorkerLostError: a member died.
        """
        data = _bytes(share)
        messages = yield from self._meet(description, failure, data, inline=True)
        if len(self.members) == 1 or not share.size:
            if total is not share:
                total.reshape(-1)[...] = share.reshape(-1)
        elif data.nbytes <= INLINE:
            self._add([np.frombuffer(message.payload, share.dtype) for message in messages], total.reshape(-1))
        else:
            yield from self._sum_ranges(share.reshape(-1), total.reshape(-1), description)
        self.sequence += 1

    def broadcast(self, array: Array, root: int, description: str, failure: str | None = None) -> Steps[None]:
        """Replace a contiguous ``array`` by that of rank ``root``; raises as :meth:`sum` does.

        Where that rank has left meanwhile, the first member's array is taken.
        """
        data = _bytes(array)
        messages = yield from self._meet(description, failure, data, inline=True)
        place = self.members.index(root) if root in self.members else 0
        source = self.members[place]
        if self.rank == source:
            if data.nbytes > INLINE:
                yield from self._move(dict.fromkeys(self._others(), data), {}, description)
        elif data.nbytes > INLINE:
            yield from self._move({}, {source: data}, description)
        else:
            data[:] = messages[place].payload
        self.sequence += 1

    def gather(self, array: Array, description: str, failure: str | None = None) -> Steps[list[Array]]:
        """Every member's ``array``, by position; they are valid until the next exchange. Raises as :meth:`sum` does."""
        data = _bytes(array)
        messages = yield from self._meet(description, failure, data, inline=True)
        self.sequence += 1
        if data.nbytes <= INLINE:
            return [np.frombuffer(message.payload, array.dtype) for message in messages]
        rows = dict(zip(self.members, self._room((len(self.members), array.size), array.dtype), strict=True))
        others = self._others()
        yield from self._move(dict.fromkeys(others, data), {rank: _bytes(rows[rank]) for rank in others}, description)
        return [array if rank == self.rank else rows[rank] for rank in self.members]

    def meet(self, description: str) -> Steps[None]:
        """Return when every member is here; raises as :meth:`sum` does."""
        yield from self._meet(description, None, memoryview(b""), inline=False)
        self.sequence += 1

    def leave(self) -> Steps[None]:
        """Take part in nothing any more; the others go on without this process at their next exchange."""
        yield from self._swap(Message(Kind.LEAVE, self.sequence, bytes(8)), "the end of its work")

    # -- messages -------------------------------------------------------------------------------------------------

    def _meet(self, description: str, failure: str | None, data: memoryview, *, inline: bool) -> Steps[list[Message]]:
        """Exchange messages until all who are left want the same; returns them by position, one's own included."""
        mark = _mark(description)
        if failure is None:
            payload = bytes(data) if inline and data.nbytes <= INLINE else b""
            own = Message(Kind.READY, self.sequence, mark, data.nbytes, payload)
        else:
            own = Message(Kind.FAILED, self.sequence, mark, data.nbytes, clip(failure))
        while True:
            messages = yield from self._swap(own, description)
            for other in messages:
                if other.kind is not Kind.READY or other.digest != mark or other.nbytes != data.nbytes:
                    break
            else:
                return messages
            leaving = {rank for rank, other in zip(self.members, messages, strict=True) if other.kind is Kind.LEAVE}
            if not leaving:
                break
            self.without(leaving)
        failed = [(self.members[p], message.text) for p, message in enumerate(messages) if message.kind is Kind.FAILED]
        sizes = {message.nbytes for message in messages if message.kind is Kind.READY}
        self.sequence += 1
        if len({message.digest for message in messages}) > 1 or len(sizes) > 1:
            raise (yield from self._difference(description))
        rank, reason = failed[0]
        raise KVStoreError(f"{description}: rank {rank} has no value for it: {reason}")

    def _swap(self, own: Message, what: str) -> Steps[list[Message]]:
        """Send one message to every member, receive one from each; they are returned by position.

        Sends are synchronous. A small one would otherwise be complete before it has left this process, and what
        :meth:`_is_done` avoids could happen to it.
        """
        if len(self.members) == 1:
            return [own]
        byte, comm, others, tag = self._mpi.BYTE, self._comm, self._others(), 2 + 2 * self._epoch
        encoded = own.encode()
        found: dict[int, Message] = {self.rank: own}
        rooms, self._rooms = self._rooms, {}

        def arrived(rank: int, status: Any) -> None:
            found[rank] = decode(memoryview(rooms[rank])[: status.Get_count(byte)], rank)

        for rank in others:
            if rank not in rooms:
                rooms[rank] = bytearray(SIZE)
        with self.losses(what):
            receives = [comm.Irecv([rooms[rank], byte], rank, tag) for rank in others]
            sends = [comm.Issend([encoded, byte], rank, tag) for rank in others]
            yield from self.wait(receives, sends, [*others, *others], what, arrived)
        self._rooms = rooms
        return [found[rank] for rank in self.members]

    def _difference(self, description: str) -> Steps[KVStoreError]:
        """What the members wanted instead of the same."""
        own = Message(Kind.TEXT, self.sequence, bytes(8), payload=clip(description))
        texts = [message.text for message in (yield from self._swap(own, description))]
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


def _bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
