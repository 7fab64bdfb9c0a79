"""The links of a job, measured where it runs: between its processes, with the cores that they share.

:func:`measure` is called by every process of a job of ``dist_sync`` at the same time, and takes about a second on fast
links. All processes send at once, as they do in an exchange, so what they take from each other is part of the result.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.errors import KVStoreError
from weftplan.kvstore.scaling.topology import Link, Topology

_SHORT, _LONG = 64, 2 << 20
"""Bytes that every process sends in all."""

_OVERHEAD = 2e-6
"""Seconds that a message keeps its sender busy."""

_KEY = "weftplan: a measurement"


def measure(store: Any, *, rounds: int = 7) -> Topology:
    """Latency, bandwidth and the cost of an exchange without data, as this process sees them.

    Args:
        store: of type ``dist_sync``; every process calls this. It gets two keys more.
        rounds: of long messages; the median is taken.

    Raises:
        KVStoreError: the store has no other processes.
    """
    if store.num_workers < 2:
        raise KVStoreError(
            "links are measured between the processes of a job, and this is one process: "
            "weftplan launch -n 4 weftplan scale --topology measured …"
        )
    from mpi4py import MPI

    fixed = _exchanges(store, _SHORT, 6 * rounds)
    if store.shares_memory:  # the store sends nothing: what its data costs is in its exchanges alone
        workers = store.num_workers
        moved = 2 * (workers - 1) / workers * (_LONG - _SHORT)
        link = Link(0.0, moved / max(_exchanges(store, _LONG, rounds) - fixed, 1e-9), 0.0)
    else:
        comm = MPI.COMM_WORLD.Dup()
        short = _everybody(MPI, comm, _SHORT, 6 * rounds)
        long = _everybody(MPI, comm, _LONG, rounds)
        link = Link(short, _LONG / max(long - short, 1e-9), _OVERHEAD)
        comm.Free()
    return Topology("measured", link, link, 1, fixed=fixed)


def _exchanges(store: Any, nbytes: int, rounds: int) -> float:
    """Median seconds of a push and a pull of so many bytes."""
    key, shape = f"{_KEY} of {nbytes} bytes", (nbytes // 4,)
    value, out = nd.ones(shape), nd.empty(shape)
    store.init(key, nd.zeros(shape))
    times = []
    for _ in range(rounds + 1):
        nd.waitall()
        store.barrier()
        start = time.perf_counter()
        store.push(key, value)
        store.pull(key, out)
        out.wait_to_read()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _everybody(mpi: Any, comm: Any, nbytes: int, rounds: int) -> float:
    """Median seconds in which every process sends ``nbytes`` in all, the same to each other one, at once."""
    part = max(1, nbytes // (comm.size - 1))
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    data, rooms = np.zeros(part, np.uint8), np.zeros((comm.size, part), np.uint8)
    times = []
    for _ in range(rounds + 1):
        _finish(mpi, [comm.Ibarrier()])
        start = time.perf_counter()
        requests = [comm.Irecv(rooms[rank], source=rank) for rank in others]
        requests += [comm.Isend(data, dest=rank) for rank in others]
        _finish(mpi, requests)
        _finish(mpi, [comm.Ibarrier()])
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _finish(mpi: Any, requests: list[Any]) -> None:
    """Wait without keeping a core busy: one that spins would hold up those that it waits for."""
    while not mpi.Request.Testall(requests):
        time.sleep(0.0002)
