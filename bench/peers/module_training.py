"""Median seconds of one Module training step (SGD with momentum): ``module_training.py PACKAGE NETWORK STEPS``.

PACKAGE is ``weftplan`` or ``mxnet``. Prints {"step_s": wall seconds, "cpu_s": CPU seconds of all threads, "loss": ...}.
"""

import importlib
import json
import statistics
import sys
import time

import numpy as np
import training_networks


def prepare(mx, network):
    """Return (module that is ready to train, random batch for it)."""
    data, labels = training_networks.batch(network)
    x, y = mx.nd.array(data), mx.nd.array(labels)
    module = mx.mod.Module(training_networks.with_loss(mx.sym, network), context=mx.cpu())
    module.bind([("data", data.shape)], [("softmax_label", labels.shape)])
    module.init_params(mx.init.Xavier())
    settings = {"learning_rate": 0.01, "momentum": 0.9, "rescale_grad": 1.0}
    module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params=settings)
    return module, mx.io.DataBatch([x], [y])


def train(mx, module, batch):
    """Make one training step, and wait for it."""
    module.forward_backward(batch)
    module.update()
    mx.nd.waitall()


def main(package, network, steps):
    """Train on one random batch; print the median wall and CPU seconds of a step, and the last loss, as JSON."""
    mx = importlib.import_module(package)
    module, batch = prepare(mx, network)

    def step():
        start, used = time.perf_counter(), time.process_time()
        train(mx, module, batch)
        return time.perf_counter() - start, time.process_time() - used

    for _ in range(2):
        step()
    wall, cpu = zip(*(step() for _ in range(steps)), strict=True)
    out = module.get_outputs()[0].asnumpy()
    labels = batch.label[0].asnumpy()
    loss = float(-np.log(out[np.arange(len(out)), labels.astype(int).ravel()] + 1e-12).mean())
    print(json.dumps({"step_s": statistics.median(wall), "cpu_s": statistics.median(cpu), "loss": loss}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
