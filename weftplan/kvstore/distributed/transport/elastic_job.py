"""The job of ``weftplan launch --elastic``, and the folder through which its launcher and processes communicate.

The launcher starts all processes itself, because a process of an MPI job cannot be replaced. It alone decides on
replacements and counts them: the *generation* is the number of replacements so far. The processes of a generation form
a mesh of sockets (``formation.py``), which the mesh of the next generation replaces. So a group never grows; after a
loss it is formed again.

=================================  =============================  ================================================
file of the folder                 written by                     meaning
=================================  =============================  ================================================
``generation``                     the launcher                   the generation, in decimal digits
``joinable``                       any process                    every rank trains and can send its state
``shares``                         any process                    a process has created a distributed store
``<store>.<generation>.<rank>``    the rank                       the socket at which the rank listens
=================================  =============================  ================================================

A replacement can join only while the file ``joinable`` exists. At other times the launcher restarts all processes after
a loss, which is always safe.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.support.atomic_files import write_text

_FOLDER, _STARTER, _REPLACES = "_WEFTPLAN_ELASTIC_FOLDER", "_WEFTPLAN_ELASTIC_STARTER", "_WEFTPLAN_ELASTIC_REPLACES"
_LAUNCHER = JobRank(-1)
_LONGEST_PATH = 100
"""Maximum bytes of a socket's path, a little less than any system allows."""


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """An elastic job, as seen by the launcher or by one of the processes.

    Attributes:
        folder: the job's folder.
        size: number of ranks.
        rank: rank of this process; -1 in the launcher.
        replaces: whether this process replaces a lost process.
    """

    folder: Path
    size: int
    rank: JobRank = _LAUNCHER
    replaces: bool = False

    @classmethod
    def create(cls, folder: Path, size: int) -> ElasticJob:
        """Return a new job of ``size`` ranks, of generation 0, in a new folder; the launcher calls this.

        Raises:
            KVStoreError: the system has no Unix sockets, or the folder's path is too long for their names.
        """
        if not hasattr(socket, "AF_UNIX"):
            raise KVStoreError("an elastic job needs Unix sockets, which this system lacks; use --restarts alone")
        if len(os.fsencode(folder)) > _LONGEST_PATH - len("/00.0000.0000"):
            raise KVStoreError(f"the path {folder} is too long for a socket: set TMPDIR to a shorter one, such as /tmp")
        job = cls(folder, size)
        job._write_generation(0)
        return job

    @classmethod
    def of_this_process(cls) -> ElasticJob | None:
        """Return the elastic job of this process; None if this process is not part of an elastic job.

        Raises:
            KVStoreError: this process was started or forked by a process of the job, not by the launcher.
        """
        folder = os.environ.get(_FOLDER)
        if folder is None:
            return None
        if not in_elastic_job():
            raise KVStoreError(
                "a process of an elastic job has started or forked this one, and the job knows only the processes that "
                "weftplan launch --elastic started: create no store of several processes here"
            )
        size, rank = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("SIZE", "RANK"))
        return cls(Path(folder), size, JobRank(rank), os.environ[_REPLACES] == "1")

    def environment(self, rank: int, *, replaces: bool) -> dict[str, str]:
        """Return the environment variables of a process that the launcher starts.

        Rank and size have the names that Open MPI's launcher uses, since programs may read them.
        """
        size = str(self.size)
        return {
            _FOLDER: str(self.folder),
            _STARTER: str(os.getpid()),
            _REPLACES: str(int(replaces)),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": size,
        }

    @property
    def generation(self) -> int:
        """The number of replacements so far."""
        return int((self.folder / "generation").read_text())

    def begin_generation(self) -> None:
        """Increment the generation; the launcher calls this before it starts a replacement."""
        self._write_generation(self.generation + 1)

    def _write_generation(self, number: int) -> None:
        write_text(self.folder / "generation", str(number))

    @property
    def joinable(self) -> bool:
        """Whether a replacement can join now."""
        return (self.folder / "joinable").exists()

    @property
    def shares(self) -> bool:
        """Whether a process of the job has created a distributed store."""
        return (self.folder / "shares").exists()

    def note_store(self) -> None:
        """Record that this process has created a distributed store."""
        (self.folder / "shares").touch()

    def set_joinable(self, joinable: bool) -> None:
        """Set whether a replacement can join from now on."""
        file = self.folder / "joinable"
        if joinable:
            file.touch()
        else:
            file.unlink(missing_ok=True)

    def socket_path(self, store: int, generation: int, rank: int) -> str:
        """Return the path of a rank's listening socket; ``store`` is the number of the store within the process."""
        return str(self.folder / f"{store}.{generation}.{rank}")


def in_elastic_job() -> bool:
    """Return whether the launcher of an elastic job is the parent of this process."""
    return os.environ.get(_STARTER) == str(os.getppid())


_has_shared: list[bool] = []
"""Not empty if the program of this process has summed over processes or begun to train over them."""


def note_sharing() -> bool:
    """Record that this process shares work with the others from now on; return whether it had shared none before.

    Until then a replacement, which runs the program from its beginning without the other processes, gets to the same
    point.
    """
    if _has_shared:
        return False
    _has_shared.append(True)
    return True


def has_joined() -> None:
    """Record that this process has joined the other processes, so that it no longer counts as a replacement."""
    os.environ[_REPLACES] = "0"


def is_joining() -> bool:
    """Return whether this process replaces a lost process and has not joined the other processes yet."""
    return in_elastic_job() and os.environ.get(_REPLACES) == "1"
