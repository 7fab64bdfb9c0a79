"""Protocols for the part of mpi4py's objects that this package uses, and the connection of a store.

``mpi.py`` and ``mesh.py`` provide the objects. The module ``mpi4py.MPI`` itself is annotated as ``ModuleType``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NewType, Protocol

JobRank = NewType("JobRank", int)
"""Number of a process in its job, from 0: the address of its messages. It never changes, also after a loss."""
Position = NewType("Position", int)
"""Index of a process among the current members of a group, which falls when a member before it leaves or dies."""


class Status(Protocol):
    """The outcome of a request."""

    error: int

    def Get_error(self) -> int: ...

    def Get_source(self) -> int: ...

    def Get_count(self, datatype: object) -> int: ...


class Request(Protocol):
    """A send, receive or barrier that may not have completed."""

    def Get_status(self, status: Status) -> bool: ...

    def Test(self) -> bool: ...

    def Wait(self) -> object: ...

    def Cancel(self) -> None: ...


class MatchedMessage(Protocol):
    """An arrived message, matched by ``Improbe``, that was not received yet."""

    def Recv(self, buf: object) -> None: ...

    def Irecv(self, buf: object) -> Request: ...


class Messages(Protocol):
    """The part of a communicator that ``dist_sync`` uses: point-to-point messages."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def Issend(self, buf: Sequence[object], dest: JobRank, tag: int) -> Request: ...

    def Irecv(self, buf: Sequence[object], source: JobRank, tag: int) -> Request: ...


class Communicator(Messages, Protocol):
    """A communicator of MPI, as ``dist_async`` uses it."""

    def Isend(self, buf: object, dest: JobRank, tag: int) -> Request: ...

    def Improbe(self, source: int, tag: int, status: Status) -> MatchedMessage | None: ...

    def Ibarrier(self) -> Request: ...


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection between the processes of a store.

    Attributes:
        library: :mod:`mpi4py.MPI`, or a module with the same names.
        comm: the communicator.
        dead: function that returns the ranks known to have died; None if the library cannot report deaths.
        close: function that closes the connection; it does nothing for MPI.
        is_alone: whether this process replaces a lost process and has not joined the other processes yet.
    """

    library: ModuleType
    comm: Messages
    dead: Callable[[], set[JobRank]] | None
    close: Callable[[], None]
    is_alone: bool = False
