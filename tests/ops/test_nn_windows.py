"""Pooling, convolution and deconvolution: ties, padding, tiles, sums in float32."""

import numpy as np

from tests.support.ops_harness import gradients, run
from tests.support.ops_nn_cases import distinct, uniform
from weftplan.ops.nn.conv_geometry import geometry

F32 = np.float32


def test_the_first_of_equal_maxima_gets_the_gradient():
    """The first of equal maxima, in row-major order, gets the gradient, also in overlapping windows."""
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
    """Padding never is the maximum, and a window of padding alone gives the lowest number."""
    data = -1 - distinct(1, 1, 3)
    out = run("Pooling", [data], {"kernel": (2,), "stride": (2,), "pad": (1,)})[0]
    np.testing.assert_array_equal(out, [[[data[0, 0, 0], data[0, 0, 1:].max()]]])
    lonely = run("Pooling", [data], {"kernel": (2,), "stride": (4,), "pad": (1,), "pooling_convention": "full"})[0]
    np.testing.assert_array_equal(lonely, [[[data[0, 0, 0], np.finfo(np.float64).min]]])


def test_tiles_stay_within_the_workspace():
    """The column matrix of a tile is at most ``workspace`` MiB for any number of images."""
    for workspace in (1, 2, 3):
        geo = geometry((500, 16, 32, 32), 8, (3, 3), (1, 1), (1, 1), (1, 1), (32, 32), 1, np.dtype(F32), workspace)
        assert geo.taps * geo.columns_per_tile * 4 <= workspace << 20
        tiles = list(geo.tiles())
        assert len(tiles) > 1
        assert sum((last - first) * (bottom - top) for first, last, top, bottom in tiles) == 500 * 32


def test_one_large_image_is_cut_into_rows():
    """An image whose columns exceed the workspace is computed in tiles of rows, with the same result."""
    geo = geometry((1, 64, 128, 128), 8, (3, 3), (1, 1), (1, 1), (1, 1), (128, 128), 1, np.dtype(F32), 2)
    assert geo.images_per_tile == 1
    assert 1 < geo.rows_per_tile < 128
    data = np.random.RandomState(0).standard_normal((1, 64, 128, 128)).astype(F32)
    weight = np.random.RandomState(1).standard_normal((8, 64, 3, 3)).astype(F32)
    params = {"kernel": (3, 3), "num_filter": 8, "pad": (1, 1), "no_bias": True}
    small = run("Convolution", [data, weight], {**params, "workspace": 2})[0]
    np.testing.assert_allclose(small, run("Convolution", [data, weight], params)[0], rtol=1e-4, atol=1e-3)


def test_float16_sums_in_float32():
    """3000 ones add up to 3000 in float16; a sum in float16 would stop at 2048."""
    ones = np.ones((1, 3000), np.float16)
    assert run("FullyConnected", [ones, ones], {"num_hidden": 1, "no_bias": True})[0] == 3000
    image = ones.reshape(1, 3000, 1, 1)
    assert run("Convolution", [image, image], {"kernel": (1, 1), "num_filter": 1, "no_bias": True})[0] == 3000
    total = run("Pooling", [ones.reshape(1, 1, 3000)], {"global_pool": True, "pool_type": "sum"})[0]
    assert total == 3000


def test_deconvolution_is_the_transpose_of_convolution():
    """<conv(x), y> equals <x, deconv(y)> for one weight and the same stride, pad and dilation."""
    window = {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1), "dilate": (1, 2)}
    x, weight = uniform(2, 4, 7, 6), uniform(6, 4, 3, 2)
    y = run("Convolution", [x, weight], {**window, "num_filter": 6, "no_bias": True})[0]
    z = uniform(*y.shape, seed=3)
    back = run("Deconvolution", [z, weight], {**window, "num_filter": 4})[0]
    assert back.shape == x.shape
    np.testing.assert_allclose((y * z).sum(), (x * back).sum(), rtol=1e-10)


def test_target_shape_chooses_pad_and_adj():
    """``target_shape`` gives the result of the pad and adj that produce this shape."""
    data, weight = uniform(2, 4, 3, 3), uniform(4, 2, 4, 4)
    common = {"kernel": (4, 4), "num_filter": 2, "stride": (2, 2)}
    named = run("Deconvolution", [data, weight], {**common, "target_shape": (6, 5)})[0]
    spelt = run("Deconvolution", [data, weight], {**common, "pad": (1, 2), "adj": (0, 1)})[0]
    np.testing.assert_array_equal(named, spelt)
