"""Replacing the last layer for other classes, and inference without computed labels."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.convert import classes_of, with_classes, without_computed_labels
from weftplan.errors import MXNetError


@pytest.mark.parametrize("name", [name for name in mx.models.names() if name != "lstm"])
def test_every_network_gets_other_classes(name: str) -> None:
    """``with_classes`` replaces only the last layer; for the network's own number of classes nothing changes."""
    net = mx.models.get(name)
    before = net.list_arguments()
    actual = with_classes(net, 7)
    shapes = mx.models.input_shapes(name, 2)
    assert actual.infer_shape(**shapes)[1] == [(2, 7)]
    assert (classes_of(net), classes_of(actual)) == (net.infer_shape(**shapes)[1][0][1], 7)
    assert {one for one in actual.list_arguments() if one not in before} == {
        one for one in actual.list_arguments() if "_7_" in one
    }
    assert len(actual.list_arguments()) == len(before)
    assert net.list_arguments() == before
    assert with_classes(net, classes_of(net)).list_arguments() == before


def test_networks_without_a_loss_get_one() -> None:
    """A network that ends in scores or a softmax gets a SoftmaxOutput; a convolution may be the last layer."""
    scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="fc")
    for net in (scores, mx.sym.softmax(scores), mx.sym.SoftmaxActivation(scores)):
        assert with_classes(net, 3).list_outputs() == ["softmax_output"]
        assert with_classes(net, 5).list_arguments() == ["data", "fc_weight", "fc_bias", "softmax_label"]
    layer = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(1, 1), num_filter=5, no_bias=True, name="conv")
    net = mx.sym.Flatten(mx.sym.Pooling(mx.sym.relu(layer), global_pool=True, kernel=(1, 1), pool_type="avg"))
    actual = with_classes(net, 3)
    assert actual.list_arguments() == ["data", "conv_3_weight", "softmax_label"]
    assert actual.infer_shape(data=(2, 4, 6, 6))[1] == [(2, 3)]


def test_networks_without_a_last_layer_are_refused() -> None:
    """A network without a last layer raises an error that names the operator before the output."""
    net = mx.sym.Concat(mx.sym.Variable("a"), mx.sym.Variable("b"), name="both")
    with pytest.raises(MXNetError, match="the output both_output comes from Concat, not from a fully connected layer"):
        with_classes(net, 3)


def test_computed_labels_are_left_out_of_inference() -> None:
    """Without its computed label a network's shapes follow from the data, and its outputs keep their bits."""
    data = mx.sym.Variable("data")
    scores = mx.sym.FullyConnected(mx.sym.Reshape(data, shape=(-1, 3)), num_hidden=4, name="fc")
    label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    net = mx.sym.SoftmaxOutput(scores, label, name="softmax")
    actual = without_computed_labels(net)
    assert actual.list_arguments() == net.list_arguments()
    assert actual.list_outputs() == net.list_outputs()
    assert actual.infer_shape(data=(2, 5, 3))[1] == [(10, 4)]
    results = []
    for one, shapes in ((net, {"softmax_label": (2, 5)}), (actual, {})):
        executor = one.simple_bind(mx.cpu(), grad_req="null", data=(2, 5, 3), **shapes)
        random = np.random.RandomState(0)
        for name in ("data", "fc_weight", "fc_bias"):
            executor.arg_dict[name][:] = mx.nd.array(random.rand(*executor.arg_dict[name].shape))
        results.append(executor.forward(is_train=False)[0].asnumpy())
    np.testing.assert_array_equal(*results)
    plain = mx.models.get("mlp")
    assert without_computed_labels(plain) is plain
