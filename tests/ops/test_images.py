"""``mx.sym.image``: contract, gradients, inference in both directions, refusals."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_contract, check_gradient
from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core import registry

NORMALIZE, CROP, TENSOR = "_image_normalize", "_image_crop", "_image_to_tensor"
WINDOW = {"x": 1, "y": 2, "width": 3, "height": 2}


@pytest.mark.parametrize(
    ("op", "shape", "params"),
    [
        (NORMALIZE, (2, 3, 4, 5), {"mean": (0.5, 1.0, 2.0), "std": (3.0, 2.0, 0.5)}),
        (NORMALIZE, (1, 4, 5), {"mean": (0.5,)}),
        (CROP, (2, 4, 5, 3), WINDOW),
        ("_image_flip_left_right", (2, 4, 5, 3), {}),
        ("_image_flip_top_bottom", (4, 5, 3), {}),
    ],
)
def test_contract_and_gradient(op, shape, params):
    """Image kernels meet the contract and have the gradients of central differences."""
    data = np.random.RandomState(0).uniform(-1, 1, shape)
    check_gradient(op, [data], params)
    for dtype in ("float16", "float32"):
        check_contract(op, [data.astype(dtype)], params)


def infer(op, data, out, params):
    """Return the (data shape, output shape) that the operator infers."""
    actual = registry.get(op)
    new = actual.infer_shape(registry.parse_params(actual, params), [data], [out])
    return new[0][0], new[1][0]


@pytest.mark.parametrize(
    ("op", "data", "out", "params", "expected"),
    [
        (NORMALIZE, None, (2, 3, 4, 5), {}, ((2, 3, 4, 5), (2, 3, 4, 5))),
        (TENSOR, (2, 4, 0, 3), (0, 0, 0, 5), {}, ((2, 4, 5, 3), (2, 3, 4, 5))),
        (TENSOR, None, (3, 4, 5), {}, ((4, 5, 3), (3, 4, 5))),
        (CROP, (0, 4, 5, 3), (2, 0, 0, 0), WINDOW, ((2, 4, 5, 3), (2, 2, 3, 3))),
        (CROP, None, (2, 0, 0, 3), WINDOW, ((2, 0, 0, 3), (2, 2, 3, 3))),
        (CROP, None, None, WINDOW, (None, None)),
    ],
)
def test_shapes(op, data, out, params, expected):
    """Known shapes of data and output complete the unknown shapes."""
    assert infer(op, data, out, params) == expected


@pytest.mark.parametrize(
    ("op", "data", "params", "error", "says"),
    [
        (NORMALIZE, (2, 4, 5), {}, ShapeError, "1 or 3 channels"),
        (NORMALIZE, (3, 4, 5), {"mean": (1.0, 2.0)}, ParameterError, "expected one number, or 3"),
        (TENSOR, (4, 5), {}, ShapeError, "an image of 3 axes or a batch of 4"),
        (CROP, (4, 5, 3), {**WINDOW, "width": 5}, ShapeError, "reaches beyond"),
        (CROP, (4, 5, 3), {**WINDOW, "height": 0}, ParameterError, "positive width and height"),
        (CROP, (4, 5, 3), {**WINDOW, "x": -1}, ParameterError, "at least 0"),
        ("_image_flip_left_right", (4, 5), {}, ShapeError, "3 axes"),
    ],
)
def test_refused(op, data, params, error, says):
    """Shapes and parameters that do not fit are refused, with the reason."""
    with pytest.raises(error, match=says):
        infer(op, data, None, params)


def test_both_interfaces_have_the_namespace():
    """mx.sym.image and mx.nd.image have the same operators, with the same results."""
    data = mx.nd.array(np.arange(24).reshape(2, 4, 3), dtype="uint8")
    symbol = mx.sym.image.normalize(mx.sym.image.to_tensor(mx.sym.Variable("data")), mean=(0.1, 0.2, 0.3), name="n")
    (out,) = symbol.eval(data=data)
    tensor = data.asnumpy().transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(mx.nd.image.to_tensor(data).asnumpy(), tensor)
    means = np.array([0.1, 0.2, 0.3], np.float32)[:, None, None]
    np.testing.assert_array_equal(out.asnumpy(), tensor - means)
    assert symbol.list_outputs() == ["n_output"]
    assert "crop" in dir(mx.sym.image)
    assert "crop" in dir(mx.nd.image)
