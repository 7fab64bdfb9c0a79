"""One process of ``bench_scale.py``: measures a link and exchanges; rank 0 prints them as JSON.

scale_rank.py ROUNDS BYTES…
"""

import json
import statistics
import sys
import time
from dataclasses import asdict

import weftplan as mx
from weftplan.kvstore.scaling import measure


def main(rounds, sizes):
    """Measure."""
    kv = mx.kv.create("dist_sync")
    found = measure(kv, rounds=rounds)
    result = {"link": asdict(found.outer), "fixed": found.fixed, "per_key": found.per_key, "exchange": {}}
    for nbytes in sizes:
        gradient, out = mx.nd.ones((nbytes // 4,)), mx.nd.empty((nbytes // 4,))
        kv.init(str(nbytes), mx.nd.zeros((nbytes // 4,)))
        times = []
        for _ in range(rounds + 1):
            mx.nd.waitall()
            kv.barrier()
            start = time.perf_counter()
            kv.push(str(nbytes), gradient)
            kv.pull(str(nbytes), out)
            out.wait_to_read()
            times.append(time.perf_counter() - start)
        assert (out.asnumpy() == kv.num_workers).all()
        result["exchange"][str(nbytes)] = statistics.median(times[1:])
    if kv.rank == 0:
        print(json.dumps(result), flush=True)
    kv.barrier()


main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
