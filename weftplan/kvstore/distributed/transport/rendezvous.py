"""Rendezvous of a job's processes on this host, and detection of those that have exited.

MPI does not name the missing processes of a collective wait. Open MPI (5.0.11) does not report a process that exits
with a nonzero status without finalizing MPI, as by ``os._exit(1)`` or a library that calls ``exit``. Each process
therefore listens at a socket name of its own and the place, and the others connect. When a process exits, in any way,
the kernel closes its sockets, which the others notice. The names are in no folder, so none remains. No data is sent.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the listener."""


class Gathering:
    """This process has come to ``place``; only on Linux and under ``weftplan launch`` is anything known of others."""

    def __init__(self, place: str) -> None:
        self.size, self.rank, self.here = map(_number, ("SIZE", "RANK", "LOCAL_SIZE"))
        job = os.environ.get("PMIX_NAMESPACE", "")
        self._name = f"\0weftplan {job} {place} "
        self._doors: dict[int, socket.socket] = {}
        self._poll = select.poll() if hasattr(select, "poll") else None
        self._seen: set[int] = set()
        self._listening: socket.socket | None = None
        if not job or sys.platform != "linux" or self._poll is None:
            self.size = 0
            return
        with contextlib.suppress(OSError):
            listening = self._listening = socket.socket(socket.AF_UNIX)
            listening.bind(f"{self._name}{self.rank}")
            listening.listen(max(self.size, 1))

    def missing(self) -> list[int]:
        """Those of the job that have not come here: on several hosts, those of the others are always among them."""
        for rank in range(self.size):
            if rank != self.rank and rank not in self._doors:
                self._reach(rank)
        return [rank for rank in range(self.size) if rank != self.rank and rank not in self._doors]

    def _reach(self, rank: int) -> None:
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
        self._poll.register(door, 0)  # which reports the end alone

    def ended(self) -> set[int]:
        """Return the known processes that had exited both at this check and at the previous check.

        A leaving process announces it before it exits, and that is read between two checks.
        """
        if not self._doors or self._poll is None:
            return set()
        ready = {file for file, _ in self._poll.poll(0)}
        ended = {rank for rank, door in self._doors.items() if door.fileno() in ready} if ready else set()
        confirmed, self._seen = ended & self._seen, ended
        return confirmed

    def close(self) -> None:
        """Forget the others, which find this process no more."""
        for one in (*self._doors.values(), *([self._listening] if self._listening is not None else [])):
            one.close()
        self._doors.clear()
        self.size = 0


def _number(name: str) -> int:
    text = os.environ.get(f"OMPI_COMM_WORLD_{name}", "")
    return int(text) if text.isdecimal() else 0


START = "start"
"""Places of processes that have begun to create their first store; every process there is watched."""
_places: dict[str, Gathering] = {}


def gather(place: str) -> Gathering:
    """This process has come to a place, now or before."""
    gathering = _places.get(place)
    if gathering is None:
        gathering = _places[place] = Gathering(place)
    return gathering


def begun() -> bool:
    """Return whether this process, or its parent before a fork, has reached a place."""
    return bool(_places)


def ended() -> set[int]:
    """Return the ranks of processes on this host that are known to have exited since they began."""
    return _places[START].ended() if START in _places else set()


def _forked() -> None:
    """Close the parent's sockets in a forked child, so that they do not outlive the parent."""
    for place in _places.values():
        place.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
