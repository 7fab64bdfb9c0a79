"""What a Module's parameters, outputs and files hold after the less usual calls."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError


def network():
    """A layer, a normalisation and a loss."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.SoftmaxOutput(mx.sym.BatchNorm(net, name="bn"), name="softmax")


def batches():
    """Four batches of five."""
    rng = np.random.default_rng(1)
    return mx.io.NDArrayIter(rng.random((20, 4)), rng.integers(0, 3, 20), batch_size=5)


def trained(**settings):
    """A module after two epochs."""
    module = mx.mod.Module(network(), **settings)
    module.fit(batches(), num_epoch=2, initializer=mx.init.Xavier(), optimizer_params={"learning_rate": 0.3})
    return module


def values(module):
    """All parameters and states, on the host."""
    args, aux = module.get_params()
    return {name: value.asnumpy() for name, value in {**args, **aux}.items()}


@pytest.mark.parametrize("contexts", [1, 2])
def test_missing_parameters_keep_their_values(contexts):
    """set_params(allow_missing=True) assigns what is given; everything else stays as trained, not made anew."""
    module = trained(context=[mx.cpu(i) for i in range(contexts)])
    before = values(module)
    module.set_params({"fc_bias": np.full(3, 9.0)}, {}, allow_missing=True)
    after = values(module)
    assert after.pop("fc_bias").tolist() == [9, 9, 9]
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    module.set_params({"fc_weight": np.zeros((3, 4))}, None, allow_missing=True)
    np.testing.assert_array_equal(values(module)["bn_moving_mean"], before["bn_moving_mean"])


def test_missing_parameters_of_a_module_that_has_none():
    """Before init_params the initializer's default makes what is not given."""
    module = mx.mod.Module(network())
    module.bind(batches().provide_data, batches().provide_label)
    module.set_params({"fc_bias": np.ones(3)}, {}, allow_missing=True)
    assert values(module)["fc_weight"].any()
    module.set_params({"fc_bias": np.zeros(3)}, {}, allow_missing=True, force_init=False)
    assert values(module)["fc_bias"].tolist() == [1, 1, 1]


def test_force_init_makes_every_parameter_anew():
    """init_params(force_init=True) asks the initializer, whatever the parameters were."""
    module = trained()
    module.init_params(mx.init.Constant(0.25), force_init=True)
    after = values(module)
    assert np.unique(after["fc_weight"]).tolist() == [0.25]
    assert after["bn_moving_mean"].tolist() == [0, 0, 0]
    assert after["bn_moving_var"].tolist() == [1, 1, 1]


def sentences(rows):
    """A network whose output has a row a word: ten sentences of six words, three features."""
    label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    net = mx.sym.FullyConnected(mx.sym.Reshape(mx.sym.Variable("data"), shape=(-1, 3)), num_hidden=4, name="fc")
    rng = np.random.default_rng(2)
    data = mx.io.NDArrayIter(rng.random((10, 6, 3)), rng.integers(0, 4, (10, 6)), batch_size=rows)
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, label, name="softmax"))
    module.bind(data.provide_data, data.provide_label)
    mx.random.seed(3)
    module.init_params(mx.init.Uniform(2.0))
    return module, data


def test_outputs_with_several_rows_a_sample():
    """predict returns every row of every sample and none of the padding; score counts exactly these."""
    whole, all_at_once = sentences(10)
    module, data = sentences(4)
    expected = whole.predict(all_at_once).asnumpy()
    assert expected.shape == (60, 4)
    np.testing.assert_allclose(module.predict(data).asnumpy(), expected, rtol=1e-6)
    assert [outputs[0].shape for outputs, _, _ in module.iter_predict(data)] == [(24, 4), (24, 4), (12, 4)]
    perplexity = mx.metric.Perplexity(None)
    assert module.score(data, ["acc", perplexity]) == [
        (name, pytest.approx(value)) for name, value in whole.score(all_at_once, ["acc", perplexity])
    ]


def test_a_loss_of_the_whole_batch():
    """An output without a row a sample is left whole, padding or not."""
    loss = mx.sym.MakeLoss(mx.sym.sum(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")))
    module = mx.mod.Module(loss, label_names=None)
    data = mx.io.NDArrayIter(np.ones((6, 2)), batch_size=4)
    module.bind(data.provide_data)
    module.init_params("one")
    assert module.predict(data, merge_batches=False)[1][0].shape == (1,)
    assert module.score(data, "loss") == [("loss", pytest.approx(module.predict(data).asnumpy().mean()))]


def test_the_number_of_scored_batches():
    """score_end_callback is told how many batches there were."""
    seen = []
    module = trained()
    module.score(batches(), "acc", score_end_callback=lambda param: seen.append(param.nbatch))
    module.score(batches(), "acc", num_batch=2, score_end_callback=lambda param: seen.append(param.nbatch))
    assert seen == [4, 2]


def test_parameter_files(tmp_path):
    """save_params writes what load_params, a checkpoint and mx.nd.load read; a file of another kind is refused."""
    module, path = trained(), tmp_path / "net-0003.params"
    module.save_params(path)
    again = mx.mod.Module(network())
    again.bind(batches().provide_data, batches().provide_label)
    again.load_params(path)
    for name, value in values(module).items():
        np.testing.assert_array_equal(values(again)[name], value, err_msg=name)
    assert set(mx.nd.load(str(path))) >= {"arg:fc_weight", "aux:bn_moving_mean"}
    mx.nd.save(str(path), {"fc_weight": mx.nd.ones((3, 4))})
    with pytest.raises(FormatError, match="neither arg:"):
        again.load_params(path)
