"""SequentialModule, PythonModule and PythonLossModule: a chain of modules trains like one network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError

RNG = np.random.RandomState(0)
DATA = RNG.rand(24, 6).astype(np.float32)
LABEL = (DATA.sum(axis=1) > 3).astype(np.float32)


def three_batches() -> Any:
    """Return an iterator over three batches of eight samples."""
    return mx.io.NDArrayIter(DATA, LABEL, batch_size=8)


def features_symbol(prefix: str = "") -> Any:
    """Return the first layer; ``prefix`` is put before its name."""
    return mx.sym.Activation(
        mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name=f"{prefix}one"), act_type="tanh"
    )


def classifier_symbol() -> Any:
    """Return the second layer with softmax, whose input is called ``data``."""
    return mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="two"), name="softmax"
    )


def sequential_module() -> Any:
    """Return a SequentialModule of both layers."""
    return (
        mx.mod.SequentialModule()
        .add(mx.mod.Module(features_symbol(), label_names=None))
        .add(mx.mod.Module(classifier_symbol()), take_labels=True, auto_wiring=True)
    )


def parameters() -> dict[str, Any]:
    """Return the same random parameters of both layers at each call."""
    random = np.random.RandomState(3)
    shapes = {"one_weight": (5, 6), "one_bias": (5,), "two_weight": (2, 5), "two_bias": (2,)}
    return {name: mx.nd.array(random.uniform(-0.5, 0.5, shape)) for name, shape in shapes.items()}


def test_a_chain_trains_as_the_whole_network() -> None:
    """Two epochs of a chain give the weights, score and predictions of a single symbol."""
    whole = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(features_symbol(), num_hidden=2, name="two"), name="softmax")
    results = []
    for module in (mx.mod.Module(whole), sequential_module()):
        module.fit(
            three_batches(),
            num_epoch=2,
            arg_params=parameters(),
            optimizer_params={"learning_rate": 0.5, "momentum": 0.9},
        )
        score = dict(module.score(three_batches(), "acc"))
        results.append((module.get_params()[0], score, module.predict(three_batches()).asnumpy()))
    for name, value in results[0][0].items():
        np.testing.assert_allclose(results[1][0][name].asnumpy(), value.asnumpy(), rtol=1e-5, err_msg=name)
    assert results[0][1] == results[1][1]
    np.testing.assert_allclose(results[0][2], results[1][2], rtol=1e-5)


def test_a_chain_knows_its_ends() -> None:
    """A chain has the inputs of its first module and the outputs of its last; gradients reach the data."""
    module = sequential_module()
    assert (module.data_names, module.output_names) == (["data"], ["softmax_output"])
    module.bind([("data", (8, 6))], [("softmax_label", (8,))], inputs_need_grad=True)
    module.init_params()
    assert [tuple(desc) for desc in module.data_shapes] == [("data", (8, 6))]
    assert [tuple(desc) for desc in module.label_shapes] == [("softmax_label", (8,))]
    assert module.output_shapes == [("softmax_output", (8, 2))]
    batch = next(iter(three_batches()))
    before = [array.shape for array in batch.data]
    module.forward_backward(batch)
    assert module.get_input_grads()[0].shape == (8, 6)
    assert np.abs(module.get_input_grads()[0].asnumpy()).max() > 0
    assert [array.shape for array in batch.data] == before


def softmax_gradient(scores: Any, labels: Any) -> Any:
    """Return the gradient of softmax cross-entropy with respect to ``scores``."""
    values = scores.asnumpy()
    power = np.exp(values - values.max(axis=1, keepdims=True))
    actual = power / power.sum(axis=1, keepdims=True)
    actual[np.arange(len(actual)), labels.asnumpy().astype(int)] -= 1
    return actual


def test_a_loss_in_python_trains() -> None:
    """A network followed by a PythonLossModule trains to the weights that SoftmaxOutput gives."""
    scores = mx.sym.FullyConnected(features_symbol(), num_hidden=2, name="two")
    lossy = (
        mx.mod.SequentialModule()
        .add(mx.mod.Module(scores, label_names=None))
        .add(mx.mod.PythonLossModule(grad_func=softmax_gradient), take_labels=True, auto_wiring=True)
    )
    whole = mx.mod.Module(mx.sym.SoftmaxOutput(scores, name="softmax"))
    trained = []
    for module in (whole, lossy):
        module.fit(three_batches(), num_epoch=2, arg_params=parameters(), optimizer_params={"learning_rate": 0.5})
        trained.append(module.get_params()[0])
    for name, value in trained[0].items():
        np.testing.assert_allclose(trained[1][name].asnumpy(), value.asnumpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_custom_python_module() -> None:
    """A PythonModule subclass with forward, backward and output shapes trains inside a chain and runs alone."""

    class Twice(mx.mod.PythonModule):
        def _compute_output_shapes(self) -> Any:
            return [("twice_output", self.data_shapes[0].shape)]

        def forward(self, data_batch: Any, is_train: Any = None) -> None:
            self.result = data_batch.data[0] * 2

        def get_outputs(self, merge_multi_context: bool = True) -> Any:
            return [self.result]

        def backward(self, out_grads: Any = None) -> None:
            self.grad = out_grads[0] * 2

        def get_input_grads(self, merge_multi_context: bool = True) -> Any:
            return [self.grad]

    module = (
        mx.mod.SequentialModule()
        .add(mx.mod.Module(features_symbol(), label_names=None))
        .add(Twice(["data"], None, ["twice_output"]), auto_wiring=True)
        .add(mx.mod.Module(classifier_symbol()), take_labels=True, auto_wiring=True)
    )
    module.fit(three_batches(), num_epoch=2, optimizer_params={"learning_rate": 0.5}, eval_metric="ce")
    alone = Twice(["data"], None, ["twice_output"])
    alone.bind([("data", (2, 2))])
    alone.init_params()
    alone.init_optimizer()
    assert alone.output_shapes == [("twice_output", (2, 2))]
    assert alone.get_params() == ({}, {})
    alone.forward(mx.io.DataBatch([mx.nd.ones((2, 2))]))
    assert alone.get_outputs()[0].asnumpy().max() == 2


def test_mistakes_are_named() -> None:
    """An empty chain, unknown or duplicate parameters, wrong names and a loss without gradient raise."""
    with pytest.raises(MXNetError, match="empty"):
        mx.mod.SequentialModule().bind([("data", (8, 6))])
    with pytest.raises(ParameterError, match="take_labels"):
        mx.mod.SequentialModule().add(mx.mod.Module(features_symbol()), labels=True)
    twins = mx.mod.SequentialModule()
    for _ in range(2):
        twins.add(mx.mod.Module(features_symbol(), label_names=None), auto_wiring=True)
    twins.bind([("data", (8, 6))])
    with pytest.raises(MXNetError, match=r"one_weight.*module 0.*module 1|one_"):
        twins.init_params()
    module = sequential_module()
    module.bind([("data", (8, 6))], [("softmax_label", (8,))])
    with pytest.raises(ParameterError, match="three_weight"):
        module.init_params(arg_params={**parameters(), "three_weight": mx.nd.ones((1,))})
    with pytest.raises(MXNetError, match="inputs_need_grad"):
        module.get_input_grads()
    with pytest.raises(ParameterError, match="one input and one label"):
        mx.mod.PythonLossModule(data_names=("a", "b"))
    loss = mx.mod.PythonLossModule()
    with pytest.raises(ParameterError, match="data names"):
        loss.bind([("other", (2, 2))])
    loss.bind([("data", (2, 2))], [("softmax_label", (2,))])
    loss.forward(mx.io.DataBatch([mx.nd.ones((2, 2))], [mx.nd.ones((2,))]), is_train=True)
    with pytest.raises(NotImplementedError, match="grad_func"):
        loss.backward()
    with pytest.raises(MXNetError, match="call backward"):
        loss.get_input_grads()
