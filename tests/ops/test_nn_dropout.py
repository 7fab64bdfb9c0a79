"""Dropout and the random slopes of LeakyReLU: kept shares, masks, random keys, and inference."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import differentiate, gradients, prepare, run
from tests.support.ops_nn_cases import CASES, uniform
from weftplan.errors import DTypeError
from weftplan.ops.core.schema import OpContext

F32 = np.float32


def test_dropout_keeps_a_share_and_scales_it():
    """Dropout keeps about 1 - p of the elements and scales them by 1 / (1 - p).

    Its byte mask is 1 for kept elements, and the gradient uses this mask.
    """
    data = np.ones((100, 1000), F32)
    call = prepare("Dropout", [data], {"p": 0.3})
    out, mask = call()
    assert mask.dtype == np.uint8
    assert abs(mask.mean() - 0.7) < 0.01
    np.testing.assert_array_equal(out, mask * F32(1 / 0.7))
    actual = differentiate(call, [data, np.zeros_like(mask)])[0][0]
    np.testing.assert_array_equal(actual, out)


class _Sized:
    """A generator that refuses to draw without a size: CuPy draws a single number then."""

    def __init__(self, generator):
        self._generator = generator

    def random(self, size=None, dtype=np.float64, out=None):
        """Return ``size`` uniform numbers; ``size`` must not be None."""
        assert size is not None
        return self._generator.random(size, dtype=dtype, out=out)

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        """Return ``size`` normal numbers; ``size`` must not be None."""
        assert size is not None
        return self._generator.standard_normal(size, dtype=dtype, out=out)


@pytest.mark.parametrize(
    "case",
    [
        ("Dropout", [uniform(5, 3)], {}),
        ("Dropout", [uniform(5, 3)], {"axes": (1,)}),
        ("LeakyReLU", [uniform(5, 3)], {"act_type": "rrelu"}),
        next(case for case in CASES if case[0] == "RNN" and case[2].get("p")),
        ("_random_uniform", [], {"shape": (3, 2)}),
        ("_random_normal", [], {"shape": (3, 2), "dtype": "float16"}),
    ],
    ids=lambda case: f"{case[0]}-{case[2].get('act_type', case[2].get('axes', ''))}",
)
def test_every_element_has_a_draw_of_its_own(case, monkeypatch):
    """Random operators always pass a size to the generator; otherwise CuPy would draw one number for all elements."""
    op, arrays, params = case
    expected = [y.copy() for y in run(op, arrays, params)]
    make = OpContext.generator
    monkeypatch.setattr(OpContext, "generator", lambda self: _Sized(make(self)))
    for got, want in zip(run(op, arrays, params), expected, strict=True):
        np.testing.assert_array_equal(got, want)


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
    """Dropout with ``axes`` keeps or drops all elements along these axes together."""
    out, mask = run("Dropout", [np.ones((40, 5, 6))], {"axes": (1, 2)})
    assert mask.shape == (40, 1, 1)
    assert (out == out[:, :1, :1]).all()
    assert 0 < mask.sum() < 40


def test_dropout_depends_on_the_key_alone():
    """Another key gives another output; the same key gives the same output, whether or not the mask is wanted."""
    data = np.ones(1000)
    first = prepare("Dropout", [data], key=(1, 2))
    repeated = first()[0]
    np.testing.assert_array_equal(first(wanted=[True, False])[0], repeated)
    assert (prepare("Dropout", [data], key=(1, 3))()[0] != repeated).any()


def test_rrelu_slopes():
    """Training draws one slope per element between the bounds; inference uses the mean of the bounds."""
    data = np.full(1000, -1.0)
    out, mask = run("LeakyReLU", [data], {"act_type": "rrelu", "lower_bound": 0.2, "upper_bound": 0.4})
    assert (mask > 0.2 - 1e-6).all()
    assert (mask < 0.4 + 1e-6).all()
    assert mask.std() > 0.03
    np.testing.assert_array_equal(out, -mask)
    calm = run("LeakyReLU", [data], {"act_type": "rrelu", "lower_bound": 0.2, "upper_bound": 0.4}, is_train=False)
    np.testing.assert_allclose(calm[0], -0.3, rtol=1e-6)


def test_only_floats_are_dropped():
    """Type inference refuses integers for Dropout and suggests a cast, because scaling would have to round them."""
    symbol = mx.sym.Dropout(mx.sym.Variable("data"))
    with pytest.raises(DTypeError, match="Dropout expects floats, got int64: cast the data first"):
        symbol.infer_type(data="int64")
    with pytest.raises(DTypeError, match="Dropout expects floats"):
        mx.nd.Dropout(mx.nd.array([1, 2], dtype="int32"))
