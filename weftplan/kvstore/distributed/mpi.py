"""The one place that imports mpi4py: the processes of this job, and the settings that Open MPI needs.

Importing :mod:`mpi4py.MPI` starts MPI, so nothing here does it before a store of several processes is made.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
from typing import Any

from weftplan.blas import usable_cpus
from weftplan.errors import KVStoreError

COMPONENTS = "basic,tuned,libnbc,ftagree,self,inter"
"""Open MPI's collective components that report a dead process. Its defaults, ``han`` and ``adapt`` among them, returned
wrong sums as success after a death on several hosts (Open MPI 5.0.11)."""


def environment() -> dict[str, str]:
    """Settings of Open MPI for the processes of a job, as environment variables."""
    return {"OMPI_MCA_coll": COMPONENTS}


def cores_of_this_process() -> int:
    """How many of this machine's cores each of the job's processes on it has for itself, at least 1."""
    here = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    return max(1, usable_cpus() // int(here)) if here.isdecimal() and int(here) else usable_cpus()


_lost: list[bool] = []


def note_loss() -> None:
    """A process of this job has died: this one will end without ``MPI_Finalize``.

    There Open MPI (5.0.11) waits for all processes, and after a death now and then for ever.
    """
    if not _lost:
        _lost.append(True)


def _end() -> None:
    """At exit, after the stores: leave at once where MPI might not let this process go."""
    if not _lost:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


def start() -> Any:
    """The module :mod:`mpi4py.MPI`, with MPI running and callable from any thread.

    Raises:
        KVStoreError: mpi4py or an MPI library is missing, or the library does not allow calls from several threads.
    """
    atexit.unregister(_end)
    atexit.register(_end)
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise KVStoreError(
            f"a distributed kvstore needs mpi4py and an MPI library, which could not be loaded ({error}): "
            f"pip install 'weftplan[mpi]'"
        ) from error
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise KVStoreError(
            "this MPI library was started without MPI_THREAD_MULTIPLE, which a distributed kvstore needs: let weftplan "
            "import mpi4py, or leave mpi4py.rc.thread_level as it is"
        )
    return mpi
