"""Results that are right here and wrong in MXNet 1.9.1; the expected values are derived by hand.

docs/mxnet-differences.md lists each of them.
"""

import io
import math
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mxnet-differences.md").read_text()
X, LABEL = mx.sym.var("x"), mx.sym.var("label")


def gradients(symbol, heads, req="write", start=0.0, **arrays):
    """Return (outputs, gradients by name) of one step with these head gradients; gradients begin at ``start``."""
    args = {name: mx.nd.array(value) for name, value in arrays.items()}
    grads = {name: mx.nd.full(array.shape, start) for name, array in args.items()}
    executor = symbol.bind(mx.cpu(), args, grads, req)
    outputs = [out.asnumpy() for out in executor.forward(is_train=True)]
    executor.backward([mx.nd.array(head) for head in heads])
    return outputs, {name: grad.asnumpy() for name, grad in grads.items()}


@pytest.mark.parametrize(
    "row",
    [
        'LeakyReLU(act_type="selu")', "SoftmaxOutput(out_grad=True)", 'SoftmaxActivation(mode="instance")',
        'grad_req="add"` adds the gradient of every operator', "a head that a group names twice", "its weight is fixed",
        "Deconvolution(target_shape=)", "`Convolution_v1` with `dilate` and `stride`", "image.flip_left_right",
        "LBSGD(batch_scale=)", "`learning_rate` of `Ftrl`", "subclass of SGD", "sign(nan)", "x[x == 0] = 9",
        "float16 beyond 2,048", "print_summary", "F1 and MCC of labels (n, 1)", "PCC counts each label",
        "cut by the number of records", "PNG read as grey", "a slice that selects nothing", "unknown_token",
        'PearsonCorrelation(average="micro")', "dump_optimizer",
        "names as text", "`batch_take` has a gradient",
        "`predict` of an array",
    ],
)  # fmt: skip
def test_the_page_lists_it(row):
    """The page of differences, which promises to be complete, has a row for each correction of this file."""
    assert row in PAGE


def test_selu():
    """Below 0 selu is s a (exp(x) - 1), so its derivative is s a exp(x); above, s."""
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    _, grads = gradients(mx.sym.LeakyReLU(X, act_type="selu"), [[1, 1]], x=[-1.0, 0.5])
    np.testing.assert_allclose(grads["x"], [scale * alpha * math.exp(-1), scale], rtol=1e-6)


def test_head_gradients_of_softmax_output():
    """With ``out_grad`` the gradient (p - onehot) is multiplied by the head's: (-1/2, 1/2) times (2, 3)."""
    _, grads = gradients(mx.sym.SoftmaxOutput(X, LABEL, out_grad=True), [[[2.0, 3.0]]], x=[[0, 0]], label=[0])
    assert grads["x"].tolist() == [[-1.0, 1.5]]


def test_softmax_activation_of_three_axes():
    """Each last axis is a distribution: p (h - sum of p h) with p = 1/2 and h = (1, 0) is (1/4, -1/4)."""
    net = mx.sym.SoftmaxActivation(X, mode="instance")
    _, grads = gradients(net, [[[[1, 0], [0, 0]]]], x=[[[0, 0], [0, 0]]])
    assert grads["x"].tolist() == [[[0.25, -0.25], [0, 0]]]


SCORES, TRUTH = {"x": [[0.0, 0.0]], "label": [0]}, {"x": [[2.0]], "label": [[0.0]]}


@pytest.mark.parametrize(
    ("net", "arrays", "gradient"),
    [
        (mx.sym.SoftmaxOutput(X, LABEL), SCORES, [[-0.5, 0.5]]),
        (mx.sym.LinearRegressionOutput(X, LABEL), TRUTH, [[2.0]]),
        (mx.sym.MAERegressionOutput(X, LABEL), TRUTH, [[1.0]]),
        (mx.sym.SVMOutput(X, LABEL, use_linear=True), SCORES, [[-1.0, 1.0]]),
        (mx.sym.Crop(X, num_args=1, h_w=(1, 1)), {"x": [[[[1.0, 2.0]]]]}, [[[[1.0, 0.0]]]]),
    ],
    ids=["softmax", "linear", "absolute", "svm", "crop"],
)
def test_gradients_are_added(net, arrays, gradient):
    """With ``grad_req="add"`` the gradient is added to the 10 that were there."""
    outputs, _ = gradients(net, [], **arrays) if "label" in arrays else ([np.zeros((1, 1, 1, 1))], None)
    _, grads = gradients(net, [np.ones_like(outputs[0])], "add", 10.0, **arrays)
    np.testing.assert_allclose(grads["x"], np.add(gradient, 10.0), rtol=1e-6)


def test_a_head_that_is_named_twice():
    """Both head gradients count: 2 (1 + 10)."""
    double = X * 2
    assert gradients(mx.sym.Group([double, double]), [[1], [10]], x=[1.0])[1]["x"].tolist() == [22.0]


def test_bias_of_a_fixed_weight():
    """The bias gets the head gradient whether or not the weight wants one."""
    net = mx.sym.FullyConnected(X, mx.sym.var("w"), mx.sym.var("b"), num_hidden=2)
    args = {"x": mx.nd.array([[1, 2]]), "w": mx.nd.ones((2, 2)), "b": mx.nd.zeros(2)}
    executor = net.bind(mx.cpu(), args, {"b": mx.nd.zeros(2)}, {"x": "null", "w": "null", "b": "write"})
    executor.forward(is_train=True)
    executor.backward([mx.nd.array([[3, 4]])])
    assert executor.grad_dict["b"].asnumpy().tolist() == [3.0, 4.0]


def test_target_shape_decides_the_padding():
    """Stride 3 spreads (1, 10, 100) times (1, 2) over 8 places; 6 are wanted, so one is cut at each end, not two."""
    net = mx.sym.Deconvolution(X, mx.sym.var("w"), kernel=2, stride=3, pad=2, num_filter=1, target_shape=6)
    outputs, grads = gradients(net, [np.ones((1, 1, 6))], x=[[[1, 10, 100]]], w=[[[1, 2]]])
    assert outputs[0].ravel().tolist() == [2, 0, 10, 20, 0, 100]
    assert grads["x"].ravel().tolist() == [2, 3, 1]


def test_dilated_convolution_with_strides():
    """Outputs w0 x0 + w1 x2 and w0 x2 + w1 x4: the gradient of x is (w0, 0, w0 + w1, 0, w1)."""
    net = mx.sym.Convolution_v1(
        X, mx.sym.var("w"), kernel=(1, 2), stride=(1, 2), dilate=(1, 2), num_filter=1, no_bias=True
    )
    outputs, grads = gradients(net, [np.ones((1, 1, 1, 2))], x=[[[[1, 2, 3, 4, 5]]]], w=[[[[10, 1]]]])
    assert outputs[0].ravel().tolist() == [13, 35]
    assert grads["x"].ravel().tolist() == [10, 0, 11, 0, 1]


def test_images_of_bytes_are_flipped():
    """A flip of a row reverses its pixels, a flip of a column too, in uint8."""
    pixels = np.array([1, 2, 3], np.uint8)
    flipped = mx.nd.image.flip_left_right(mx.nd.array(pixels.reshape(3, 1, 1)[None, :, 0], dtype="uint8"))
    assert flipped.asnumpy().ravel().tolist() == [3, 2, 1]
    flipped = mx.nd.image.flip_top_bottom(mx.nd.array(pixels.reshape(3, 1, 1), dtype="uint8"))
    assert flipped.asnumpy().ravel().tolist() == [3, 2, 1]


def test_lbsgd_averages_gradients_in_one_array():
    """Gradients 1 and 3 in the same array have the mean 2; after the warm-up the rate is multiplied by the scale 2."""
    optimizer = mx.optimizer.LBSGD(learning_rate=1.0, warmup_epochs=0, updates_per_epoch=1, num_epochs=1, batch_scale=2)
    weight, grad = mx.nd.array([0.0]), mx.nd.array([0.0])
    for value in (1.0, 3.0):
        grad[:] = value
        optimizer.update(0, weight, grad, None)
    assert weight.asnumpy().tolist() == [-4.0]


def test_rate_of_ftrl_replaces_that_of_its_schedule():
    """z = 2 - 2 / 0.1 = -18, so the weight is (18 - 0.01) / ((1 + 2) / 0.1)."""
    schedule = mx.lr_scheduler.FactorScheduler(1000, base_lr=0.5)
    optimizer = mx.optimizer.Ftrl(learning_rate=0.1, lr_scheduler=schedule)
    weight = mx.nd.array([1.0])
    optimizer.update(0, weight, mx.nd.array([2.0]), optimizer.create_state(0, weight))
    assert weight.asnumpy()[0] == pytest.approx(17.99 / 30, rel=1e-6)


def test_an_overridden_update_is_called():
    """An updater calls the method that a subclass overrides."""

    class Jump(mx.optimizer.SGD):
        def update(self, index, weight, grad, state):
            weight[:] = weight - 100

    weight = mx.nd.array([1.0])
    mx.optimizer.get_updater(Jump(learning_rate=0.1))(0, mx.nd.array([2.0]), weight)
    assert weight.asnumpy().tolist() == [-99.0]


def test_sign_of_nan():
    """The sign of NaN is NaN, and a step by signs shows it in the weight."""
    assert np.isnan(mx.nd.sign(mx.nd.array([math.nan])).asnumpy()).all()
    weight = mx.nd.array([1.0, 1.0])
    mx.nd.signsgd_update(weight, mx.nd.array([math.nan, 3.0]), 0.5, out=weight)
    assert np.isnan(weight.asnumpy()[0])
    assert weight.asnumpy()[1] == 0.5


def test_scores_of_columns_and_sequences():
    """Labels (n, 1) are n labels: all right, so every score is 1. A sequence counts each step."""
    label, pred = mx.nd.array([[1], [0]]), mx.nd.array([[0.2, 0.8], [0.7, 0.3]])
    for name in ("f1", "mcc", "pcc"):
        metric = mx.metric.create(name)
        metric.update([label], [pred])
        assert metric.get() == (name, 1.0)
    steps = mx.metric.PCC()  # guesses 1, 1, 1, 0 for labels 1, 1, 0, 0: (3·4 - 8) / sqrt((16 - 10) (16 - 8))
    steps.update([mx.nd.array([[1, 1, 0, 0]])], [mx.nd.array([[[0, 0, 0, 1], [1, 1, 1, 0]]])])
    assert steps.get()[1] == pytest.approx(4 / math.sqrt(6 * 8))


MASKS = {
    "number": lambda x: x == 0,
    "array": lambda x: x <= mx.nd.zeros((2, 2)),
    "function": lambda x: mx.nd.logical_not(x),
    "joined": lambda x: mx.nd.logical_and(x > -1, x < 1),
}


@pytest.mark.parametrize("mask", list(MASKS))
def test_comparisons_are_masks(mask):
    """Assignment and reading by a comparison select as in NumPy; a copy as integers still holds positions."""
    x = mx.nd.array([[0.0, 1.0], [2.0, 0.0]])
    chosen = MASKS[mask](x)
    assert x[chosen].asnumpy().tolist() == [0, 0]
    x[chosen] = 9
    assert x.asnumpy().tolist() == [[9, 1], [2, 9]]
    x[chosen] = mx.nd.array([5, 6])
    assert x.asnumpy().tolist() == [[5, 1], [2, 6]]
    rows = mx.nd.array([0.0, 1.0]) == 1
    assert x[rows].asnumpy().tolist() == [[2, 6]]
    assert x[rows.astype("int32")].asnumpy().tolist() == [[5, 1], [2, 6]]
    with pytest.raises(IndexError):
        x[mx.nd.array([0.0, 1.0, 1.0]) == 1] = 0
    rows[:] = mx.nd.array([1.0, 2.0]) - 1  # positions now
    rows[:] = 2 * rows
    with pytest.raises(IndexError):
        x[rows].wait_to_read()


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2049), ("uint8", 256), ("int8", 128)])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions_are_exact_or_refused(name, dtype, most):
    """The longest axis whose positions the dtype holds gives the last of them; one more is refused, bound or not."""
    sign = 1 if name == "argmax" else -1
    values = np.full(most, 10 - sign, dtype)
    values[-1] = 10
    assert getattr(mx.nd, name)(mx.nd.array(values, dtype=dtype), axis=0).asnumpy().tolist() == [most - 1]
    longer = mx.nd.zeros((most + 1,), dtype=dtype)
    with pytest.raises(mx.MXNetError, match="cast the data"):
        getattr(mx.nd, name)(longer, axis=0)
    with pytest.raises(mx.MXNetError, match="cast the data"):
        getattr(mx.sym, name)(X, axis=0).bind(mx.cpu(), {"x": longer})


def test_moving_statistics_are_no_parameters():
    """A summary counts scale and shift of a BatchNorm, and the weights of every operator: 3·9·4 + 4 + 2·4 + 4."""
    net = mx.sym.BatchNorm(mx.sym.Deconvolution(X, kernel=(3, 3), num_filter=4, no_bias=False), fix_gamma=False)
    net = mx.sym.LeakyReLU(net, act_type="prelu")
    assert mx.viz.print_summary(net, {"x": (1, 3, 5, 5)}, echo=lambda line: None) == 108 + 4 + 8 + 4


def test_parts_of_a_record_file(tmp_path):
    """Two parts have four records each, although the first record is larger than the seven others."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    writer = mx.recordio.MXRecordIO(str(tmp_path / "a.rec"), "w")
    for number in range(8):
        picture = pixels if number == 0 else pixels[:8, :8]
        writer.write(mx.recordio.pack_img((0, float(number), number, 0), picture, img_fmt=".png"))
    writer.close()
    parts = []
    for part in range(2):
        read = mx.io.ImageRecordIter(
            str(tmp_path / "a.rec"), data_shape=(3, 8, 8), batch_size=1, num_parts=2, part_index=part
        )
        parts.append([int(batch.label[0].asnumpy()[0]) for batch in read])
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_pictures_read_as_grey():
    """A PNG of one colour is 0.299 r + 0.587 g + 0.114 b, rounded; a JPEG keeps the grey values stored in it."""
    image = pytest.importorskip("PIL.Image")
    colour = image.new("RGB", (8, 8), (10, 20, 31))  # 18.26; 2.99 + 11.74 + 3.534
    content = io.BytesIO()
    colour.save(content, "png")
    assert set(mx.image.imdecode(content.getvalue(), flag=0).asnumpy().ravel()) == {18}
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    content = io.BytesIO()
    image.fromarray(noise).save(content, "jpeg", subsampling=0)
    with image.open(content) as stored:
        stored.draft("YCbCr", None)
        luma = np.asarray(stored)[:, :, 0]
    assert np.array_equal(mx.image.imdecode(content.getvalue(), flag=0).asnumpy()[:, :, 0], luma)


def test_nothing_is_no_result():
    """A slice of no rows is refused by operators, as arrays and in a graph."""
    with pytest.raises(mx.MXNetError, match="selects nothing of axis 0"):
        mx.nd.slice_axis(mx.nd.ones((3, 2)), axis=0, begin=1, end=1)
    with pytest.raises(mx.MXNetError, match="selects nothing of axis 0"):
        mx.sym.slice(X, begin=(1,), end=(1,)).simple_bind(mx.cpu(), x=(3, 2))


def test_an_unknown_shape_of_bind():
    """``()`` is an unknown shape, which a bind infers, as ``infer_shape`` does."""
    net = mx.sym.LinearRegressionOutput(X, LABEL)
    executor = net.simple_bind(mx.cpu(), x=(2, 3), label=())
    assert executor.arg_dict["label"].shape == (2, 3)
    assert executor.reshape(x=(1, 3), label=()).arg_dict["label"].shape == (1, 3)


def test_a_known_unknown_token():
    """A word that is not in the vocabulary has the number that the token for unknown words has there."""
    coded, vocabulary = mx.rnn.encode_sentences([["a", "z"]], {"a": 0, "b": 7}, unknown_token="b")
    assert (coded, vocabulary) == ([[0, 7]], {"a": 0, "b": 7})


def test_correlation_of_all_batches():
    """Of the pairs (0, 0), (1, 1) and (2, 2) in two batches the correlation is 1, over all batches, too."""
    metric = mx.metric.PearsonCorrelation(average="micro")
    for values in ([0.0, 1.0], [2.0]):
        metric.update([mx.nd.array(values)], [mx.nd.array(values)])
    assert metric.get_global()[1] == pytest.approx(1.0)


def test_states_never_hold_the_optimizer():
    """``dump_optimizer=True`` is refused."""
    with pytest.raises(mx.MXNetError, match="dump_optimizer"):
        mx.optimizer.get_updater(mx.optimizer.SGD(0.9)).get_states(True)


def test_a_monitor_gets_names_as_text():
    """The callback of an executor gets ``str``, which ``py_str`` takes, as it takes MXNet's bytes."""
    names: list = []
    executor = mx.sym.relu(X, name="r").simple_bind(mx.cpu(), grad_req="null", x=(2,))
    executor.set_monitor_callback(lambda name, array: names.append(name))
    executor.forward()
    assert [mx.base.py_str(name) for name in names] == names == ["r_output"]


def test_gradient_of_batch_take():
    """The head gradients 5 and 7 go to the elements that were taken."""
    net = mx.sym.batch_take(X, mx.sym.var("index"))
    _, grads = gradients(net, [[5, 7]], x=[[1, 2], [3, 4]], index=[1, 0])
    assert grads["x"].tolist() == [[0, 5], [7, 0]]


def test_a_prediction_is_no_training():
    """Dropout passes everything on in ``predict`` of an array, though the module is bound for training."""
    module = mx.mod.Module(mx.sym.Dropout(mx.sym.var("data"), p=0.9), label_names=None)
    module.bind([("data", (4, 8))], for_training=True)
    module.init_params()
    assert module.predict(np.ones((4, 8))).asnumpy().min() == 1.0
