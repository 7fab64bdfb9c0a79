"""What single neural-network operators promise beyond the common contract."""

import numpy as np
import pytest
from ops_harness import check_gradient, differentiate, gradients, prepare, run
from ops_nn_cases import distinct, uniform

from weftplan.errors import ParameterError
from weftplan.ops import registry
from weftplan.ops.nn.conv_geometry import geometry

F32 = np.float32


def kept(op, arrays, params):
    """What the gradient rule keeps alive: x<k> for forward inputs, y<k> for outputs; sorted."""
    call = prepare(op, arrays, params)
    call()
    _, builder = differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])
    found = set()
    for made in builder.calls:
        ignored = made.op.ignored(made.params)
        used = [x for k, x in enumerate(made.inputs) if k not in ignored]
        found |= {f"x{k}" for k, x in enumerate(call.inputs) if any(x is one for one in used)}
        found |= {f"y{k}" for k, y in enumerate(call.outputs) if any(y is one for one in used)}
    return " ".join(sorted(found))


X = uniform(2, 3, 4, 4)
C3 = [uniform(3) for _ in range(4)]


@pytest.mark.parametrize(
    ("op", "arrays", "params", "expected"),
    [
        ("FullyConnected", [uniform(3, 4), uniform(5, 4), uniform(5)], {"num_hidden": 5}, "x0 x1"),
        ("Convolution", [X, uniform(2, 3, 1, 1), uniform(2)], {"kernel": (1, 1), "num_filter": 2}, "x0 x1"),
        *(
            ("Activation", [X], {"act_type": kind}, "y0")
            for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
        ),
        ("LeakyReLU", [X], {}, "y0"),
        ("LeakyReLU", [X], {"slope": -0.1}, "x0"),
        ("LeakyReLU", [X], {"act_type": "elu"}, "y0"),
        ("LeakyReLU", [X], {"act_type": "selu"}, "y0"),
        ("LeakyReLU", [X], {"act_type": "gelu"}, "x0"),
        ("LeakyReLU", [X], {"act_type": "rrelu"}, "y1"),
        ("LeakyReLU", [X, C3[0]], {"act_type": "prelu"}, "x0 x1"),
        ("Pooling", [X], {"kernel": (2, 2), "pool_type": "avg"}, ""),
        ("Pooling", [X], {"kernel": (2, 2), "pool_type": "sum"}, ""),
        ("Pooling", [X], {"kernel": (2, 2)}, "x0 y0"),
        ("BatchNorm", [X, *C3], {}, "x0 y1 y2"),
        ("BatchNorm", [X, *C3], {"fix_gamma": False}, "x0 x1 y1 y2"),
        ("Dropout", [X], {}, "y1"),
        ("softmax", [X], {}, "y0"),
        ("log_softmax", [X], {}, "y0"),
        ("SoftmaxOutput", [uniform(2, 3), np.zeros(2)], {}, "x1 y0"),
        ("LinearRegressionOutput", [uniform(2, 3), uniform(2, 3)], {}, "x1 y0"),
        ("MakeLoss", [X], {}, ""),
        ("MakeLoss", [X], {"normalization": "valid"}, "y0"),
        ("Embedding", [np.zeros(2), uniform(3, 2)], {"input_dim": 3, "output_dim": 2}, "x0"),
        ("L2Normalization", [X], {}, "y0 y1"),
    ],
)
def test_backward_keeps_no_more_than_it_must(op, arrays, params, expected):
    """The tensors that stay alive for the backward pass are exactly these: they decide the planned peak."""
    assert kept(op, arrays, params) == expected


# ---------------------------------------------------------------------------------------------------- BatchNorm


def batch_norm(is_train=True, recompute=False, **params):
    """(call after it ran, pristine inputs)"""
    arrays = [uniform(4, 3, 2, 2), *(uniform(3, seed=k) for k in range(3)), uniform(3, low=0.5, high=2.0)]
    call = prepare(
        "BatchNorm", [x.copy() for x in arrays], {"momentum": 0.7, **params}, is_train=is_train, recompute=recompute
    )
    call()
    return call, arrays


def test_moving_statistics_follow_the_batch_in_training():
    """new = momentum·old + (1 - momentum)·batch, the variance biased; gamma and beta stay as they are."""
    call, (data, gamma, beta, mean, var) = batch_norm()
    np.testing.assert_allclose(call.inputs[3], 0.7 * mean + 0.3 * data.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(call.inputs[4], 0.7 * var + 0.3 * data.var((0, 2, 3)), rtol=1e-12)
    np.testing.assert_array_equal(call.inputs[1], gamma)
    np.testing.assert_array_equal(call.inputs[2], beta)


@pytest.mark.parametrize(
    "how", [{"recompute": True}, {"is_train": False}, {"use_global_stats": True}], ids=lambda how: next(iter(how))
)
def test_moving_statistics_stay(how):
    """Recomputing, predicting and use_global_stats leave the moving statistics alone."""
    call, arrays = batch_norm(**how)
    np.testing.assert_array_equal(call.inputs[3], arrays[3])
    np.testing.assert_array_equal(call.inputs[4], arrays[4])


def test_recomputed_batch_norm_gives_the_same_bits():
    """A recomputed forward call normalises by the batch, as the first one did."""
    for first, again in zip(batch_norm()[0].outputs, batch_norm(recompute=True)[0].outputs, strict=True):
        np.testing.assert_array_equal(first, again)


def test_prediction_uses_the_moving_statistics():
    """Outside training the output is gamma·(x - moving_mean) / sqrt(moving_var + eps) + beta."""
    call, (data, gamma, beta, mean, var) = batch_norm(is_train=False, fix_gamma=False, eps=0.2)
    shape = (1, 3, 1, 1)
    expected = (data - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + 0.2) * gamma.reshape(shape)
    np.testing.assert_allclose(call.outputs[0], expected + beta.reshape(shape), rtol=1e-12)
    np.testing.assert_array_equal(call.outputs[1], mean)
    np.testing.assert_allclose(call.outputs[2], 1 / np.sqrt(var + 0.2), rtol=1e-12)


def test_fixed_gamma_counts_as_one_and_gets_no_gradient():
    """fix_gamma: any stored gamma gives what gamma = 1 gives, and its gradient is 0."""
    call, (data, _, beta, mean, var) = batch_norm(fix_gamma=True)
    ones = run("BatchNorm", [data, np.ones(3), beta, mean, var], {"fix_gamma": False, "momentum": 0.7})
    np.testing.assert_array_equal(call.outputs[0], ones[0])
    found = differentiate(call, [np.ones(s.shape) for s in call.out_specs])[0]
    assert not found[1].any()
    assert found[2].all()


def test_batch_norm_of_a_far_mean():
    """The variance is taken of centred data: a mean a thousand deviations away costs no accuracy of the variance."""
    rng = np.random.RandomState(0)
    data = (1000 + rng.standard_normal((64, 2, 8, 8))).astype(F32)
    vectors = [np.ones(2, F32), np.zeros(2, F32), np.zeros(2, F32), np.ones(2, F32)]
    out = run("BatchNorm", [data, *vectors], {"eps": 1e-5})[0]
    np.testing.assert_allclose(out.var((0, 2, 3)), 1.0, rtol=1e-3)


# ------------------------------------------------------------------------------------------- Dropout and rrelu


def test_dropout_keeps_a_share_and_scales_it():
    """About 1 - p of the elements stay, scaled by 1 / (1 - p); the byte mask says which; the gradient uses it."""
    data = np.ones((100, 1000), F32)
    call = prepare("Dropout", [data], {"p": 0.3})
    out, mask = call()
    assert mask.dtype == np.uint8
    assert abs(mask.mean() - 0.7) < 0.01
    np.testing.assert_array_equal(out, mask * F32(1 / 0.7))
    found = differentiate(call, [data, np.zeros_like(mask)])[0][0]
    np.testing.assert_array_equal(found, out)


def test_dropout_outside_training():
    """Outside training dropout is the identity, forward and backward, unless mode is always."""
    data = uniform(50, 4)
    out, mask = run("Dropout", [data], {"p": 0.5}, is_train=False)
    np.testing.assert_array_equal(out, data)
    assert mask.all()
    np.testing.assert_array_equal(gradients("Dropout", [data], [data], {"p": 0.5}, is_train=False)[0], data)
    out, mask = run("Dropout", [data], {"p": 0.5, "mode": "always"}, is_train=False)
    np.testing.assert_array_equal(out, data * mask * 2)
    assert not mask.all()


def test_dropout_axes_share_one_draw():
    """Along `axes` all elements live or die together."""
    out, mask = run("Dropout", [np.ones((40, 5, 6))], {"axes": (1, 2)})
    assert mask.shape == (40, 1, 1)
    assert (out == out[:, :1, :1]).all()
    assert 0 < mask.sum() < 40


def test_dropout_depends_on_the_key_alone():
    """Another key, other numbers; the same key, the same numbers, whether or not somebody wants the mask."""
    data = np.ones(1000)
    first = prepare("Dropout", [data], key=(1, 2))
    again = first()[0]
    np.testing.assert_array_equal(first(wanted=[True, False])[0], again)
    assert (prepare("Dropout", [data], key=(1, 3))()[0] != again).any()


def test_rrelu_slopes():
    """Training draws slopes between the bounds, one per element; otherwise their mean is the slope."""
    data = np.full(1000, -1.0)
    out, mask = run("LeakyReLU", [data], {"act_type": "rrelu", "lower_bound": 0.2, "upper_bound": 0.4})
    assert (mask > 0.2 - 1e-6).all()
    assert (mask < 0.4 + 1e-6).all()
    assert mask.std() > 0.03
    np.testing.assert_array_equal(out, -mask)
    calm = run("LeakyReLU", [data], {"act_type": "rrelu", "lower_bound": 0.2, "upper_bound": 0.4}, is_train=False)
    np.testing.assert_allclose(calm[0], -0.3, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ Pooling


def test_the_first_of_equal_maxima_gets_the_gradient():
    """Row-major order within the window decides between equal maxima, with overlapping windows too."""
    data = np.array([[[[1.0, 1], [1, 1]]]])
    np.testing.assert_array_equal(
        gradients("Pooling", [data], [np.ones((1, 1, 1, 1))], {"kernel": (2, 2)})[0], [[[[1, 0], [0, 0]]]]
    )
    np.testing.assert_array_equal(
        gradients("Pooling", [data], [np.ones((1, 1, 1, 1))], {"global_pool": True})[0], [[[[1, 0], [0, 0]]]]
    )
    row = np.array([[[1.0, 1, 0, 1, 1, 1]]])
    np.testing.assert_array_equal(
        gradients("Pooling", [row], [np.ones((1, 1, 4))], {"kernel": (3,)})[0], [[[1, 1, 0, 2, 0, 0]]]
    )


def test_max_pooling_of_negative_numbers_ignores_padding():
    """Padding never wins a maximum, and a window of padding alone gives the lowest number."""
    data = -1 - distinct(1, 1, 3)
    out = run("Pooling", [data], {"kernel": (2,), "stride": (2,), "pad": (1,)})[0]
    np.testing.assert_array_equal(out, [[[data[0, 0, 0], data[0, 0, 1:].max()]]])
    lonely = run("Pooling", [data], {"kernel": (2,), "stride": (4,), "pad": (1,), "pooling_convention": "full"})[0]
    np.testing.assert_array_equal(lonely, [[[data[0, 0, 0], np.finfo(np.float64).min]]])


# -------------------------------------------------------------------------------------- Convolution and products


def test_tiles_stay_within_the_workspace():
    """The column matrix of a tile is at most `workspace` MiB, however many images there are."""
    for workspace in (1, 2, 3):
        geo = geometry((500, 16, 32, 32), 8, (3, 3), (1, 1), (1, 1), (1, 1), (32, 32), 1, np.dtype(F32), workspace)
        assert geo.taps * geo.columns_per_tile * 4 <= workspace << 20
        tiles = list(geo.tiles())
        assert len(tiles) > 1
        assert sum((last - first) * (bottom - top) for first, last, top, bottom in tiles) == 500 * 32


def test_one_large_image_is_cut_into_rows():
    """An image whose columns alone exceed the workspace is worked on some rows at a time."""
    geo = geometry((1, 64, 128, 128), 8, (3, 3), (1, 1), (1, 1), (1, 1), (128, 128), 1, np.dtype(F32), 2)
    assert geo.images_per_tile == 1
    assert 1 < geo.rows_per_tile < 128
    data = np.random.RandomState(0).standard_normal((1, 64, 128, 128)).astype(F32)
    weight = np.random.RandomState(1).standard_normal((8, 64, 3, 3)).astype(F32)
    params = {"kernel": (3, 3), "num_filter": 8, "pad": (1, 1), "no_bias": True}
    small = run("Convolution", [data, weight], {**params, "workspace": 2})[0]
    np.testing.assert_allclose(small, run("Convolution", [data, weight], params)[0], rtol=1e-4, atol=1e-3)


def test_float16_sums_in_float32():
    """3000 ones add up to 3000 in float16, where adding one by one would stop at 2048."""
    ones = np.ones((1, 3000), np.float16)
    assert run("FullyConnected", [ones, ones], {"num_hidden": 1, "no_bias": True})[0] == 3000
    image = ones.reshape(1, 3000, 1, 1)
    assert run("Convolution", [image, image], {"kernel": (1, 1), "num_filter": 1, "no_bias": True})[0] == 3000
    total = run("Pooling", [ones.reshape(1, 1, 3000)], {"global_pool": True, "pool_type": "sum"})[0]
    assert total == 3000


def test_deconvolution_is_the_transpose_of_convolution():
    """<conv(x), y> = <x, deconv(y)> for one weight and the same stride, pad and dilation."""
    window = {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1), "dilate": (1, 2)}
    x, weight = uniform(2, 4, 7, 6), uniform(6, 4, 3, 2)
    y = run("Convolution", [x, weight], {**window, "num_filter": 6, "no_bias": True})[0]
    z = uniform(*y.shape, seed=3)
    back = run("Deconvolution", [z, weight], {**window, "num_filter": 4})[0]
    assert back.shape == x.shape
    np.testing.assert_allclose((y * z).sum(), (x * back).sum(), rtol=1e-10)


def test_target_shape_chooses_pad_and_adj():
    """target_shape gives what the pad and adj that lead to it give."""
    data, weight = uniform(2, 4, 3, 3), uniform(4, 2, 4, 4)
    common = {"kernel": (4, 4), "num_filter": 2, "stride": (2, 2)}
    named = run("Deconvolution", [data, weight], {**common, "target_shape": (6, 5)})[0]
    spelt = run("Deconvolution", [data, weight], {**common, "pad": (1, 2), "adj": (0, 1)})[0]
    np.testing.assert_array_equal(named, spelt)


# ------------------------------------------------------------------------------------------ softmax and losses


def cross_entropy(labels, axis, *, weight=1.0, alpha=0.0, counted=None):
    """The loss of SoftmaxOutput as an objective for check_gradient."""

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
    """Whatever gradient comes in, the data's gradient is that of the (scaled, smoothed, masked) cross entropy."""
    labels = np.array(labels)
    check_gradient(
        "SoftmaxOutput", [uniform(*shape), labels], params, wrt=(0,), objective=cross_entropy(labels, axis, **how)
    )


def test_out_grad_multiplies():
    """With out_grad the gradient is multiplied by the incoming one, element by element."""
    data, labels, ograd = uniform(4, 3), np.array([0, 1, 2, 1]), uniform(4, 3, seed=2)
    plain = gradients("SoftmaxOutput", [data, labels], [ograd])[0]
    np.testing.assert_allclose(
        gradients("SoftmaxOutput", [data, labels], [ograd], {"out_grad": True})[0], plain * ograd, rtol=1e-12
    )


@pytest.mark.parametrize("kind", ["int32", "int64", "float32", "uint8"])
def test_labels_of_any_dtype(kind):
    """Labels need not have the data's dtype."""
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
    """The gradient is that of the loss, times grad_scale over the elements of a sample."""
    label = distinct(4, 3)

    def objective(outputs):
        return float(loss(outputs[0], label).sum()) * 2.0 / 3.0, [np.ones_like(outputs[0])]

    check_gradient(op, [uniform(4, 3), label], {"grad_scale": 2.0}, wrt=(0,), objective=objective)


@pytest.mark.parametrize("op", ["SoftmaxOutput", "LinearRegressionOutput", "MakeLoss", "make_loss"])
def test_losses_ignore_the_incoming_gradient(op):
    """Losses are marked so that no head gradient need be given, and their gradient does not depend on one."""
    assert registry.get(op).loss
    inputs = [uniform(4, 3), np.zeros(4) if op == "SoftmaxOutput" else np.zeros((4, 3))]
    inputs = inputs[: len(registry.get(op).input_names({}))]
    first = gradients(op, inputs, [np.zeros((4, 3))])[0]
    np.testing.assert_array_equal(first, gradients(op, inputs, [np.full((4, 3), 9.0)])[0])
    assert first.any()


def test_block_grad_stops():
    """BlockGrad and its alias pass the data and no gradient, without a backward node."""
    call = prepare("stop_gradient", [uniform(3)])
    call()
    found, builder = differentiate(call, [np.ones(3)])
    assert not found[0].any()
    assert not builder.calls


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "SoftmaxOutput"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_softmax_of_large_numbers(op, dtype):
    """Data near the end of the dtype's range gives no infinity and no NaN."""
    top = float(np.finfo(dtype).max) / 4
    data = np.array([[top, 0, -top], [top, top, top]], dtype)
    inputs = [data, np.zeros(2, dtype)] if op == "SoftmaxOutput" else [data]
    out = run(op, inputs)[0].astype(np.float64)
    assert np.isfinite(out).all()
    probability = np.exp(out) if op == "log_softmax" else out
    np.testing.assert_allclose(probability, [[1, 0, 0], [1 / 3] * 3], rtol=1e-3)


@pytest.mark.parametrize("kind", ["sigmoid", "tanh", "softrelu", "softsign"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_activation_of_large_numbers(kind, dtype):
    """Saturated activations are finite, and their slopes lie between 0 and 1."""
    data = np.array([-1e4, -100, 0, 100, 1e4], dtype)
    call = prepare("Activation", [data], {"act_type": kind})
    out = call()[0]
    slope = differentiate(call, [np.ones_like(data)])[0][0]
    assert np.isfinite(out).all()
    assert (slope >= 0).all()
    assert (slope <= 1).all()


def test_softmax_lengths():
    """Only the first `length` classes count; the others are 0; a length of 0 gives a row of zeros."""
    out = run("softmax", [np.zeros((4, 3)), np.array([3, 2, 1, 0])], {"use_length": True})[0]
    np.testing.assert_allclose(out, [[1 / 3] * 3, [0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]])


def test_softmax_output_dtype():
    """`dtype` sets the dtype of the output and leaves that of the gradient."""
    data = uniform(3, 4).astype(np.float16)
    assert run("softmax", [data], {"dtype": "float32"})[0].dtype == F32
    assert gradients("softmax", [data], [np.ones((3, 4), F32)], {"dtype": "float32"})[0].dtype == np.float16


# -------------------------------------------------------------------------------------------------- Embedding


def test_embedding_clips_indices_and_adds_repeated_rows():
    """Indices outside the vocabulary are clipped; the gradient of a row adds up over its uses."""
    weight = uniform(3, 2)
    index = np.array([-5, 1, 1, 99])
    params = {"input_dim": 3, "output_dim": 2}
    np.testing.assert_array_equal(run("Embedding", [index, weight], params)[0], weight[[0, 1, 1, 2]])
    found = gradients("Embedding", [index, weight], [np.ones((4, 2))], params)
    np.testing.assert_array_equal(found[1], [[1, 1], [2, 2], [1, 1]])
    assert not found[0].any()


def test_temperature_must_be_positive():
    """A temperature of 0 is refused in words."""
    with pytest.raises(ParameterError, match=r"temperature=0\.0"):
        run("softmax", [uniform(2, 3)], {"temperature": 0.0})
