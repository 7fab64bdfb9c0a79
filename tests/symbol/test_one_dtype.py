"""The shortcut of dtype inference for networks of one dtype gives the result of a walk over the graph."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.symbol.inference import solver as infer


def infer_all(symbol, **known):
    """Return the dtypes of all entries, with float32 for variables of unknown dtype."""
    return infer.infer_dtypes(symbol._nodes(), known, default=np.dtype(np.float32))


def networks():
    """Return networks by name: with one dtype, a mask, integer positions, a cast, an attribute, or no inputs."""
    data = mx.sym.Variable("data")
    fc = mx.sym.FullyConnected(data, num_hidden=3)
    return {
        "one dtype": mx.sym.SoftmaxOutput(mx.sym.Activation(fc, act_type="relu")),
        "a mask": mx.sym.FullyConnected(mx.sym.Dropout(fc), num_hidden=2),
        "places that are read": mx.sym.Cast(mx.sym.argsort(fc, dtype="int32"), dtype="float16") + 1,
        "a cast": mx.sym.FullyConnected(mx.sym.Cast(data, dtype="float64"), num_hidden=3),
        "an attribute": mx.sym.FullyConnected(mx.sym.Variable("x", dtype="float64"), num_hidden=3),
        "no inputs": data + mx.sym.zeros((2, 3), dtype="float32"),
    }


@pytest.mark.parametrize("name", networks())
def test_shortcut_gives_the_dtypes_of_a_walk(name, monkeypatch):
    """Inference with the shortcut gives the dtypes of a walk forward and backward."""
    symbol = networks()[name]
    actual = infer_all(symbol)
    monkeypatch.setattr(infer, "of_one_dtype", lambda nodes, default, **known: None)
    assert actual == infer_all(symbol)
    assert all(fact is not None for fact in actual)


def test_networks_of_one_dtype_need_no_walk(monkeypatch):
    """Networks of one dtype need no walk, also with a mask, and with a given dtype that is the default."""
    monkeypatch.setattr(infer._Solver, "_walk", None)
    for name in ("one dtype", "a mask"):
        symbol = networks()[name]
        assert np.dtype(np.float32) in infer_all(symbol)
        assert infer_all(symbol) == infer_all(symbol, data="float32")
    with pytest.raises(TypeError):
        infer_all(networks()["a cast"])
