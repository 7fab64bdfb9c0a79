"""Networks, and runs of them with dynamic executors, for several test files."""

import gc
import itertools
import time

import numpy as np

import weftplan as mx
from weftplan import device
from weftplan.ndarray.memory.release import drain

SIMULATED = itertools.count(4500)
"""Numbers of simulated devices; each use takes a new device."""
CONTEXTS = [device.cpu(45), device.sim(45)]


def network():
    """Return a network with branches, an identity, dropout, batch normalization and two outputs."""
    data = mx.sym.Variable("data")
    net = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=40, name="one"), act_type="tanh", name="tanh")
    left = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=30, name="left"), act_type="relu", name="relu")
    right = mx.sym.Dropout(mx.sym.FullyConnected(net, num_hidden=30, name="right"), p=0.5, name="drop")
    both = mx.sym.BatchNorm(mx.sym.identity(left + right), fix_gamma=False, name="norm")
    last = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(both, num_hidden=10, name="two"), name="softmax")
    return mx.sym.Group([last, mx.sym.BlockGrad(both, name="shown")])


def deep():
    """Return a long chain of layers, whose results have one reader each in inference."""
    net = mx.sym.Variable("data")
    for k in range(20):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=50, name=f"fc{k}"), act_type="tanh")
    return mx.sym.sum(net, name="total")


def run(ctx, symbol=network, steps=3, **bind):
    """Train ``symbol`` for ``steps`` steps from fixed values.

    Returns:
        The executor, and all outputs, states and gradients of each step and of an inference after it.
    """
    mx.random.seed(7)
    executor = symbol().simple_bind(ctx, data=(20, 30), **bind)
    rng = np.random.RandomState(0)
    for name, array in sorted(executor.arg_dict.items()):
        array[:] = rng.randint(0, 9, array.shape) if "label" in name else rng.rand(*array.shape) - 0.5
    results = []
    for _ in range(steps):
        executor.forward(is_train=True)
        executor.backward(*([mx.nd.ones(o.shape, ctx=ctx) for o in executor.outputs],) if symbol is deep else ())
        results += [a.asnumpy() for a in (*executor.outputs, *executor.aux_arrays)]
        results += [a.asnumpy() for a in executor.grad_arrays if a is not None]
        executor.forward(is_train=False)
        results += [a.asnumpy() for a in executor.outputs]
    return executor, results


def wait_until_freed(resource):
    """Wait, for at most a minute, until ``resource`` has no bytes in use, and return its statistics.

    A worker may free its last array some time after its operation.
    """
    end = time.monotonic() + 60
    while True:
        gc.collect()
        drain()
        mx.nd.waitall()
        drain()
        actual = resource.statistics()
        if actual.requested_bytes == 0 or time.monotonic() > end:
            return actual
