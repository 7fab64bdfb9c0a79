"""Starts MPI and connects the processes of the job; the only module that imports mpi4py.

The first distributed store starts MPI, which waits until all processes have started it. A plain import of
:mod:`mpi4py.MPI` would wait inside MPI, where Ctrl-C has no effect, and forever if a process never starts MPI. Here a
separate thread starts MPI, and :func:`start` waits for this thread with a time-out.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from types import ModuleType

from weftplan import config
from weftplan.engine.edges import forking
from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.transport.mpi_types import Communicator, Connection, JobRank
from weftplan.kvstore.distributed.transport.rendezvous import START, Gathering, begun, ended, gather
from weftplan.kvstore.distributed.transport.shutdown import end_too, failures, lost, note_loss, prepare
from weftplan.support.blas_threads import usable_cpus
from weftplan.support.package_log import log

COMPONENTS = "basic,tuned,libnbc,ftagree,self,inter"
"""Open MPI's collective components that report a dead process. With the default components, such as ``han`` and
``adapt``, Open MPI 5.0.11 returned wrong sums without an error after a death on several hosts."""

TCP = "OMPI_MCA_btl_tcp_flags"
"""Environment variable that sets Open MPI's TCP protocol."""
SEND_AND_INPLACE = "send,inplace"
"""TCP protocol that sends large messages in pieces. The default, ``put``, sends a message as a whole before the answer
to a message in the opposite direction. The two directions then alternate, and an exchange takes up to twice as long."""


def environment() -> dict[str, str]:
    """Return Open MPI's settings for a job as environment variables; a :data:`TCP` that the user has set is kept."""
    return {"OMPI_MCA_coll": COMPONENTS, TCP: os.environ.get(TCP, SEND_AND_INPLACE)}


def cores_of_this_process() -> int:
    """Return the number of usable cores divided by the number of the job's processes on this host, at least 1."""
    local_size = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    return max(1, usable_cpus() // int(local_size)) if local_size.isdecimal() and int(local_size) else usable_cpus()


_stores = count(1)


def _wait(is_complete: Callable[[], bool], gathering: Gathering, what: str, failed: Callable[[], int]) -> None:
    """Wait until a collective function of MPI, which all processes of the job call, is complete.

    Args:
        is_complete: function that returns whether it is done.
        gathering: the processes that have reached the call.
        what: description of the call for errors.
        failed: function that returns the number of processes that MPI reports as dead.

    Raises:
        WorkerLostError: a process has ended, or is too late.
    """
    since, warned, pause_s, looked = time.monotonic(), False, 1e-4, 0.0
    stall_s, timeout_s = float(config.get("WEFTPLAN_KVSTORE_STALL")), float(config.get("WEFTPLAN_KVSTORE_TIMEOUT"))
    while not is_complete():
        waited = time.monotonic() - since
        if waited - looked > 0.02:
            looked = waited
            missing, ended_ranks, dead = gathering.missing(), ended(), failed()
            if ended_ranks or dead:
                note_loss()
                raise WorkerLostError(
                    f"{what}: {_named(sorted(ended_ranks)) if ended_ranks else 'a rank'} died meanwhile"
                )
            late = waited > timeout_s
            if late or (waited > stall_s and not warned):
                warned = True
                who = _named(missing) if missing else "the others"
                if missing and gathering.local_size < gathering.size:
                    count = gathering.local_size
                    who += f" (those of other hosts may have come; {count} processes are to run on this one)"
                text = f"rank {gathering.rank} has waited {waited:.0f} s for {who} to {what}"
                if late:
                    note_loss(missing)
                    raise WorkerLostError(f"{text}; gave up")
                log.warning("%s", text)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)


def _named(ranks: list[JobRank]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def communicator(mpi: ModuleType) -> Communicator:
    """Return a new communicator of all processes for a store; every process calls this when it creates the store.

    Raises:
        WorkerLostError: a process has died, or does not create the store in time.
    """
    what, gathering = "create the same store", gather(f"store {next(_stores)}")
    try:
        comm: Communicator
        comm, request = mpi.COMM_WORLD.Idup()
        _wait(request.Test, gathering, what, lambda: failures(mpi))
    except mpi.Exception as error:
        note_loss()
        raise WorkerLostError(f"{what}: a rank was lost ({error})") from error
    return comm


def connect(mpi: ModuleType) -> Connection:
    """Return the connection between all processes for a new store; raises as :func:`communicator` does."""
    tells = hasattr(mpi.COMM_WORLD, "Get_failed")
    return Connection(mpi, communicator(mpi), partial(_dead, mpi) if tells else None, lambda: None)


def _dead(mpi: ModuleType) -> set[JobRank]:
    """Return the ranks that have died according to MPI, or exited according to the rendezvous."""
    world = mpi.COMM_WORLD
    world.Iprobe(source=world.rank)  # makes MPI process messages about deaths
    dead = world.Get_failed()
    return ended() | set(map(JobRank, mpi.Group.Translate_ranks(dead, list(range(dead.size)), world.group)))


def _started() -> ModuleType:
    """Import and return mpi4py.MPI, and start MPI, unless the program has set ``mpi4py.rc`` to do this itself.

    If this module starts MPI, it also finalizes MPI at exit.
    """
    settings = importlib.import_module("mpi4py").rc
    starts, previous = settings.initialize is not False, (settings.initialize, settings.finalize)
    ends = starts and settings.finalize is None
    settings.initialize = False
    if ends:
        settings.finalize = False
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except BaseException:
        settings.initialize, settings.finalize = previous
        raise
    if ends:
        end_too(mpi)
    if starts and not mpi.Is_initialized():
        _initialize(mpi)
    return mpi


def _initialize(mpi: ModuleType) -> None:
    """Start MPI on a thread, which does not hold the interpreter's lock, and wait for it with a time-out."""
    over, error = threading.Event(), ctypes.c_int()  # `over` is set last: it publishes `error`
    begin = ctypes.CDLL(mpi.__file__).MPI_Init_thread

    def run() -> None:
        error.value = begin(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
        over.set()

    threading.Thread(target=run, name="weftplan-start", daemon=True).start()
    try:
        _wait(over.is_set, gather(START), "create a store of all processes", lambda: 0)
    except BaseException:
        note_loss()
        raise
    if error.value:
        raise RuntimeError(f"MPI_Init_thread returned {error.value}")
    for comm in (mpi.COMM_WORLD, mpi.COMM_SELF):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py turns returned errors into exceptions


_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
"""Environment variables of MPI's launchers; a launched process has at least one of them."""


def _refuse_other_launcher() -> None:
    """Raise KVStoreError in a process of MXNet's launcher: each of its processes would silently be a job of one."""
    role = os.environ.get("DMLC_ROLE")
    if role is None or any(name in os.environ for name in _OF_MPI):
        return
    workers = os.environ.get("DMLC_NUM_WORKER", "N")
    raise KVStoreError(
        f"DMLC_ROLE={role} says that MXNet's launcher has started this process, of which MPI knows nothing: every "
        f"process would train alone as rank 0 of 1. Start the job with: weftplan launch -n {workers} script.py "
        f"(no servers and no scheduler are needed), or unset DMLC_ROLE"
    )


def start() -> ModuleType:
    """Return the module :mod:`mpi4py.MPI`, with MPI running and callable from any thread.

    Raises:
        KVStoreError: mpi4py or an MPI library is missing, the library does not allow calls from several threads, or
            MXNet's launcher has started this process.
        WorkerLostError: another process does not start MPI in time.
    """
    if forking.process.in_child and begun():
        raise KVStoreError(
            "this process was forked from one that shares a store with others, and MPI works in that one only: create "
            "no store of several processes here"
        )
    _refuse_other_launcher()
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    prepare()
    gather(START)
    try:
        mpi = sys.modules.get("mpi4py.MPI") or _started()
    except KVStoreError:
        raise
    except (ImportError, RuntimeError) as error:
        raise KVStoreError(
            f"a distributed kvstore needs mpi4py and an MPI library, which could not be loaded ({error}): "
            f"pip install 'weftplan[mpi]'"
        ) from error
    if not mpi.Is_initialized():
        if lost():
            raise WorkerLostError("MPI was not started before, because a process did not come: end this one, too")
        raise KVStoreError("mpi4py.rc.initialize is False, and nobody has started MPI: call MPI.Init_thread() before")
    gather(START).missing()  # connects to all processes of this host, whose exits are detected from now on
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise KVStoreError(
            "this MPI library was started without MPI_THREAD_MULTIPLE, which a distributed kvstore needs: let weftplan "
            "import mpi4py, or leave mpi4py.rc.thread_level as it is"
        )
    return mpi
