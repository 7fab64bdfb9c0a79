"""The agreement of all members to exchange through memory that they share.

Each member offers its areas and maps the areas of all others. Memory is shared only if every member has mapped all of
them, so all members take the same decision.
"""

from __future__ import annotations

from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.group.messages import Meeting
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.kvstore.distributed.transport.shared_memory import Areas, SharedMemory
from weftplan.kvstore.distributed.transport.wire import Message, MessageKind, decode


class SharingMembers(Meeting):
    """Members that can agree to share memory."""

    @property
    def shares_memory(self) -> bool:
        """Whether messages and sums go through memory that all members share."""
        return self._shared is not None

    def share_memory(self) -> Steps[None]:
        """Use shared memory from now on if all members can map each other's memory; every member calls this."""
        areas = Areas.new() if len(self.members) > 1 else None
        offer = Message(MessageKind.TEXT, self.sequence, bytes(8), 0, areas.offer() if areas else b"")
        offers = [decode(raw, rank).payload for rank, raw in (yield from self._named(offer, "offer memory"))]
        peers: dict[JobRank, Areas] = {}
        reason = b"" if areas else b"no"
        try:
            for rank, words in zip(self.members, offers, strict=True):
                if rank != self.rank:
                    peers[rank] = Areas.accept(words)
        except (OSError, ValueError):
            reason = b"no"
        answer = Message(MessageKind.TEXT, self.sequence, bytes(8), 0, reason)
        # A second round: unless all members accepted all offers, none may use shared memory.
        answers = [decode(raw, rank).payload for rank, raw in (yield from self._named(answer, "share memory"))]
        if areas is not None and not any(answers):
            self._shared = SharedMemory(areas, peers)
            return
        for area in (*peers.values(), *([areas] if areas else [])):
            area.close()
