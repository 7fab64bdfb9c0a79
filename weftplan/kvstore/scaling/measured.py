"""The links of a job, and what its store does for each key, measured where it runs: with the cores that it has there.

:func:`measure` is called by every process of a job of ``dist_sync`` at the same time, and takes about a second on fast
links. All processes send at once, as they do in an exchange, so what they take from each other is part of the result.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.blas import usable_cpus
from weftplan.engine import get as get_engine
from weftplan.errors import KVStoreError
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.distributed.sequencer import rest
from weftplan.kvstore.scaling.topology import Link, Topology

_SHORT, _LONG, _LONGEST = 64, 2 << 20, 32 << 20
"""Bytes that every process sends in all; long messages come in two lengths, one twice the other."""

_RESOLVED = 3.0
"""A long message takes this many times as long as a short one, or it is made longer: the difference of two times that
are almost equal is noise, and the bandwidth that follows from it could be anything."""

_TRIPS = 4
"""Short messages, in time, that a long one takes beside its bytes, at most."""

_OVERHEAD = 2e-6
"""Seconds that a message keeps its sender busy."""

_KEYS = 17
"""Keys that are exchanged as one, beside one alone: what each of them takes is a part of the difference."""

_KEY = "weftplan: a measurement"

Update = Callable[[Any, nd.NDArray, nd.NDArray], None]


def measure(store: Any, *, rounds: int = 7, update: Update | None = None) -> Topology:
    """Latency, bandwidth, the cost of an exchange without data and that of a key, as this process sees them.

    Args:
        store: of type ``dist_sync``, without an optimizer; every process calls this. It gets a few keys more.
        rounds: of long messages; the median is taken.
        update: what the store is to do with each sum, as for ``set_updater``; it counts as part of what a key takes.

    Raises:
        KVStoreError: the store has no other processes.
    """
    if store.num_workers < 2:
        raise KVStoreError(
            "links are measured between the processes of a job, and this is one process: "
            "weftplan launch -n 4 weftplan scale --topology measured …"
        )
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    fixed, workers = _exchanges(store, _SHORT, 6 * rounds), store.num_workers
    if store.shares_memory:  # the store sends nothing: what its data costs is in its exchanges alone
        per_byte, fixed = _line(MPI, comm, fixed, lambda nbytes: _exchanges(store, nbytes, rounds))
        link = Link(0.0, 2 * (workers - 1) / workers / per_byte, 0.0)
    else:
        short = _everybody(MPI, comm, _SHORT, 6 * rounds)
        per_byte, short = _line(MPI, comm, short, lambda nbytes: _everybody(MPI, comm, nbytes, rounds))
        link = Link(short, 1 / per_byte, _OVERHEAD)
    comm.Free()
    first, per_key = _of_keys(store, 6 * rounds, update)
    busy = bool(store.shares_memory) and usable_cpus() < 2 * workers
    # The exchanges above were of arrays that were there; those of training wait for threads that make them, too.
    return Topology("measured", link, link, 1, fixed=max(fixed, first) - per_key, per_key=per_key, busy=busy)


def slowest(work: Callable[[], object], store: Any, *, rounds: int = 7) -> float:
    """Median seconds in which all processes of the job have done ``work()``, when all begin at once.

    The slowest of them counts, each time anew: they wait for each other at every exchange, and it is not always one and
    the same that is late.
    """
    from mpi4py import MPI

    times = np.empty(rounds + 2)
    for place in range(len(times)):
        store.barrier()
        start = time.perf_counter()
        work()
        times[place] = time.perf_counter() - start
    comm, all_times = MPI.COMM_WORLD.Dup(), np.empty_like(times)
    _finish(MPI, [comm.Iallreduce(times, all_times, MPI.MAX)])
    comm.Free()
    return float(np.median(all_times[2:]))


def _line(mpi: Any, comm: Any, short: float, timed: Callable[[int], float]) -> tuple[float, float]:
    """Seconds a byte, and seconds of no bytes, from two long messages.

    All processes make them longer together, until the difference from a short one is clear to each. A short message is
    no point of the line: it travels in another way. But what a long one takes beside its bytes is not more than a few
    short ones do, which announce and answer it; what is more is noise, as queues and other programs make it. Where the
    two long ones do not differ as they should on a busy machine, between half of the longer one's time and all of it
    counts for its bytes.
    """
    nbytes = _LONG
    while True:
        once = timed(nbytes)
        if nbytes >= _LONGEST or _least(mpi, comm, once / short) >= _RESOLVED:
            break
        nbytes *= 2
    twice = timed(2 * nbytes)
    per_byte = min(max((twice - once) / nbytes, twice / (4 * nbytes)), twice / (2 * nbytes))
    per_byte = max(per_byte, (twice - _TRIPS * short) / (2 * nbytes))
    return per_byte, max(short, twice - 2 * nbytes * per_byte)


def _least(mpi: Any, comm: Any, value: float) -> float:
    """The least of the processes' values, on each of them."""
    least = np.empty(1)
    _finish(mpi, [comm.Iallreduce(np.array([value]), least, mpi.MIN)])
    return float(least[0])


def _exchanges(store: Any, nbytes: int, rounds: int) -> float:
    """Median seconds of a push and a pull of so many bytes."""
    key, shape = f"{_KEY} of {nbytes} bytes", (nbytes // 4,)
    value, out = nd.ones(shape), nd.empty(shape)
    if key not in store._stored:  # measured before
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


def _of_keys(store: Any, rounds: int, update: Update | None) -> tuple[float, float]:
    """Seconds that an exchange of one small key, updated and pulled, adds to what makes its gradient; those that each
    further key adds, which are not more.

    As in training, all are pushed in one call, before the operations that make the gradients have ended.
    """
    keys = [f"{_KEY} of key {index}" for index in range(_KEYS)]
    values, outs = ([nd.ones((_SHORT // 4,)) for _ in keys] for _ in range(2))
    if keys[0] not in store._stored:
        store.init(keys, [nd.zeros((_SHORT // 4,)) for _ in keys])
    times: dict[tuple[int, int], list[float]] = {(made, sent): [] for made in (1, _KEYS) for sent in (0, made)}
    rule, store._rule = store._rule, BucketRule(-1, None)  # one exchange, however many keys
    store.set_updater(update)
    try:
        for _ in range(rounds + 1):
            for (made, sent), found in times.items():
                nd.waitall()
                store.barrier()
                start = time.perf_counter()
                with _making(values[:made]):
                    if sent:
                        store.pushpull(keys[:sent], values[:sent], outs[:sent])
                nd.waitall()
                found.append(time.perf_counter() - start)
    finally:
        store._rule = rule
        store.set_updater(None)
    took = {case: statistics.median(found[1:]) for case, found in times.items()}
    first = max(0.0, took[1, 1] - took[1, 0])
    further = (took[_KEYS, _KEYS] - took[_KEYS, 0] - first) / (_KEYS - 1)
    return first, min(first, max(0.0, further))


@contextlib.contextmanager
def _making(values: list[nd.NDArray]) -> Iterator[None]:
    """A block behind which operations write ``values`` one by one: what is pushed within waits for them.

    Not on NaiveEngine, where every push runs at once, those of a backward pass, too.
    """
    engine, pushed = get_engine(), threading.Event()
    if engine.kind != "NaiveEngine":
        engine.push(pushed.wait, (), [value.var for value in values], name="backward")
    for value in values:
        engine.push(_nothing, (), (value.var,), name="gradient")
    try:
        yield
    finally:
        pushed.set()


def _nothing() -> None:
    """The operation that writes a value."""


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
    """Wait as a store does: MPI moves bytes only when it is asked how far they are."""
    looks = 0
    while not mpi.Request.Testall(requests):
        looks += 1
        rest(looks)
