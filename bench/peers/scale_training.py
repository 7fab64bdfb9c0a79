"""One process of ``bench_scale.py --training``: a step with exchanges, modelled and measured; rank 0 prints JSON.

scale_training.py NETWORK ROUNDS
"""

import json
import statistics
import sys

import numpy as np

import weftplan as mx
from weftplan import models
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.scaling import measure, seconds, slowest
from weftplan.kvstore.updater import Updater

BATCH, STEPS = 64, 10


def trained(network, store):
    """A module that trains with this store, and functions that make forward and backward, and a whole step."""
    shapes = models.input_shapes(network, BATCH)
    module = mx.mod.Module(models.get(network), data_names=["data"], label_names=["softmax_label"])
    module.bind([("data", shapes["data"])], [("softmax_label", (BATCH,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=store, optimizer="sgd", optimizer_params={"learning_rate": 0.01, "momentum": 0.9})
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal(shapes["data"]).astype("f4"), rng.integers(0, 10, BATCH)
    batch = mx.io.DataBatch([mx.nd.array(images)], [mx.nd.array(labels)])

    def compute():
        module.forward_backward(batch)
        mx.nd.waitall()

    def step():
        module.forward_backward(batch)
        module.update()
        mx.nd.waitall()

    return module, compute, step


def main(network, rounds):
    """Measure, model, and print."""
    kv, probe = mx.kv.create("dist_sync"), mx.kv.create("dist_sync")
    alone_module, compute, _ = trained(network, None)
    parameters, _ = alone_module.get_params()
    items = [(array.nbytes, array.nbytes, array.dtype) for array in reversed(list(parameters.values()))]
    buckets = BucketRule.from_environment().cut(items)
    update = Updater(mx.optimizer.create("sgd", learning_rate=0.01, momentum=0.9))
    _, _, step = trained(network, kv)
    alone, measured, modelled, exchanges, keys = [], [], [], [], []
    step()
    for _ in range(rounds):  # in turn: what else the machine does is the same for all of them
        topology = measure(probe, rounds=3, update=update)
        workers = kv.num_workers
        exchanges.append(sum(seconds("one_step", sum(one), workers, topology, len(one)) for one in buckets))
        keys.append(topology.per_key)
        alone.append(slowest(compute, kv, rounds=STEPS))
        measured.append(slowest(step, kv, rounds=STEPS))
        modelled.append(alone[-1] + exchanges[-1])
    if kv.rank == 0:
        columns = {"alone": alone, "exchanges": exchanges, "key": keys, "modelled": modelled, "measured": measured}
        print(json.dumps({name: statistics.median(found) for name, found in columns.items()}), flush=True)
    kv.barrier()


main(sys.argv[1], int(sys.argv[2]))
