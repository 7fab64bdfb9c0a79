"""Contributed operators of MXNet and slice assignment: values, gradients, contract, inference, bad input."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_contract, check_gradient, gradients, run
from weftplan.errors import IndexRangeError, ParameterError, ShapeError


def uniform(*shape, seed=0):
    """Return random float64 numbers in [0, 1)."""
    return np.random.RandomState(seed + sum(shape)).uniform(0, 1, shape)


def test_quadratic():
    """quadratic returns a · x² + b · x + c with its gradient.

    For integers only the result is truncated, not the factors.
    """
    x, params = uniform(3, 4) - 0.5, {"a": 1.5, "b": -2.0, "c": 0.25}
    np.testing.assert_allclose(run("_contrib_quadratic", [x], params)[0], 1.5 * x**2 - 2 * x + 0.25)
    check_gradient("_contrib_quadratic", [x], params)
    check_contract("_contrib_quadratic", [x.astype(np.float32)], params)
    check_contract("_contrib_quadratic", [uniform(70, 70)], params)  # more than one block
    whole = mx.nd.contrib.quadratic(mx.nd.array([1, 2], dtype="int32"), a=1.5, b=1, c=0.5)
    assert whole.asnumpy().tolist() == [3, 8]


def test_a_gradient_is_multiplied():
    """gradientmultiplier returns its data and multiplies the gradient by the scalar."""
    x = uniform(2, 3)
    np.testing.assert_array_equal(run("_contrib_gradientmultiplier", [x], {"scalar": -0.5})[0], x)
    np.testing.assert_allclose(gradients("_contrib_gradientmultiplier", [x], [x], {"scalar": -0.5})[0], -0.5 * x)
    check_contract("_contrib_gradientmultiplier", [x], {"scalar": 2.0})


@pytest.mark.parametrize("axes", [None, (1,), (2, 0), (-1, -3, 0)])
def test_index_array(axes):
    """index_array returns the int64 indices of every element along ``axes``; only the data's shape matters."""
    shape = (2, 3, 4)
    expected = np.stack(np.mgrid[:2, :3, :4], axis=-1)[..., axes or slice(None)]
    actual = run("_contrib_index_array", [uniform(*shape)], {} if axes is None else {"axes": axes})[0]
    assert actual.dtype == np.int64
    np.testing.assert_array_equal(actual, expected)
    check_contract("_contrib_index_array", [uniform(*shape)])
    symbol = mx.sym.contrib.index_array(mx.sym.Variable("x"), axes=axes)
    assert symbol.infer_shape(x=shape)[1] == [expected.shape]


def test_index_array_needs_axes_that_exist():
    """index_array refuses an axis beyond the data's during shape inference."""
    with pytest.raises(ShapeError, match="axes of index_array"):
        mx.sym.contrib.index_array(mx.sym.Variable("x"), axes=(2,)).infer_shape(x=(2, 3))


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 2)])
def test_index_copy(shape):
    """index_copy replaces rows at integer or float32 indices, and has gradients for both tensors.

    Of rows with equal indices, the last is copied."""
    old, new = uniform(*shape), uniform(3, *shape[1:], seed=7)
    for places in (np.array([0, 4, 2]), np.array([4, 0, 1], np.float32)):
        expected = old.copy()
        expected[places.astype(int)] = new
        np.testing.assert_array_equal(run("_contrib_index_copy", [old, places, new], {})[0], expected)
        check_gradient("_contrib_index_copy", [old, places, new], {}, wrt=[0, 2])
        check_contract("_contrib_index_copy", [old, places, new], {})
    assert run("_contrib_index_copy", [old, np.array([1, 1, 1]), new], {})[0][1].tolist() == new[2].tolist()


def test_index_copy_refuses():
    """index_copy refuses bad shapes, and indices out of range, for which MXNet 1.9.1 writes beyond the tensor."""
    sym = mx.sym.contrib.index_copy(*(mx.sym.Variable(name) for name in ("old", "index", "new")))
    assert sym.infer_shape(old=(5, 3), index=(2,))[0] == [(5, 3), (2,), (2, 3)]
    for shapes, words in (
        ({"old": (5, 3), "index": (2,), "new": (3, 3)}, "of 2 rows"),
        ({"old": (5, 3), "index": (1, 3)}, "expected a vector"),
        ({"old": (5, 3), "index": (3,), "new": (3, 2)}, "into .5, 3."),
        ({"old": (2, 3), "index": (3,)}, "only 2"),
    ):
        with pytest.raises(ShapeError, match=words):
            sym.infer_shape(**shapes)
    for places in ([0, 5], [0, -1]):
        with pytest.raises(IndexRangeError, match="index_copy: indices from"):
            mx.nd.contrib.index_copy(mx.nd.zeros((5, 3)), mx.nd.array(places), mx.nd.ones((2, 3))).wait_to_read()


def test_boolean_mask():
    """boolean_mask returns the rows whose mask is nonzero, as in MXNet 1.9.1.

    Negative numbers, fractions and NaN count as nonzero.
    """
    data = mx.nd.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    mask = mx.nd.contrib.boolean_mask
    assert mask(data, mx.nd.array([0, 1, 0])).asnumpy().tolist() == [[4, 5, 6]]
    assert mask(data, mx.nd.array([-1, 0.5, np.nan])).asnumpy().tolist() == data.asnumpy().tolist()
    none = mask(data, mx.nd.zeros((3,)))
    assert (none.shape, none.dtype) == ((0, 3), np.float32)
    whole = mask(data.astype("int32"), mx.nd.array([1, 0, 1], dtype="int8"))
    assert (whole.asnumpy().tolist(), whole.dtype) == ([[1, 2, 3], [7, 8, 9]], np.int32)
    with pytest.raises(ParameterError, match="only 0 is supported"):
        mask(data, mx.nd.array([1, 0, 1]), axis=1)
    for wrong in (mx.nd.array([1, 0]), mx.nd.array([[1, 0, 1]])):
        with pytest.raises(ShapeError, match="one number for each row"):
            mask(data, wrong)


REGIONS = [
    {"begin": (0, 1), "end": (2, 3)},
    {"begin": (None, 3), "end": (None, None), "step": (1, -2)},
    {"begin": (1,), "end": (2,)},
]


@pytest.mark.parametrize("region", REGIONS)
def test_regions_are_replaced(region):
    """``_slice_assign`` and ``_slice_assign_scalar`` equal NumPy's assignment, out of place and in place."""
    x = uniform(3, 4)
    place = tuple(map(slice, region["begin"], region["end"], region.get("step", (None,) * 2)))
    part = uniform(*x[place].shape, seed=5)
    for name, inputs, params in (
        ("_slice_assign", [x, part], region),
        ("_slice_assign_scalar", [x], {"scalar": 7.0, **region}),
    ):
        expected = x.copy()
        expected[place] = part if len(inputs) == 2 else 7
        np.testing.assert_array_equal(run(name, inputs, params)[0], expected)
        check_gradient(name, inputs, params)
        check_contract(name, inputs, params)
    array = mx.nd.array(x)
    mx.nd._internal._crop_assign_scalar(array, scalar=7, out=array, **region)
    np.testing.assert_allclose(array.asnumpy(), expected, rtol=1e-6)
    with pytest.raises(ShapeError, match="output of slice"):
        mx.nd._internal._crop_assign(array, mx.nd.ones((5, 5)), **region)


# ------------------------------------------------------------------------------------------------------------- boxes


def centres(corners):
    """Return boxes (…, 4), given as corners, as centre and size."""
    low, high = corners[..., :2], corners[..., 2:]
    return np.concatenate([(low + high) / 2, high - low], axis=-1)


def corners(count, images, seed):
    """Return random boxes as corners, of shape (images, count, 4)."""
    low = uniform(images, count, 2, seed=seed)
    return np.concatenate([low, low + 0.1 + uniform(images, count, 2, seed=seed + 9)], axis=-1)


def test_boxes_are_encoded_and_decoded():
    """box_encode returns offsets in units of the anchors; box_decode restores the boxes from either form of anchors."""
    anchors, refs = corners(3, 2, 0), corners(4, 2, 1)
    samples, matches = np.array([[1.0, 0.4, 0.6], [-1, 2, 0.5]]), np.array([[0.0, 1, 3], [2, 1.7, 0]])
    means, stds = np.zeros(4), np.array([0.1, 0.2, 0.3, 0.4])
    inputs = [samples, matches, anchors, refs, means, stds]
    target, mask = run("_contrib_box_encode", inputs)
    actual = np.stack([one[rows.astype(int)] for one, rows in zip(refs, matches, strict=True)])
    own, second = centres(anchors), centres(actual)
    expected = np.concatenate(
        [(second[..., :2] - own[..., :2]) / own[..., 2:], np.log(second[..., 2:] / own[..., 2:])], -1
    )
    positive = (samples > 0.5)[..., None]
    np.testing.assert_array_equal(mask, np.broadcast_to(positive, mask.shape))
    np.testing.assert_allclose(target, expected / stds * positive, atol=1e-12)
    shifted = run("_contrib_box_encode", [*inputs[:4], means + 0.5, stds])[0]
    np.testing.assert_allclose(shifted, (expected - 0.5) / stds * positive, atol=1e-12)
    check_contract("_contrib_box_encode", inputs)
    factors = {f"std{k}": stds[k] for k in range(4)}
    for form, arguments in (("corner", anchors), ("center", own)):
        for image in range(2):
            offsets = [(expected / stds)[image : image + 1], arguments[image : image + 1]]
            decoded = run("_contrib_box_decode", offsets, {**factors, "format": form})[0]
            np.testing.assert_allclose(decoded[0], actual[image], atol=1e-12)
    check_contract("_contrib_box_decode", [target, anchors[:1]], {"clip": 0.1, **factors})


def test_the_growth_of_a_box_is_limited():
    """``clip`` of box_decode limits the logarithms of the sizes."""
    data, anchor = np.array([[[0.0, 0, 5, -5]]]), np.array([[[0.0, 0, 1, 1]]])
    actual = run("_contrib_box_decode", [data, anchor], {"clip": np.log(2.0)})[0]
    np.testing.assert_allclose(actual[0, 0], [-1, -np.exp(-5) / 2, 1, np.exp(-5) / 2])


def test_boxes_of_wrong_shapes():
    """box_encode and box_decode refuse shapes that do not fit; the error names the arrays."""
    ones = mx.nd.ones
    four = ones((4,)), ones((4,))
    with pytest.raises(ShapeError, match="samples must have 2 dimensions"):
        mx.nd.contrib.box_encode(ones((3,)), ones((1, 3)), ones((1, 3, 4)), ones((1, 2, 4)), *four)
    with pytest.raises(ShapeError, match="anchors of box_encode"):
        mx.nd.contrib.box_encode(ones((1, 3)), ones((1, 3)), ones((1, 2, 4)), ones((1, 2, 4)), *four)
    with pytest.raises(ShapeError, match="number of offsets and of anchors"):
        mx.nd.contrib.box_decode(ones((2, 3, 4)), ones((1, 2, 4)))


# ---------------------------------------------------------------------------------------------------------- zipfian


def test_classes_without_replacement():
    """_sample_unique_zipfian returns rows of distinct classes below range_max, mostly small classes.

    It also returns the number of draws of each row. If all classes are wanted, each row is a permutation.
    """
    mx.random.seed(4)
    classes, tries = mx.nd._internal._sample_unique_zipfian(1000, shape=(3, 200))
    assert classes.dtype == tries.dtype == np.int64
    for row in classes.asnumpy():
        assert len(set(row.tolist())) == 200
        assert (row >= 0).all()
        assert (row < 1000).all()
    assert np.mean(classes.asnumpy() < 100) > 0.3  # a third of the draws are below 10
    assert (tries.asnumpy() > 200).all()
    every, tries = mx.nd._internal._sample_unique_zipfian(50, shape=(2, 50))
    assert [sorted(row) for row in every.asnumpy().tolist()] == [list(range(50))] * 2
    assert (tries.asnumpy() >= 50).all()
    with pytest.raises(ShapeError, match="no 6 different classes below range_max=5"):
        mx.nd._internal._sample_unique_zipfian(5, shape=(1, 6))
    with pytest.raises(ShapeError, match="two dimensions"):
        mx.nd._internal._sample_unique_zipfian(5, shape=(3,))


def test_classes_with_replacement():
    """rand_zipfian returns the expected counts of the formula, for arrays and symbols, and its draws follow them."""
    mx.random.seed(5)
    inputs = mx.nd.array([0, 3, 19], dtype="int32")
    expected = np.log((np.arange(20) + 2) / (np.arange(20) + 1)) / np.log(21) * 20000
    executor = mx.sym.Group(mx.sym.contrib.rand_zipfian(mx.sym.Variable("x"), 20000, 20)).bind(mx.cpu(), {"x": inputs})
    for classes, true, sampled in (mx.nd.contrib.rand_zipfian(inputs, 20000, 20), executor.forward()):
        drawn = classes.asnumpy()
        assert (drawn.dtype, drawn.shape) == (np.int64, (20000,))
        np.testing.assert_allclose(true.asnumpy(), expected[[0, 3, 19]])
        np.testing.assert_allclose(sampled.asnumpy(), expected[drawn])
        counts = np.bincount(drawn, minlength=20)
        assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()


# ------------------------------------------------------------------------------------------------------------ AdamW

RATES = {"lr": 0.5, "wd": 0.1, "eta": 0.3, "beta1": 0.75, "beta2": 0.875, "clip_gradient": 2.0}


def adamw(w, g, mean, var):
    """Return weight, mean and variance after one step in float64; ``g`` is already rescaled."""
    g = np.clip(g, -2, 2)
    mean, var = 0.75 * mean + 0.25 * g, 0.875 * var + 0.125 * g * g
    return w - 0.3 * (0.5 * mean / (np.sqrt(var) + 1e-8) + 0.1 * w), mean, var


def arrays(dtype="float32", shape=(70, 70)):
    """Return weight and gradient in ``dtype``, mean and variance in float32; by default more than one block."""
    result = [uniform(*shape, seed=k) for k in range(4)]
    return [mx.nd.array(x, dtype=dtype if k < 2 else "float32") for k, x in enumerate(result)]


@pytest.mark.parametrize("mixed", [False, True])
def test_steps_of_adamw(mixed):
    """Weight and states equal the formula; a float16 weight is stepped through its float32 copy."""
    w, g, mean, var = arrays("float16" if mixed else "float32")
    expected = adamw(w.asnumpy().astype("f8"), 3.0 * g.asnumpy().astype("f8"), mean.asnumpy(), var.asnumpy())
    if mixed:
        wide = w.astype("float32")
        mx.nd.contrib.mp_adamw_update(w, g, mean, var, wide, 3.0, out=w, **RATES)
        np.testing.assert_allclose(wide.asnumpy(), expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(w.asnumpy(), wide.asnumpy().astype("float16"))
    else:
        mx.nd.contrib.adamw_update(w, g, mean, var, mx.nd.array([3]), out=w, **RATES)
        np.testing.assert_allclose(w.asnumpy(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean.asnumpy(), expected[1], rtol=1e-6)
    np.testing.assert_allclose(var.asnumpy(), expected[2], rtol=1e-6)


@pytest.mark.parametrize("factor", [np.nan, np.inf, -np.inf, 0.0])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_bad_factor_skips_the_step(factor, mixed):
    """A rescaling factor of 0, NaN or infinity leaves weight and states unchanged, whatever the gradient."""
    inputs = arrays("float16" if mixed else "float32")
    inputs[1][:] = np.inf
    states = [*inputs[:1], *inputs[2:], *([inputs[0].astype("float32")] if mixed else [])]
    before = [x.asnumpy() for x in states]
    step = mx.nd.contrib.mp_adamw_update if mixed else mx.nd.contrib.adamw_update
    step(*inputs, *states[3:], factor, out=inputs[0], **RATES)
    for x, old in zip(states, before, strict=True):
        np.testing.assert_array_equal(x.asnumpy(), old)


@pytest.mark.parametrize("mixed", [False, True])
def test_several_weights_at_once(mixed):
    """One update of two weights with their own rates equals two single updates.

    Lists of other lengths are refused and change nothing.
    """
    sets = [arrays("float16" if mixed else "float32", (3, 4)) for _ in range(2)]
    if mixed:
        sets = [[*one, one[0].astype("float32")] for one in sets]
    alone = [[x.copy() for x in one] for one in sets]
    single = mx.nd.contrib.mp_adamw_update if mixed else mx.nd.contrib.adamw_update
    several = mx.nd.contrib.multi_mp_adamw_update if mixed else mx.nd.contrib.multi_adamw_update
    rates = [(0.1, 0.2, 0.3), (0.4, 0.5, 0.6)]
    for one, (lr, wd, eta) in zip(alone, rates, strict=True):
        single(*one, 2.0, lr=lr, wd=wd, eta=eta, out=one[0])
    lists = list(zip(*sets, strict=True))
    lrs, wds, etas = zip(*rates, strict=True)
    with pytest.raises(ParameterError, match="expected lists of 2 items"):
        several(*lists, 2.0, lrs=lrs[:1], wds=wds, etas=etas, out=lists[0])
    several(*lists, 2.0, lrs=lrs, wds=wds, etas=etas, out=lists[0])
    for one, second in zip(sets, alone, strict=True):
        for x, y in zip(one, second, strict=True):
            np.testing.assert_array_equal(x.asnumpy(), y.asnumpy())


def test_group_adagrad():
    """GroupAdaGrad has one rate per row and clips gradients.

    It refuses weight decay, and weights that are not matrices.
    """
    optimizer = mx.optimizer.contrib.GroupAdaGrad(
        learning_rate=0.5, rescale_grad=2.0, clip_gradient=1.0, eps=1e-3, wd=0
    )
    weight, grad = (mx.nd.array(uniform(3, 4, seed=k)) for k in range(2))
    state = optimizer.create_state(0, weight)
    w, h, g = weight.asnumpy(), np.zeros((3, 1)), np.clip(2 * grad.asnumpy(), -1, 1)
    for _ in range(2):
        optimizer.update(0, weight, grad, state)
        h = h + (g * g).mean(axis=1, keepdims=True)
        w = w - 0.5 * g / np.sqrt(h + 1e-3)
    np.testing.assert_allclose(weight.asnumpy(), w, rtol=1e-5)
    np.testing.assert_allclose(state.asnumpy(), h, rtol=1e-5)
    with pytest.raises(ShapeError, match="two dimensions"):
        optimizer.create_state(0, mx.nd.ones((3,)))
    decaying = mx.optimizer.create("groupadagrad", wd=0.1)
    with pytest.raises(ParameterError, match="no weight decay"):
        decaying.update(0, weight, grad, state)


def test_scale_gradient():
    """_scale_gradient returns its data and multiplies their gradient by the number in the array."""
    x, scale = uniform(3, 4), np.array([8.0])
    np.testing.assert_array_equal(run("_scale_gradient", [x, scale], {})[0], x)
    np.testing.assert_allclose(gradients("_scale_gradient", [x, scale], [x], {})[0], 8.0 * x)
    check_contract("_scale_gradient", [x, scale], {})
