"""Dtype inference of networks whose variables share one dtype: equal to a walk over the graph."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.symbol.inference import solver as infer


def dtypes(symbol, **known):
    """Return the dtypes of all entries, with float32 for unknown variables."""
    return infer.infer_dtypes(symbol._nodes(), known, default=np.dtype(np.float32))


def networks():
    """Networks of one dtype, with a mask, with one that is read, with a cast, with an attribute."""
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
def test_as_a_walk_finds_them(name, monkeypatch):
    """The shortcut for float32 variables gives the result of a walk forwards and backwards."""
    symbol = networks()[name]
    actual = dtypes(symbol)
    monkeypatch.setattr(infer, "of_one_dtype", lambda nodes, default, **known: None)
    assert actual == dtypes(symbol)
    assert all(fact is not None for fact in actual)


def test_nothing_is_walked_where_all_is_float32(monkeypatch):
    """Networks of one dtype take no walk, not even with a mask, and with given dtypes that are the default."""
    monkeypatch.setattr(infer._Solver, "_walk", None)
    for name in ("one dtype", "a mask"):
        symbol = networks()[name]
        assert np.dtype(np.float32) in dtypes(symbol)
        assert dtypes(symbol) == dtypes(symbol, data="float32")
    with pytest.raises(TypeError):
        dtypes(networks()["a cast"])
