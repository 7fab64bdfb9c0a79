"""Messages between members before data moves, and the decisions that follow from them.

Every exchange begins with a message from each process to each other process. All members see the same messages, so all
decide alike: to exchange the data, to fail with the same error, or to continue without leaving members. Messages go
through shared memory if all members have it, else through MPI; ``wire.py`` has their format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.group.membership import Members, Steps, Watch
from weftplan.kvstore.distributed.transport.mpi_types import Connection, Status
from weftplan.kvstore.distributed.transport.shared_memory import Areas, SharedMemory
from weftplan.kvstore.distributed.transport.wire import (
    HEADER,
    INLINE,
    SIZE,
    Kind,
    Message,
    clip,
    decode,
    digest,
    encoded,
)

_LOOKS = 8
"""At messages in shared memory before the driver is asked how to wait: some microseconds."""

_PIECE = 64
"""Letters of a description that are compared at once, to find the first that differ."""

mark_of = lru_cache(1024)(digest)
"""Descriptions come again at every step."""


class Meeting(Members):
    """Members that exchange their intentions before data."""

    _shared: SharedMemory | None = None

    def _join(self, connection: Connection) -> None:
        super()._join(connection)
        self._rooms: dict[int, bytearray] = {}
        """Receive buffers, by rank; no request of a lost exchange may still write there."""
        self._shared = None

    @property
    def shares_memory(self) -> bool:
        """Whether messages and sums go through memory that all members share."""
        return self._shared is not None

    def share_memory(self) -> Steps[None]:
        """Use shared memory if all members run on one host and agree; every member calls this."""
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
        """Cancel pending receives; no exchange follows."""
        super().stop_listening()
        self._connection.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def meet(self, description: str) -> Steps[None]:
        """Return when every member is here; raises as :meth:`agreed` does."""
        yield from self.agreed(description, None, 0)
        self.sequence += 1

    def leave(self) -> Steps[None]:
        """Take part in nothing any more; the others go on without this process at their next exchange."""
        own, what = Message(Kind.LEAVE, self.sequence, bytes(8)).encode(), "the end of its work"
        if self._shared is None or len(self.members) == 1:
            yield from self.swap(own, what)
            return
        self._shared.send(own)
        yield from self._until_none(self._shared.behind, what)

    def regroup(self) -> Steps[int]:
        """See :meth:`Members.regroup`; messages in shared memory restart."""
        leader = yield from super().regroup()
        if self._shared is not None:
            self._shared.begin(self._epoch)
        return leader

    def agreed(
        self, description: str, failure: str | None, nbytes: int, payload: bytes = b""
    ) -> Steps[list[memoryview]]:
        """Exchange messages until all remaining members agree; return all payloads by position.

        They are valid until the next exchange.
        """
        mark = mark_of(description)
        if failure is None:
            own = encoded(int(Kind.READY), self.sequence, mark, nbytes, payload)
        else:
            own = Message(Kind.FAILED, self.sequence, mark, nbytes, clip(failure)).encode()
        while True:
            every = yield from self.swap(own, description)
            if failure is None and alike(own, every):
                return [raw[HEADER:] for raw in every]
            messages = [decode(raw, rank) for rank, raw in zip(self.members, every, strict=True)]
            for other in messages:
                if other.kind is not Kind.READY or other.digest != mark or other.nbytes != nbytes:
                    break
            else:
                return [raw[HEADER:] for raw in every]
            leaving = {rank for rank, other in zip(self.members, messages, strict=True) if other.kind is Kind.LEAVE}
            self.without(leaving)
            if not leaving:
                break  # else all say again what they want
        sizes = {message.nbytes for message in messages if message.kind is Kind.READY}
        self.sequence += 1
        if len({message.digest for message in messages}) > 1 or len(sizes) > 1:
            raise (yield from self._difference(description))
        raise self.failure(description, messages)

    def failure(self, description: str, messages: Sequence[Message]) -> KVStoreError:
        """Return the error of the first member that failed."""
        for rank, message in zip(self.members, messages, strict=True):
            if message.kind is Kind.FAILED:
                return KVStoreError(f"{description}: rank {rank} has no value for it: {message.text}")
        return KVStoreError(f"{description}: the processes are not at the same place of their programs")

    def _named(self, own: Message, what: str) -> Steps[list[tuple[int, memoryview]]]:
        """:meth:`swap`, with the ranks of the members."""
        every = yield from self.swap(own.encode(), what)
        return list(zip(self.members, every, strict=True))

    def swap(self, own: bytes, what: str) -> Steps[list[memoryview]]:
        """Send a message to every member and return the message of each, by position.

        Messages are valid until the next call; in shared memory until the call after it.
        """
        if len(self.members) == 1:
            return [memoryview(own)]
        shared = self._shared
        if shared is None:
            received = yield from self._swap_by_mpi(own, what)
            return [received[rank] for rank in self.members]
        shared.send(own)
        others = self.others()
        for _ in range(_LOOKS):
            if not shared.missing(others):
                break
        else:
            yield from self._until_none(shared.missing, what)
        return [memoryview(own) if rank == self.rank else shared.received(rank) for rank in self.members]

    def _until_none(self, missing: Callable[[list[int]], list[int]], what: str) -> Steps[None]:
        """Wait until none of the others is ``missing`` any more."""
        left, watch = missing(self.others()), Watch(self, what)
        with self.losses(what):
            while left:
                watch.in_vain(left)
                yield
                left = missing(left)

    def _swap_by_mpi(self, own: bytes, what: str) -> Steps[dict[int, memoryview]]:
        """Return the same, by rank; valid until the next call.

        Sends are synchronous. A small one would otherwise be complete before it has left this process, and what
        :meth:`_is_done` avoids could happen to it.
        """
        byte, comm, others, tag = self._mpi.BYTE, self._comm, self.others(), 2 + 2 * self._epoch
        received = {self.rank: memoryview(own)}
        rooms, self._rooms = self._rooms, {}

        def arrived(rank: int, status: Status) -> None:
            received[rank] = memoryview(rooms[rank])[: status.Get_count(byte)]

        for rank in others:
            if rank not in rooms:
                rooms[rank] = bytearray(SIZE)
        with self.losses(what):
            receives = [comm.Irecv([rooms[rank], byte], rank, tag) for rank in others]
            sends = [comm.Issend([own, byte], rank, tag) for rank in others]
            yield from self.wait(receives, sends, [*others, *others], what, arrived)
        self._rooms = rooms
        return received

    def _difference(self, description: str) -> Steps[KVStoreError]:
        """Return the error with the members' differing descriptions; long descriptions start at the difference."""
        marks = b"".join([digest(description[at : at + _PIECE]) for at in range(0, len(description), _PIECE)])
        every = yield from self._texts(marks[:INLINE], description)
        text = description
        if max(map(len, every)) // 8 * _PIECE > INLINE // 4:  # bytes of a letter at most
            pieces = zip(*[[found[at : at + 8] for at in range(0, len(found), 8)] for found in every], strict=False)
            same = next((place for place, found in enumerate(pieces) if len(set(found)) > 1), min(map(len, every)) // 8)
            text = f"... {description[max(0, same - 1) * _PIECE :]}"
        own = clip(text)
        every = yield from self._texts(own, description)
        rank, other = next(
            ((self.members[p], found.decode(errors="replace")) for p, found in enumerate(every) if found != own),
            (self.members[0], "arrays of other sizes"),
        )
        return KVStoreError(
            f"the processes do not do the same: rank {self.rank} wants to {own.decode(errors='replace')}, rank {rank} "
            f"to {other}. Make the same calls of the store, in the same order, on every rank"
        )

    def _texts(self, own: bytes, what: str) -> Steps[list[bytes]]:
        message = Message(Kind.TEXT, self.sequence, bytes(8), payload=own)
        return [decode(raw, rank).payload for rank, raw in (yield from self._named(message, what))]

    def others(self) -> list[int]:
        """Return every other member, starting after this one, so that first messages go to different members."""
        members, place = self.members, self.position
        return members[place + 1 :] + members[:place]


def alike(own: bytes, every: Sequence[memoryview]) -> bool:
    """Return whether all messages have the same header."""
    head = own[:HEADER]
    for raw in every:  # noqa: SIM110  # a generator costs more than the rest
        if raw[:HEADER] != head:
            return False
    return True
