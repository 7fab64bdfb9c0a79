"""Optimizers from papers, compared with the papers' formulas in NumPy.

A formula takes (weight, gradient, state, step number, learning rate, weight decay, settings), updates ``state``, and
returns the new weight.
"""

import math

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan.errors import ParameterError, ScheduledRateError


def ftrl(w, g, s, t, lr, wd, p):
    """Return the next weight by McMahan et al., 2013, algorithm 1; weight decay is the L2 coefficient."""
    s["z"] = s["z"] + g - (np.sqrt(s["n"] + g * g) - np.sqrt(s["n"])) * w / lr
    s["n"] = s["n"] + g * g
    shrunk = np.sign(s["z"]) * p["lamda1"] - s["z"]
    return np.where(np.abs(s["z"]) > p["lamda1"], shrunk / ((p["beta"] + np.sqrt(s["n"])) / lr + wd), 0)


def ftml(w, g, s, t, lr, wd, p):
    """Return the next weight by Zheng and Kwok, 2017, algorithm 1; weight decay is added to the gradient."""
    g = g + wd * w
    s["v"] = p["beta2"] * s["v"] + (1 - p["beta2"]) * g * g
    d = (1 - p["beta1"] ** t) / lr * (np.sqrt(s["v"] / (1 - p["beta2"] ** t)) + p["epsilon"])
    s["z"] = p["beta1"] * s["z"] + (1 - p["beta1"]) * g - (d - p["beta1"] * s["d"]) * w
    s["d"] = d
    return -s["z"] / d


def lamb(w, g, s, t, lr, wd, p):
    """Return the next weight by You et al., 2020, algorithm 2, with bounds for the norm of the weight."""
    s["m"] = p["beta1"] * s["m"] + (1 - p["beta1"]) * g
    s["v"] = p["beta2"] * s["v"] + (1 - p["beta2"]) * g * g
    fix = (1 - p["beta1"] ** t, 1 - p["beta2"] ** t) if p["bias_correction"] else (1, 1)
    step = s["m"] / fix[0] / (np.sqrt(s["v"] / fix[1]) + p["epsilon"]) + wd * w
    length = np.linalg.norm(w)
    length = max(length, p["lower_bound"] or length)
    length = min(length, p["upper_bound"] or length)
    return w - lr * length / np.linalg.norm(step) * step


def adamw(w, g, s, t, lr, wd, p):
    """Return the next weight by Loshchilov and Hutter, 2019, algorithm 2; epsilon is added before bias correction."""
    s["m"] = p["beta1"] * s["m"] + (1 - p["beta1"]) * g
    s["v"] = p["beta2"] * s["v"] + (1 - p["beta2"]) * g * g
    fix = math.sqrt(1 - p["beta2"] ** t) / (1 - p["beta1"] ** t) if p["correct_bias"] else 1.0
    return w - lr * (fix * s["m"] / (np.sqrt(s["v"]) + p["epsilon"]) + wd * w)


def adamax(w, g, s, t, lr, wd, p):
    """Return the next weight by Kingma and Ba, 2015, algorithm 2; weight decay is added to the gradient."""
    g = g + wd * w
    s["m"] = p["beta1"] * s["m"] + (1 - p["beta1"]) * g
    s["u"] = np.maximum(p["beta2"] * s["u"], np.abs(g))
    return w - lr / (1 - p["beta1"] ** t) * s["m"] / s["u"]


def nadam(w, g, s, t, lr, wd, p):
    """Return the next weight by Dozat, 2016, with the momentum schedule of section 3."""
    g = g + wd * w
    now, following = (p["beta1"] * (1 - 0.5 * 0.96 ** (n * p["schedule_decay"])) for n in (t, t + 1))
    s["product"] = s.get("product", 1.0) * now if np.ndim(s.get("product", 1.0)) == 0 else now
    s["m"] = p["beta1"] * s["m"] + (1 - p["beta1"]) * g
    s["v"] = p["beta2"] * s["v"] + (1 - p["beta2"]) * g * g
    mean = (1 - now) * g / (1 - s["product"]) + following * s["m"] / (1 - s["product"] * following)
    return w - lr * mean / (np.sqrt(s["v"] / (1 - p["beta2"] ** t)) + p["epsilon"])


def signum(w, g, s, t, lr, wd, p):
    """Return the next weight by Bernstein et al., 2018, algorithm 2."""
    s["m"] = p["momentum"] * s["m"] - (1 - p["momentum"]) * (g + wd * w)
    return (1 - lr * p["wd_lh"]) * w + lr * np.sign(s["m"])


def signsgd(w, g, s, t, lr, wd, p):
    """Return the next weight by signSGD, which is Signum without momentum."""
    return (1 - lr * wd) * w - lr * np.sign(g)


def dcasgd(w, g, s, t, lr, wd, p):
    """Return the next weight by Zheng et al., 2017, equation 10, with momentum."""
    before = s.get("w", w)
    s["m"] = p["momentum"] * s["m"] - lr * (g + wd * w + p["lamda"] * g * g * (w - before))
    s["w"] = w
    return w + s["m"]


def lars(w, g, s, t, lr, wd, p):
    """Return the next weight by You et al., 2017, algorithm 1; the norm is that of the gradient before clipping."""
    length = np.linalg.norm(w)
    rate = lr * p["eta"] * length / (np.linalg.norm(s["unlimited"]) + wd * length + p["eps"])
    s["m"] = p["momentum"] * s["m"] + rate * (g + wd * w)
    return w - s["m"]


CASES = [
    ("ftrl", ftrl, {"learning_rate": 0.3, "lamda1": 0.05, "beta": 0.7}),
    ("ftml", ftml, {"learning_rate": 0.1, "beta1": 0.6, "beta2": 0.99, "epsilon": 1e-6}),
    ("lamb", lamb, {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "bias_correction": True,
                    "lower_bound": None, "upper_bound": None}),
    ("lamb", lamb, {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "bias_correction": False,
                    "lower_bound": 5.0, "upper_bound": 10.0}),
    ("adamw", adamw, {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "correct_bias": True}),
    ("adamw", adamw, {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "correct_bias": False}),
    ("adamax", adamax, {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.99}),
    ("nadam", nadam, {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-8, "schedule_decay": 0.01}),
    ("signum", signum, {"learning_rate": 0.1, "momentum": 0.7, "wd_lh": 0.2}),
    ("signum", signsgd, {"learning_rate": 0.1, "momentum": 0.0}),
    ("dcasgd", dcasgd, {"learning_rate": 0.1, "momentum": 0.6, "lamda": 0.3}),
    ("dcasgd", dcasgd, {"learning_rate": 0.1, "momentum": 0.0, "lamda": 0.3}),
    ("lars", lars, {"learning_rate": 0.5, "momentum": 0.8, "eta": 0.3, "eps": 0.01}),
    ("lars", lars, {"learning_rate": 0.5, "momentum": 0.0, "eta": 0.3, "eps": 0.0}),
]  # fmt: skip


@together()
@pytest.mark.parametrize(("name", "step", "settings"), CASES)
@pytest.mark.parametrize("wd", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.4])
def test_steps_are_those_of_the_papers(name, step, settings, wd, clip):
    """Five steps give the formula's weight; ``state_bytes`` is the size of the states."""
    rng = np.random.default_rng(7)
    start = rng.standard_normal((3, 4))
    weight = mx.nd.array(start, dtype="float64")
    optimizer = mx.optimizer.create(name, wd=wd, rescale_grad=0.5, clip_gradient=clip, **settings)
    optimizer.idx2name = {0: "fc_weight"}
    updater = mx.optimizer.get_updater(optimizer)
    expected, state = start, dict.fromkeys("znvdmu", 0.0)
    # These optimizers clip the sum of gradient and weight decay, the others the gradient alone.
    with_decay = name in ("ftml", "adamax", "nadam")
    for t in range(1, 6):
        gradient = rng.standard_normal((3, 4))
        updater(0, mx.nd.array(gradient, dtype="float64"), weight)
        g = state["unlimited"] = gradient * 0.5
        if clip is not None and with_decay:
            expected = step(expected, np.clip(g + wd * expected, -clip, clip) - wd * expected, state, t, settings["learning_rate"], wd, settings)  # fmt: skip # noqa: E501
        elif clip is not None and step is signum:
            limited = np.clip(g, -clip, clip)
            expected = step(expected, limited, state, t, settings["learning_rate"], wd, settings)
        else:
            g = g if clip is None else np.clip(g, -clip, clip)
            expected = step(expected, g, state, t, settings["learning_rate"], wd, settings)
    np.testing.assert_allclose(weight.asnumpy(), expected, rtol=2e-5, atol=1e-7)
    held = updater.states[0]
    arrays = [a for a in (held if isinstance(held, tuple) else [held]) if a is not None]
    assert optimizer.state_bytes(weight.nbytes) == sum(a.nbytes for a in arrays)


@pytest.mark.parametrize(
    ("name", "dtype"), [("adamax", "float16"), *((name, "float32") for name in sorted({name for name, _, _ in CASES}))]
)
def test_what_has_no_gradient_stays(name, dtype):
    """A gradient of 0 gives no NaN, and without weight decay no change of the weight."""
    weight = mx.nd.array([[1.0, 2.0]], dtype=dtype)
    updater = mx.optimizer.get_updater(mx.optimizer.create(name, learning_rate=0.1, wd=0.0))
    for _ in range(3):
        updater(0, mx.nd.array([[0.0, 0.5]], dtype=dtype), weight)
        assert np.isfinite(weight.asnumpy()).all()
    if name not in ("ftrl", "ftml"):  # these compute the weight from their states alone
        assert weight.asnumpy()[0, 0] == 1


def test_langevin_noise():
    """SGLD moves by half a step on average, with noise of variance lr that depends on the seed."""

    def weights(seed):
        mx.random.seed(seed)
        weight = mx.nd.ones((20000,))
        updater = mx.optimizer.get_updater(mx.optimizer.SGLD(learning_rate=0.04, wd=0.0))
        updater(0, mx.nd.full((20000,), 2.0), weight)
        return weight.asnumpy()

    actual = weights(3)
    np.testing.assert_array_equal(actual, weights(3))
    assert (actual != weights(4)).any()
    assert actual.mean() == pytest.approx(1 - 0.02 * 2, abs=0.005)
    assert actual.std() == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize(("strategy", "growth"), [("linear", 0.5), ("power2", 0.25), ("sqrt", math.sqrt(0.5))])
def test_large_batches(strategy, growth):
    """LBSGD updates every batch_scale batches by their mean, at a rate that grows during warmup."""
    optimizer = mx.optimizer.create(
        "lbsgd", learning_rate=0.1, batch_scale=4, warmup_epochs=1, updates_per_epoch=8, warmup_strategy=strategy
    )
    weight = mx.nd.zeros((2,))
    updater = mx.optimizer.get_updater(optimizer)
    for number in range(1, 5):
        updater(0, mx.nd.full((2,), float(number)), weight)
        if number < 4:
            assert weight.asnumpy().tolist() == [0, 0]
    np.testing.assert_allclose(weight.asnumpy(), -0.1 * (1 + 3 * growth) * 2.5, rtol=1e-6)
    for _ in range(4):
        updater(0, mx.nd.full((2,), 1.0), weight)
    np.testing.assert_allclose(weight.asnumpy(), -0.1 * (1 + 3 * growth) * 2.5 - 0.1 * 4, rtol=1e-6)
    with pytest.raises(ParameterError, match="batch_scale"):
        mx.optimizer.LBSGD(batch_scale=0)


def test_large_batches_by_norms():
    """LBSGD with strategy lars multiplies the rate by the ratio of weight norm to gradient norm."""
    weight = mx.nd.array([3.0, 4.0])
    updater = mx.optimizer.get_updater(mx.optimizer.LBSGD(learning_rate=0.1, warmup_strategy="lars"))
    updater(0, mx.nd.array([1.0, 0.0]), weight)
    np.testing.assert_allclose(weight.asnumpy(), [3 - 0.1 * 5, 4], rtol=1e-6)


def test_rates_of_layers():
    """LARS uses the plain rate for biases, gammas and zero norms; momentum_correction rescales the momentum."""
    names = {0: "fc_weight", 1: "fc_bias", 2: "bn_gamma"}
    settings = {"learning_rate": 0.5, "wd": 0.1, "eta": 0.1, "param_idx2name": names}
    updater = mx.optimizer.get_updater(mx.optimizer.LARS(**settings))
    for index, weight, expected in (
        (0, [0.0, 0.0], [-0.5, 0.0]),
        (1, [3.0, 4.0], [2.5, 4.0]),
        (2, [1.0, 2.0], [0.5, 2.0]),
    ):
        array = mx.nd.array(weight)
        updater(index, mx.nd.array([1.0, 0.0]), array)
        np.testing.assert_allclose(array.asnumpy(), expected, rtol=1e-6)
    for correction, factor in ((True, 0.5), (False, 1.0)):
        optimizer = mx.optimizer.LARS(
            learning_rate=0.5, momentum=0.9, momentum_correction=correction, param_idx2name={0: "a_bias", 1: "b_bias"}
        )
        updater = mx.optimizer.get_updater(optimizer)
        weights = [mx.nd.array([3.0]), mx.nd.array([3.0])]
        for gradient, rate in ((1.0, 0.5), (0.0, 0.25)):
            optimizer.set_learning_rate(rate)
            for index, array in enumerate(weights):
                updater(index, mx.nd.array([gradient]), array)
        assert [float(array.asscalar()) for array in weights] == pytest.approx([2.5 - 0.9 * factor * 0.5] * 2)


def test_update_lists():
    """update_multi_precision takes lists of parameters, as in MXNet, and gives the results of single calls."""
    optimizer = mx.optimizer.LAMB(learning_rate=0.1, multi_precision=True)
    lists = [mx.nd.ones((2,), dtype="float16"), mx.nd.ones((3,))]
    alone = [a.copy() for a in lists]
    grads = [mx.nd.full(a.shape, 0.5, dtype=a.dtype) for a in lists]
    states = [optimizer.create_state_multi_precision(i, a) for i, a in enumerate(lists)]
    optimizer.update_multi_precision([0, 1], lists, grads, states)
    second = mx.optimizer.LAMB(learning_rate=0.1, multi_precision=True)
    for i, (a, g) in enumerate(zip(alone, grads, strict=True)):
        second.update_multi_precision(i, a, g, second.create_state_multi_precision(i, a))
    for a, b in zip(lists, alone, strict=True):
        np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())
        assert (a.asnumpy() < 1).all()


def test_a_scheduled_rate_is_not_set():
    """set_learning_rate with a scheduler raises an error that is a UserWarning, as in MXNet."""
    scheduler = mx.lr_scheduler.FactorScheduler(step=1)
    with pytest.raises(UserWarning, match="follows lr_scheduler"):
        mx.optimizer.SGD(lr_scheduler=scheduler).set_learning_rate(0.5)
    assert issubclass(ScheduledRateError, ParameterError)


def test_multipliers_of_arguments_alone():
    """The lr_mult of an operator is inherited by its automatic parameters; the operator itself has no entry."""
    bias = mx.sym.Variable("fc_bias", lr_mult=1.0)
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), bias=bias, name="fc", num_hidden=2, lr_mult=0)
    optimizer = mx.optimizer.SGD(sym=net, param_idx2name={0: "fc_weight", 1: "fc_bias"})
    assert optimizer.lr_mult == {"fc_weight": 0.0, "fc_bias": 1.0}
