"""Memory shared by the processes of a host, for messages and for sums without MPI.

Each process has an *area* of its own, which the others can only read: two slots for messages, then room for arrays. A
message's number is written last, so a reader that sees the number sees the message and all earlier writes. This needs a
processor that keeps the order of stores, like x86-64; elsewhere messages go through MPI.

Two slots are enough: message n + 2 overwrites message n when all others have sent n + 1, which they do after reading n.
The others do not wait for a leaving process: it only asks for their progress, and reads no message. After a loss
numbers restart with those of the new agreement.

An area is a file without a name: it is freed with the last process that maps it. Only the driver of exchanges
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
from weftplan.kvstore.distributed.transport.wire import SIZE
from weftplan.kvstore.reduce import Array

_SLOT, _TEXT = 8192, 64
"""Bytes of a slot: the number of its message, the length, the message from the second one on."""

_MARK = 48, 64
"""Offset of random bytes in the first slot, which identify an area."""

_GROWTH = 1 << 20
"""The room for arrays grows by multiples of this."""

_EPOCH = 1 << 40
"""Messages of one agreement at most."""

assert SIZE <= _SLOT - _TEXT


class Area:
    """The memory of one process, as this process sees it.

    Attributes:
        words: all of it, as numbers of eight bytes.
        data: all of it, as bytes.
        room: bytes after the slots.
    """

    def __init__(self, file: int, *, own: bool) -> None:
        self._file, self._own = file, own
        self._map(2 * _SLOT)

    @classmethod
    def new(cls) -> Area:
        """Return an area of this process; raise OSError if the system has none."""
        area = cls(os.memfd_create("weftplan"), own=True)
        area.data[slice(*_MARK)] = os.urandom(_MARK[1] - _MARK[0])
        return area

    def _map(self, nbytes: int) -> None:
        if self._own:
            os.ftruncate(self._file, nbytes)
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if self._own else 0)
        self.data = memoryview(mmap.mmap(self._file, nbytes, mmap.MAP_SHARED, rights))
        self.words = self.data.cast("Q")
        self.room: Array = np.frombuffer(self.data, np.uint8)[2 * _SLOT :]

    def reach(self, nbytes: int) -> None:
        """Make room for ``nbytes``; for another process's area only after that process has done the same."""
        if self.room.nbytes < nbytes:
            self._map(2 * _SLOT + -(-nbytes // _GROWTH) * _GROWTH)

    def offer(self) -> bytes:
        """Return the words that another process needs to :meth:`accept` this area."""
        words = (os.uname().nodename, os.getpid(), self._file, self.data[slice(*_MARK)].hex())
        return " ".join(map(str, words)).encode()

    @classmethod
    def accept(cls, words: list[str]) -> Area:
        """The area that another process on this host has offered in these words.

        Raises:
            OSError: it is not to be had.
            ValueError: the process is on another host, or this is another file.
        """
        host, process, file, mark = words
        if host != os.uname().nodename:
            raise ValueError(f"an area of the host {host}")
        descriptor = os.open(f"/proc/{int(process)}/fd/{int(file)}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            area = cls(descriptor, own=False)
            if area.data[slice(*_MARK)].hex() != mark:
                raise ValueError("another file than the one that was offered")
        except BaseException:
            os.close(descriptor)
            raise
        return area

    def close(self) -> None:
        """Close the file; existing views keep the memory."""
        with contextlib.suppress(OSError):
            os.close(self._file)


def can_share() -> bool:
    """Return whether the setting, the system and the processor allow processes of one host to share memory."""
    here = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")
    return here and bool(config.get("WEFTPLAN_KVSTORE_SHARED_MEMORY"))


class Areas:
    """Shared areas of a process: one for its messages and shares, one for the sums that it computes.

    They are apart, because others may still read sums of the last exchange when shares of the next are written.
    """

    def __init__(self, shares: Area, sums: Area) -> None:
        self.shares, self.sums = shares, sums

    @classmethod
    def new(cls) -> Areas | None:
        """Return areas of this process; None if the system has none."""
        if not can_share():
            return None
        try:
            return cls(Area.new(), Area.new())
        except OSError:
            return None

    def offer(self) -> bytes:
        """Return the bytes that another process needs to :meth:`accept` these areas."""
        return self.shares.offer() + b" " + self.sums.offer()

    @classmethod
    def accept(cls, offer: bytes) -> Areas:
        """The areas that another process on this host has offered; raises as :meth:`Area.accept` does."""
        words = offer.decode().split()
        shares = Area.accept(words[: len(words) // 2])
        try:
            return cls(shares, Area.accept(words[len(words) // 2 :]))
        except BaseException:
            shares.close()
            raise

    def close(self) -> None:
        """Let go of them."""
        self.shares.close()
        self.sums.close()


class SharedMemory:
    """The areas of all processes of a store that run on this host: messages in order, and room for arrays.

    Args:
        own: this process's areas.
        others: those of the others, by rank.
    """

    def __init__(self, own: Areas, others: dict[int, Areas]) -> None:
        self.own = own
        self._areas = others
        self._number = 0

    def begin(self, epoch: int) -> None:
        """Restart the numbers of messages: all survivors do this at the end of an agreement, before they send
        anything."""
        self._number = epoch * _EPOCH

    def send(self, message: bytes) -> None:
        """The next message to all; it may be read until this process has sent one more and all others, too."""
        own = self.own.shares
        self._number += 1
        start = self._number % 2 * _SLOT
        own.data[start + _TEXT : start + _TEXT + len(message)] = message
        own.words[start // 8 + 1] = len(message)
        own.words[start // 8] = self._number

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not sent the current message."""
        number = self._number
        place, areas = number % 2 * (_SLOT // 8), self._areas
        return [rank for rank in ranks if areas[rank].shares.words[place] != number]

    def behind(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have not reached the current message. A process that needs none of their messages does
        not wait for them, so they may have overwritten it."""
        number = self._number
        place, areas = number % 2 * (_SLOT // 8), self._areas
        return [rank for rank in ranks if areas[rank].shares.words[place] < number]

    def received(self, rank: int) -> memoryview:
        """The message of a rank that is not missing."""
        area, start = self._areas[rank].shares, self._number % 2 * _SLOT
        length = area.words[start // 8 + 1]
        if length > SIZE:
            raise KVStoreError(f"rank {rank} sent {length} bytes, a message has at most {SIZE}")
        return area.data[start + _TEXT : start + _TEXT + length]

    def shares(self, rank: int, nbytes: int) -> Array:
        """Return another process's room for its shares, at least ``nbytes``, after that process has made it."""
        return self._room(self._areas[rank].shares, rank, nbytes)

    def sums(self, rank: int, nbytes: int) -> Array:
        """Room for the sums of another process, likewise."""
        return self._room(self._areas[rank].sums, rank, nbytes)

    def _room(self, area: Area, rank: int, nbytes: int) -> Array:
        try:
            area.reach(nbytes)
        except ValueError:
            raise KVStoreError(f"rank {rank} shares less memory than the {nbytes} bytes it was to have") from None
        return area.room

    def close(self) -> None:
        """Let go of all areas."""
        for areas in (self.own, *self._areas.values()):
            areas.close()
