"""Median seconds of one Module training step (SGD with momentum): ``module_training.py PACKAGE NETWORK STEPS``.

PACKAGE is ``weftplan`` or ``mxnet``; prints {"step_s": ..., "cpu_s": ..., "loss": ...}: a step's
wall time and the CPU time of all threads.
"""

import importlib
import json
import statistics
import sys
import time

import numpy as np
import training_networks


def main(package, network, steps):
    """Train on one random batch."""
    mx = importlib.import_module(package)
    data, labels = training_networks.batch(network)
    x, y = mx.nd.array(data), mx.nd.array(labels)
    module = mx.mod.Module(training_networks.with_loss(mx.sym, network), context=mx.cpu())
    module.bind([("data", data.shape)], [("softmax_label", labels.shape)])
    module.init_params(mx.init.Xavier())
    settings = {"learning_rate": 0.01, "momentum": 0.9, "rescale_grad": 1.0}
    module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params=settings)
    one = mx.io.DataBatch([x], [y])

    def step():
        start, used = time.perf_counter(), time.process_time()
        module.forward_backward(one)
        module.update()
        mx.nd.waitall()
        return time.perf_counter() - start, time.process_time() - used

    for _ in range(2):
        step()
    wall, cpu = zip(*(step() for _ in range(steps)), strict=True)
    out = module.get_outputs()[0].asnumpy()
    loss = float(-np.log(out[np.arange(len(out)), labels.astype(int).ravel()] + 1e-12).mean())
    print(json.dumps({"step_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "loss": loss}))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
