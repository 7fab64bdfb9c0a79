"""Small networks for tests of executors, and values for their arguments."""

import numpy as np

import weftplan as mx


def mlp():
    """Return a network of two layers and a softmax loss."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc1")
    net = mx.sym.Activation(net, act_type="tanh", name="act")
    net = mx.sym.FullyConnected(net, num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def fill(executor, seed=0):
    """Write random values from ``seed`` to every argument."""
    rng = np.random.default_rng(seed)
    for name, array in executor.arg_dict.items():
        if name.endswith("label"):
            array[:] = rng.integers(0, 3, array.shape).astype("float32")
        else:
            array[:] = rng.standard_normal(array.shape).astype("float32")
