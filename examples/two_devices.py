"""Two devices train one network: each gets half of every batch, and the kvstore adds their gradients.

    python examples/two_devices.py

``mx.cpu(0)`` and ``mx.cpu(1)`` have workers of their own; on a machine with two GPUs replace them by ``mx.gpu(0)`` and
``mx.gpu(1)``. Simulated devices, which enqueue work as GPUs do, give the same bits.
"""

import numpy as np

import weftplan as mx

rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 256)
data = (rng.standard_normal((4, 1, 8, 8))[labels] + 0.3 * rng.standard_normal((256, 1, 8, 8))).astype("float32")


def train(contexts):
    """Train the network on the devices ``contexts``, and return the module."""
    mx.random.seed(3)
    module = mx.mod.Module(mx.models.digits("mlp"), context=contexts)
    batches = mx.io.NDArrayIter(data, labels, batch_size=64)
    module.fit(batches, kvstore="device", optimizer_params={"learning_rate": 0.2}, num_epoch=3, progress=True)
    return module


cpus, simulated = train([mx.cpu(0), mx.cpu(1)]), train([mx.sim(0), mx.sim(1)])
weights = [module.get_params()[0] for module in (cpus, simulated)]
assert all(np.array_equal(weights[0][name].asnumpy(), weights[1][name].asnumpy()) for name in weights[0])
print("two CPU contexts and two simulated devices gave the same weights, bit for bit")
plan = mx.models.digits("mlp").plan(data=(64, 1, 8, 8), context=[mx.cpu(0), mx.cpu(1)], kvstore="device")
for purpose, nbytes in plan.external_bytes.items():
    print(f"{purpose:16} {nbytes:>9,} bytes")
