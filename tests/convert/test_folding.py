"""Batch normalization folded into layers: equal outputs, fewer nodes, and unsuitable nodes stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan import models
from weftplan.convert import fold_batch_norm
from weftplan.symbol.node import topological_order

RNG = np.random.default_rng(5)


def values(symbol: Any, **shapes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return (arguments, auxiliary states, inputs and labels) of a symbol with random values."""
    arg_shapes, _, aux_shapes = symbol.infer_shape(**shapes)
    args, data = {}, {}
    for name, shape in zip(symbol.list_arguments(), arg_shapes, strict=True):
        result = mx.nd.array(RNG.normal(size=shape) * (0.3 if len(shape) > 1 else 1.0))
        (data if name in shapes or name.endswith("label") else args)[name] = result
    aux = {
        name: mx.nd.array(RNG.uniform(0.5, 2.0, shape))
        for name, shape in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True)
    }
    return args, aux, data


def outputs(symbol: Any, args: dict[str, Any], aux: dict[str, Any], data: dict[str, Any]) -> list[Any]:
    """Return the outputs of ``symbol`` in inference."""
    known = {**args, **data}
    bound = symbol.bind(mx.cpu(), {name: known[name] for name in symbol.list_arguments()}, aux_states=aux)
    return [out.asnumpy() for out in bound.forward(is_train=False)]


def operators(symbol: Any) -> list[str]:
    """Return the names of a graph's operators."""
    return [node.op.name for node in topological_order(symbol.entries) if node.op is not None]


@pytest.mark.parametrize("fix_gamma", [True, False])
@pytest.mark.parametrize("no_bias", [True, False])
@pytest.mark.parametrize("layer", ["1d", "2d", "grouped", "dense"])
def test_a_folded_layer_gives_the_same_numbers(layer: str, no_bias: bool, fix_gamma: bool) -> None:
    """After folding, the BatchNorm is gone, the output agrees within rounding, and the planned peak is no larger."""
    x = mx.sym.Variable("data")
    if layer == "dense":
        y, shape = mx.sym.FullyConnected(x, num_hidden=6, no_bias=no_bias, name="layer"), (4, 3, 5)
    elif layer == "1d":
        y = mx.sym.Convolution(x, kernel=(3,), num_filter=6, no_bias=no_bias, name="layer")
        shape = (2, 4, 9)
    else:
        groups = 2 if layer == "grouped" else 1
        y = mx.sym.Convolution(
            x, kernel=(3, 3), num_filter=6, pad=(1, 1), num_group=groups, no_bias=no_bias, name="layer"
        )
        shape = (2, 4, 7, 6)
    symbol = mx.sym.Activation(mx.sym.BatchNorm(y, fix_gamma=fix_gamma, eps=1e-3, name="norm"), act_type="relu")
    args, aux, data = values(symbol, data=shape)
    if layer == "grouped":  # SyncBatchNorm equals BatchNorm in inference
        text = symbol.tojson().replace('"op": "BatchNorm"', '"op": "_contrib_SyncBatchNorm"')
        symbol = mx.sym.load_json(text.replace('"eps": "0.001"', '"eps": "0.001", "key": "norm", "ndev": "2"'))
    folded, new_args, new_aux = fold_batch_norm(symbol, args, aux)
    assert not {"BatchNorm", "_contrib_SyncBatchNorm"} & {*operators(folded)}
    assert set(new_args) == {"layer_weight", "layer_bias"}
    assert not new_aux
    (wanted,), (actual,) = outputs(symbol, args, aux, data), outputs(folded, new_args, new_aux, data)
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    before, after = (one.plan(grad_req="null", data=shape, kernels="numpy") for one in (symbol, folded))
    assert after.peak <= before.peak


def test_a_real_network_loses_its_batch_norms() -> None:
    """All 27 BatchNorms of MobileNet are folded; outputs keep names and values."""
    symbol = models.get("mobilenet")
    args, aux, data = values(symbol, data=(1, 3, 32, 32))
    folded, new_args, new_aux = fold_batch_norm(symbol, args, aux)
    assert operators(symbol).count("BatchNorm") == 27
    assert "BatchNorm" not in operators(folded)
    (wanted,), (actual,) = outputs(symbol, args, aux, data), outputs(folded, new_args, new_aux, data)
    np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-5)
    assert folded.list_outputs() == symbol.list_outputs()


def test_what_others_read_stays() -> None:
    """A layer with two readers, a shared weight, another axis, or visible statistics is not folded."""
    x, w = mx.sym.Variable("data"), mx.sym.Variable("w")

    def layer(source: Any, **more: Any) -> Any:
        return mx.sym.Convolution(source, kernel=(1, 1), num_filter=4, no_bias=True, **more)

    two_readers = layer(x)
    cases = [
        mx.sym.BatchNorm(two_readers) + two_readers,
        mx.sym.BatchNorm(layer(x, weight=w)) + layer(x, weight=w),
        mx.sym.BatchNorm(layer(x), axis=2),
        mx.sym.BatchNorm(layer(x), output_mean_var=True),
        mx.sym.BatchNorm(mx.sym.Activation(layer(x), act_type="relu")),
        mx.sym.BatchNorm(mx.sym.FullyConnected(x, num_hidden=3, flatten=False)),
    ]
    for symbol in cases:
        if symbol.list_outputs()[1:]:
            symbol = mx.sym.Group([symbol[0], symbol[1]])
        args, aux, data = values(symbol, data=(2, 4, 4, 4))
        folded, new_args, new_aux = fold_batch_norm(symbol, args, aux)
        assert operators(folded) == operators(symbol)
        assert (new_args, new_aux) == (args, aux)
        for wanted, actual in zip(
            outputs(symbol, args, aux, data), outputs(folded, new_args, new_aux, data), strict=True
        ):
            np.testing.assert_array_equal(actual, wanted)


def test_missing_values_and_taken_names() -> None:
    """If a value is missing, nothing is folded; a new bias gets an unused name; the given symbol is unchanged."""
    x = mx.sym.Variable("data")
    layer = mx.sym.Convolution(x, kernel=(1, 1), num_filter=4, no_bias=True, name="layer")
    symbol = mx.sym.broadcast_add(
        mx.sym.BatchNorm(layer, name="norm"), mx.sym.Variable("layer_bias", shape=(1, 4, 1, 1))
    )
    args, aux, data = values(symbol, data=(2, 4, 3, 3))
    json = symbol.tojson()
    less = {name: value for name, value in args.items() if name != "norm_beta"}
    assert operators(fold_batch_norm(symbol, less, aux)[0]) == operators(symbol)
    folded, new_args, new_aux = fold_batch_norm(symbol, args, aux)
    assert "layer_bias_folded" in new_args
    assert symbol.tojson() == json
    (wanted,), (actual,) = outputs(symbol, args, aux, data), outputs(folded, new_args, new_aux, data)
    np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    assert operators(mx.sym.load_json(folded.tojson())) == operators(folded)
