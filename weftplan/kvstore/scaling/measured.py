"""The links of a job, and what its store does beside them, measured where it runs: with the cores that it has there.

:func:`measure` is called by every process of a job of ``dist_sync`` at the same time, and takes a few seconds. All
that is measured are exchanges of the store, short ones and long ones in turn, and each is told apart: seconds in
which MPI carries data make the link, the others what the store does for an exchange, a key and a byte. So what the
processes take from each other, in the network and on cores that they share, is part of the result; and a link with a
slow store is no slow link.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.engine import get as get_engine
from weftplan.errors import KVStoreError
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.distributed.exchange.sequencer import rest
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.scaling.topology import Link, Topology
from weftplan.support.blas_threads import usable_cpus

_SMALL = 64
"""Bytes of each of many small keys."""

_SHORT, _LONG, _LONGEST = 2 * INLINE, 2 << 20, 32 << 20
"""Bytes of exchanges. The short ones are just long enough to be made as long ones are, with their data behind the
messages that agree on them."""

_RESOLVED = 8.0
"""A long exchange takes this many times as long as a short one, or it is made longer: the difference of two times that
are almost equal is noise, and the bandwidth that follows from it could be anything."""

_ENOUGH_S, _MORE = 1.0, 6
"""Seconds that rounds take, where there are not more of them than so many times as many as asked for."""

_OVERHEAD = 2e-6
"""Seconds that a message keeps its sender busy."""

_KEYS = 17
"""Keys that are exchanged as one, beside one alone: what each of them takes is a part of the difference."""

_KEY = "weftplan: a measurement"

Update = Callable[[Any, nd.NDArray, nd.NDArray], None]
Work = Callable[[], object]


def measure(store: Any, *, rounds: int = 7, update: Update | None = None) -> Topology:
    """Latency, bandwidth, and what an exchange, a key and a byte take beside them; all processes are told the same.

    The slowest process counts, each time anew, as in :func:`slowest`.

    Args:
        store: of type ``dist_sync``, without an optimizer; every process calls this. It gets a few keys more.
        rounds: of long exchanges, at least; fast ones are repeated for a second, up to six times as often.
        update: what the store is to do with each sum, as for ``set_updater``; it counts as part of what an exchange, a
            key and a byte take.

    Raises:
        KVStoreError: the store has no other processes.
    """
    if store.num_workers < 2:
        raise KVStoreError(
            "links are measured between the processes of a job, and this is one process: "
            "weftplan launch -n 4 weftplan scale --topology measured …"
        )
    busy = bool(store.shares_memory) and usable_cpus() < 2 * store.num_workers
    with _job(store) as job:
        store.set_updater(update)
        try:
            link, per_byte = _of_bytes(job, rounds)
            first, per_key = _of_keys(job, 6 * rounds)
        finally:
            store.set_updater(None)
    return Topology("measured", link, link, 1, fixed=first - per_key, per_key=per_key, per_byte=per_byte, busy=busy)


def slowest(work: Work, store: Any, *, rounds: int = 7) -> float:
    """Median seconds in which all processes of the job have done ``work()``, when all begin at once.

    The slowest of them counts, each time anew: they wait for each other at every exchange, and it is not always one and
    the same that is late.
    """
    with _job(store) as job:
        job.seconds([work], 1)  # what is made once is made
        return job.seconds([work], rounds)[0]


class _Job:
    """The processes of a store, which do something together and agree on how long it took."""

    def __init__(self, mpi: Any, comm: Any, store: Any) -> None:
        self._mpi, self._comm, self.store = mpi, comm, store

    def seconds(self, works: Sequence[Work], rounds: int) -> list[float]:
        """Medians of what each takes the slowest process, begun at once; in turn, since a machine has its moods."""
        return [found for found, _ in self.parts(works, rounds)]

    def parts(self, works: Sequence[Work], rounds: int) -> list[tuple[float, float]]:
        """The same, and the seconds of it in which MPI carries data of the store."""
        times, group = np.empty((rounds, len(works), 2)), self.store._group
        for row in times:
            for place, work in enumerate(works):
                nd.waitall()
                self.store.barrier()
                start, moving_s = time.perf_counter(), group.moving_s
                work()
                row[place] = time.perf_counter() - start, group.moving_s - moving_s
        return [(float(took), float(moved)) for took, moved in np.median(self.slowest(times), axis=0)]

    def slowest(self, times: Any) -> Any:
        """The longest of all processes' times, at each place."""
        found, looks = np.empty_like(times), 0
        request = self._comm.Iallreduce(times, found, self._mpi.MAX)
        while not request.Test():
            looks += 1
            rest(looks)
        return found


@contextlib.contextmanager
def _job(store: Any) -> Iterator[_Job]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield _Job(MPI, comm, store)
    comm.Free()  # together, so not after an error of one of them


def _of_bytes(job: _Job, rounds: int) -> tuple[Link, float]:
    """(the link, seconds that a byte takes beside it)."""
    nbytes, short = _LONG, _exchange(job.store, _SHORT)
    job.seconds([short], 1)  # what is made once is made
    while True:
        works = [short, _exchange(job.store, nbytes)]
        least, most = job.seconds(works, 1)
        if nbytes >= _LONGEST or most >= _RESOLVED * least:
            break
        nbytes *= 2
    rounds = min(max(rounds, int(_ENOUGH_S / (least + most))), _MORE * rounds)
    (all_short, moved_short), (all_long, moved_long) = job.parts(works, rounds)
    every = max(all_long - all_short, all_long / 2)  # noise does not make it less
    workers = job.store.num_workers
    sent = 2 * (workers - 1) / workers * (nbytes - _SHORT)
    if job.store.shares_memory:  # nothing is sent: what data cost is all one
        return Link(0.0, sent / every, 0.0), 0.0
    moved = max(moved_long - moved_short, moved_long / 2)
    latency = max(0.0, moved_short / 2 - (workers - 1) * _OVERHEAD)
    return Link(latency, sent / moved, _OVERHEAD), max(0.0, every - moved) / (nbytes - _SHORT)


def _exchange(store: Any, nbytes: int) -> Work:
    """A push and a pull of so many bytes."""
    key, shape = f"{_KEY} of {nbytes} bytes", (nbytes // 4,)
    value, out = nd.ones(shape), nd.empty(shape)
    if key not in store._stored:  # measured before
        store.init(key, nd.zeros(shape))

    def exchange() -> None:
        store.push(key, value)
        store.pull(key, out)
        out.wait_to_read()

    return exchange


def _of_keys(job: _Job, rounds: int) -> tuple[float, float]:
    """Seconds that an exchange of one small key, updated and pulled, adds to what makes its gradient; those that each
    further key adds, which are not more.

    As in training, all are pushed in one call, before the operations that make the gradients have ended.
    """
    store, keys = job.store, [f"{_KEY} of key {index}" for index in range(_KEYS)]
    values, outs = ([nd.ones((_SMALL // 4,)) for _ in keys] for _ in range(2))
    if keys[0] not in store._stored:
        store.init(keys, [nd.zeros((_SMALL // 4,)) for _ in keys])

    def work(made: int, sent: int) -> None:
        with _making(values[:made]):
            if sent:
                store.pushpull(keys[:sent], values[:sent], outs[:sent])
        nd.waitall()

    rule, store._rule = store._rule, BucketRule(-1, None)  # one exchange, however many keys
    try:
        cases = [partial(work, made, sent) for made in (1, _KEYS) for sent in (0, made)]
        job.seconds(cases, 1)  # what is made once is made
        one_made, one, all_made, every = job.seconds(cases, rounds)
    finally:
        store._rule = rule
    first = max(0.0, one - one_made)
    return first, min(first, max(0.0, (every - all_made - first) / (_KEYS - 1)))


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
