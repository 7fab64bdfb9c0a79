"""Messages between all processes over stream sockets, with the part of mpi4py's interface that a store's members use.

Unlike an MPI job, a mesh reports each lost process, because the kernel closes its sockets, and can be formed again with
a replacement. Members use the same calls for both.

Messages between two processes arrive in the order in which they were sent, and all messages of a process arrive before
its end is noticed. A send is complete when the kernel has taken all of its bytes. No call blocks; data moves when a
request is polled. One thread at a time may use a mesh.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from types import ModuleType

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.locks import members

_HEADER = struct.Struct("<qQ")
"""Header of a message: its tag, and the number of bytes after the header."""

_MAX_READ = 1 << 22
"""Approximate maximum number of bytes that a poll reads from a socket, so that the caller can check for time-outs."""

SUCCESS, ERR_OTHER, ERR_PROC_FAILED = 0, 16, 75
"""Error codes with the values of Open MPI, since callers take this module for its library."""


class MeshError(RuntimeError):
    """Failure of a request: the other process is lost, or the message is longer than the receive buffer."""


class MeshStatus:
    """The outcome of a request: an error code, and the number of received bytes."""

    def __init__(self) -> None:
        self.error = SUCCESS
        self._nbytes = 0

    def set(self, error: int, nbytes: int) -> None:
        """Set the outcome."""
        self.error, self._nbytes = error, nbytes

    def Get_count(self, datatype: object) -> int:
        """Return the number of received bytes."""
        del datatype
        return self._nbytes


class MeshRequest:
    """A send or receive.

    Args:
        mesh: the mesh that moves the data.
        buffer: buffer for the received message; None for a send.
    """

    def __init__(self, mesh: Mesh, buffer: memoryview | None = None) -> None:
        self._mesh = mesh
        self.buffer = buffer
        self.completed = False
        self.error = SUCCESS
        self.nbytes = 0

    def finish(self, nbytes: int = 0, error: int = SUCCESS) -> None:
        """Set the outcome of the request."""
        self.completed, self.nbytes, self.error, self.buffer = True, nbytes, error, None

    def Get_status(self, status: object) -> bool:
        """Return whether the request has ended, and store its outcome in ``status``; do not raise if it has failed."""
        if not self.completed:
            self._mesh.move()
        if self.completed and isinstance(status, MeshStatus):
            status.set(self.error, self.nbytes)
        return self.completed

    def Test(self) -> bool:
        """Return whether the request has ended; raise MeshError if it has failed."""
        if not self.completed:
            self._mesh.move()
        if self.error:
            raise MeshError(self.error)
        return self.completed

    def Wait(self) -> None:
        """Raise MeshError if the request has failed. This does not wait: callers have polled the request to its end."""
        if self.error:
            raise MeshError(self.error)

    def Cancel(self) -> None:
        """Cancel a receive to which no message was matched; other requests are not affected."""
        self._mesh.withdraw(self)

    def __bool__(self) -> bool:
        return not self.completed

    @staticmethod
    def Waitall(requests: Sequence[MeshRequest]) -> None:
        """Do nothing: all requests have ended, and none has resources to free."""


class _Peer:
    """The connection to another process, with unfinished messages in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_closed = False
        self.unsent: deque[tuple[memoryview, MeshRequest | None]] = deque()
        """(bytes to send, request that ends when they are sent, or None for a header), in order."""
        self.posted: defaultdict[int, deque[MeshRequest]] = defaultdict(deque)
        """Receives that wait for a message, by tag."""
        self.early: defaultdict[int, deque[bytearray]] = defaultdict(deque)
        """Received messages that wait for a receive, by tag."""
        self._head = memoryview(bytearray(_HEADER.size))
        self._have = 0
        self._tag = 0
        self._body: memoryview | None = None
        """Buffer for the data of the message that is being received; None while its header is being received."""
        self._taker: MeshRequest | bytearray = bytearray()
        """The posted receive that takes the message being received, or a new buffer without such a receive."""

    def send(self) -> None:
        """Send as much as the kernel takes without blocking."""
        while self.unsent and not self.is_closed:
            data, request = self.unsent[0]
            try:
                count = self.connection.send(data) if data else 0
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            if count < len(data):
                self.unsent[0] = data[count:], request
                continue
            self.unsent.popleft()
            if request is not None:
                request.finish()

    def receive(self) -> None:
        """Read what has arrived, up to about :data:`_MAX_READ` bytes; close the connection at its end."""
        received = 0
        while received < _MAX_READ and not self.is_closed:
            target = self._head if self._body is None else self._body
            if self._have < len(target):
                try:
                    count = self.connection.recv_into(target[self._have :])
                except BlockingIOError:
                    return
                except OSError:
                    count = 0
                if not count:
                    self.close()
                    return
                self._have += count
                received += count
            if self._have == len(target):
                self._have = 0
                if self._body is None:
                    self._begin(*_HEADER.unpack(self._head))
                else:
                    self._end(self._body)

    def _begin(self, tag: int, nbytes: int) -> None:
        """Choose the buffer for a message's data: the buffer of a posted receive, or a new buffer."""
        self._tag = tag
        posted = self.posted[tag]
        # Not if earlier messages of the tag wait: they come first. A message too long for its receive fails in match().
        if posted and not self.early[tag] and (buffer := posted[0].buffer) is not None and len(buffer) >= nbytes:
            self._taker = posted.popleft()
            self._body = buffer[:nbytes]
        else:
            self._taker = bytearray(nbytes)
            self._body = memoryview(self._taker)

    def _end(self, body: memoryview) -> None:
        self._body = None
        if isinstance(self._taker, MeshRequest):
            self._taker.finish(len(body))
        else:
            self.early[self._tag].append(self._taker)
            self.match(self._tag)
        self._taker = bytearray()

    def match(self, tag: int) -> None:
        """Match waiting messages of a tag to posted receives, in order."""
        early, posted = self.early[tag], self.posted[tag]
        while early and posted:
            data, request = early.popleft(), posted.popleft()
            buffer = request.buffer
            if buffer is None or len(buffer) < len(data):
                request.finish(error=ERR_OTHER)
                continue
            buffer[: len(data)] = data
            request.finish(len(data))

    def close(self) -> None:
        """Close the connection and fail all requests that wait for the other process."""
        self.is_closed = True
        self.connection.close()
        waiting = [request for _, request in self.unsent if request is not None]
        waiting += [request for posted in self.posted.values() for request in posted]
        waiting += [self._taker] if isinstance(self._taker, MeshRequest) else []
        for request in waiting:
            request.finish(error=ERR_PROC_FAILED)
        self.unsent.clear()
        self.posted.clear()


_all: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """The connections of a process to all other processes of a generation, used as a communicator.

    Args:
        rank: rank of this process.
        size: number of processes.
        peers: connected sockets by rank, which the mesh takes over.
    """

    def __init__(self, rank: JobRank, size: int, peers: dict[JobRank, socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._poll = select.poll()
        self._peers: dict[JobRank, _Peer] = {}
        self._by_file: dict[int, _Peer] = {}
        self._seen: set[JobRank] = set()
        for other, connection in peers.items():
            connection.setblocking(False)
            peer = self._peers[other] = self._by_file[connection.fileno()] = _Peer(connection)
            self._poll.register(peer.connection, select.POLLIN)
        _all.add(self)

    def Issend(self, buf: Sequence[object], dest: JobRank, tag: int) -> MeshRequest:
        """Start to send ``buf[0]`` to rank ``dest``; the buffer must not change before the request has ended.

        Raises:
            MeshError: the other process is lost.
        """
        peer, request = self._peers[dest], MeshRequest(self)
        if peer.is_closed:
            raise MeshError(ERR_PROC_FAILED)
        data = _bytes_of(buf[0])
        peer.unsent.append((memoryview(_HEADER.pack(tag, len(data))), None))
        peer.unsent.append((data, request))
        peer.send()
        return request

    def Irecv(self, buf: Sequence[object], source: JobRank, tag: int) -> MeshRequest:
        """Start to receive the next message of a tag from rank ``source`` into ``buf[0]``.

        The request fails if the buffer is too small, or if the other process is lost before the message.
        """
        peer, request = self._peers[source], MeshRequest(self, _bytes_of(buf[0]))
        peer.posted[tag].append(request)
        peer.match(tag)  # the message may have arrived before this receive, or before its sender's end
        if peer.is_closed and not request.completed:
            peer.posted[tag].remove(request)
            request.finish(error=ERR_PROC_FAILED)
        return request

    def withdraw(self, request: MeshRequest) -> None:
        """Remove a receive from the posted receives and end it; do nothing if a message was matched to it."""
        for peer in self._peers.values():
            for posted in peer.posted.values():
                if request in posted:
                    posted.remove(request)
                    request.finish()
                    return

    def move(self) -> None:
        """Send and receive as much as is possible without blocking."""
        for peer in self._peers.values():
            if peer.unsent:
                peer.send()
        for file, _ in self._poll.poll(0):
            peer = self._by_file[file]
            peer.receive()
            if peer.is_closed:
                self._poll.unregister(file)
                del self._by_file[file]

    def dead(self) -> set[JobRank]:
        """Return the ranks whose connections were closed at this call and at the previous call."""
        # A process that leaves announces it before its connections close. The caller reads messages between two calls,
        # so it knows the announcement before this reports a death.
        self.move()
        closed = {rank for rank, peer in self._peers.items() if peer.is_closed}
        confirmed, self._seen = closed & self._seen, closed
        return confirmed

    def close(self) -> None:
        """Close all connections; to the other processes, this process is then lost."""
        for peer in self._peers.values():
            if not peer.is_closed:
                peer.close()
        self._by_file.clear()


def _forked() -> None:
    """Close the connections in a forked child; open copies would hide the parent's exit from other processes."""
    for mesh in members(_all):
        mesh.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _bytes_of(buffer: object) -> memoryview:
    if not isinstance(buffer, bytes | bytearray | memoryview):
        raise KVStoreError(f"a message must be bytes, got {type(buffer).__name__}")
    return memoryview(buffer).cast("B")


LIBRARY = ModuleType("weftplan.mesh")
"""Stand-in for :mod:`mpi4py.MPI`, with the names that members use."""
vars(LIBRARY).update(
    SUCCESS=SUCCESS,
    ERR_OTHER=ERR_OTHER,
    ERR_PROC_FAILED=ERR_PROC_FAILED,
    BYTE=None,
    Exception=MeshError,
    Status=MeshStatus,
    Request=MeshRequest,
)
