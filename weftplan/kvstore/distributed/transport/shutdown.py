"""Shutdown of a process: with ``MPI_Finalize`` if all processes finish, without it after a loss."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from types import ModuleType

from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.kvstore.distributed.transport.rendezvous import ended
from weftplan.support import program_end

_lost: list[bool] = []
_started_mpi: list[tuple[ModuleType, int]] = []
"""(mpi4py.MPI, id of the process that started it), if this package has started MPI and therefore must finalize it."""
_registered: list[Callable[[], None]] = []
"""The registered exit function; empty before registration."""

_LATE_S = 1.0
"""Maximum seconds to wait for the last barrier after a process was seen to exit."""


def note_loss(late: Iterable[JobRank] = ()) -> None:
    """Record that a process of this job has died or was given up, so that this process exits without ``MPI_Finalize``.

    ``late`` are ranks that were given up because they did not come in time.

    In ``MPI_Finalize`` Open MPI (5.0.11) waits for all processes, after a death sometimes forever. A process that was
    given up is notified by the other processes, and exits in the same way.
    """
    program_end.given_up.update(late)
    if not _lost:
        _lost.append(True)
        for tell in program_end.when_lost:
            tell()


def lost() -> bool:
    """Return whether :func:`note_loss` was called."""
    return bool(_lost)


def prepare() -> None:
    """Register this module's exit function; exit functions registered later, such as those of stores, run before it."""
    if not _registered:
        _registered.append(atexit.register(_end))


def end_too(mpi: ModuleType) -> None:
    """Record that this package starts MPI in this process, so that MPI is finalized at exit."""
    _started_mpi.append((mpi, os.getpid()))


def _end() -> None:
    """Finalize MPI if this package started it and no process was lost; after a loss exit without finalizing."""
    for mpi, process in _started_mpi:
        is_owner = process == os.getpid() and not mpi.Is_finalized()  # not in the child of a fork
        if not _lost and is_owner and _all_end(mpi):
            mpi.Finalize()
        elif is_owner and program_end.failure() and program_end.status_is_told:
            # Exit with status 0: Open MPI (5.0.11) counts a process that exits with another status without finalizing
            # MPI as two losses, and then kills processes that go on. The launcher reads the status elsewhere.
            _leave(0)
        return
    if not _lost:
        return
    # The program started MPI, and mpi4py would finalize it at exit. The program's exit status is not known here.
    _leave(1 if program_end.failure() else 0)


def _leave(status: int) -> None:
    """Flush the output streams and exit this process without further exit functions."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _all_end(mpi: ModuleType) -> bool:
    """Wait until all processes have reached their exit; return False if a process is lost and MPI might wait forever.

    A process that has closed its stores detects a later loss only in this call.
    """
    world, pause_s, since = mpi.COMM_WORLD, 1e-4, 0.0
    if not hasattr(world, "Get_failed"):
        return True
    try:
        request = world.Ibarrier()
        while not request.Test():
            if failures(mpi):
                return False
            if ended():
                since = since or time.monotonic()
                if time.monotonic() - since > _LATE_S:
                    return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
    except mpi.Exception:
        return False
    return True


def failures(mpi: ModuleType) -> int:
    """Return the number of processes that MPI reports as dead; 0 if this MPI cannot report deaths."""
    if not hasattr(mpi.COMM_WORLD, "Get_failed"):
        return 0
    failed = mpi.COMM_WORLD.Get_failed()
    size: int = failed.size
    failed.Free()
    return size
