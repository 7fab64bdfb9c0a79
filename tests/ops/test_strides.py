"""Kernels on views: NumPy's wrong results are avoided, and prepared calls equal their kernels."""

import numpy as np
import pytest

from tests.support.ops_harness import check_prepared, differentiate, gradients, prepare
from tests.support.ops_nn_cases import CASES as NN_CASES
from tests.support.ops_nn_cases import ident, uniform
from tests.support.ops_tensor_cases import CASES as TENSOR_CASES
from tests.support.ops_tensor_cases import NO_GRADIENT
from tests.support.together import together
from weftplan.ops.core import kernels, registry, tiling
from weftplan.ops.core.rules import broadcast_shape, same_shape
from weftplan.ops.core.schema import REQUIRED

ALL = TENSOR_CASES + NO_GRADIENT + NN_CASES


@pytest.fixture
def strict_negative(monkeypatch):
    """Replace NumPy's ``negative`` by a function that refuses views."""
    plain = np.negative

    def negative(x, /, out=None, **how):
        assert x.flags.c_contiguous, "negative of a view"
        assert out is None or out.flags.c_contiguous, "negative into a view"
        return plain(x, out=out, **how)

    monkeypatch.setattr(np, "negative", negative)


def test_the_strict_negative_refuses_views(strict_negative):
    """``strict_negative`` accepts whole arrays and refuses a column of an array."""
    x = np.ones((3, 4), np.float32)
    np.negative(x, out=x)
    with pytest.raises(AssertionError, match="of a view"):
        np.negative(x[:, 1:2], out=x[:, 1:2])


@together()
@pytest.mark.parametrize("case", ALL, ids=ident)
def test_no_kernel_negates_a_view(case, strict_negative):
    """No kernel calls ``negative`` on a view.

    NumPy 2.1 to 2.4.6 negates some views wrongly (see ``weftplan/ops/core/kernels.py``).
    """
    op, arrays, params = case
    call = prepare(op, arrays, params)
    call()
    if call.op.gradient is not None:
        differentiate(call, [np.ones(s.shape, s.dtype) for s in call.out_specs])


@together(by=lambda mode: mode)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("batch", [1, 2, 4, 5])
@pytest.mark.parametrize("mode", ["rnn_relu", "rnn_tanh", "lstm", "gru"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rnn_of_every_small_size(mode, size, batch, dtype):
    """RNN results of every small size are close to the float64 results.

    Gates are columns of one array, with strides of 1 to 4 times the size.
    """
    gates = {"lstm": 4, "gru": 3}.get(mode, 1)
    steps, inputs = 3, 2
    arrays = [
        uniform(steps, batch, inputs, seed=1),
        uniform(gates * size * (inputs + size + 2), seed=2),
        uniform(1, batch, size, seed=3),
        *([uniform(1, batch, size, seed=4)] if mode == "lstm" else []),
    ]
    arrays = [x.astype(dtype) for x in arrays]
    params = {"mode": mode, "num_layers": 1, "state_size": size, "state_outputs": True}
    narrow, exact = (prepare("RNN", [x.astype(t) for x in arrays], params) for t in (dtype, "float64"))
    pairs = list(zip(narrow(), exact(), strict=True))[: narrow.op.num_visible_outputs(narrow.params)]
    ograds = [np.full(s.shape, 0.5) for s in exact.out_specs]
    actual = differentiate(narrow, [g.astype(s.dtype) for g, s in zip(ograds, narrow.out_specs, strict=True)])[0]
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for got, want in [*pairs, *zip(actual, differentiate(exact, ograds)[0], strict=True)]:
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance * scale)


PREPARED = sorted(
    name
    for name in registry.names(aliases=False)
    if (op := registry.get(name)).backward_of is None
    and getattr(op.forward, "replayable", False)
    and op.infer_shape in (same_shape, broadcast_shape)
    and all(param.default is not REQUIRED for param in op.params)
)
"""Elementwise operators that need no parameters; the contract tests cover the others."""


@together()
@pytest.mark.parametrize("name", PREPARED)
def test_prepared_calls(name):
    """A prepared call can be repeated, gives the kernel's results, and causes no NumPy warning."""
    op = registry.get(name)
    arrays = [np.linspace(0.1, 0.9, 7, dtype=np.float32)] * len(op.input_names(registry.parse_params(op, {})))
    assert check_prepared(prepare(name, arrays))


def test_arrays_of_many_blocks(monkeypatch):
    """A prepared call of several blocks has the kernel's bits.

    For more than MAX_PREPARED blocks it calls the kernel itself.
    """
    monkeypatch.setattr(kernels, "MAX_PREPARED", 3)
    x = np.linspace(-1, 1, 3 * tiling.block() + 1, dtype=np.float32)
    assert check_prepared(prepare("sigmoid", [x[:-1]]))
    assert check_prepared(prepare("sigmoid", [x]))


@pytest.mark.parametrize(
    ("op", "params", "at_nan"),
    [
        ("relu", {}, np.nan),
        ("Activation", {"act_type": "relu"}, 3.0),
        ("clip", {"a_min": -0.5, "a_max": 1.5}, 3.0),
        ("LeakyReLU", {"act_type": "leaky", "slope": 0.0}, 3.0),
        ("LeakyReLU", {"act_type": "elu", "slope": 0.0}, 3.0),
        ("LeakyReLU", {"act_type": "selu"}, 3.0 * 1.0507009873554805),
        ("LeakyReLU", {"act_type": "gelu"}, np.nan),
        ("abs", {}, np.nan),
    ],
)
def test_gradients_at_nan(op, params, at_nan):
    """At NaN a gradient is NaN or the scaled incoming gradient, but never 0, which would hide the NaN."""
    x = np.array([np.nan, 1.0, np.nan])
    (actual,) = gradients(op, [x], [np.full(3, 3.0)], params)
    np.testing.assert_allclose(actual[[0, 2]], at_nan)
    assert np.isfinite(actual[1])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_clip_gradient_at_unrepresentable_limits(dtype):
    """The gradient of clip compares values with the exact limits in float32.

    A value that rounding moved beyond a limit has the gradient 0.
    """
    limit = np.float16(0.3671)
    above, below = float(limit) - 1e-4, float(limit) + 1e-4
    x = np.array([limit], dtype)
    assert gradients("clip", [x], [np.ones(1, dtype)], {"a_min": -1, "a_max": above})[0] == 0
    assert gradients("clip", [x], [np.ones(1, dtype)], {"a_min": -1, "a_max": below})[0] == 1
    assert gradients("clip", [x], [np.ones(1, dtype)], {"a_min": below, "a_max": 1})[0] == 0
    assert gradients("clip", [x], [np.ones(1, dtype)], {"a_min": above, "a_max": 1})[0] == 1
