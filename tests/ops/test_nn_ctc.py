"""CTCLoss: sums over every alignment, lengths, extreme logits, memory, wrong inputs, bound graphs."""

import itertools

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_hidden, differentiate, gradients, prepare, run
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ops.core import registry


def uniform(*shape, scale=1.0):
    """Return random float64 numbers in [-scale, scale)."""
    return np.random.RandomState(sum(shape)).uniform(-scale, scale, shape)


def loss_over_paths(logits, labels, blank):
    """Return minus the log of the summed probability of every path that collapses to ``labels``."""
    steps, channels = logits.shape
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    total = 0.0
    for path in itertools.product(range(channels), repeat=steps):
        if [k for k, _ in itertools.groupby(path) if k != blank] == labels:
            total += np.prod(p[range(steps), path])
    return -np.log(total)


@pytest.mark.parametrize("labels", [[], [1], [2, 1], [1, 1], [1, 2, 1], [2, 2, 1]])
def test_every_alignment_counts(labels):
    """The loss equals that of all paths that collapse to the labels, enumerated one by one."""
    data = uniform(5, 1, 3, scale=2.0)
    padded = np.array([labels + [0] * (3 - len(labels))])
    assert run("CTCLoss", [data, padded])[0][0] == pytest.approx(loss_over_paths(data[:, 0], labels, 0), rel=1e-12)
    last = np.array([[k - 1 for k in labels] + [-1] * (3 - len(labels))])
    shifted = np.roll(data, -1, axis=2)
    actual = run("CTCLoss", [shifted, last], {"blank_label": "last"})[0][0]
    assert actual == pytest.approx(loss_over_paths(data[:, 0], labels, 0), rel=1e-12)


def test_a_short_sample_is_as_if_alone():
    """Steps and labels beyond a sample's lengths do not affect its loss and gradient; their own gradient is 0."""
    data, label = uniform(8, 3, 4), np.array([[1, 2, 3], [2, 2, 1], [3, 1, 1]])
    steps, labels = np.array([3, 8, 5]), np.array([2, 3, 1])
    flags = {"use_data_lengths": True, "use_label_lengths": True}
    whole = run("CTCLoss", [data, label, steps, labels], flags)[0]
    actual = gradients("CTCLoss", [data, label, steps, labels], [np.array([1.0, -2.0, 0.5])], flags)[0]
    for k, weight in enumerate((1.0, -2.0, 0.5)):
        alone = [data[: steps[k], k : k + 1], label[k : k + 1, : labels[k]]]
        assert whole[k] == pytest.approx(run("CTCLoss", alone)[0][0], rel=1e-12)
        expected = gradients("CTCLoss", alone, [np.array([weight])])[0]
        np.testing.assert_allclose(actual[: steps[k], k : k + 1], expected, atol=1e-13)
        assert not actual[steps[k] :, k].any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_extreme_logits(dtype):
    """Logits of 800 give finite losses and gradients: 0 on the right path, the distance of 800 off it."""
    data = np.zeros((2, 2, 3))
    data[0, 0, 1] = data[1, 0, 2] = 800.0
    data[0, 1, 2] = data[1, 1, 2] = 800.0
    arrays = [data.astype(dtype), np.array([[1, 2], [1, 2]])]
    np.testing.assert_allclose(run("CTCLoss", arrays)[0], [0.0, 800.0])
    actual = gradients("CTCLoss", arrays, [np.ones(2, dtype)])[0]
    np.testing.assert_allclose(actual[:, 0], 0.0)
    np.testing.assert_allclose(actual[:, 1], [[0, -1, 1], [0, 0, 0]])


def test_what_cannot_be_aligned():
    """Labels that need more steps than the data have give the loss and the gradient 0, as in MXNet.

    Equal labels in sequence need a blank between them.
    """
    arrays = [uniform(3, 2, 3), np.array([[1, 1, 2], [1, 2, 1]])]
    loss = run("CTCLoss", arrays)[0]
    actual = gradients("CTCLoss", arrays, [np.ones(2)])[0]
    assert loss[0] == 0
    assert loss[1] > 0
    assert not actual[:, 0].any()
    assert actual[:, 1].any()


def test_memory():
    """Nothing but NumPy's buffers is allocated outside the workspace.

    The workspace does not grow with the number of steps.
    """
    limit = 4 * 8192 * 8 + 20_000
    sizes = []
    for steps in (20, 60):
        data = uniform(steps, 16, 500).astype(np.float32)
        call = prepare("CTCLoss", [data, np.random.RandomState(0).randint(1, 500, (16, 10))])
        check_hidden(call, limit)
        calls = differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])[1].calls
        assert [one.op.name for one in calls] == ["_backward_CTCLoss"]
        check_hidden(calls[0], limit)
        sizes.append((call.declared, calls[0].declared))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("arrays", "params", "error", "words"),
    [
        ([uniform(2, 1, 3), np.ones((1, 3))], {}, ShapeError, "3 labels do not fit into 2 steps"),
        ([uniform(4, 2, 3), np.ones((3, 2))], {}, ShapeError, "batch of data and label"),
        ([uniform(4, 2), np.ones((2, 2))], {}, ShapeError, "steps, batch, channels"),
        ([uniform(4, 2, 3), np.ones((2, 2)), np.ones(3)], {"use_label_lengths": True}, ShapeError, "lengths"),
        ([np.ones((4, 2, 3), int), np.ones((2, 2))], {}, DTypeError, "expects floats"),
        ([uniform(4, 2, 3), np.ones((2, 2))], {"blank_label": "middle"}, ParameterError, "blank_label"),
    ],
)
def test_wrong_inputs(arrays, params, error, words):
    """Wrong inputs raise an error that names the input."""
    with pytest.raises(error, match=words):
        run("CTCLoss", arrays, params)


def test_names():
    """CTCLoss has its old names, the right inputs, and their inferred shapes."""
    assert {registry.get(name).name for name in ("ctc_loss", "_contrib_CTCLoss", "_contrib_ctc_loss")} == {"CTCLoss"}
    loss = mx.sym.CTCLoss(mx.sym.Variable("x"), use_label_lengths=True, name="c")
    assert loss.list_arguments() == ["x", "c_label", "c_label_lengths"]
    shapes, outs, _ = loss.infer_shape(x=(6, 0, 4), c_label=(5, 2))
    assert shapes == [(6, 5, 4), (5, 2), (5,)]
    assert outs == [(5,)]


@pytest.mark.parametrize("request_", ["write", "add"])
def test_in_a_bound_graph(request_):
    """A bound CTCLoss gives the kernels' loss and gradients, written or added."""
    data, label = uniform(5, 2, 4).astype(np.float32), np.array([[1, 2], [3, 0]], np.float32)
    loss = mx.sym.CTCLoss(mx.sym.Variable("x"), mx.sym.Variable("label"))
    inputs = {"x": mx.nd.array(data), "label": mx.nd.array(label)}
    before = {"x": mx.nd.ones(data.shape)}
    executor = loss.bind(mx.cpu(), inputs, args_grad=before, grad_req={"x": request_, "label": "null"})
    out = executor.forward(is_train=True)[0].asnumpy()
    np.testing.assert_allclose(out, run("CTCLoss", [data, label])[0], rtol=1e-6)
    executor.backward([mx.nd.array([1.0, 2.0])])
    expected = gradients("CTCLoss", [data, label], [np.array([1.0, 2.0], np.float32)])[0]
    extra = 1.0 if request_ == "add" else 0.0
    np.testing.assert_allclose(before["x"].asnumpy(), expected + extra, rtol=1e-5, atol=1e-6)
