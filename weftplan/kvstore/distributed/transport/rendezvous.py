"""Rendezvous of a job's processes on one host, and detection of processes that have exited.

MPI does not name the missing processes of a collective wait. Open MPI (5.0.11) also does not report a process that
exits with a nonzero status without finalizing MPI, for example by ``os._exit(1)``. Therefore, at each *place* of the
program, each process listens on a socket whose name has its rank and the place, and the other processes connect. When a
process exits in any way, the kernel closes its sockets, which the others notice. The sockets are in the abstract
namespace, so no files remain. No data is sent.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys

from weftplan.kvstore.distributed.transport.mpi_types import JobRank

_CREDENTIALS = struct.Struct("3i")
"""Fields of ``SO_PEERCRED``: ids of the process that listens on a socket, of its user and of its group."""


class Gathering:
    """The processes of this host at a place of the program, which this process has reached.

    Other processes are detected only on Linux, in jobs of Open MPI's launcher, such as those of ``weftplan launch``.
    """

    def __init__(self, point: str) -> None:
        self.size, self.rank, self.local_size = map(_number, ("SIZE", "RANK", "LOCAL_SIZE"))
        job = os.environ.get("PMIX_NAMESPACE", "")
        self._name = f"\0weftplan {job} {point} "
        self._doors: dict[JobRank, socket.socket] = {}
        self._poll = select.poll() if hasattr(select, "poll") else None
        self._seen: set[JobRank] = set()
        self._listening: socket.socket | None = None
        if not job or sys.platform != "linux" or self._poll is None:
            self.size = 0
            return
        with contextlib.suppress(OSError):
            listening = self._listening = socket.socket(socket.AF_UNIX)
            listening.bind(f"{self._name}{self.rank}")
            listening.listen(max(self.size, 1))

    def missing(self) -> list[JobRank]:
        """Return the ranks of the job that have not reached the place; ranks on other hosts are always included."""
        peers = [JobRank(rank) for rank in range(self.size) if rank != self.rank]
        for rank in peers:
            if rank not in self._doors:
                self._reach(rank)
        return [rank for rank in peers if rank not in self._doors]

    def _reach(self, rank: JobRank) -> None:
        door = socket.socket(socket.AF_UNIX)
        try:
            door.setblocking(False)
            door.connect(f"{self._name}{rank}")
            about = door.getsockopt(socket.SOL_SOCKET, getattr(socket, "SO_PEERCRED", 17), _CREDENTIALS.size)
            if _CREDENTIALS.unpack(about)[1] != os.getuid():
                raise OSError("somebody else listens there")
        except OSError:
            door.close()
            return
        self._doors[rank] = door
        assert self._poll is not None, "nobody is reached without it"
        self._poll.register(door, 0)  # no event mask: poll reports only the end of the connection

    def ended(self) -> set[JobRank]:
        """Return the connected ranks that had exited both at this check and at the previous check."""
        # A process that leaves announces it before it exits. Messages are read between two checks, so the announcement
        # is known before this reports an exit.
        if not self._doors or self._poll is None:
            return set()
        ready = {file for file, _ in self._poll.poll(0)}
        ended = {rank for rank, door in self._doors.items() if door.fileno() in ready} if ready else set()
        confirmed, self._seen = ended & self._seen, ended
        return confirmed

    def close(self) -> None:
        """Close all sockets; this process then detects no other processes."""
        for door in (*self._doors.values(), *([self._listening] if self._listening is not None else [])):
            door.close()
        self._doors.clear()
        self.size = 0


def _number(name: str) -> int:
    text = os.environ.get(f"OMPI_COMM_WORLD_{name}", "")
    return int(text) if text.isdecimal() else 0


START = "start"
"""The place of processes that have begun to create their first store; their exits are detected from then on."""
_gatherings: dict[str, Gathering] = {}


def gather(point: str) -> Gathering:
    """Record that this process has reached a place, and return the gathering there."""
    gathering = _gatherings.get(point)
    if gathering is None:
        gathering = _gatherings[point] = Gathering(point)
    return gathering


def begun() -> bool:
    """Return whether this process, or its parent before a fork, has reached any place."""
    return bool(_gatherings)


def ended() -> set[JobRank]:
    """Return the ranks of processes on this host that have exited since they reached :data:`START`."""
    return _gatherings[START].ended() if START in _gatherings else set()


def _forked() -> None:
    """Close the sockets in a forked child; open copies would hide the parent's exit from other processes."""
    for gathering in _gatherings.values():
        gathering.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
