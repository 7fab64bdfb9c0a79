"""Process shutdown: with MPI if all processes finish, without it after a loss."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType

from weftplan.kvstore.distributed.transport.rendezvous import ended
from weftplan.support import program_end

_lost: list[bool] = []
_own: list[tuple[ModuleType, int]] = []
"""MPI and the process that has started it, where this package has: it then ends MPI, too."""
_registered: list[Callable[[], None]] = []
"""The registered exit function; None before registration."""

_LATE_S = 1.0
"""Seconds after which a process that waits for all exits assumes that an exited process did not finalize MPI."""


def note_loss() -> None:
    """Note that a process of this job has died or was abandoned: this process will exit without ``MPI_Finalize``.

    Open MPI (5.0.11) waits there for all processes, and after a death sometimes for ever. An abandoned process is
    notified and exits in this way, too.
    """
    if not _lost:
        _lost.append(True)


def lost() -> bool:
    """Return whether a loss was noted."""
    return bool(_lost)


def prepare() -> None:
    """Register this module's exit function. Functions registered later, such as those of stores, run first."""
    if not _registered:
        _registered.append(atexit.register(_end))


def end_too(mpi: ModuleType) -> None:
    """End this MPI, too, which this process starts."""
    _own.append((mpi, os.getpid()))


def _end() -> None:
    """Finalize MPI at exit, after the stores, unless that might block this process."""
    for mpi, process in _own:
        here = process == os.getpid() and not mpi.Is_finalized()  # not in the child of a fork
        if not _lost and here and _all_end(mpi):
            mpi.Finalize()
        elif here and program_end.failure() and program_end.status_is_told:
            # Open MPI (5.0.11) counts a process that ends with another status without ending MPI as two, and then ends
            # others that go on.
            _leave(0)
        return
    if not _lost:
        return
    # MPI was started elsewhere, and ends with the interpreter. The program's exit status is not known here.
    _leave(1 if program_end.failure() else 0)


def _leave(status: int) -> None:
    """End this process now."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _all_end(mpi: ModuleType) -> bool:
    """Wait until all processes have come to their end; False: one of them is lost, and MPI might wait for it for ever.

    One that left before the others hears of their losses nowhere else.
    """
    world, rest_s, since = mpi.COMM_WORLD, 1e-4, 0.0
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
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, 0.01)
    except mpi.Exception:
        return False
    return True


def failures(mpi: ModuleType) -> int:
    """Return how many processes have died, as far as MPI says."""
    if not hasattr(mpi.COMM_WORLD, "Get_failed"):
        return 0
    failed = mpi.COMM_WORLD.Get_failed()
    size: int = failed.size
    failed.Free()
    return size
