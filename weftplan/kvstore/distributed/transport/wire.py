"""The wire format of messages between processes: a header of fixed size and a short payload.

A header has numbers; a payload is the bytes of an array or UTF-8 text. Nothing is pickled. :func:`decode` accepts any
bytes, and returns a valid message or raises.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.transport.mpi_types import JobRank

INLINE = 4096
"""Maximum bytes of a payload; larger data is sent separately, after all headers were compared."""

_MAGIC = b"WFT1"
_LAYOUT = struct.Struct("<4sHHQQ8s")
"""Fields of a header: magic, kind, length of the payload, sequence number, bytes of the sender's array, digest."""

HEADER = _LAYOUT.size
"""Bytes of a message before its payload."""

SIZE = HEADER + INLINE
"""Bytes of the longest message."""


class MessageKind(IntEnum):
    """The kinds of messages."""

    READY = 1
    """The sender takes part in the exchange."""
    FAILED = 2
    """The sender failed; the payload is the error's text."""
    LEAVE = 3
    """The sender leaves, and takes part in no further exchange."""
    TEXT = 4
    """The payload is an offer of shared memory, an answer to the offers, or text and digests for an error message."""
    SUMMED = 5
    """The sender has summed its range in shared memory."""


class Message(NamedTuple):
    """A decoded message.

    Attributes:
        kind: kind of the message.
        sequence: number of exchanges that the sender has completed.
        digest: eight bytes that identify the description of the exchange.
        nbytes: bytes of the sender's array; 0 without an array.
        payload: the bytes of the array if they fit, or UTF-8 text.
    """

    kind: MessageKind
    sequence: int
    digest: bytes
    nbytes: int = 0
    payload: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes of the message."""
        return encoded(*self)

    @property
    def text(self) -> str:
        """The payload as text."""
        return self.payload.decode(errors="replace")


def encoded(kind: int, sequence: int, mark: bytes, nbytes: int = 0, payload: bytes = b"") -> bytes:
    """Return the bytes of a message from its fields; unlike :meth:`Message.encode`, this needs no ``Message``."""
    return _LAYOUT.pack(_MAGIC, kind, len(payload), sequence, nbytes, mark) + payload


def digest(description: str) -> bytes:
    """Return an eight-byte digest of a description."""
    return blake2b(description.encode(), digest_size=8).digest()


def clip(text: str) -> bytes:
    """Return text as a payload, truncated to :data:`INLINE` bytes."""
    data = text.encode()
    return data if len(data) <= INLINE else data[: INLINE - 3] + b"..."


def decode(data: bytes | bytearray | memoryview, sender: int) -> Message:
    """Return the message in ``data``, sent by rank ``sender``.

    Raises:
        KVStoreError: the bytes are not a message of this version.
    """
    if len(data) < _LAYOUT.size:
        raise KVStoreError(f"rank {sender} sent {len(data)} bytes, a message has at least {_LAYOUT.size}")
    magic, kind, length, sequence, nbytes, mark = _LAYOUT.unpack_from(data)
    if magic != _MAGIC:
        raise KVStoreError(f"rank {sender} sent bytes that begin with {magic!r}, not a message of this version")
    if kind not in MessageKind._value2member_map_:
        raise KVStoreError(f"rank {sender} sent a message of the unknown kind {kind}")
    if len(data) != _LAYOUT.size + length:
        raise KVStoreError(f"rank {sender} sent {len(data)} bytes, its header says {_LAYOUT.size + length}")
    return Message(MessageKind(kind), sequence, mark, nbytes, bytes(data[_LAYOUT.size :]))


_VIEW_MAGIC = b"WFV2"
WHY = 256
"""Bytes for the failure text of a view."""
_VIEW_LAYOUT = struct.Struct(f"<4sIQ{WHY}s")
"""Fields of a view: magic, epoch, sequence number, failure text. One bit per process follows, set if it is gone."""


@dataclass(frozen=True, slots=True)
class View:
    """A process's knowledge of the group after a loss.

    Attributes:
        epoch: number of the agreement.
        sequence: number of exchanges that the process has completed.
        gone: ranks that have left or died.
        why: the failure of the process itself, in one line; empty if it has not failed.
    """

    epoch: int
    sequence: int
    departed: frozenset[JobRank]
    why: str = ""

    def agrees(self, other: View | None) -> bool:
        """Return whether another process's view has the same epoch and the same ranks in ``gone``; False for None."""
        return other is not None and other.epoch == self.epoch and other.departed == self.departed

    def encode(self, size: int) -> bytes:
        """Return the bytes of the view in a job of ``size`` processes."""
        bits = sum(1 << rank for rank in self.departed)
        why = self.why.encode()[:WHY].rstrip(b"\0")
        return _VIEW_LAYOUT.pack(_VIEW_MAGIC, self.epoch, self.sequence, why) + bits.to_bytes((size + 7) // 8, "little")

    @classmethod
    def decode(cls, data: bytes | bytearray, sender: int, size: int) -> View:
        """Return the view in ``data``, sent by rank ``sender`` in a job of ``size`` processes.

        Raises:
            KVStoreError: the bytes are not a view of this job.
        """
        if len(data) != view_bytes(size):
            raise KVStoreError(f"rank {sender} sent {len(data)} bytes, a view has {view_bytes(size)} here")
        magic, epoch, sequence, why = _VIEW_LAYOUT.unpack_from(data)
        bits = int.from_bytes(data[_VIEW_LAYOUT.size :], "little")
        if magic != _VIEW_MAGIC or bits >> size:
            raise KVStoreError(f"rank {sender} sent bytes that begin with {bytes(data[:8])!r}, not a view of this job")
        departed = frozenset(JobRank(rank) for rank in range(size) if bits >> rank & 1)
        return cls(epoch, sequence, departed, why.rstrip(b"\0").decode(errors="ignore"))


def view_bytes(size: int) -> int:
    """Return the bytes of a view in a job of ``size`` processes."""
    return _VIEW_LAYOUT.size + (size + 7) // 8
