"""One process of ``bench_scale.py``: links and exchanges, measured and modelled in turn; rank 0 prints JSON.

scale_rank.py ROUNDS BYTES…
"""

import json
import statistics
import sys
from dataclasses import asdict

import weftplan as mx
from weftplan.kvstore.scaling import measure, seconds, slowest

EXCHANGES = 3


def exchange(kv, nbytes):
    """A function that pushes and pulls so many bytes."""
    gradient, out = mx.nd.ones((nbytes // 4,)), mx.nd.empty((nbytes // 4,))
    kv.init(str(nbytes), mx.nd.zeros((nbytes // 4,)))

    def work():
        kv.push(str(nbytes), gradient)
        kv.pull(str(nbytes), out)
        out.wait_to_read()

    return work, out


def main(rounds, sizes):
    """Measure, model, and print medians."""
    kv = mx.kv.create("dist_sync")
    works = {nbytes: exchange(kv, nbytes) for nbytes in sizes}
    links, modelled, measured = [], {nbytes: [] for nbytes in sizes}, {nbytes: [] for nbytes in sizes}
    for _ in range(rounds):  # in turn: what else the machine does is the same for all of them
        topology = measure(kv, rounds=EXCHANGES)
        for name in ("fixed", "per_key", "per_byte"):
            links.append((name, getattr(topology, name)))
        links += asdict(topology.outer).items()
        for nbytes, (work, out) in works.items():
            modelled[nbytes].append(seconds("one_step", nbytes, kv.num_workers, topology))
            measured[nbytes].append(slowest(work, kv, rounds=EXCHANGES))
            assert (out.asnumpy() == kv.num_workers).all()
    if kv.rank == 0:
        names = dict(links)
        print(
            json.dumps(
                {
                    "link": {name: statistics.median(found for what, found in links if what == name) for name in names},
                    "modelled": {nbytes: statistics.median(found) for nbytes, found in modelled.items()},
                    "measured": {nbytes: statistics.median(found) for nbytes, found in measured.items()},
                }
            ),
            flush=True,
        )
    kv.barrier()


main(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
