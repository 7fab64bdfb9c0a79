"""Memory shared by the processes of a host, for messages and sums without MPI.

Each process has its own *areas*, which other processes can only read: two slots for messages, then room for arrays.

Invariants:

* A message's number is written last, so a reader that sees the number also sees the message and all earlier writes.
  This needs a processor that keeps the order of stores, such as x86-64; on other processors, messages go through MPI.
* Two slots are enough: a process writes message n + 2 over message n after all others have sent n + 1, hence have read
  n. The other processes do not wait for a process that leaves; it checks only their numbers and reads no message.
* After a loss, numbers restart at a value given by the new epoch, so no old number equals a new number.

An area is a file without a name, freed with the last process that maps it. Only the thread that drives exchanges
(``sequencer.py``) uses this module.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
from collections.abc import Iterable

import numpy as np

from weftplan import config
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.kvstore.distributed.transport.wire import SIZE
from weftplan.kvstore.fixed_order_sums import Array

_SLOT, _TEXT = 8192, 64
"""Bytes of a slot, and offset of the message in a slot, after its number and its length (8 bytes each)."""

_MARK = 48, 64
"""Byte range in the first slot with random bytes that identify an area."""

_GROWTH = 1 << 20
"""The part of an area for arrays grows in steps of this number of bytes."""

_EPOCH = 1 << 40
"""Maximum number of messages in one epoch."""

assert SIZE <= _SLOT - _TEXT


class Area:
    """The memory of one process, as mapped by this process.

    Attributes:
        words: the whole area, as 8-byte integers.
        data: the whole area, as bytes.
        payload: the bytes after the slots, for arrays.
    """

    def __init__(self, file: int, *, is_owner: bool) -> None:
        self._file, self._is_owner = file, is_owner
        self._map(2 * _SLOT)

    @classmethod
    def new(cls) -> Area:
        """Return a new area of this process; raise OSError if the system cannot create it."""
        area = cls(os.memfd_create("weftplan"), is_owner=True)
        area.data[slice(*_MARK)] = os.urandom(_MARK[1] - _MARK[0])
        return area

    def _map(self, nbytes: int) -> None:
        if self._is_owner:
            os.ftruncate(self._file, nbytes)
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if self._is_owner else 0)
        self.data = memoryview(mmap.mmap(self._file, nbytes, mmap.MAP_SHARED, rights))
        self.words = self.data.cast("Q")
        self.payload: Array = np.frombuffer(self.data, np.uint8)[2 * _SLOT :]

    def reach(self, nbytes: int) -> None:
        """Enlarge the memory for arrays to at least ``nbytes``; the owner must do this before other processes do."""
        if self.payload.nbytes < nbytes:
            self._map(2 * _SLOT + -(-nbytes // _GROWTH) * _GROWTH)

    def offer(self) -> bytes:
        """Return text that another process passes to :meth:`accept` to map this area."""
        words = (os.uname().nodename, os.getpid(), self._file, self.data[slice(*_MARK)].hex())
        return " ".join(map(str, words)).encode()

    @classmethod
    def accept(cls, words: list[str]) -> Area:
        """Map the area of another process on this host, given the words of its offer.

        Raises:
            OSError: the other process's file cannot be opened or mapped.
            ValueError: the process is on another host, or the file is not the offered file.
        """
        host, process, file, mark = words
        if host != os.uname().nodename:
            raise ValueError(f"an area of the host {host}")
        descriptor = os.open(f"/proc/{int(process)}/fd/{int(file)}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            area = cls(descriptor, is_owner=False)
            if area.data[slice(*_MARK)].hex() != mark:
                raise ValueError("another file than the one that was offered")
        except BaseException:
            os.close(descriptor)
            raise
        return area

    def close(self) -> None:
        """Close the file; the memory stays mapped while views of it exist."""
        with contextlib.suppress(OSError):
            os.close(self._file)


def can_share() -> bool:
    """Return whether setting, system and processor allow exchanges in shared memory."""
    supported = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")
    return supported and bool(config.get("WEFTPLAN_KVSTORE_SHARED_MEMORY"))


class Areas:
    """The two areas of a process: one for its messages and shares, one for the sums that it computes.

    They are separate because other processes may still read sums of the last exchange while this process writes the
    shares of the next.
    """

    def __init__(self, shares: Area, sums: Area) -> None:
        self.shares, self.sums = shares, sums

    @classmethod
    def new(cls) -> Areas | None:
        """Return new areas of this process; None if memory cannot be shared."""
        if not can_share():
            return None
        try:
            return cls(Area.new(), Area.new())
        except OSError:
            return None

    def offer(self) -> bytes:
        """Return text that another process passes to :meth:`accept` to map these areas."""
        return self.shares.offer() + b" " + self.sums.offer()

    @classmethod
    def accept(cls, offer: bytes) -> Areas:
        """Map the areas of another process on this host, given its offer; raises as :meth:`Area.accept` does."""
        words = offer.decode().split()
        shares = Area.accept(words[: len(words) // 2])
        try:
            return cls(shares, Area.accept(words[len(words) // 2 :]))
        except BaseException:
            shares.close()
            raise

    def close(self) -> None:
        """Close the files of both areas."""
        self.shares.close()
        self.sums.close()


class SharedMemory:
    """The areas of all processes of a store on this host, with the messages between the processes.

    Args:
        mine: areas of this process.
        peers: areas of the other processes, by rank.
    """

    def __init__(self, mine: Areas, peers: dict[JobRank, Areas]) -> None:
        self.mine = mine
        self._areas = peers
        self._number = 0

    def begin(self, epoch: int) -> None:
        """Restart the numbers of messages after an agreement; all survivors do this before they send a message."""
        self._number = epoch * _EPOCH

    def send(self, message: bytes) -> None:
        """Send the next message to all processes.

        It stays readable until the second next message, which this process sends only when all others have sent one
        more message.
        """
        area = self.mine.shares
        self._number += 1
        start = self._number % 2 * _SLOT
        area.data[start + _TEXT : start + _TEXT + len(message)] = message
        area.words[start // 8 + 1] = len(message)
        area.words[start // 8] = self._number  # last: it makes the message, and all earlier writes, visible

    def missing(self, ranks: Iterable[JobRank]) -> list[JobRank]:
        """Return those of ``ranks`` that have not sent the message with this process's current number."""
        number = self._number
        word, areas = number % 2 * (_SLOT // 8), self._areas
        return [rank for rank in ranks if areas[rank].shares.words[word] != number]

    def behind(self, ranks: Iterable[JobRank]) -> list[JobRank]:
        """Return those of ``ranks`` that have sent neither the message with the current number nor a later message.

        A process that leaves uses this: other processes do not wait for its messages, so they may already be ahead.
        """
        number = self._number
        word, areas = number % 2 * (_SLOT // 8), self._areas
        return [rank for rank in ranks if areas[rank].shares.words[word] < number]

    def received(self, rank: JobRank) -> memoryview:
        """Return the current message of a rank, which must not be :meth:`missing`."""
        area, start = self._areas[rank].shares, self._number % 2 * _SLOT
        length = area.words[start // 8 + 1]
        if length > SIZE:
            raise KVStoreError(f"rank {rank} sent {length} bytes, a message has at most {SIZE}")
        return area.data[start + _TEXT : start + _TEXT + length]

    def shares(self, rank: JobRank, nbytes: int) -> Array:
        """Return the memory with another process's shares; its owner must have enlarged it to ``nbytes`` before."""
        return self._payload(self._areas[rank].shares, rank, nbytes)

    def sums(self, rank: JobRank, nbytes: int) -> Array:
        """Return the memory with another process's sums; its owner must have enlarged it to ``nbytes`` before."""
        return self._payload(self._areas[rank].sums, rank, nbytes)

    def _payload(self, area: Area, rank: JobRank, nbytes: int) -> Array:
        try:
            area.reach(nbytes)
        except ValueError:
            raise KVStoreError(f"rank {rank} shares less memory than the {nbytes} bytes it was to have") from None
        return area.payload

    def close(self) -> None:
        """Close the files of all areas."""
        for areas in (self.mine, *self._areas.values()):
            areas.close()
