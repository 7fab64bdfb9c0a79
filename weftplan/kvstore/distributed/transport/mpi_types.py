"""Types of the objects that move messages, as mpi4py has them; the library itself is a ``ModuleType``.

:mod:`mpi` and :mod:`mesh` provide them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol


class Status(Protocol):
    """The outcome of a request."""

    error: int

    def Get_error(self) -> int: ...

    def Get_source(self) -> int: ...

    def Get_count(self, datatype: object) -> int: ...


class Request(Protocol):
    """A send, a receive or a barrier that goes on."""

    def Get_status(self, status: Status) -> bool: ...

    def Test(self) -> bool: ...

    def Wait(self) -> object: ...

    def Cancel(self) -> None: ...


class Message(Protocol):
    """A message that has come and was matched."""

    def Recv(self, buf: object) -> None: ...

    def Irecv(self, buf: object) -> Request: ...


class Messages(Protocol):
    """Messages between the processes of one store."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def Issend(self, buf: Sequence[object], dest: int, tag: int) -> Request: ...

    def Irecv(self, buf: Sequence[object], source: int, tag: int) -> Request: ...


class Communicator(Messages, Protocol):
    """The processes of one store, as MPI joins them."""

    def Isend(self, buf: object, dest: int, tag: int) -> Request: ...

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None: ...

    def Ibarrier(self) -> Request: ...


@dataclass(frozen=True, slots=True)
class Connection:
    """Members of a store that can exchange messages.

    Attributes:
        library: the module with the names of :mod:`mpi4py.MPI`.
        comm: moves the messages.
        dead: returns the ranks that are known to have died; None if this library does not tell.
        close: ends the connection, if it can be formed again.
        is_alone: this process replaces a lost one and has not met the others yet.
    """

    library: ModuleType
    comm: Messages
    dead: Callable[[], set[int]] | None
    close: Callable[[], None]
    is_alone: bool = False
