"""Schedules, metrics, iterators, optimizers and initializers, compared with results by hand or NumPy."""

import math

import numpy as np
import pytest

import weftplan as mx
from weftplan.data.ndarray_iter import NDArrayIter
from weftplan.errors import ParameterError, ShapeError
from weftplan.training.initializers import initializer as init
from weftplan.training.metrics import metric
from weftplan.training.optimizers import lr_scheduler
from weftplan.training.optimizers import sgd_adam as optimizers


def test_schedules():
    """Each schedule has the expected rate at chosen updates."""
    multi = lr_scheduler.MultiFactorScheduler([10, 20], factor=0.1, base_lr=1.0)
    assert [multi(n) for n in (1, 10, 11, 20, 21)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    factor = lr_scheduler.FactorScheduler(10, factor=0.5, base_lr=1.0, stop_factor_lr=0.3)
    assert [factor(n) for n in (1, 10, 11, 21, 31)] == [1, 1, 0.5, 0.3, 0.3]
    poly = lr_scheduler.PolyScheduler(100, base_lr=1.0, pwr=1)
    assert [poly(n) for n in (0, 50, 100, 200)] == pytest.approx([1, 0.5, 0, 0])
    cosine = lr_scheduler.CosineScheduler(100, base_lr=2.0, final_lr=1.0)
    assert [cosine(n) for n in (0, 50, 100)] == pytest.approx([2, 1.5, 1])
    warm = lr_scheduler.CosineScheduler(100, base_lr=1.0, warmup_steps=10)
    assert warm(5) == pytest.approx(0.5)
    assert warm(10) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lr_scheduler.FactorScheduler(0),
        lambda: lr_scheduler.FactorScheduler(5, factor=1.5),
        lambda: lr_scheduler.MultiFactorScheduler([5, 5]),
        lambda: lr_scheduler.PolyScheduler(0),
        lambda: lr_scheduler.CosineScheduler(10, warmup_steps=-1),
        lambda: lr_scheduler.CosineScheduler(10, base_lr=0.1, warmup_begin_lr=1.0),
        lambda: optimizers.create("sgd", learning_rate=-1),
        lambda: optimizers.create("sdg"),
        lambda: init.create("xavierr"),
        lambda: init.Xavier(factor_type="both"),
        lambda: metric.create("acurracy"),
        lambda: metric.TopKAccuracy(0),
    ],
)
def test_bad_settings(make):
    """Invalid settings raise ParameterError at creation."""
    with pytest.raises(ParameterError):
        make()


def test_metrics():
    """Metrics of a small batch equal values computed by hand."""
    scores = mx.nd.array([[0.3, 0.7], [0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    labels = mx.nd.array([1, 0, 0, 1])
    accuracy = metric.create("acc")
    accuracy.update([labels], [scores])
    assert accuracy.get() == ("accuracy", 0.5)
    accuracy.reset()
    assert math.isnan(accuracy.get()[1])
    entropy = metric.create("ce")
    entropy.update([labels], [scores])
    assert entropy.get()[1] == pytest.approx(-np.log([0.7, 0.9, 0.2, 0.4]).mean())
    mse = metric.create("mse")
    mse.update([mx.nd.array([1, 2])], [mx.nd.array([2, 4])])
    mse.update([mx.nd.array([0, 0])], [mx.nd.array([0, 1])])
    assert mse.get()[1] == pytest.approx((2.5 + 0.5) / 2)
    top2 = metric.TopKAccuracy(top_k=2)
    top2.update([mx.nd.array([2, 0])], [mx.nd.array([[0.1, 0.5, 0.4], [0.1, 0.5, 0.4]])])
    assert top2.get() == ("top_k_accuracy_2", 0.5)
    both = metric.create(["acc", lambda label, pred: float(pred.max())])
    both.update([labels], [scores])
    assert dict(both.get_name_value())["accuracy"] == 0.5
    assert both.get()[1][1] == pytest.approx(0.9)


def test_metric_shapes_that_do_not_fit():
    """Labels and predictions of unequal shape or number raise; the error states both shapes or numbers."""
    with pytest.raises(ShapeError, match=r"\(3,\).*\(4, 2\)"):
        metric.create("acc").update([np.zeros(3)], [np.zeros((4, 2))])
    with pytest.raises(ShapeError, match="1 label arrays but 2"):
        metric.create("acc").update([np.zeros(3)], [np.zeros((3, 2))] * 2)


def test_iterator_order_padding_and_names():
    """NDArrayIter pads the last batch with the first samples, or on request discards it or rolls it over."""
    data = np.arange(20, dtype=np.float32).reshape(10, 2)
    it = NDArrayIter({"a": data, "b": data[:, 0]}, np.arange(10), batch_size=4)
    assert [d.name for d in it.provide_data] == ["a", "b"]
    assert it.provide_data[0].shape == (4, 2)
    assert it.provide_label[0].name == "softmax_label"
    batches = list(it)
    assert [b.pad for b in batches] == [0, 0, 2]
    assert batches[-1].label[0].asnumpy().tolist() == [8, 9, 0, 1]
    assert len(list(NDArrayIter(data, batch_size=4, last_batch_handle="discard"))) == 2
    rolling = NDArrayIter(data, np.arange(10), batch_size=4, last_batch_handle="roll_over")
    assert [b.label[0].asnumpy().tolist() for b in rolling] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    rolling.reset()
    assert [b.label[0].asnumpy().tolist() for b in rolling] == [[8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_iterator_shuffles_by_seed():
    """One seed gives the same orders, different in each epoch; each sample comes once."""
    data = np.arange(50, dtype=np.float32)

    def epochs():
        mx.random.seed(11)
        it = NDArrayIter(data, batch_size=10, shuffle=True)
        first = [x for b in it for x in b.data[0].asnumpy()]
        it.reset()
        return first, [x for b in it for x in b.data[0].asnumpy()]

    (a1, a2), (b1, b2) = epochs(), epochs()
    assert (a1, a2) == (b1, b2)
    assert a1 != a2
    assert sorted(a1) == sorted(a2) == data.tolist()


def test_iterator_bad_input():
    """Unequal numbers of samples, a batch larger than the data, and an unknown last_batch_handle raise."""
    with pytest.raises(ShapeError, match="differ in number of samples"):
        NDArrayIter(np.zeros((3, 1)), np.zeros(4), batch_size=1)
    with pytest.raises(ParameterError, match=r"batch_size must be an integer in \[1, 3\].* got 4"):
        NDArrayIter(np.zeros((3, 1)), batch_size=4, last_batch_handle="roll_over")
    with pytest.raises(ParameterError, match="last_batch_handle"):
        NDArrayIter(np.zeros((3, 1)), batch_size=1, last_batch_handle="drop")


def rescale_and_clip(g, rescale, clip):
    """Return the gradient times ``rescale``, clipped to ``clip`` unless it is None."""
    g = g * rescale
    return np.clip(g, -clip, clip) if clip is not None else g


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_against_numpy(momentum, clip):
    """Five SGD steps with weight decay, momentum and clipping equal the formula."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 3))
    weight = mx.nd.array(w, dtype="float64")
    opt = optimizers.create(
        "sgd",
        learning_rate=0.1,
        momentum=momentum,
        wd=0.01,
        clip_gradient=clip,
        rescale_grad=0.5,
        param_idx2name={0: "fc_weight"},
    )
    update = optimizers.get_updater(opt)
    m = np.zeros_like(w)
    for _ in range(5):
        g = rng.standard_normal((4, 3))
        update(0, mx.nd.array(g, dtype="float64"), weight)
        m = momentum * m - 0.1 * (rescale_and_clip(g, 0.5, clip) + 0.01 * w)
        w = w + m
    np.testing.assert_allclose(weight.asnumpy(), w, rtol=1e-12)


def test_adam_against_numpy():
    """Five Adam steps equal the formula, with bias correction in the learning rate."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((5,))
    weight = mx.nd.array(w, dtype="float64")
    update = optimizers.get_updater(optimizers.create("adam", learning_rate=0.01))
    mean, var = np.zeros_like(w), np.zeros_like(w)
    for t in range(1, 6):
        g = rng.standard_normal((5,))
        update("w", mx.nd.array(g, dtype="float64"), weight)
        mean = 0.9 * mean + 0.1 * g
        var = 0.999 * var + 0.001 * g * g
        lr = 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        w = w - lr * mean / (np.sqrt(var) + 1e-8)
    np.testing.assert_allclose(weight.asnumpy(), w, rtol=1e-10)


def test_multipliers():
    """Weight decay spares biases; lr_mult comes from the symbol or is set by name."""
    symbol = mx.sym.Variable("a_weight", lr_mult=2.0) + mx.sym.Variable("b_bias")
    opt = optimizers.create("sgd", learning_rate=0.5, wd=0.1, sym=symbol, param_idx2name={0: "a_weight", 1: "b_bias"})
    assert opt._rates(0) == (1.0, 0.1)
    assert opt._rates(1) == (0.5, 0.0)
    opt.set_lr_mult({"b_bias": 0.0})
    assert opt._rates(1) == (0.0, 0.0)


def test_scheduler_drives_the_optimizer():
    """The scheduler sets the learning rate by the number of updates; setting it by hand raises."""
    opt = optimizers.create("sgd", learning_rate=1.0, lr_scheduler=lr_scheduler.FactorScheduler(1, 0.5))
    update = optimizers.get_updater(opt)
    weight = mx.nd.zeros((1,))
    for _ in range(3):
        update(0, mx.nd.ones((1,)), weight)
    assert weight.asscalar() == pytest.approx(-(1.0 + 0.5 + 0.25))
    with pytest.raises(ParameterError, match="lr_scheduler"):
        opt.set_learning_rate(1.0)


def initialized_values(rule, shape=(200, 100), name="fc_weight"):
    """Return the values that ``rule`` gives to an array after a fixed seed."""
    mx.random.seed(5)
    arr = mx.nd.empty(shape)
    rule(init.InitDesc(name), arr)
    return arr.asnumpy()


def test_initializers_statistics_and_seeds():
    """Initializers have the documented ranges and deviations; one seed gives the same bits."""
    assert np.abs(initialized_values(init.Uniform(0.5))).max() <= 0.5
    assert initialized_values(init.Normal(0.2)).std() == pytest.approx(0.2, rel=0.02)
    xavier = initialized_values(init.Xavier())
    assert np.abs(xavier).max() == pytest.approx(math.sqrt(3 / 150), rel=0.01)
    gaussian = initialized_values(init.MSRAPrelu(slope=0))
    assert gaussian.std() == pytest.approx(math.sqrt(2 / 150), rel=0.02)
    assert np.array_equal(xavier, initialized_values(init.Xavier()))
    assert (initialized_values(init.Zero()) == 0).all()
    assert (initialized_values(init.One()) == 1).all()
    assert (initialized_values(init.Constant(3)) == 3).all()


def test_initializer_chooses_by_name_and_attribute():
    """A parameter's name decides its value; its ``__init__`` attribute takes precedence; unknown names raise."""
    rule = init.Uniform()
    for name, want in (("x_bias", 0), ("x_gamma", 1), ("x_beta", 0), ("x_moving_mean", 0), ("x_moving_var", 1)):
        assert (initialized_values(rule, (3,), name) == want).all()
    arr = mx.nd.empty((2,))
    rule(init.InitDesc("anything", {"__init__": init.Constant(4).dumps()}), arr)
    assert arr.asnumpy().tolist() == [4, 4]
    with pytest.raises(ParameterError, match="no rule to initialize 'strange'"):
        rule("strange", arr)
    with pytest.raises(ParameterError, match="at least 2 dimensions"):
        init.Xavier()("w_weight", arr)
