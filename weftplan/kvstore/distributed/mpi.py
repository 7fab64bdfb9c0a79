"""The one place that imports mpi4py: the processes of this job, and the settings that Open MPI needs.

Importing :mod:`mpi4py.MPI` starts MPI, so nothing here does it before a store of several processes is made.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import time
from typing import Any

from weftplan.blas import usable_cpus
from weftplan.errors import KVStoreError

COMPONENTS = "basic,tuned,libnbc,ftagree,self,inter"
"""Open MPI's collective components that report a dead process. Its defaults, ``han`` and ``adapt`` among them, returned
wrong sums as success after a death on several hosts (Open MPI 5.0.11)."""

TCP = "OMPI_MCA_btl_tcp_flags"
BOTH_WAYS = "send,inplace"
"""How Open MPI sends by TCP: large messages in pieces. Its default, ``put``, hands a whole message to the connection at
once, with the answer to the message that comes from the other side behind it: the two then take turns, and an exchange
takes up to twice as long."""


def environment() -> dict[str, str]:
    """Settings of Open MPI for the processes of a job, as environment variables; a user may set that of :data:`TCP`."""
    return {"OMPI_MCA_coll": COMPONENTS, TCP: os.environ.get(TCP, BOTH_WAYS)}


def cores_of_this_process() -> int:
    """How many of this machine's cores each of the job's processes on it has for itself, at least 1."""
    here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    return max(1, usable_cpus() // int(here)) if here.isdecimal() and int(here) else usable_cpus()


_lost: list[bool] = []
_own: list[tuple[Any, int]] = []
"""MPI and the process that has started it, where this module has: it then ends MPI, too."""
_ends: list[Any] = []
"""What is called at exit, once it is."""


def note_loss() -> None:
    """A process of this job has died or was given up: this one will end without ``MPI_Finalize``.

    There Open MPI (5.0.11) waits for all processes, and after a death now and then for ever. One that was given up
    hears of it and ends in this way, too.
    """
    if not _lost:
        _lost.append(True)


def _end() -> None:
    """At exit, after the stores: end MPI, or nothing where that might not let this process go."""
    for mpi, process in _own:
        here = process == os.getpid() and not mpi.Is_finalized()  # not in the child of a fork
        if not _lost and here and _all_end(mpi):
            mpi.Finalize()
        return
    if not _lost:
        return
    # MPI was started elsewhere, and ends when the interpreter does. What the program exits with is not known here.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


def _all_end(mpi: Any) -> bool:
    """Wait until all processes have come to their end; False: one of them is lost, and MPI might wait for it for ever.

    One that left before the others hears of their losses nowhere else.
    """
    world, rest_s = mpi.COMM_WORLD, 1e-4
    if not hasattr(world, "Get_failed"):
        return True
    try:
        request = world.Ibarrier()
        while not request.Test():
            failed = world.Get_failed()
            lost = failed.size
            failed.Free()
            if lost:
                return False
            time.sleep(rest_s)
            rest_s = min(2 * rest_s, 0.01)
    except mpi.Exception:
        return False
    return True


def _started() -> Any:
    """MPI, which this module is to end unless the program has said otherwise."""
    settings = importlib.import_module("mpi4py").rc
    ends = settings.finalize is None and settings.initialize is not False
    if ends:
        settings.finalize = False
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except BaseException:
        if ends:
            settings.finalize = None
        raise
    if ends:
        _own.append((mpi, os.getpid()))
    return mpi


def start() -> Any:
    """The module :mod:`mpi4py.MPI`, with MPI running and callable from any thread.

    Raises:
        KVStoreError: mpi4py or an MPI library is missing, or the library does not allow calls from several threads.
    """
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    try:
        mpi = sys.modules.get("mpi4py.MPI") or _started()
    except (ImportError, RuntimeError) as error:
        raise KVStoreError(
            f"a distributed kvstore needs mpi4py and an MPI library, which could not be loaded ({error}): "
            f"pip install 'weftplan[mpi]'"
        ) from error
    if not _ends:
        _ends.append(atexit.register(_end))  # once: what is registered later, as stores are, comes first
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise KVStoreError(
            "this MPI library was started without MPI_THREAD_MULTIPLE, which a distributed kvstore needs: let weftplan "
            "import mpi4py, or leave mpi4py.rc.thread_level as it is"
        )
    return mpi
