"""Mixed precision: float16 or bfloat16 computation, float32 weights, and a loss scale that adapts."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.training import weights
from weftplan.errors import BindError, ParameterError
from weftplan.training.fit.checkpoint_writer import Checkpoints, read_snapshot
from weftplan.training.fit.precision import SCALE, LossScale, lowered


def network():
    """Return a classifier with a convolution, batch normalization and a fully connected layer."""
    net = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=4, kernel=(3, 3), name="conv")
    net = mx.sym.BatchNorm(net, fix_gamma=False, name="bn")
    net = mx.sym.Activation(net, act_type="relu", name="act")
    net = mx.sym.FullyConnected(mx.sym.Flatten(net, name="flat"), num_hidden=3, name="fc")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def data(scale=1.0):
    """Return an iterator over images whose class is given by their brightness; ``scale`` multiplies the pixels."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 3, 48)
    images = rng.random((48, 1, 6, 6)) * 0.3 + labels[:, None, None, None] * 0.5
    return mx.io.NDArrayIter(images.astype("float32") * scale, labels, batch_size=8, shuffle=True)


def fit(dtype="float16", *, module=None, make=data, contexts=None, **settings):
    """Train ``module`` (default: a new one) for four epochs by default with mixed precision ``dtype``; return it."""
    mx.random.seed(3)
    module = mx.mod.Module(network(), context=contexts or mx.cpu()) if module is None else module
    module.fit(
        make(),
        num_epoch=settings.pop("num_epoch", 4),
        kvstore="device",
        optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        initializer=mx.init.Xavier(),
        mixed_precision=dtype,
        **settings,
    )
    return module


def test_what_runs_in_which_dtype():
    """Products and the nodes after them are float16; parameters, losses and outputs are float32."""
    low = lowered(network(), "float16")
    internals = low.get_internals()
    _, types, _ = internals.infer_type(**dict.fromkeys(low.list_arguments(), "float32"))
    by_name = dict(zip(internals.list_outputs(), [np.dtype(one).name for one in types], strict=True))
    assert by_name["conv_output"] == by_name["act_output"] == by_name["fc_output"] == "float16"
    assert by_name["bn_output"] == "float16"
    assert by_name["softmax_output"] == by_name["softmax_scaled_output"] == "float32"
    assert {by_name[name] for name in ("conv_weight", "fc_weight", "bn_gamma", SCALE)} == {"float32"}
    assert low.list_outputs() == network().list_outputs()
    assert set(low.list_arguments()) == {*network().list_arguments(), SCALE}
    assert low.list_auxiliary_states() == network().list_auxiliary_states()


def first_batch():
    """Return an iterator over the first batch of :func:`data`."""
    batches = data()
    one = next(batches)
    return mx.io.NDArrayIter(one.data[0], one.label[0], batch_size=8)


def test_it_learns_as_float32_does():
    """A float16 step moves the float32 weights as a float32 step does, up to rounding.

    The module's symbol keeps its arguments, and predictions are float32.
    """
    low, whole = fit(make=first_batch, num_epoch=1), fit(None, make=first_batch, num_epoch=1)
    for name, value in weights(whole).items():
        assert weights(low)[name].dtype == np.float32
        np.testing.assert_allclose(weights(low)[name], value, rtol=0.02, atol=4e-3)
    assert low.symbol.list_arguments() == whole.symbol.list_arguments()
    assert low.predict(data()).dtype == np.float32


def test_a_step_does_not_depend_on_the_scale():
    """Loss scales 1 and 1024 give the same weights after a step, up to float16's smallest values."""
    ends = []
    for scale in (1.0, 1024.0):
        mx.random.seed(3)
        module = mx.mod.Module(network())
        batches = data()
        module.set_precision("float16")
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params(mx.init.Xavier())
        module.init_optimizer(None, "sgd", {"learning_rate": 0.1})
        scaling = LossScale(scale)
        module.set_loss_scale(scale)
        module.forward_backward(next(batches))
        assert scaling.update(module)
        ends.append(weights(module))
    for name, value in ends[0].items():
        np.testing.assert_allclose(ends[1][name], value, rtol=1e-3, atol=1e-5)


def test_small_gradients_survive():
    """Gradients below float16's smallest value change weights only with a loss scale."""

    def weights_change(scale):
        net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc1")
        net = mx.sym.FullyConnected(net, num_hidden=2, name="fc2")
        net = mx.sym.SoftmaxOutput(net, grad_scale=1e-9, name="softmax")
        mx.random.seed(1)
        module = mx.mod.Module(net)
        module.set_precision("float16")
        module.bind([("data", (4, 3))], [("softmax_label", (4,))])
        module.init_params(mx.init.Xavier())
        before = weights(module)
        module.init_optimizer(None, "sgd", {"learning_rate": 1e8})
        module.set_loss_scale(scale)
        batch = mx.io.DataBatch([mx.nd.ones((4, 3))], [mx.nd.zeros((4,))])
        module.forward_backward(batch)
        LossScale(scale).update(module)
        return any((before[name] != value).any() for name, value in weights(module).items())

    assert not weights_change(1.0)
    assert weights_change(2.0**16)


def test_an_overflow_leaves_an_update_out_and_halves_the_scale():
    """A step with infinite gradients is skipped and halves the scale; ``every`` good steps double it."""
    mx.random.seed(3)
    module = mx.mod.Module(network(), context=[mx.cpu(0), mx.cpu(1)])
    batches = data()
    module.set_precision("float16")
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params(mx.init.Xavier())
    module.init_optimizer("device", "sgd", {"learning_rate": 0.1})
    scaling = LossScale(2.0**24, every=2)
    module.set_loss_scale(scaling.scale)
    batch = next(batches)
    before = weights(module)
    module.forward_backward(batch)
    assert not scaling.update(module)
    after = weights(module)
    for name in module.param_names:
        np.testing.assert_array_equal(after[name], before[name])
    assert (scaling.scale, scaling.skipped, module.loss_scale) == (2.0**23, 1, 2.0**23)
    while not scaling.update(module):
        module.forward_backward(batch)
    scale = scaling.scale
    assert scale < 2.0**23
    module.forward_backward(batch)
    assert scaling.update(module)
    assert scaling.scale == 2 * scale
    assert module.group.executors[1].arg_dict[SCALE].asscalar() == 2 * scale
    assert module._states_holder().optimizer.rescale_grad == 1 / 8


def test_the_scale_is_part_of_a_checkpoint(tmp_path):
    """A checkpoint includes the loss scale: a resumed run has the bits of an uninterrupted run."""

    class Stopped(BaseException):
        pass

    def stop(param):
        if (param.epoch, param.nbatch) == (1, 3):
            raise Stopped

    with pytest.raises(Stopped):
        fit(batch_end_callback=stop, checkpoint=tmp_path / "run", every=2)
    facts = read_snapshot(Checkpoints(tmp_path / "run").files()[-1]).facts
    assert facts["scaling"]["good"] == facts["step"] - facts["scaling"]["skipped"] == 8
    resumed, whole = fit(checkpoint=tmp_path / "run", every=2, resume=True), fit()
    for name, value in weights(whole).items():
        np.testing.assert_array_equal(weights(resumed)[name], value)
    with pytest.raises(ParameterError, match="mixed_precision was 'float16', is now None"):
        fit(None, checkpoint=tmp_path / "run", every=2, resume=True)


@pytest.mark.parametrize("settings", [{"micro_batches": 2}, {"contexts": [mx.cpu(0), mx.cpu(1)]}], ids=["micro", "two"])
def test_with_micro_batches_and_devices(settings):
    """Mixed precision with micro-batches or two devices moves weights as float32 does, up to rounding."""
    module, whole = (fit(dtype, make=first_batch, num_epoch=1, **settings) for dtype in ("float16", None))
    for name, value in weights(whole).items():
        np.testing.assert_allclose(weights(module)[name], value, rtol=0.02, atol=4e-3)


def test_buckets():
    """Each bucket of a BucketingModule has the same loss scale."""

    def generate(key):
        net = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=7, output_dim=4, name="embed")
        net = mx.sym.FullyConnected(mx.sym.Reshape(net, shape=(-1, 4)), num_hidden=7, name="fc")
        label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
        return mx.sym.SoftmaxOutput(net, label, name="softmax"), ("data",), ("softmax_label",)

    mx.random.seed(1)
    rng = np.random.default_rng(0)
    sentences = [list(rng.integers(1, 7, length)) for length in (3, 5) for _ in range(8)]
    it = mx.rnn.BucketSentenceIter(sentences, 4, buckets=[3, 5], invalid_label=0)
    module = mx.mod.BucketingModule(generate, it.default_bucket_key)
    module.fit(it, num_epoch=1, eval_metric=mx.metric.Perplexity(0), mixed_precision="float16")
    for bucket in module._buckets.values():
        assert bucket.group.executors[0].arg_dict[SCALE].asscalar() == module.loss_scale == 2.0**10


@pytest.mark.parametrize(
    ("dtype", "words"),
    [("int8", "must be 'float16', 'bfloat16' or None, got 'int8'"), (16, "got 16")],
)
def test_modes_that_there_are_not(dtype, words):
    """An unknown dtype raises before bind."""
    module = mx.mod.Module(network())
    with pytest.raises(ParameterError, match=words):
        fit(dtype, module=module)
    assert not module.binded


def test_bfloat16():
    """bfloat16 uses loss scale 1; a step moves the float32 weights as a float32 step does, up to rounding."""
    pytest.importorskip("ml_dtypes")
    low, whole = (fit(dtype, make=first_batch, num_epoch=1) for dtype in ("bfloat16", None))
    assert low.loss_scale == 1.0
    types = dict.fromkeys(lowered(network(), "bfloat16").list_arguments(), "float32")
    internals = lowered(network(), "bfloat16").get_internals()
    by_name = dict(
        zip(internals.list_outputs(), [np.dtype(one).name for one in internals.infer_type(**types)[1]], strict=True)
    )
    assert by_name["conv_output"] == "bfloat16"
    for name, value in weights(whole).items():
        assert weights(low)[name].dtype == np.float32
        np.testing.assert_allclose(weights(low)[name], value, rtol=0.1, atol=0.03)


def test_bfloat16_without_its_package(monkeypatch):
    """Without ml_dtypes, bfloat16 raises before bind; the error names the package."""
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    module = mx.mod.Module(network())
    with pytest.raises(ParameterError, match="pip install ml_dtypes"):
        fit("bfloat16", module=module)
    assert not module.binded


def test_a_module_that_was_bound_in_float32():
    """A module bound in float32 is refused unless force_rebind=True."""
    module = fit(None, num_epoch=1)
    with pytest.raises(BindError, match="pass force_rebind=True"):
        fit(module=module, num_epoch=1)
    fit(module=module, num_epoch=1, force_rebind=True)
    assert module.loss_scale == 2.0**10
