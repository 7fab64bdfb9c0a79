"""Softmax and losses: gradients of the underlying objective, labels, lengths, extreme numbers."""

import numpy as np
import pytest

from tests.support.ops_harness import SideBySide, check_gradient, differentiate, gradients, prepare, run
from tests.support.ops_nn_cases import distinct, uniform
from weftplan.errors import ParameterError
from weftplan.ops.core import registry, tiling
from weftplan.ops.nn import softmax_core, softmax_output

F32 = np.float32


def cross_entropy(labels, axis, *, weight=1.0, alpha=0.0, counted=None):
    """Return the loss of SoftmaxOutput as an objective for check_gradient."""

    def objective(outputs):
        p = np.moveaxis(outputs[0], axis, -1)
        classes = p.shape[-1]
        target = np.eye(classes)[np.clip(labels, 0, classes - 1)]
        if alpha:
            target = target * (1 - alpha) + (1 - target) * alpha / (classes - 1)
        terms = -(target * np.log(p)).sum(-1)
        if counted is not None:
            terms = terms[counted]
        return weight * float(terms.sum()), [np.ones_like(outputs[0])]

    return objective


@pytest.mark.parametrize(
    ("shape", "labels", "axis", "params", "how"),
    [
        ((4, 3), [0, 1, 2, 1], -1, {}, {}),
        ((4, 3), [0, 1, 2, 1], -1, {"grad_scale": 3.0, "normalization": "batch"}, {"weight": 0.75}),
        ((4, 3), [0, 1, 2, 1], -1, {"smooth_alpha": 0.3}, {"alpha": 0.3}),
        ((4, 3), [0, -1, 2, 1], -1, {"use_ignore": True}, {"counted": [True, False, True, True]}),
        (
            (4, 3),
            [0, 2, 2, 1],
            -1,
            {"use_ignore": True, "ignore_label": 2, "normalization": "valid"},
            {"counted": [True, False, False, True], "weight": 0.5},
        ),
        ((2, 3, 2), [[0, 1], [2, 1]], 1, {"multi_output": True}, {"weight": 0.5}),
        ((2, 2, 3), [[0, 1], [2, 1]], -1, {"preserve_shape": True, "normalization": "batch"}, {"weight": 0.25}),
    ],
)
def test_softmax_output_has_the_gradient_of_cross_entropy(shape, labels, axis, params, how):
    """The data's gradient is that of the (scaled, smoothed, masked) cross entropy, whatever gradient comes in."""
    labels = np.array(labels)
    check_gradient(
        "SoftmaxOutput", [uniform(*shape), labels], params, wrt=(0,), objective=cross_entropy(labels, axis, **how)
    )


def test_out_grad_multiplies():
    """With out_grad the gradient is multiplied element by element by the incoming gradient."""
    data, labels, ograd = uniform(4, 3), np.array([0, 1, 2, 1]), uniform(4, 3, seed=2)
    plain = gradients("SoftmaxOutput", [data, labels], [ograd])[0]
    np.testing.assert_allclose(
        gradients("SoftmaxOutput", [data, labels], [ograd], {"out_grad": True})[0], plain * ograd, rtol=1e-12
    )


@pytest.mark.parametrize("kind", ["int32", "int64", "float32", "uint8"])
def test_labels_of_any_dtype(kind):
    """Labels of another dtype than the data give the same gradient."""
    data = uniform(4, 3)
    labels = np.array([0, 1, 2, 1])
    np.testing.assert_array_equal(
        gradients("SoftmaxOutput", [data, labels.astype(kind)], [data])[0],
        gradients("SoftmaxOutput", [data, labels], [data])[0],
    )


@pytest.mark.parametrize(
    ("op", "loss"),
    [
        ("LinearRegressionOutput", lambda y, t: 0.5 * (y - t) ** 2),
        ("MAERegressionOutput", lambda y, t: np.abs(y - t)),
        ("LogisticRegressionOutput", lambda y, t: -(t * np.log(y) + (1 - t) * np.log(1 - y))),
    ],
)
def test_regression_outputs_have_the_gradient_of_their_loss(op, loss):
    """The gradient is that of the loss, times grad_scale, divided by the elements of a sample."""
    label = distinct(4, 3)

    def objective(outputs):
        return float(loss(outputs[0], label).sum()) * 2.0 / 3.0, [np.ones_like(outputs[0])]

    check_gradient(op, [uniform(4, 3), label], {"grad_scale": 2.0}, wrt=(0,), objective=objective)


@pytest.mark.parametrize("op", ["SoftmaxOutput", "LinearRegressionOutput", "MakeLoss", "make_loss"])
def test_losses_ignore_the_incoming_gradient(op):
    """Losses need no head gradient: they are marked as losses, and their gradient does not depend on it."""
    assert registry.get(op).loss
    inputs = [uniform(4, 3), np.zeros(4) if op == "SoftmaxOutput" else np.zeros((4, 3))]
    inputs = inputs[: len(registry.get(op).input_names({}))]
    first = gradients(op, inputs, [np.zeros((4, 3))])[0]
    np.testing.assert_array_equal(first, gradients(op, inputs, [np.full((4, 3), 9.0)])[0])
    assert first.any()


def test_block_grad_stops():
    """stop_gradient has the gradient 0 and no backward node."""
    call = prepare("stop_gradient", [uniform(3)])
    call()
    actual, builder = differentiate(call, [np.ones(3)])
    assert not actual[0].any()
    assert not builder.calls


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "SoftmaxOutput"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_softmax_of_large_numbers(op, dtype):
    """Data near the limit of the dtype's range give finite, correct probabilities."""
    top = float(np.finfo(dtype).max) / 4
    data = np.array([[top, 0, -top], [top, top, top]], dtype)
    inputs = [data, np.zeros(2, dtype)] if op == "SoftmaxOutput" else [data]
    out = run(op, inputs)[0].astype(np.float64)
    assert np.isfinite(out).all()
    probability = np.exp(out) if op == "log_softmax" else out
    np.testing.assert_allclose(probability, [[1, 0, 0], [1 / 3] * 3], rtol=1e-3)


@pytest.mark.parametrize(
    ("op", "shape", "params"),
    [
        ("softmax", (13, 40), {"axis": -1, "temperature": 2.0}),
        ("SoftmaxOutput", (13, 40), {}),
        ("SoftmaxOutput", (3, 5, 7), {"multi_output": True}),
    ],
)
def test_rows_of_a_large_softmax_are_cut(monkeypatch, op, shape, params):
    """Parts that run at the same time, each in its own scratch, give the bits of a single part."""
    monkeypatch.setattr(tiling, "block", lambda: 80)
    data = uniform(*shape, low=-30, high=30).astype(F32)
    label = [np.zeros((shape[0], *shape[2:]), F32)] if op == "SoftmaxOutput" else []
    whole = run(op, [data, *label], params)[0]
    together, divide = SideBySide(), np.divide

    def after_the_sums_of_all(*args, **kwargs):
        together.meet()
        return divide(*args, **kwargs)

    monkeypatch.setattr(np, "divide", after_the_sums_of_all)
    monkeypatch.setattr(softmax_core, "FEW", 32)
    monkeypatch.setattr(softmax_core, "split_in_rooms", together)
    assert run(op, [data, *label], params)[0].tobytes() == whole.tobytes()
    assert together.counts == [min(4, shape[0])]


@pytest.mark.parametrize(("shape", "params"), [((13, 40), {}), ((3, 5, 7), {"multi_output": True})])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_small_softmax_takes_a_shorter_way_to_the_same_bits(monkeypatch, kind, shape, params):
    """The bare form for a small softmax gives the bits of the general form."""
    data = uniform(*shape, low=-30, high=30).astype(kind)
    inputs = [data, np.zeros((shape[0], *shape[2:]), kind)]
    short = run("SoftmaxOutput", inputs, params)[0]
    monkeypatch.setattr(softmax_core, "softmax_bare", lambda *_: None)
    assert run("SoftmaxOutput", inputs, params)[0].tobytes() == short.tobytes()


@pytest.mark.parametrize(
    ("shape", "params", "labels"),
    [((5, 3), {}, [0, -1, 3, 2, 1 << 40]), ((1, 3, 5), {"multi_output": True}, [[-7, 1, 3, 2, 9]])],
)
def test_a_label_that_is_no_class_leaves_the_output(shape, params, labels):
    """A label below or above the classes subtracts nothing: the gradient is the output."""
    data, labels = uniform(*shape), np.array(labels, np.float64)
    output = run("SoftmaxOutput", [data, labels], params)[0]
    actual = gradients("SoftmaxOutput", [data, labels], [np.ones(shape)], params)[0]
    classes = np.arange(3).reshape(3, *[1] * (len(shape) - 2))
    wanted = (output - (np.expand_dims(labels, 1) == classes)) / (5 if params else 1)
    np.testing.assert_allclose(actual, wanted, rtol=1e-15)


@pytest.mark.parametrize("elements", [40, 41, 47])
def test_the_gradient_of_a_large_softmax_is_cut(monkeypatch, elements):
    """A gradient in parts scales every element once, and has the bits of a single part."""
    data, label = uniform(1, elements, low=-3, high=3).astype(F32), np.array([7], F32)
    params = {"grad_scale": 0.3}
    whole = gradients("SoftmaxOutput", [data, label], [np.ones_like(data)], params)[0]
    counts = []

    def backwards(work, parts):
        counts.append(parts)
        for number in reversed(range(parts)):
            work(number)

    monkeypatch.setattr(softmax_output, "FEW", 8)
    monkeypatch.setattr(softmax_output, "split", backwards)
    cut = gradients("SoftmaxOutput", [data, label], [np.ones_like(data)], params)[0]
    assert cut.tobytes() == whole.tobytes()
    assert counts == [4]


def test_softmax_lengths():
    """Only the first ``length`` classes count; the others are 0. A length of 0 gives a row of zeros."""
    out = run("softmax", [np.zeros((4, 3)), np.array([3, 2, 1, 0])], {"use_length": True})[0]
    np.testing.assert_allclose(out, [[1 / 3] * 3, [0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]])


def test_softmax_output_dtype():
    """``dtype`` sets the dtype of the output but not of the gradient."""
    data = uniform(3, 4).astype(np.float16)
    assert run("softmax", [data], {"dtype": "float32"})[0].dtype == F32
    assert gradients("softmax", [data], [np.ones((3, 4), F32)], {"dtype": "float32"})[0].dtype == np.float16


def test_temperature_must_be_positive():
    """A temperature of 0 is refused; the error names the parameter."""
    with pytest.raises(ParameterError, match=r"temperature=0\.0"):
        run("softmax", [uniform(2, 3)], {"temperature": 0.0})


@pytest.mark.parametrize(("shape", "divisor"), [((5,), 1), ((4, 3), 4), ((5, 3, 2), 15), ((2, 3, 4, 5), 24)])
def test_batch_of_make_loss(shape, divisor):
    """normalization='batch' divides by the product of all sizes but the last, as measured on MXNet 1.9.1."""
    (gradient,) = gradients("MakeLoss", [np.ones(shape)], [np.ones(shape)], {"normalization": "batch"})
    np.testing.assert_array_equal(gradient, np.full(shape, 1 / divisor))
