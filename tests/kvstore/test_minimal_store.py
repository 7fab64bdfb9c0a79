"""The store ``teststore``: a minimal plug-in store."""

import pytest

import weftplan as mx
from weftplan.errors import ParameterError


def test_the_least_store():
    """``broadcast`` copies, ``pushpull`` sums into ``out`` or into the values, and an optimizer is refused."""
    store = mx.kv.create("teststore")
    outs = [mx.nd.zeros((2,), mx.cpu(i)) for i in range(2)]
    store.broadcast("a", mx.nd.ones((2,)), out=outs)
    assert [o.asnumpy().tolist() for o in outs] == [[1, 1]] * 2
    target = mx.nd.zeros((2,))
    store.pushpull("a", outs, out=target)
    assert target.asnumpy().tolist() == [2, 2]
    store.pushpull("a", outs)
    assert [o.asnumpy().tolist() for o in outs] == [[2, 2]] * 2
    assert (store.type, store.rank, store.num_workers) == ("teststore", 0, 1)
    assert not store.is_capable("optimizer")
    with pytest.raises(ParameterError, match="unknown capability"):
        store.is_capable("flight")
    with pytest.raises(NotImplementedError):
        store.set_optimizer(mx.optimizer.SGD())
