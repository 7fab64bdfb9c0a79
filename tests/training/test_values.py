"""A Module's parameters, outputs and files after unusual calls."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.training import weights as values
from weftplan.errors import DTypeError, FormatError, MXNetError, ParameterError


def network():
    """Return a classifier of one layer with batch normalization."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.SoftmaxOutput(mx.sym.BatchNorm(net, name="bn"), name="softmax")


def four_batches():
    """Return an iterator over four batches of five samples."""
    rng = np.random.default_rng(1)
    return mx.io.NDArrayIter(rng.random((20, 4)), rng.integers(0, 3, 20), batch_size=5)


def trained_module(**settings):
    """Return a module that was trained for two epochs."""
    module = mx.mod.Module(network(), **settings)
    module.fit(four_batches(), num_epoch=2, initializer=mx.init.Xavier(), optimizer_params={"learning_rate": 0.3})
    return module


@pytest.mark.parametrize("contexts", [1, 2])
def test_missing_parameters_keep_their_values(contexts):
    """set_params with allow_missing=True keeps the values of parameters that are not given."""
    module = trained_module(context=[mx.cpu(i) for i in range(contexts)])
    before = values(module)
    module.set_params({"fc_bias": np.full(3, 9.0)}, {}, allow_missing=True)
    after = values(module)
    assert after.pop("fc_bias").tolist() == [9, 9, 9]
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    module.set_params({"fc_weight": np.zeros((3, 4))}, None, allow_missing=True)
    np.testing.assert_array_equal(values(module)["bn_moving_mean"], before["bn_moving_mean"])


def test_missing_parameters_of_a_module_that_has_none():
    """Before init_params, set_params gives missing parameters the default initializer's values."""
    module = mx.mod.Module(network())
    module.bind(four_batches().provide_data, four_batches().provide_label)
    module.set_params({"fc_bias": np.ones(3)}, {}, allow_missing=True)
    assert values(module)["fc_weight"].any()
    module.set_params({"fc_bias": np.zeros(3)}, {}, allow_missing=True, force_init=False)
    assert values(module)["fc_bias"].tolist() == [1, 1, 1]


def network_with_head(classes, head):
    """Return the network with a last layer called ``head`` of ``classes`` units."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    net = mx.sym.FullyConnected(mx.sym.BatchNorm(net, name="bn"), num_hidden=classes, name=head)
    return mx.sym.SoftmaxOutput(net, name="softmax")


def test_a_checkpoint_with_another_head(caplog):
    """``fit`` with allow_missing=True initializes a new last layer and logs the unused parameters of the old."""
    old = mx.mod.Module(network_with_head(3, "old"))
    old.fit(four_batches(), num_epoch=1, initializer=mx.init.Xavier())
    args, aux = old.get_params()
    new = mx.mod.Module(network_with_head(5, "new"), fixed_param_names=["fc_weight", "fc_bias"])
    new.fit(
        four_batches(), num_epoch=1, arg_params=args, aux_params=aux, allow_missing=True, initializer=mx.init.One(),
    )  # fmt: skip
    np.testing.assert_array_equal(values(new)["fc_weight"], args["fc_weight"].asnumpy())
    assert values(new)["new_weight"].shape == (5, 3)
    assert "no parameters named ['old_weight', 'old_bias']" in caplog.text
    with pytest.raises(MXNetError, match=r"unknown names \['old_weight', 'old_bias'\].*allow_missing=True"):
        new.init_params(arg_params=args, aux_params=aux, force_init=True)
    caplog.clear()
    new.fit(four_batches(), num_epoch=1, force_init=True)
    assert "call init_optimizer(…, force_init=True) before fit" in caplog.text


def test_force_init_overwrites_every_parameter():
    """init_params with force_init=True initializes every parameter of a trained module."""
    module = trained_module()
    module.init_params(mx.init.Constant(0.25), force_init=True)
    after = values(module)
    assert np.unique(after["fc_weight"]).tolist() == [0.25]
    assert after["bn_moving_mean"].tolist() == [0, 0, 0]
    assert after["bn_moving_var"].tolist() == [1, 1, 1]


def word_classifier(rows):
    """Return (module, iterator) for ten sentences of six words in batches of ``rows``.

    The network has an output row for each word.
    """
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
    """If a sample has several output rows, predict and score use all rows of samples and none of the padding."""
    whole, all_at_once = word_classifier(10)
    module, data = word_classifier(4)
    expected = whole.predict(all_at_once).asnumpy()
    assert expected.shape == (60, 4)
    np.testing.assert_allclose(module.predict(data).asnumpy(), expected, rtol=1e-6)
    assert [outputs[0].shape for outputs, _, _ in module.iter_predict(data)] == [(24, 4), (24, 4), (12, 4)]
    perplexity = mx.metric.Perplexity(None)
    assert module.score(data, ["acc", perplexity]) == [
        (name, pytest.approx(value)) for name, value in whole.score(all_at_once, ["acc", perplexity])
    ]


def test_a_loss_of_the_whole_batch():
    """An output whose first axis is not the batch is not cut for padding."""
    loss = mx.sym.MakeLoss(mx.sym.sum(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")))
    module = mx.mod.Module(loss, label_names=None)
    data = mx.io.NDArrayIter(np.ones((6, 2)), batch_size=4)
    module.bind(data.provide_data)
    module.init_params("one")
    assert module.predict(data, merge_batches=False)[1][0].shape == (1,)
    assert module.score(data, "loss") == [("loss", pytest.approx(module.predict(data).asnumpy().mean()))]


def test_the_number_of_scored_batches():
    """score_end_callback gets the number of scored batches."""
    seen = []
    module = trained_module()
    module.score(four_batches(), "acc", score_end_callback=lambda param: seen.append(param.nbatch))
    module.score(four_batches(), "acc", num_batch=2, score_end_callback=lambda param: seen.append(param.nbatch))
    assert seen == [4, 2]


def test_parameter_files(tmp_path):
    """save_params writes a file that load_params and mx.nd.load read; a file of another kind raises."""
    module, path = trained_module(), tmp_path / "net-0003.params"
    module.save_params(path)
    repeated = mx.mod.Module(network())
    repeated.bind(four_batches().provide_data, four_batches().provide_label)
    repeated.load_params(path)
    for name, value in values(module).items():
        np.testing.assert_array_equal(values(repeated)[name], value, err_msg=name)
    assert set(mx.nd.load(str(path))) >= {"arg:fc_weight", "aux:bn_moving_mean"}
    mx.nd.save(str(path), {"fc_weight": mx.nd.ones((3, 4))})
    with pytest.raises(FormatError, match="neither arg:"):
        repeated.load_params(path)


@pytest.mark.parametrize("contexts", [1, 2])
def test_training_after_predicting_arrays(contexts):
    """After ``predict`` with an array, which has another batch size and no label, score and fit still work."""
    module = trained_module(context=[mx.cpu(i) for i in range(contexts)])
    before = module.score(four_batches(), "ce")
    module.predict(np.ones((3, 4)))
    assert module.score(four_batches(), "ce") == before
    module.predict(np.ones((3, 4)))
    module.fit(four_batches(), num_epoch=1)
    assert module.label_shapes == [("softmax_label", (5,))]
    with pytest.raises(DTypeError, match="label 'softmax_label' must be an NDArray or a NumPy array"):
        module.forward(mx.io.DataBatch([mx.nd.ones((2, 4))], [[0, 1]]))


def test_training_what_was_bound_to_predict():
    """``fit`` of a module bound for inference raises; with force_rebind=True it trains."""
    module = mx.mod.Module(network())
    module.bind([("data", (5, 4))], for_training=False)
    module.init_params()
    with pytest.raises(MXNetError, match=r"bind got no label_shapes.*bind again \(fit: force_rebind=True\)"):
        module.fit(four_batches(), num_epoch=1)
    module.fit(four_batches(), num_epoch=1, force_rebind=True)


@pytest.mark.parametrize("lost", ["arg:fc_bias", "aux:bn_moving_var"])
def test_a_checkpoint_that_lacks_a_value(lost, tmp_path):
    """Bind refuses a checkpoint that lacks a value; init_params with allow_missing=True can supply the value."""
    trained_module().save_checkpoint(tmp_path / "net", 1)
    saved = mx.nd.load(str(tmp_path / "net-0001.params"))
    del saved[lost]
    mx.nd.save(str(tmp_path / "net-0001.params"), saved)
    module = mx.mod.Module.load(tmp_path / "net", 1)
    with pytest.raises(MXNetError, match=rf"no value for \['{lost[4:]}'\]; .*load it with mx\.model\.load_checkpoint"):
        module.bind(four_batches().provide_data, four_batches().provide_label)
    assert not module.binded
    symbol, args, aux = mx.model.load_checkpoint(tmp_path / "net", 1)
    module = mx.mod.Module(symbol)
    module.bind(four_batches().provide_data, four_batches().provide_label)
    module.init_params(arg_params=args, aux_params=aux, allow_missing=True)
    module.fit(four_batches(), num_epoch=1)


@pytest.mark.parametrize("epoch", ["3", -1, 1.0, None, True])
def test_epochs_that_are_none(epoch, tmp_path):
    """save_checkpoint with an invalid epoch raises and writes no file."""
    with pytest.raises(ParameterError, match="the epoch of a checkpoint is a number >= 0, got"):
        trained_module().save_checkpoint(tmp_path / "net", epoch)
    assert not list(tmp_path.iterdir())


def test_prefixes(tmp_path):
    """A checkpoint prefix may be str, Path or bytes, with dots and non-ASCII letters."""
    prefix = str(tmp_path / "模型.v2")
    module = trained_module()
    for kind in (prefix, tmp_path / "模型.v2", prefix.encode()):
        module.save_checkpoint(kind, 12345, save_optimizer_states=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "模型.v2-12345.params", "模型.v2-12345.states", "模型.v2-symbol.json",
        ]  # fmt: skip
        mx.mod.Module.load(kind, 12345, load_optimizer_states=True)
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("how", ["set_params", "init_params", "load"])
def test_predicting_without_naming_the_label(how, tmp_path):
    """Inference with label_names=None gives the same predictions; the label is a parameter that is not read."""
    teacher = trained_module()
    args, aux = teacher.get_params()
    if how == "load":
        teacher.save_checkpoint(tmp_path / "net", 1)
        module = mx.mod.Module.load(tmp_path / "net", 1, label_names=None)
    else:
        module = mx.mod.Module(network(), label_names=None)
    module.bind([("data", (5, 4))], for_training=False)
    if how == "set_params":
        module.set_params(args, aux, allow_missing=True)
    else:
        module.init_params(arg_params=args, aux_params=aux)
    np.testing.assert_array_equal(module.predict(four_batches()).asnumpy(), teacher.predict(four_batches()).asnumpy())


def test_training_without_naming_the_label(tmp_path):
    """Training with label_names=None raises, since the label would be a parameter of zeros."""
    trained_module().save_checkpoint(tmp_path / "net", 1)
    for module in (
        mx.mod.Module.load(tmp_path / "net", 1, label_names=None),
        mx.mod.Module(network(), label_names=None),
    ):
        with pytest.raises(MXNetError, match="softmax_label"):
            module.fit(four_batches(), num_epoch=1)


def test_an_epoch_that_is_not_there(tmp_path):
    """Loading a missing epoch raises FileNotFoundError, which lists the existing files."""
    trained_module().save_checkpoint(tmp_path / "net", 7)
    with pytest.raises(FileNotFoundError, match=r"beside it there are net-0007\.params: .*net-0008\.params"):
        mx.model.load_checkpoint(tmp_path / "net", 8)
