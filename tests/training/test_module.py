"""Module: training, checkpoints, misuse, and the same bits on every engine and number of workers."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.training import weights
from weftplan.data.batch import DataBatch
from weftplan.data.ndarray_iter import NDArrayIter
from weftplan.errors import BindError, MXNetError, ParameterError, ShapeError
from weftplan.training.module.module import Module


def two_layers(dropout=0.0):
    """Return a classifier of two layers with batch normalization and optional dropout: 5 inputs, 3 classes."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="fc1")
    net = mx.sym.Activation(net, act_type="relu")
    if dropout:
        net = mx.sym.Dropout(net, p=dropout)
    net = mx.sym.BatchNorm(net, name="bn")
    net = mx.sym.FullyConnected(net, num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def blobs(n=120):
    """Return (samples, labels) of three separable clusters."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    centres = rng.standard_normal((3, 5)) * 3
    return (centres[labels] + rng.standard_normal((n, 5))).astype("float32"), labels.astype("float32")


def fit(contexts, *, epochs=5, kvstore="device", dropout=0.0, seed=1, **kwargs):
    """Train a module on :func:`blobs`; return (module, iterator)."""
    mx.random.seed(seed)
    data, labels = blobs()
    it = NDArrayIter(data, labels, batch_size=30, shuffle=True)
    module = Module(two_layers(dropout), context=contexts)
    module.fit(
        it,
        num_epoch=epochs,
        kvstore=kvstore,
        **{
            "optimizer_params": {"learning_rate": 0.2, "momentum": 0.9},
            "initializer": mx.init.Xavier(),
            **kwargs,
        },
    )
    return module, it


@pytest.mark.parametrize("contexts", [[mx.cpu()], [mx.cpu(0), mx.cpu(1)], [mx.cpu(i) for i in range(3)]])
@pytest.mark.parametrize("kvstore", ["local", "device", None])
def test_learns(contexts, kvstore):
    """Training reaches accuracy 0.95 on one, two and three contexts, with a store or without."""
    module, it = fit(contexts, kvstore=kvstore)
    assert module.score(it, "acc")[0][1] > 0.95
    assert module.predict(it).shape == (120, 3)


@pytest.mark.parametrize("engine", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("workers", [1, 4])
def test_same_bits_on_every_engine(engine, workers):
    """Two contexts with dropout give the same weight bits on every engine with 1 and 4 workers."""

    def train(kind, count):
        with mx.engine.using(mx.engine.create(kind, cpu_workers=count)):
            module, _ = fit([mx.cpu(0), mx.cpu(1)], epochs=2, dropout=0.3)
            return weights(module)

    base = train("NaiveEngine", 1)
    got = train(engine, workers)
    assert base.keys() == got.keys()
    for name, value in base.items():
        assert np.array_equal(value, got[name]), name


def test_seed_matters():
    """Another seed gives other weights, so the comparison of engines is able to fail."""
    a, _ = fit([mx.cpu()], epochs=1, seed=1)
    b, _ = fit([mx.cpu()], epochs=1, seed=2)
    assert not np.array_equal(weights(a)["fc1_weight"], weights(b)["fc1_weight"])


def test_allocated_equals_planned():
    """Each executor allocates exactly its planned peak."""
    module, _ = fit([mx.cpu(0), mx.cpu(1)], epochs=1)
    for executor in module.group.executors:
        assert executor.allocated_bytes == executor.memory_plan.peak
        assert executor.memory_plan.lower_bound <= executor.memory_plan.peak <= executor.memory_plan.unshared_bytes


@pytest.mark.parametrize("count", [1, 2])
def test_checkpoint_round_trip(tmp_path, count):
    """A module loaded from a checkpoint with optimizer states makes the same next step.

    With two contexts a checkpoint averages the moving statistics, which training does not read; so only parameters are
    compared.
    """
    prefix = tmp_path / "net"
    contexts = [mx.cpu(i) for i in range(count)]
    whole, it = fit(contexts, epochs=2)
    whole.save_checkpoint(prefix, 2, save_optimizer_states=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net-0002.params", "net-0002.states", "net-symbol.json"]
    reloaded = Module.load(prefix, 2, load_optimizer_states=True, context=contexts)
    reloaded.bind(it.provide_data, it.provide_label)
    reloaded.init_params()
    reloaded.init_optimizer(kvstore="device", optimizer_params={"learning_rate": 0.2, "momentum": 0.9})
    it.reset()
    batch = it.next()
    for module in (whole, reloaded):
        module.forward_backward(batch)
        module.update()
    for name, value in weights(whole).items():
        if count == 1 or "moving" not in name:
            assert np.array_equal(value, weights(reloaded)[name]), name


def test_other_batch_size_is_rebound():
    """A batch of another size runs without changing the weights."""
    module, _ = fit([mx.cpu()], epochs=1)
    data, labels = blobs()
    before = weights(module)
    module.forward(DataBatch([mx.nd.array(data[:7])], [mx.nd.array(labels[:7])]), is_train=False)
    assert module.get_outputs()[0].shape == (7, 3)
    assert all(np.array_equal(before[n], v) for n, v in weights(module).items())


def test_input_gradients_and_fixed_parameters():
    """inputs_need_grad gives the gradient of the data; a fixed parameter does not change."""
    data, labels = blobs()
    module = Module(two_layers(), context=[mx.cpu(0), mx.cpu(1)], fixed_param_names=["fc1_weight"])
    module.bind([("data", (30, 5))], [("softmax_label", (30,))], inputs_need_grad=True)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore="local", optimizer_params={"learning_rate": 1.0})
    before = weights(module)
    module.forward_backward(DataBatch([mx.nd.array(data[:30])], [mx.nd.array(labels[:30])]))
    module.update()
    assert module.get_input_grads()[0].shape == (30, 5)
    assert np.abs(module.get_input_grads()[0].asnumpy()).max() > 0
    after = weights(module)
    assert np.array_equal(before["fc1_weight"], after["fc1_weight"])
    assert not np.array_equal(before["fc2_weight"], after["fc2_weight"])


def test_steps_in_the_wrong_order():
    """A step in the wrong order raises; the error names the missing step."""
    module = Module(two_layers())
    batch = DataBatch([mx.nd.zeros((3, 5))], [mx.nd.zeros((3,))])
    with pytest.raises(MXNetError, match="not bound"):
        module.forward(batch)
    with pytest.raises(MXNetError, match="not bound"):
        module.init_params()
    module.bind([("data", (3, 5))], [("softmax_label", (3,))])
    with pytest.raises(MXNetError, match="init_params"):
        module.forward(batch)
    module.init_params()
    with pytest.raises(MXNetError, match="init_optimizer"):
        module.update()
    with pytest.raises(MXNetError, match="num_epoch"):
        module.fit(NDArrayIter(np.zeros((3, 5)), np.zeros(3), 3))


def test_bad_names_and_shapes():
    """Unknown names, missing or misshapen parameters, and a batch smaller than the number of contexts raise."""
    with pytest.raises(BindError, match=r"data_names \['x'\]"):
        Module(two_layers(), data_names=["x"])
    with pytest.raises(BindError, match="fixed_param_names"):
        Module(two_layers(), fixed_param_names=["nope"])
    assert Module(two_layers(), fixed_param_names=["data", "softmax_label", "fc1_bias"]).fixed_param_names == [
        "fc1_bias"
    ]
    module = Module(two_layers(), context=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(BindError, match="cannot be split over 2 contexts"):
        module.bind([("data", (1, 5))], [("softmax_label", (1,))])
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    with pytest.raises(ShapeError, match=r"'fc1_weight': the network needs \(16, 5\), got \(2, 2\)"):
        module.init_params(arg_params={"fc1_weight": mx.nd.zeros((2, 2))}, aux_params={}, allow_missing=True)
    with pytest.raises(MXNetError, match="missing from the given"):
        module.init_params(arg_params={}, aux_params={})
    with pytest.raises(MXNetError, match="unknown names"):
        module.init_params(arg_params={"zzz": mx.nd.zeros((1,))}, allow_missing=True)


def test_contexts_agree_on_moving_statistics_after_an_epoch():
    """Contexts have different moving statistics during an epoch; ``fit`` averages them at its end."""
    net = mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc"), name="bn")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    rng = np.random.default_rng(5)
    data = mx.io.NDArrayIter(rng.random((40, 4)), rng.integers(0, 3, 40), batch_size=8)
    module = mx.mod.Module(net, context=[mx.cpu(0), mx.cpu(1)])
    differed = []

    def look(param):
        first, second = (executor.aux_dict["bn_moving_mean"].asnumpy() for executor in module.group.executors)
        differed.append(not np.array_equal(first, second))

    module.fit(data, num_epoch=2, batch_end_callback=look, initializer=mx.init.Uniform(0.5))
    first, second = (executor.aux_dict["bn_moving_mean"].asnumpy() for executor in module.group.executors)
    np.testing.assert_array_equal(first, second)
    assert all(differed)


def test_without_a_store_parameters_are_the_average_of_the_contexts():
    """Without a store each context trains alone; get_params averages them, and so does the end of an epoch."""
    apart = []

    def context_weights():
        return [executor.arg_dict["fc1_weight"].asnumpy() for executor in module.group.executors]

    def look(param):
        first, second = context_weights()
        assert not np.array_equal(first, second)
        np.testing.assert_array_equal(module.get_params()[0]["fc1_weight"].asnumpy(), (first + second) / 2)
        apart.append(param.nbatch)

    data, labels = blobs()
    module = Module(two_layers(), context=[mx.cpu(0), mx.cpu(1)])
    module.fit(NDArrayIter(data, labels, batch_size=30), num_epoch=2, kvstore=None, batch_end_callback=look)
    assert apart == [0, 1, 2, 3] * 2
    first, second = context_weights()
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kvstore", ["local", "device"])
@pytest.mark.shows("MXNET_UPDATE_ON_KVSTORE")
def test_updating_on_the_store_or_on_the_devices_is_the_same(optimizer, kvstore, monkeypatch):
    """MXNET_UPDATE_ON_KVSTORE decides where the optimizer runs and does not change the weights."""
    results = []
    for where in ("0", "1"):
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", where)
        settings = {"learning_rate": 0.1, "wd": 0.01, **({"momentum": 0.9} if optimizer == "sgd" else {})}
        module, _ = fit(
            [mx.cpu(0), mx.cpu(1)], epochs=2, kvstore=kvstore, optimizer=optimizer, optimizer_params=settings
        )
        assert module._update_on_kvstore == (where == "1")
        first, second = (executor.arg_dict for executor in module.group.executors)
        for name in module.param_names:
            np.testing.assert_array_equal(first[name].asnumpy(), second[name].asnumpy(), err_msg=name)
        results.append(module.get_params()[0])
    for name, value in results[0].items():
        np.testing.assert_array_equal(value.asnumpy(), results[1][name].asnumpy(), err_msg=name)


def test_a_kvstore_that_is_none_of_its_kind():
    """A number as ``kvstore`` raises."""
    with pytest.raises(MXNetError, match="kvstore must be a name such as 'device', a store or None, got 3"):
        fit([mx.cpu(0)], kvstore=3)


@pytest.mark.parametrize("contexts", [1, 2])
def test_states_stay_from_batch_to_batch(contexts):
    """State arguments are no parameters; they start as zeros and keep the values of ``set_states``."""
    state = mx.sym.Variable("state")
    new = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc") + state
    module = mx.mod.Module(new, label_names=None, state_names=["state"], context=[mx.cpu(i) for i in range(contexts)])
    module.bind([("data", (4, 3))], for_training=False)
    module.init_params(mx.init.One())
    assert module.param_names == ["fc_weight", "fc_bias"]
    batch = mx.io.DataBatch([mx.nd.zeros((4, 3))])
    results = []
    for _ in range(3):
        module.forward(batch)
        results.append(module.get_outputs()[0].asnumpy())
        module.set_states(states=module.get_outputs(merge_multi_context=False))
    bias = module.get_params()[0]["fc_bias"].asnumpy()
    for k, result in enumerate(results):
        np.testing.assert_allclose(result, np.tile(bias * (k + 1), (4, 1)))
    module.set_states(value=7)
    np.testing.assert_array_equal(module.get_states()[0].asnumpy(), np.full((4, 2), 7))
    assert len(module.get_states(merge_multi_context=False)[0]) == contexts
    with pytest.raises(ParameterError, match="either states or value"):
        module.set_states()
