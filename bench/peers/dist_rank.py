"""One process of ``bench_dist.py``: exchanges of a store and of raw mpi4py, alternating; rank 0 prints JSON.

dist_rank.py ROUNDS BYTES…
"""

import json
import statistics
import sys
import time

import numpy as np

import weftplan as mx

KEYS = 8


def main(rounds, sizes):
    """Time both exchanges of each size until each sum has arrived: one key below 64 KiB, else eight in one push."""
    kv = mx.kv.create("dist_sync")
    from mpi4py import MPI

    comm, result = MPI.COMM_WORLD.Dup(), {}
    for nbytes in sizes:
        count = KEYS if nbytes >= 1 << 16 else 1
        size = nbytes // 4 // count
        keys = [f"{nbytes} {index}" for index in range(count)]
        gradients = [mx.nd.ones((size,)) for _ in keys]
        outs = [mx.nd.empty((size,)) for _ in keys]
        for key in keys:
            kv.init(key, mx.nd.zeros((size,)))
        send, receive = np.ones(size * count, np.float32), np.empty(size * count, np.float32)

        def store(keys=keys, gradients=gradients, outs=outs):
            kv.push(keys, gradients)
            kv.pull(keys, outs)
            for out in outs:
                out.wait_to_read()

        def raw(send=send, receive=receive):
            comm.Allreduce(send, receive)

        times, loops = {"store": [], "raw": []}, {}
        for _ in range(rounds if nbytes >= 1 << 16 else 20 * rounds):
            for name, work in (("store", store), ("raw", raw)):
                comm.Barrier()
                start = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - start)
        for name, work in (("store", store), ("raw", raw)):  # without barriers, as in training
            comm.Barrier()
            repeats, start = len(times[name]), time.perf_counter()
            for _ in range(repeats):
                work()
            loops[name] = (time.perf_counter() - start) / repeats
        assert all((out.asnumpy() == kv.num_workers).all() for out in outs)
        by_name = {name: (statistics.median(one[1:]), min(one[1:]), loops[name]) for name, one in times.items()}
        result[str(nbytes)] = by_name
    if kv.rank == 0:
        print(json.dumps(result), flush=True)
    kv.barrier()


main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
