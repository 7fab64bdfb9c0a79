"""Constant folding: outputs keep their bits, nodes become fewer, and other nodes stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.convert import fold_batch_norm, fold_constants
from weftplan.symbol.node import topological_order

RNG = np.random.default_rng(7)


def operators(symbol: Any) -> list[str]:
    """Return the names of a graph's operators."""
    return [node.op.name for node in topological_order(symbol.entries) if node.op is not None]


def outputs(symbol: Any, args: dict[str, Any], data: Any, aux: Any = None) -> list[Any]:
    """Return the outputs of ``symbol`` in inference for ``data``."""
    known = {**args, "data": data}
    bound = symbol.bind(mx.cpu(), {name: known[name] for name in symbol.list_arguments()}, aux_states=aux or {})
    return [out.asnumpy() for out in bound.forward(is_train=False)]


def normalised_layer() -> tuple[Any, dict[str, Any]]:
    """Return (symbol, arguments) of a layer whose weight rows are normalized, scaled, and multiplied by 1."""
    data, weight, gain = (mx.sym.Variable(name) for name in ("data", "weight", "gain"))
    length = mx.sym.sqrt(mx.sym.sum(mx.sym.square(weight), axis=1, keepdims=True))
    scaled = mx.sym.broadcast_mul(mx.sym.broadcast_div(weight, length), gain, name="scaled")
    masked = scaled * mx.sym.ones(shape=(5, 4))
    net = mx.sym.FullyConnected(data, masked, num_hidden=5, no_bias=True, name="fc")
    args = {"weight": mx.nd.array(RNG.normal(size=(5, 4))), "gain": mx.nd.array(RNG.normal(size=(5, 1)))}
    return net, args


def test_what_depends_on_parameters_alone_is_a_parameter():
    """The nodes that compute a weight from parameters become one array with equal bits; the inputs are unchanged."""
    net, args = normalised_layer()
    data = mx.nd.array(RNG.normal(size=(3, 4)))
    before = {name: value.asnumpy() for name, value in args.items()}
    folded, folded_args, _ = fold_constants(net, args, {})
    assert operators(folded) == ["FullyConnected"]
    assert len(folded_args) == 1
    assert folded.list_outputs() == net.list_outputs()
    np.testing.assert_array_equal(outputs(folded, folded_args, data)[0], outputs(net, args, data)[0])
    assert "broadcast" not in folded.debug_str()
    for name, value in args.items():
        np.testing.assert_array_equal(value.asnumpy(), before[name])


def test_nothing_to_fold():
    """If each node reads the data, the graph and its arrays stay."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
    args = {"fc_weight": mx.nd.ones((2, 3)), "fc_bias": mx.nd.ones((2,))}
    folded, same, _ = fold_constants(net, args, {})
    assert operators(folded) == ["FullyConnected"]
    assert {name: id(value) for name, value in same.items()} == {name: id(value) for name, value in args.items()}


def random_weight(weight: Any) -> Any:
    """Return a weight that is drawn again in each run."""
    return mx.sym.Dropout(weight, mode="always", p=0.5)


def on_other_device(weight: Any) -> Any:
    """Return a weight that is computed in another device group."""
    with mx.AttrScope(ctx_group="far"):
        return mx.sym.exp(weight)


@pytest.mark.parametrize("compute_weight", [random_weight, on_other_device])
def test_what_must_stay(compute_weight):
    """A random node and a node with a device group are not folded."""
    weight = compute_weight(mx.sym.Variable("weight"))
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), weight, num_hidden=2, no_bias=True)
    folded, _, _ = fold_constants(net, {"weight": mx.nd.ones((2, 3))}, {})
    assert len(operators(folded)) == 2


def test_large_results_and_outputs_stay():
    """A result above ``most_bytes`` is not folded, and an output keeps its node and name."""
    weight = mx.sym.Variable("weight")
    wide = mx.sym.broadcast_to(weight, shape=(64, 64))
    half = mx.sym.exp(weight, name="half")
    net = mx.sym.Group([mx.sym.dot(mx.sym.Variable("data"), wide), half])
    args = {"weight": mx.nd.array(RNG.normal(size=(64, 1)))}
    assert operators(fold_constants(net, args, {}, most_bytes=1000)[0]) == operators(net)
    folded, result, _ = fold_constants(net, args, {})
    assert operators(folded) == ["dot", "exp"]
    data = mx.nd.array(RNG.normal(size=(2, 64)))
    for a, b in zip(outputs(folded, result, data), outputs(net, args, data), strict=True):
        np.testing.assert_array_equal(a, b)
    assert folded.list_outputs() == net.list_outputs()


def test_batch_norm_is_folded_into_a_folded_weight():
    """A batch normalization is folded into a weight that constant folding has computed."""
    net, args = normalised_layer()
    net = mx.sym.BatchNorm(net, name="bn", fix_gamma=False)
    args |= {"bn_gamma": mx.nd.array([1.0, 2, 3, 4, 5]), "bn_beta": mx.nd.ones((5,))}
    aux = {"bn_moving_mean": mx.nd.ones((5,)), "bn_moving_var": mx.nd.full((5,), 2.0)}
    data = mx.nd.array(RNG.normal(size=(3, 4)))
    folded = fold_batch_norm(*fold_constants(net, args, aux))
    assert operators(folded[0]) == ["FullyConnected"]
    np.testing.assert_allclose(
        outputs(folded[0], folded[1], data)[0], outputs(net, args, data, aux)[0], rtol=1e-5, atol=1e-5
    )
