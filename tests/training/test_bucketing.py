"""BucketingModule trains one set of parameters with batches of several sequence lengths."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import BindError, MXNetError

BATCH, LENGTHS = 4, (2, 3, 5)


def network(length):
    """Return (symbol, data names, label names) of a recurrent classifier of ``length`` words of three numbers each."""
    data = mx.sym.Variable("data")
    weights = [mx.sym.Variable(name) for name in ("in_weight", "in_bias", "state_weight")]
    state = None
    for t in range(length):
        word = mx.sym.Reshape(mx.sym.slice_axis(data, axis=1, begin=t, end=t + 1), shape=(-1, 3))
        new = mx.sym.FullyConnected(word, *weights[:2], num_hidden=4)
        if state is not None:
            new = new + mx.sym.FullyConnected(state, weights[2], num_hidden=4, no_bias=True)
        state = mx.sym.Activation(new, act_type="tanh")
    return (
        mx.sym.SoftmaxOutput(mx.sym.FullyConnected(state, num_hidden=3, name="out"), name="softmax"),
        ["data"],
        ["softmax_label"],
    )


class Sentences(mx.io.DataIter):
    """An iterator over nine batches whose lengths alternate: 2, 3, 5, 2, ..."""

    def __init__(self):
        super().__init__(BATCH)
        rng = np.random.default_rng(0)
        self.batches = [
            mx.io.DataBatch(
                [mx.nd.array(rng.normal(size=(BATCH, length, 3)))],
                [mx.nd.array(rng.integers(0, 3, BATCH))],
                bucket_key=length,
                provide_data=[("data", (BATCH, length, 3))],
                provide_label=[("softmax_label", (BATCH,))],
            )
            for length in LENGTHS * 3
        ]
        self.reset()

    @property
    def provide_data(self):
        return [("data", (BATCH, max(LENGTHS), 3))]

    @property
    def provide_label(self):
        return [("softmax_label", (BATCH,))]

    def reset(self):
        self.left = iter(self.batches)

    def next(self):
        return next(self.left)


def trainable_module(contexts=1, **settings):
    """Return a bound module with initial parameters and a momentum optimizer."""
    module = mx.mod.BucketingModule(network, max(LENGTHS), context=[mx.cpu(i) for i in range(contexts)], **settings)
    module.bind(Sentences().provide_data, Sentences().provide_label)
    mx.random.seed(1)
    module.init_params(mx.init.Uniform(0.5))
    module.init_optimizer("device", optimizer_params={"learning_rate": 0.2, "momentum": 0.9})
    return module


@pytest.mark.parametrize("contexts", [1, 2])
def test_training_is_that_of_separate_modules(contexts):
    """Outputs and parameters equal those of a new Module per batch, which gets the current parameters."""
    module = trainable_module(contexts)
    args, _ = module.get_params()
    weights = {name: value.asnumpy().astype("float64") for name, value in args.items()}
    momentum = {name: np.zeros_like(value) for name, value in weights.items()}
    for batch in Sentences():
        alone = mx.mod.Module(network(batch.bucket_key)[0])
        alone.bind(batch.provide_data, batch.provide_label)
        alone.init_params(arg_params={n: mx.nd.array(v) for n, v in weights.items() if n in alone.param_names})
        alone.forward_backward(batch)
        module.forward_backward(batch)
        np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), alone.get_outputs()[0].asnumpy(), rtol=1e-4)
        module.update()
        for name, grads in zip(alone.param_names, alone.group.grad_arrays, strict=True):
            momentum[name] = 0.9 * momentum[name] - 0.2 * grads[0].asnumpy() / BATCH
            weights[name] = weights[name] + momentum[name]
    for name, value in module.get_params()[0].items():
        np.testing.assert_allclose(value.asnumpy(), weights[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_fit_score_and_predict(tmp_path):
    """fit, score and predict use all buckets; set_params and load_params change every bucket.

    The executors of all buckets share a memory pool.
    """
    module = mx.mod.BucketingModule(network, max(LENGTHS))
    data = Sentences()
    mx.random.seed(1)
    module.fit(
        data,
        eval_metric="ce",
        num_epoch=30,
        initializer=mx.init.Uniform(0.5),
        optimizer_params={"learning_rate": 0.3, "momentum": 0.9},
    )
    loss = module.score(data, "ce")[0][1]
    assert loss < 0.85  # of log(3) = 1.1
    assert module.predict(data).shape == (BATCH * 9, 3)
    module.save_params(tmp_path / "net.params")
    module.set_params({name: value * 0 for name, value in module.get_params()[0].items()}, {})
    assert module.score(data, "ce")[0][1] == pytest.approx(np.log(3))
    module.load_params(tmp_path / "net.params")
    assert module.score(data, "ce")[0][1] == pytest.approx(loss)
    executors = [bucket.group.executors[0] for bucket in module._buckets.values()]
    assert len(executors) == 3
    assert len({id(executor._memory.pool) for executor in executors}) == 1


def test_which_bucket():
    """A batch without a bucket key uses the default bucket; the module's shapes are those of the last bucket."""
    module = trainable_module()
    assert (module.bucket_key, module.output_names) == (5, ["softmax_output"])
    module.switch_bucket(2, [("data", (BATCH, 2, 3))], [("softmax_label", (BATCH,))])
    assert (module.bucket_key, module.data_shapes[0].shape) == (2, (BATCH, 2, 3))
    module.forward(mx.io.DataBatch([mx.nd.ones((BATCH, 5, 3))]), is_train=False)
    assert (module.bucket_key, module.output_shapes) == (5, [("softmax_output", (BATCH, 3))])
    module.forward(
        mx.io.DataBatch([mx.nd.ones((2, 2, 3))], bucket_key=2), is_train=False
    )  # fewer samples, known bucket
    assert module.get_outputs()[0].shape == (2, 3)


def test_monitors_watch_buckets_that_come_later():
    """A monitor reports outputs of buckets that are bound after ``install_monitor``."""
    module, monitor = trainable_module(), mx.mon.Monitor(1, pattern="softmax_output")
    module.install_monitor(monitor)
    for batch in Sentences().batches[:3]:
        monitor.tic()
        module.forward(batch, is_train=False)
        assert [name for _, name, _ in monitor.toc()] == ["softmax_output"]


def test_misuse():
    """A missing default key, an unbound module, and a new bucket without shapes or with other parameters raise."""
    with pytest.raises(BindError, match="needs default_bucket_key"):
        mx.mod.BucketingModule(network, None)
    unbound = mx.mod.BucketingModule(network, 5)
    for step in (lambda: unbound.forward(Sentences().batches[0]), lambda: unbound.switch_bucket(2, [])):
        with pytest.raises(MXNetError, match="not bound"):
            step()
    module = trainable_module()
    with pytest.raises(MXNetError, match=r"the first batch of bucket 3 must say its shapes: .*bucket_key=3"):
        module.forward(mx.io.DataBatch([mx.nd.ones((BATCH, 3, 3))], bucket_key=3))
    second = mx.mod.BucketingModule(
        lambda key: (mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name=f"fc{key}"), ["data"], None), 1
    )
    second.bind([("data", (2, 3))], for_training=False)
    second.init_params()
    with pytest.raises(BindError, match=r"bucket 2 has parameters \['fc2_weight', 'fc2_bias'\]"):
        second.switch_bucket(2, [("data", (2, 3))])
    assert second.bucket_key == 1


def test_a_checkpoint_of_buckets(tmp_path):
    """save_checkpoint writes parameters, keys and a symbol per bucket; the loaded module computes the same."""
    module = trainable_module()
    for batch in Sentences().batches[:3]:
        module.forward_backward(batch)
        module.update()
    prefix = tmp_path / "words"
    assert module.save_checkpoint(prefix, 3) == tmp_path / "words-0003.params"
    assert sorted(mx.nd.load(str(tmp_path / "words.buckets"))[0].asnumpy().tolist()) == sorted(LENGTHS)
    for length in LENGTHS:
        assert mx.sym.load(tmp_path / f"words-{length}-symbol.json").list_outputs() == ["softmax_output"]
    reloaded = mx.mod.BucketingModule.load(prefix, 3, sym_gen=network, default_bucket_key=max(LENGTHS))
    reloaded.bind(Sentences().provide_data, Sentences().provide_label)
    for name, value in module.get_params()[0].items():
        np.testing.assert_array_equal(reloaded.get_params()[0][name].asnumpy(), value.asnumpy())
    batch = Sentences().batches[1]
    for one in (module, reloaded):
        one.forward(batch, is_train=False)
    np.testing.assert_array_equal(module.get_outputs()[0].asnumpy(), reloaded.get_outputs()[0].asnumpy())
    with pytest.raises(BindError, match="sym_gen and default_bucket_key"):
        mx.mod.BucketingModule.load(prefix, 3)


@pytest.mark.parametrize("contexts", [1, 2])
def test_states_and_gradients_of_the_current_bucket(contexts):
    """States and input gradients are those of the last bucket used, merged or for each context."""

    def symbol_of(length):
        data, state = mx.sym.Variable("data"), mx.sym.Variable("state")
        last = mx.sym.Reshape(mx.sym.slice_axis(data, axis=1, begin=length - 1, end=length), shape=(-1, 3))
        return mx.sym.FullyConnected(last, num_hidden=2, name="fc") + state, ["data"], None

    module = mx.mod.BucketingModule(symbol_of, 5, context=[mx.cpu(i) for i in range(contexts)], state_names=["state"])
    module.bind([("data", (4, 5, 3))], inputs_need_grad=True)
    module.init_params(mx.init.One())
    for key in (5, 2):
        batch = mx.io.DataBatch([mx.nd.ones((4, key, 3))], bucket_key=key, provide_data=[("data", (4, key, 3))])
        module.forward(batch, is_train=True)
        module.set_states(value=key)
        assert [state.shape for state in module.get_states()] == [(4, 2)]
        assert module.get_states()[0].asnumpy().tolist() == [[key, key]] * 4
        assert len(module.get_states(merge_multi_context=False)[0]) == contexts
        want = np.zeros((4, key, 3))
        want[:, -1] = module.get_params()[0]["fc_weight"].asnumpy().sum(0)
        module.backward([mx.nd.ones((4, 2))])
        np.testing.assert_allclose(module.get_input_grads()[0].asnumpy(), want)
        parts = module.get_input_grads(merge_multi_context=False)
        np.testing.assert_allclose(np.concatenate([part.asnumpy() for part in parts[0]]), want)


def test_networks_and_parameters_in_memory():
    """``load_dict`` uses the given networks, and calls ``sym_gen`` for other buckets; bind sets the given parameters.

    The error about missing arguments lists their names.
    """
    trained = trainable_module()
    args, aux = trained.get_params()
    renamed = mx.sym.Group([network(2)[0]])
    calls = []

    def generate(length):
        calls.append(length)
        return network(length)

    networks = {5: network(5)[0], 2: renamed}
    module = mx.mod.BucketingModule.load_dict(networks, generate, 5, args, aux)
    assert module.symbol is networks[5]
    module.bind(Sentences().provide_data, Sentences().provide_label, for_training=False)
    for batch in Sentences():
        module.forward(batch, is_train=False)
        trained.forward(batch, is_train=False)
        assert module.get_outputs()[0].asnumpy().tobytes() == trained.get_outputs()[0].asnumpy().tobytes()
        assert (module.symbol is renamed) == (batch.bucket_key == 2)
    with pytest.raises(BindError, match="default_bucket_key, aux_params not given"):
        mx.mod.BucketingModule.load_dict(networks, generate, None, args)
