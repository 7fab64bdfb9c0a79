"""Gradient arrays of a bind are contiguous; their order is the order of their completion in backward."""

from __future__ import annotations

import numpy as np

import weftplan as mx
from weftplan.kvstore.distributed.arrays.contiguous import side_by_side


def bound(**settings: object) -> mx.executor.Executor:
    """Return an executor of three layers, whose biases have odd sizes."""
    net = mx.sym.Variable("data")
    for index, width in enumerate((7, 13, 5)):
        net = mx.sym.FullyConnected(net, num_hidden=width, name=f"layer{index}")
    return net.simple_bind(mx.cpu(), data=(2, 3), **settings)


def test_the_last_gradient_comes_first():
    """All gradients of a dtype are one range of memory, from the last argument to the first, without overlap."""
    executor = bound()
    arrays = [grad.raw() for grad in reversed(executor.grad_arrays)]
    whole = side_by_side(arrays)
    assert whole is not None
    assert whole.nbytes == sum(array.nbytes for array in arrays)
    for index, array in enumerate(arrays):
        array[...] = index
    assert whole.tolist() == [index for index, array in enumerate(arrays) for _ in range(array.size)]
    assert len({id(grad.var) for grad in executor.grad_arrays}) == len(arrays)


def test_dtypes_have_separate_ranges():
    """Each dtype has its own range without gaps for arguments without gradients, and all gradients start as zeros."""
    executor = bound(grad_req={**dict.fromkeys(bound().arg_dict, "write"), "data": "null", "layer1_bias": "null"})
    arrays = [grad for grad in reversed(executor.grad_arrays) if grad is not None]
    assert side_by_side([array.raw() for array in arrays]) is not None
    assert all(not array.asnumpy().any() for array in arrays)
    mixed = mx.sym.Group([mx.sym.Variable("a") * 2, mx.sym.Variable("b") * 2, mx.sym.Variable("c") * 2])
    shapes, types = {"a": (3,), "b": (5,), "c": (7,)}, {"a": "float32", "b": "float64", "c": "float32"}
    executor = mixed.simple_bind(mx.cpu(), type_dict=types, **shapes)
    assert side_by_side([executor.grad_dict[name].raw() for name in "ca"]) is not None
    assert executor.grad_dict["b"].dtype == np.float64


def test_gradients_are_those_of_separate_arrays():
    """Contiguous gradient arrays have the bits of separate gradient arrays."""
    rng = np.random.default_rng(0)
    one = bound()
    values = {name: rng.standard_normal(array.shape).astype("f4") for name, array in one.arg_dict.items()}
    args = {name: mx.nd.array(value) for name, value in values.items()}
    grads = {name: mx.nd.zeros(value.shape) for name, value in values.items()}
    two = one.symbol.bind(mx.cpu(), args, args_grad=grads)
    for executor in (one, two):
        for name, value in values.items():
            executor.arg_dict[name][:] = value
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((2, 5))])
    for name in values:
        assert one.grad_dict[name].asnumpy().tobytes() == two.grad_dict[name].asnumpy().tobytes()
