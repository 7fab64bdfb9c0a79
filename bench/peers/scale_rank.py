"""One process of ``bench_scale.py``: measures a link and exchanges; rank 0 prints them as JSON.

scale_rank.py ROUNDS BYTES…
"""

import json
import statistics
import sys
import time

import numpy as np

import weftplan as mx
from weftplan.kvstore.distributed import mpi

MPI = mpi.start()

LONG = 2 << 20


def finish(*requests):
    """Wait without keeping a core busy: one that spins would hold up those that it waits for."""
    while not MPI.Request.Testall(list(requests)):
        time.sleep(0.0002)


def everybody(comm, nbytes, rounds):
    """Median seconds in which every rank sends ``nbytes`` in all, the same to each other one, at once."""
    part = max(1, nbytes // (comm.size - 1))
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    data, rooms = np.zeros(part, np.uint8), np.zeros((comm.size, part), np.uint8)
    times = []
    for _ in range(rounds + 1):
        finish(comm.Ibarrier())
        start = time.perf_counter()
        requests = [comm.Irecv(rooms[rank], source=rank) for rank in others]
        requests += [comm.Isend(data, dest=rank) for rank in others]
        finish(*requests)
        finish(comm.Ibarrier())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main(rounds, sizes):
    """Measure."""
    kv = mx.kv.create("dist_sync")
    comm = MPI.COMM_WORLD.Dup()
    small = everybody(comm, 64, 20 * rounds)
    result = {"latency": small, "overhead": 2e-6, "exchange": {}}
    result["bandwidth"] = LONG / (everybody(comm, LONG, rounds) - small)
    for nbytes in sizes:
        gradient, out = mx.nd.ones((nbytes // 4,)), mx.nd.empty((nbytes // 4,))
        kv.init(nbytes, mx.nd.zeros((nbytes // 4,)))
        times = []
        for _ in range(rounds + 1):
            mx.nd.waitall()
            kv.barrier()
            start = time.perf_counter()
            kv.push(nbytes, gradient)
            kv.pull(nbytes, out)
            out.wait_to_read()
            times.append(time.perf_counter() - start)
        assert (out.asnumpy() == kv.num_workers).all()
        result["exchange"][str(nbytes)] = statistics.median(times[1:])
    if kv.rank == 0:
        print(json.dumps(result), flush=True)
    kv.barrier()


main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
