"""Types of the MPI objects that a distributed store uses, as mpi4py has them; the module itself is a ``ModuleType``."""

from __future__ import annotations

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


class Communicator(Protocol):
    """The processes of one store."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def Isend(self, buf: object, dest: int, tag: int) -> Request: ...

    def Issend(self, buf: object, dest: int, tag: int) -> Request: ...

    def Irecv(self, buf: object, source: int, tag: int) -> Request: ...

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None: ...

    def Ibarrier(self) -> Request: ...
