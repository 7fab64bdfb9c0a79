"""Networks and values shared by tests of training."""

from __future__ import annotations

import numpy as np

import weftplan as mx


def weights(module: mx.mod.BaseModule) -> dict[str, np.ndarray]:
    """Return every parameter and auxiliary state of a module, as NumPy arrays by name."""
    args, aux = module.get_params()
    return {name: value.asnumpy() for name, value in {**args, **aux}.items()}


def small_network() -> mx.sym.Symbol:
    """Return a classifier with six hidden units and three classes."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="fc1")
    net = mx.sym.Activation(net, act_type="relu", name="act")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")
