"""SVRGModule: results of MXNet 1.9.1 for one snapshot, and the formula for several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from weftplan.contrib.svrg_optimization.svrg_module import SVRGModule

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError

SHAPES = {"f1_weight": (5, 6), "f1_bias": (5,), "f2_weight": (1, 5), "f2_bias": (1,)}
FIRST = {
    "f1_bias": [0.5122933983802795, -0.1829030066728592, 0.10161614418029785],
    "f1_weight": [0.5392232537269592, 0.09307406097650528, 0.344941109418869],
    "f2_bias": [0.006201908923685551],
    "f2_weight": [0.5042505264282227, -0.18120796978473663, -0.770294189453125],
}
"""First values of each parameter after four epochs with one snapshot, from MXNet 1.9.1."""
SECOND = {
    "f1_bias": [0.4937290549278259, -0.1809561848640442, 0.06887480616569519],
    "f1_weight": [0.5447342395782471, 0.0891365110874176, 0.3675728440284729],
    "f2_bias": [0.06789585947990417],
    "f2_weight": [0.45364120602607727, -0.19138199090957642, -0.8796485066413879],
}
"""Like ``FIRST``, for a snapshot every second epoch; MXNet ran with gradient sums set to zero before each snapshot."""


class Counted(mx.io.NDArrayIter):
    """An iterator whose ``calls`` has an R for each ``reset`` and an n for each ``next``."""

    calls = ""

    def reset(self) -> None:
        self.calls += "R"
        super().reset()

    def next(self) -> Any:
        self.calls += "n"
        return super().next()


def network() -> mx.sym.Symbol:
    """Return a regression network of two layers."""
    hidden = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="f1"), act_type="tanh")
    out = mx.sym.FullyConnected(hidden, num_hidden=1, name="f2")
    return mx.sym.LinearRegressionOutput(out, mx.sym.Variable("lin_reg_label"), name="lr")


def train_module(update_freq: int, context: Any = None, **settings: Any) -> tuple[SVRGModule, Counted]:
    """Train four epochs on 42 samples in batches of ten; return (module, iterator)."""
    random = np.random.RandomState(0)
    data = random.randn(42, 6).astype("f")
    batches = Counted(data, (data @ random.randn(6, 1)).astype("f"), 10, label_name="lin_reg_label")
    module = SVRGModule(network(), label_names=["lin_reg_label"], update_freq=update_freq, context=context)
    start = {
        name: mx.nd.array(np.random.RandomState(k).randn(*shape).astype("f") * 0.3)
        for k, (name, shape) in enumerate(SHAPES.items())
    }
    module.fit(
        batches, eval_metric="mse", optimizer="sgd", optimizer_params={"learning_rate": 0.05, "momentum": 0.5},
        num_epoch=4, arg_params=start, **settings,
    )  # fmt: skip
    return module, batches


@pytest.mark.parametrize(("freq", "expected"), [(4, FIRST), (2, SECOND)])
@pytest.mark.parametrize("contexts", [1, 2])
def test_results_of_mxnet(freq: int, expected: dict[str, list[float]], contexts: int) -> None:
    """One and two snapshots on one and two contexts give MXNet's parameters and iterator calls."""
    module, batches = train_module(freq, [mx.cpu(k) for k in range(contexts)])
    for name, value in module.get_params()[0].items():
        np.testing.assert_allclose(value.asnumpy().ravel()[:3], expected[name], rtol=2e-5, atol=2e-6)
    epoch = "nnnnnnR"
    full = {4: ["R", epoch, epoch, epoch, epoch, epoch], 2: ["R", epoch, epoch, epoch, epoch, epoch, epoch]}[freq]
    assert batches.calls.removeprefix("R") == "".join(full)


def test_a_store_changes_nothing() -> None:
    """With a store the first update uses the parameters too, not the zeros that MXNet then has on its contexts."""
    alone, _ = train_module(2, kvstore=None)
    stored, _ = train_module(2, kvstore=mx.kv.create("local"))
    for name, value in alone.get_params()[0].items():
        np.testing.assert_array_equal(stored.get_params()[0][name].asnumpy(), value.asnumpy())


def test_first_update_after_a_snapshot_is_the_mean_gradient() -> None:
    """The first update after a snapshot uses the mean gradient of all batches; without a snapshot update raises."""
    random = np.random.RandomState(1)
    data, label = random.randn(12, 6).astype("f"), random.randn(12, 1).astype("f")
    batches = mx.io.NDArrayIter(data, label, 4, label_name="lin_reg_label")
    module = SVRGModule(network(), label_names=["lin_reg_label"], update_freq=1)
    module.bind(batches.provide_data, batches.provide_label)
    mx.random.seed(0)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 1.0, "rescale_grad": 1.0})
    with pytest.raises(MXNetError, match="call update_full_grads"):
        module.update()
    before = module.get_params()[0]["f2_weight"].asnumpy()
    module.update_full_grads(batches)
    batches.reset()
    gradients = []
    for batch in batches:
        module._mod_aux.forward_backward(batch)
        gradients.append(module._mod_aux.group.executors[0].grad_dict["f2_weight"].asnumpy())
    batches.reset()
    module.forward_backward(batches.next())
    module.update()
    after = module.get_params()[0]["f2_weight"].asnumpy()
    np.testing.assert_allclose(before - after, np.mean(gradients, axis=0), rtol=1e-5, atol=1e-6)


def test_settings_that_do_not_fit() -> None:
    """An invalid update_freq, and an argument of ``fit`` that SVRG does not support, raise."""
    for freq in (None, 0, 1.5, True):
        with pytest.raises(ParameterError, match="update_freq must be the epochs between two full gradients"):
            SVRGModule(network(), label_names=["lin_reg_label"], update_freq=freq)  # type: ignore[arg-type]
    for name, value in (("micro_batches", 2), ("mixed_precision", "float16"), ("checkpoint", "x"), ("resume", True)):
        with pytest.raises(ParameterError, match=f"SVRGModule.fit: {name} does not go with full gradients"):
            train_module(1, **{name: value})
