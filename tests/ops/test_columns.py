"""Correlation, im2col and col2im: inference in both directions, refusals, and inverses."""

import numpy as np
import pytest

from tests.support.ops_harness import gradients, run
from tests.support.ops_harness import infer_shapes as infer
from weftplan.errors import ParameterError, ShapeError

WINDOW = {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 1)}


@pytest.mark.parametrize(
    ("op", "ins", "outs", "params", "expected"),
    [
        ("Correlation", [(2, 3, 6, 0), None], [None], {}, ([(2, 3, 6, 0)] * 2, [(2, 9, 4, 0)])),
        ("Correlation", [(0, 3, 6, 7), (0, 3, 0, 0)], [(2, 0, 0, 0)], {}, ([(2, 3, 6, 7)] * 2, [(2, 9, 4, 5)])),
        ("im2col", [(2, 3, 4, 5)], [None], WINDOW, ([(2, 3, 4, 5)], [(2, 18, 12)])),
        ("im2col", [(0, 0, 4, 5)], [(2, 18, 0)], WINDOW, ([(2, 3, 4, 5)], [(2, 18, 12)])),
        ("im2col", [(2, 3, 0, 5)], [None], WINDOW, ([(2, 3, 0, 5)], [(2, 18, 0)])),
        ("col2im", [(2, 18, 0)], [None], {**WINDOW, "output_size": (4, 5)}, ([(2, 18, 12)], [(2, 3, 4, 5)])),
        ("col2im", [None], [(2, 3, 0, 0)], {**WINDOW, "output_size": (4, 5)}, ([(2, 18, 12)], [(2, 3, 4, 5)])),
    ],
)
def test_shapes(op, ins, outs, params, expected):
    """Known shapes of inputs and outputs complete the unknown shapes."""
    assert infer(op, ins, outs, params) == expected


@pytest.mark.parametrize(
    ("op", "ins", "params", "error", "says"),
    [
        ("Correlation", [(2, 3, 6, 7)] * 2, {"kernel_size": 2}, ParameterError, "odd kernel_size"),
        ("Correlation", [(2, 3, 6, 7)] * 2, {"max_displacement": 3}, ShapeError, "no room"),
        ("Correlation", [(2, 3, 6, 7), (2, 4, 6, 7)], {}, ShapeError, "data1 and data2"),
        ("im2col", [(2, 3, 4, 5)], {"kernel": (5, 2)}, ShapeError, "window of 5 does not fit"),
        ("im2col", [(2, 3, 4, 5)], {"kernel": (2, 2), "stride": (1,)}, ParameterError, r"stride=\(1,\) does not fit"),
        ("im2col", [(2, 3, 4)], {"kernel": (2, 2)}, ShapeError, "differ in rank"),
        ("im2col", [(2, 3, 4)], {"kernel": ()}, ParameterError, "one, two or three positive sizes"),
        ("col2im", [(2, 17, 12)], {**WINDOW, "output_size": (4, 5)}, ShapeError, "multiple of 6 rows"),
        ("col2im", [(2, 18, 11)], {**WINDOW, "output_size": (4, 5)}, ShapeError, "columns for output_size"),
        ("col2im", [(2, 18, 12)], {**WINDOW, "output_size": (4,)}, ParameterError, "does not fit kernel"),
    ],
)
def test_refused(op, ins, params, error, says):
    """Shapes and parameters that do not fit are refused, with the reason."""
    with pytest.raises(error, match=says):
        infer(op, ins, [None], params)


def test_columns_and_back():
    """col2im restores windows that do not overlap, and adds each element as often as windows contain it."""
    image = np.random.RandomState(0).uniform(-1, 1, (2, 3, 6, 4))
    apart = {"kernel": (2, 2), "stride": (2, 2)}
    (columns,) = run("im2col", [image], apart)
    np.testing.assert_array_equal(run("col2im", [columns], {**apart, "output_size": (6, 4)})[0], image)
    close = {"kernel": (3, 1)}
    (columns,) = run("im2col", [np.ones((1, 1, 5, 2))], close)
    assert run("col2im", [columns], {**close, "output_size": (5, 2)})[0][0, 0, :, 0].tolist() == [1, 2, 3, 2, 1]


def test_columns_multiply_as_convolution():
    """The weight times the columns of im2col equals the convolution."""
    image, weight = (np.random.RandomState(k).uniform(-1, 1, s) for k, s in enumerate(((1, 2, 5, 4), (3, 2, 3, 2))))
    (columns,) = run("im2col", [image], WINDOW)
    expected = run("Convolution", [image, weight], {**WINDOW, "num_filter": 3, "no_bias": True})[0]
    np.testing.assert_allclose(weight.reshape(3, -1) @ columns[0], expected.reshape(3, -1), atol=1e-12)


def test_correlation_finds_a_shift():
    """Correlation of an image and its shifted copy is largest at that displacement."""
    image = np.random.RandomState(0).choice([-1.0, 1.0], (1, 8, 12, 12))
    moved = np.roll(image, (1, -2), axis=(2, 3))
    (out,) = run("Correlation", [image, moved], {"max_displacement": 2, "pad_size": 2})
    assert out.shape == (1, 25, 12, 12)
    assert out[0, :, 4:8, 4:8].mean(axis=(1, 2)).argmax() == (1 + 2) * 5 + (-2 + 2)


def test_correlation_of_equal_pixels():
    """For equal pixels, the absolute difference has slope 1 for the first map, as in MXNet, and -1 for the second."""
    image = np.ones((1, 1, 3, 3))
    params = {"max_displacement": 0, "is_multiply": False}
    first, second = gradients("Correlation", [image, image], [np.full((1, 1, 3, 3), 2.0)], params)
    np.testing.assert_array_equal(first, np.full((1, 1, 3, 3), 2.0))
    np.testing.assert_array_equal(second, np.full((1, 1, 3, 3), -2.0))
