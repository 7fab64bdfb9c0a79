"""random_pdf_*: densities against formulas, gradients against differences, blocks, inference."""

import math

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_contract, check_gradient, run
from weftplan.errors import DTypeError, ShapeError
from weftplan.ops.contrib import densities


def binomial(x, k, p):
    """Return the probability of ``x`` failures before ``k`` successes of probability ``p``."""
    return math.gamma(x + k) / math.gamma(x + 1) / math.gamma(k) * p**k * (1 - p) ** x


FORMULAS = {
    "uniform": lambda x, low, high: 1 / (high - low),
    "normal": lambda x, mu, sigma: math.exp(-(((x - mu) / sigma) ** 2) / 2) / sigma / math.sqrt(2 * math.pi),
    "gamma": lambda x, a, b: b**a * x ** (a - 1) * math.exp(-b * x) / math.gamma(a),
    "exponential": lambda x, lam: lam * math.exp(-lam * x),
    "poisson": lambda x, lam: lam**x * math.exp(-lam) / math.gamma(x + 1),
    "negative_binomial": binomial,
    "generalized_negative_binomial": lambda x, mu, alpha: binomial(x, 1 / alpha, 1 / (mu * alpha + 1)),
}
PARAMETERS = {
    "uniform": ([0.0, -1.0], [5.0, 4.5]),
    "normal": ([1.0, 2.0], [0.5, 2.0]),
    "gamma": ([0.5, 3.0], [2.0, 0.7]),
    "exponential": ([0.5, 2.0],),
    "poisson": ([0.5, 3.0],),
    "negative_binomial": ([1.5, 4.0], [0.3, 0.8]),
    "generalized_negative_binomial": ([1.5, 2.0], [0.3, 1.8]),
}
WHOLE = ("poisson", "negative_binomial", "generalized_negative_binomial")
SAMPLES = np.array([[1.0, 3, 2], [4, 1, 2]])
DIRICHLET = [
    np.array([[[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]], [[0.6, 0.3, 0.1], [0.25, 0.25, 0.5]]]),
    np.array([[0.5, 1.5, 2.0], [1.0, 3.0, 0.7]]),
]


def arrays(name):
    """Return the samples and the parameters of a distribution in float64."""
    return [SAMPLES, *map(np.array, PARAMETERS[name])]


@pytest.mark.parametrize("name", FORMULAS)
def test_values(name):
    """The density of every sample follows the parameters of its row; ``is_log`` returns its logarithm."""
    inputs = arrays(name)
    expected = [
        [FORMULAS[name](x, *(values[row] for values in inputs[1:])) for x in samples]
        for row, samples in enumerate(SAMPLES)
    ]
    np.testing.assert_allclose(run(f"random_pdf_{name}", inputs)[0], expected, rtol=1e-10)
    np.testing.assert_allclose(run(f"random_pdf_{name}", inputs, {"is_log": True})[0], np.log(expected), atol=1e-10)


def test_values_of_vectors():
    """random_pdf_dirichlet equals the formula of the density."""
    samples, alpha = DIRICHLET
    expected = [
        [math.gamma(sum(a)) * math.prod(x**(b - 1) / math.gamma(b) for x, b in zip(one, a, strict=True)) for one in row]
        for row, a in zip(samples, alpha, strict=True)
    ]  # fmt: skip
    np.testing.assert_allclose(run("random_pdf_dirichlet", DIRICHLET)[0], expected, rtol=1e-10)


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("name", [*FORMULAS, "dirichlet"])
def test_gradients(name, is_log):
    """Densities have the gradients of central differences, for all inputs except integer samples."""
    inputs = DIRICHLET if name == "dirichlet" else arrays(name)
    wanted = range(1, len(inputs)) if name in WHOLE else range(len(inputs))
    check_gradient(f"random_pdf_{name}", inputs, {"is_log": is_log}, wrt=list(wanted))
    check_contract(f"random_pdf_{name}", inputs, {"is_log": is_log})


@pytest.mark.parametrize("name", ["gamma", "negative_binomial", "dirichlet"])
def test_blocks(name, monkeypatch):
    """The block size does not change results, even for rows longer than a block."""
    inputs = DIRICHLET if name == "dirichlet" else [np.tile(SAMPLES, 5), *arrays(name)[1:]]

    def results():
        symbol = getattr(mx.sym, f"random_pdf_{name}")(*map(mx.sym.Variable, "abc"[: len(inputs)]))
        values = dict(zip("abc", (mx.nd.array(x, dtype="float64") for x in inputs), strict=False))
        grads = {key: mx.nd.zeros(value.shape, dtype="float64") for key, value in values.items()}
        executor = symbol.bind(mx.cpu(), values, grads)
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones(executor.outputs[0].shape, dtype="float64"))
        return [executor.outputs[0].asnumpy(), *(grads[key].asnumpy() for key in values)]

    whole = results()
    monkeypatch.setattr(densities, "_AT_ONCE", 4)
    for one, second in zip(whole, results(), strict=True):
        np.testing.assert_allclose(one, second, rtol=1e-12)


def test_impossible_sample_has_gradient_zero():
    """An impossible integer sample has the density NaN but the gradient 0, as in MXNet 1.9.1."""
    executor = mx.sym.random_pdf_negative_binomial(*map(mx.sym.Variable, "xkp")).bind(
        mx.cpu(), {"x": mx.nd.array([[-1.0]]), "k": mx.nd.array([1]), "p": mx.nd.array([0.5])},
        {"x": mx.nd.full((1, 1), 7)},
    )  # fmt: skip
    assert np.isnan(executor.forward(is_train=True)[0].asnumpy())
    executor.backward(mx.nd.ones((1, 1)))
    assert executor.grad_dict["x"].asnumpy() == 0


def test_inference():
    """The shape of samples starts with that of the parameters, and a Dirichlet output drops the vector axis.

    Only floats are accepted.
    """
    x, a, b = map(mx.sym.Variable, "xab")
    normal, dirichlet = mx.sym.random_pdf_normal(x, a, b), mx.sym.random_pdf_dirichlet(x, a)
    assert normal.infer_shape(x=(2, 3, 4), a=(2, 3))[:2] == ([(2, 3, 4), (2, 3), (2, 3)], [(2, 3, 4)])
    assert dirichlet.infer_shape(x=(2, 3, 4), a=(2, 4))[1] == [(2, 3)]
    assert dirichlet.infer_shape(x=(4,), a=(4,))[1] == [(1,)]
    for shapes in ({"x": (2, 3), "a": (3,)}, {"x": (2, 3), "a": (2, 3, 1)}, {"x": (2, 3), "a": (2,), "b": (1,)}):
        with pytest.raises(ShapeError):
            normal.infer_shape(**shapes)
    for shape in ((2, 3), (1, 2, 3, 4), (3, 4)):
        with pytest.raises(ShapeError):
            dirichlet.infer_shape(x=(2, 3, 4), a=shape)
    with pytest.raises(DTypeError, match="expects floats"):
        mx.nd.random_pdf_poisson(mx.nd.ones((2, 3), dtype="int32"), mx.nd.ones((2,), dtype="int32"))
    half = mx.nd.random.pdf_normal(*(mx.nd.full((2, 3)[: 2 - (k > 0)], k + 1, dtype="float16") for k in range(3)))
    assert half.dtype == np.float16


def test_arrays_draw_like_others():
    """``mx.nd.random.normal_like`` draws with the shape and dtype of its data; an unknown name is an AttributeError."""
    mx.random.seed(3)
    actual = mx.nd.random.normal_like(loc=100, scale=0.5, data=mx.nd.ones((4, 5), dtype="float16"))
    assert (actual.shape, actual.dtype) == ((4, 5), np.float16)
    assert 95 < actual.asnumpy().mean() < 105
    with pytest.raises(AttributeError, match="no operator 'nope'"):
        _ = mx.nd.random.nope
