"""Messages that members swap before data moves, and the decisions that follow from them.

Each exchange begins with a message from each member to each other member. All members see the same messages, so all
make the same decision: exchange the data, fail with the same error, or continue without members that leave. Messages go
through shared memory if all members have it, else through MPI; ``wire.py`` defines their format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.group.membership import LossWatch, Members, Steps
from weftplan.kvstore.distributed.transport.mpi_types import Connection, JobRank, Status
from weftplan.kvstore.distributed.transport.shared_memory import SharedMemory
from weftplan.kvstore.distributed.transport.wire import (
    HEADER,
    INLINE,
    SIZE,
    Message,
    MessageKind,
    clip,
    decode,
    digest,
    encoded,
)
from weftplan.support import program_end
from weftplan.support.package_log import log

_LOOKS = 8
"""Number of polls of shared memory, a few microseconds, before a step yields to the driving thread."""

_PIECE = 64
"""Characters per digest, when members search for the first difference between their descriptions."""

mark_of = lru_cache(1024)(digest)
"""The digest of a description, cached because descriptions repeat at every training step."""


class Meeting(Members):
    """Members that agree on each exchange by messages before data moves."""

    _shared: SharedMemory | None = None

    def _join(self, connection: Connection) -> None:
        super()._join(connection)
        self._receive_buffers: dict[JobRank, bytearray] = {}
        """Receive buffers by rank, without those of lost exchanges, which MPI may still write to."""
        self._shared = None

    def stop_listening(self) -> None:
        """Cancel the receives for views, and close the connection and shared memory; no exchange may follow."""
        super().stop_listening()
        self._connection.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def meet(self, description: str) -> Steps[None]:
        """Wait until every member calls this with the same description; raises as :meth:`agreed` does."""
        yield from self.agreed(description, None, 0)
        self.sequence += 1

    def leave(self) -> Steps[None]:
        """Announce that this process leaves; the others go on without it at their next exchange."""
        text = clip(program_end.unfinished[0]) if program_end.unfinished else b""
        message, what = Message(MessageKind.LEAVE, self.sequence, bytes(8), 0, text).encode(), "the end of its work"
        if self._shared is None or len(self.members) == 1:
            yield from self.swap(message, what)
            return
        # The others do not wait for this process's next message, so they may be ahead: wait for their numbers only.
        self._shared.send(message)
        yield from self._until_none(self._shared.behind, what)

    def regroup(self) -> Steps[JobRank]:
        """Do :meth:`Members.regroup`, then restart the numbers of messages in shared memory."""
        leader = yield from super().regroup()
        if self._shared is not None:
            self._shared.begin(self._epoch)
        return leader

    def agreed(
        self, description: str, failure: str | None, nbytes: int, payload: bytes = b""
    ) -> Steps[list[memoryview]]:
        """Swap messages until all remaining members agree to exchange; return all payloads by position.

        The payloads are valid until the next exchange.

        Args:
            description: names the exchange; must be the same on all members.
            failure: why this process has no data; None if it has.
            nbytes: bytes of this process's data; must be the same on all members.
            payload: data small enough to be sent in the message.

        Raises:
            KVStoreError: a member failed, or the descriptions or bytes differ.
            WorkerLostError: a member was lost.
        """
        # All members see the same messages, so in each branch below all members take the same decision.
        mark = mark_of(description)
        if failure is None:
            message = encoded(int(MessageKind.READY), self.sequence, mark, nbytes, payload)
        else:
            message = Message(MessageKind.FAILED, self.sequence, mark, nbytes, clip(failure)).encode()
        while True:
            every = yield from self.swap(message, description)
            if failure is None and alike(message, every):
                return [raw[HEADER:] for raw in every]
            messages = [decode(raw, rank) for rank, raw in zip(self.members, every, strict=True)]
            for other in messages:
                if other.kind is not MessageKind.READY or other.digest != mark or other.nbytes != nbytes:
                    break
            else:
                return [raw[HEADER:] for raw in every]
            leaving = {
                rank: other.text
                for rank, other in zip(self.members, messages, strict=True)
                if other.kind is MessageKind.LEAVE
            }
            self.without({*leaving})
            for rank, text in leaving.items():
                # Not an error, but later sums have fewer terms.
                whence = f"rank {rank} has left {text}".rstrip()
                log.warning("%s; the other ranks, %d of them, go on", whence, len(self.members))
            if not leaving:
                break  # if members leave, the remaining members swap messages again
        sizes = {message.nbytes for message in messages if message.kind is MessageKind.READY}
        self.sequence += 1
        if len({message.digest for message in messages}) > 1 or len(sizes) > 1:
            raise (yield from self._difference(description))
        raise self.failure(description, messages)

    def failure(self, description: str, messages: Sequence[Message]) -> KVStoreError:
        """Return the error to raise: the failure of the first failed member, or an error for differing programs."""
        for rank, message in zip(self.members, messages, strict=True):
            if message.kind is MessageKind.FAILED:
                return KVStoreError(f"{description}: rank {rank} has no value for it: {message.text}")
        return KVStoreError(f"{description}: the processes are not at the same place of their programs")

    def _named(self, message: Message, what: str) -> Steps[list[tuple[JobRank, memoryview]]]:
        """Do :meth:`swap`, and return (rank, message) of each member."""
        every = yield from self.swap(message.encode(), what)
        return list(zip(self.members, every, strict=True))

    def swap(self, message: bytes, what: str) -> Steps[list[memoryview]]:
        """Send a message to every member and return the message of each member, by position.

        The messages are valid until the next call, and in shared memory until the second next call. ``what`` describes
        the exchange in errors.
        """
        if len(self.members) == 1:
            return [memoryview(message)]
        shared = self._shared
        if shared is None:
            received = yield from self._swap_by_mpi(message, what)
            return [received[rank] for rank in self.members]
        shared.send(message)
        peers = self.peers()
        for _ in range(_LOOKS):
            if not shared.missing(peers):
                break
        else:
            yield from self._until_none(shared.missing, what)
        return [memoryview(message) if rank == self.rank else shared.received(rank) for rank in self.members]

    def _until_none(self, missing: Callable[[list[JobRank]], list[JobRank]], what: str) -> Steps[None]:
        """Wait until no member is missing; ``missing`` returns those of a list of ranks that are still awaited."""
        pending, watch = missing(self.peers()), LossWatch(self, what)
        with self.losses(what):
            while pending:
                watch.in_vain(pending)
                yield
                pending = missing(pending)

    def _swap_by_mpi(self, message: bytes, what: str) -> Steps[dict[JobRank, memoryview]]:
        """Do :meth:`swap` with MPI; return the messages by rank, valid until the next call."""
        byte, comm, peers, tag = self._mpi.BYTE, self._comm, self.peers(), 2 + 2 * self._epoch
        received = {self.rank: memoryview(message)}
        # If this exchange is lost, its buffers must not be used again: MPI may still write to them.
        buffers, self._receive_buffers = self._receive_buffers, {}

        def arrived(rank: JobRank, status: Status) -> None:
            received[rank] = memoryview(buffers[rank])[: status.Get_count(byte)]

        for rank in peers:
            if rank not in buffers:
                buffers[rank] = bytearray(SIZE)
        with self.losses(what):
            receives = [comm.Irecv([buffers[rank], byte], rank, tag) for rank in peers]
            # Synchronous sends: a small normal send completes before the message has left this process, and a later
            # failure of the transport would end this process, as _is_done explains.
            sends = [comm.Issend([message, byte], rank, tag) for rank in peers]
            yield from self.wait(receives, sends, [*peers, *peers], what, arrived)
        self._receive_buffers = buffers
        return received

    def _difference(self, description: str) -> Steps[KVStoreError]:
        """Return an error that quotes two differing descriptions, long ones from their first difference on.

        Every member calls this. They first swap digests of the pieces of their descriptions, then the texts.
        """
        marks = b"".join([digest(description[at : at + _PIECE]) for at in range(0, len(description), _PIECE)])
        every = yield from self._texts(marks[:INLINE], description)
        text = description
        if max(map(len, every)) // 8 * _PIECE > INLINE // 4:  # a character has up to 4 bytes
            pieces = zip(*[[text[at : at + 8] for at in range(0, len(text), 8)] for text in every], strict=False)
            same = next((index for index, text in enumerate(pieces) if len(set(text)) > 1), min(map(len, every)) // 8)
            text = f"... {description[max(0, same - 1) * _PIECE :]}"
        message = clip(text)
        every = yield from self._texts(message, description)
        rank, other = next(
            ((self.members[p], text.decode(errors="replace")) for p, text in enumerate(every) if text != message),
            (self.members[0], "arrays of other sizes"),
        )
        return KVStoreError(
            f"the processes do not do the same: rank {self.rank} wants to {message.decode(errors='replace')}, "
            f"rank {rank} to {other}. Make the same calls of the store, in the same order, on every rank"
        )

    def _texts(self, text: bytes, what: str) -> Steps[list[bytes]]:
        message = Message(MessageKind.TEXT, self.sequence, bytes(8), payload=text)
        return [decode(raw, rank).payload for rank, raw in (yield from self._named(message, what))]

    def peers(self) -> list[JobRank]:
        """Return all other members, in cyclic order, beginning after this process."""
        # The order differs between members, so that their first messages go to different targets.
        members, position = self.members, self.position
        return members[position + 1 :] + members[:position]


def alike(message: bytes, every: Sequence[memoryview]) -> bool:
    """Return whether all messages have the same header as ``message``."""
    head = message[:HEADER]
    for raw in every:  # noqa: SIM110  # a generator costs more than the rest
        if raw[:HEADER] != head:
            return False
    return True
