"""Formation of a mesh of sockets between all processes of a generation, for a store of an elastic job.

The launcher numbers the generations (``elastic_job.py``). A process that waits for others polls this number, and starts
over with the next generation if a process is lost meanwhile. So all processes end with the same mesh, or with an error
after a time-out. If a process is lost between the formation and its first message, the caller forms the next mesh.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Generator
from itertools import count

from weftplan import config
from weftplan.errors import WorkerLostError
from weftplan.kvstore.distributed.transport.elastic_job import ElasticJob, has_joined
from weftplan.kvstore.distributed.transport.mesh import LIBRARY, Mesh
from weftplan.kvstore.distributed.transport.mpi_types import Connection, JobRank
from weftplan.support.package_log import log

_HELLO = struct.Struct("<I")
"""First message on a connection: the rank of the process that connects."""
_LOOK_S = 0.002
"""Seconds between two polls of the job's folder."""

_stores = count(1)


class Formation:
    """Forms the connections of one store of an elastic job, first at its creation and again after each loss.

    Args:
        job: the job of this process.
    """

    def __init__(self, job: ElasticJob) -> None:
        self.job = job
        job.note_store()
        self._store = next(_stores)
        self._generation = 0 if job.replaces else -1
        """Last generation whose mesh this process had, -1 before the first mesh. A replacement starts with 0, because
        it can only join a later generation."""

    def connect(self) -> Connection:
        """Connect to all other processes and return the connection; a replacement gets one without other processes.

        Raises:
            WorkerLostError: a rank does not connect in time.
        """
        if self.job.replaces:
            return _connection(Mesh(self.job.rank, self.job.size, {}), is_alone=True)
        steps = self.reconnect()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                connection: Connection = end.value
                return connection

    def reconnect(self) -> Generator[None, None, Connection]:
        """Connect to all processes of the next generation; a generator, which yields while it waits.

        Raises:
            WorkerLostError: a rank does not connect in time, or training has ended on another rank.
        """
        self._generation, mesh = yield from _form(self.job, self._store, self._generation)
        has_joined()
        return _connection(mesh)


def _connection(mesh: Mesh, *, is_alone: bool = False) -> Connection:
    return Connection(LIBRARY, mesh, mesh.dead, mesh.close, is_alone)


def _form(job: ElasticJob, store: int, previous: int) -> Generator[None, None, tuple[int, Mesh]]:
    """Form the mesh of the newest generation later than ``previous``; return (generation, mesh).

    If the generation changes meanwhile, because a process was lost, start over with the new generation.
    """
    stall_s, timeout_s = float(config.get("WEFTPLAN_KVSTORE_STALL")), float(config.get("WEFTPLAN_KVSTORE_TIMEOUT"))
    begun, warned = time.monotonic(), False
    entrance: _Entrance | None = None
    try:
        while True:
            generation = job.generation
            if generation > previous and (entrance is None or entrance.generation != generation):
                if entrance is not None:
                    entrance.close()
                entrance = _Entrance(job, store, generation)
            if entrance is not None and entrance.is_complete():
                return generation, entrance.mesh()
            # Another rank that has ended its training will not come to this mesh.
            if previous >= 0 and not job.joinable:
                raise WorkerLostError(f"rank {job.rank} cannot join: another rank has come to the end of its training")
            waited = time.monotonic() - begun
            if waited > stall_s and not warned:
                warned = True
                log.warning("%s", _waits(job, entrance, waited))
            if waited > timeout_s:
                raise WorkerLostError(f"{_waits(job, entrance, waited)}; gave up")
            yield
            time.sleep(_LOOK_S)
    finally:
        if entrance is not None:
            entrance.close()


def _waits(job: ElasticJob, entrance: _Entrance | None, seconds: float) -> str:
    if entrance is None:
        whom = "a replacement of a lost rank"
    else:
        whom = f"ranks {', '.join(map(str, entrance.missing()))} of generation {entrance.generation}"
    return f"rank {job.rank} has waited {seconds:.0f} s for {whom}"


class _Entrance:
    """The connections of a generation while they form: a rank connects to smaller ranks and accepts larger ranks."""

    def __init__(self, job: ElasticJob, store: int, generation: int) -> None:
        self.generation = generation
        self._job, self._store = job, store
        self._peers: dict[JobRank, socket.socket] = {}
        self._unnamed: list[socket.socket] = []
        """Accepted connections whose rank was not received yet."""
        self._path = job.socket_path(store, generation, job.rank)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.setblocking(False)
        self._listening.bind(self._path)
        self._listening.listen(job.size)

    def missing(self) -> list[JobRank]:
        ranks = map(JobRank, range(self._job.size))
        return [rank for rank in ranks if rank != self._job.rank and rank not in self._peers]

    def is_complete(self) -> bool:
        """Connect to smaller ranks and accept larger ranks, without waiting; return whether all are connected."""
        for rank in map(JobRank, range(self._job.rank)):
            if rank not in self._peers:
                self._connect(rank)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unnamed.append(self._listening.accept()[0])
        for peer in list(self._unnamed):
            peer.setblocking(False)
            try:
                hello = peer.recv(_HELLO.size)  # sent in one call, the four bytes also arrive together
            except BlockingIOError:
                continue
            except OSError:
                hello = b""
            self._unnamed.remove(peer)
            if len(hello) == _HELLO.size:
                self._peers[JobRank(_HELLO.unpack(hello)[0])] = peer
            else:  # the process ended before it sent its rank
                peer.close()
        return not self.missing()

    def _connect(self, rank: JobRank) -> None:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.setblocking(False)
            peer.connect(self._job.socket_path(self._store, self.generation, rank))
            peer.send(_HELLO.pack(self._job.rank))
        except OSError:  # the rank does not listen yet
            peer.close()
            return
        self._peers[rank] = peer

    def mesh(self) -> Mesh:
        """Return a mesh, which takes over the connections."""
        peers, self._peers = self._peers, {}
        return Mesh(self._job.rank, self._job.size, peers)

    def close(self) -> None:
        """Close and unlink the listening socket, and close all connections that no mesh has taken over."""
        for connection in (self._listening, *self._unnamed, *self._peers.values()):
            connection.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
