"""Random operators: moments, dependence on the key alone, inference, impossible parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import DTypeError, ParameterError

CASES: list[tuple[str, dict[str, float], float, float]] = [
    ("uniform", {"low": 1, "high": 3}, 2, 4 / 12),
    ("normal", {"loc": 1, "scale": 2}, 1, 4),
    ("gamma", {"alpha": 3, "beta": 2}, 6, 12),
    ("exponential", {"scale": 2}, 2, 4),
    ("poisson", {"lam": 4}, 4, 4),
    ("negative_binomial", {"k": 5, "p": 0.5}, 5, 10),
    ("generalized_negative_binomial", {"mu": 3, "alpha": 0.5}, 3, 7.5),
]
"""Distributions as (name, parameters, mean, variance)."""


def drawn(symbol: Any, **values: Any) -> Any:
    """Return the draws of a symbol after a fixed seed."""
    mx.random.seed(5)
    return symbol.bind(mx.cpu(), values).forward()[0].asnumpy()


@pytest.mark.parametrize(("name", "params", "mean", "variance"), CASES)
def test_moments(name: str, params: dict[str, float], mean: float, variance: float) -> None:
    """Draws have the mean and variance of their distribution, and equal seeds give equal draws.

    Each element of an array of parameters gives its own block of draws.
    """
    symbol = getattr(mx.sym.random, name)(shape=(100, 200), **params)
    values = drawn(symbol)
    assert values.shape == (100, 200)
    np.testing.assert_array_equal(values, drawn(symbol))
    symbols = {key: mx.sym.Variable(key) for key in params}
    arrays = {key: mx.nd.array([value, value]) for key, value in params.items()}
    blocks = drawn(getattr(mx.sym.random, name)(shape=(100, 200), **symbols), **arrays)
    assert blocks.shape == (2, 100, 200)
    for actual in (values, blocks[0], blocks[1]):
        assert abs(actual.mean() - mean) < 6 * (variance / actual.size) ** 0.5
        assert abs(actual.var() / variance - 1) < 0.1
    assert not (blocks[0] == blocks[1]).all()


def test_numbers_do_not_depend_on_the_length() -> None:
    """A short draw equals the start of a long draw."""
    short, long = (drawn(mx.sym.random.gamma(2, 1, shape=(n,))) for n in (10, 10_000))
    np.testing.assert_array_equal(short, long[:10])


def test_integers_and_order() -> None:
    """randint draws every number of its range and no other; shuffle permutes the rows."""
    values = drawn(mx.sym.random.randint(low=-2, high=3, shape=(1000,)))
    assert values.dtype == np.int32
    assert set(values.tolist()) == {-2, -1, 0, 1, 2}
    rows = mx.nd.array(np.arange(20).reshape(10, 2))
    mixed = drawn(mx.sym.random.shuffle(mx.sym.Variable("x")), x=rows)
    assert sorted(map(tuple, mixed)) == sorted(map(tuple, rows.asnumpy()))
    assert (mixed != rows.asnumpy()).any()


def test_classes_and_their_probabilities() -> None:
    """multinomial draws classes by their probabilities, with their log-probabilities.

    The gradient of the log-probabilities is the count over the probability.
    """
    table = np.float32([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]])
    both = mx.sym.random.multinomial(mx.sym.Variable("x"), shape=(5000,))
    executor = both.bind(mx.cpu(), {"x": mx.nd.array(table)}, {"x": mx.nd.zeros((2, 3))})
    index, logs = (one.asnumpy() for one in executor.forward(is_train=True))
    assert index.shape == logs.shape == (2, 5000)
    for row in range(2):
        actual = np.bincount(index[row], minlength=3)
        np.testing.assert_allclose(actual / 5000, table[row], atol=0.03)
        np.testing.assert_allclose(logs[row], np.log(table[row])[index[row]], rtol=1e-5)
    executor.backward([mx.nd.zeros((2, 5000), dtype="int32"), mx.nd.ones((2, 5000))])
    counts = np.stack([np.bincount(index[row], minlength=3) for row in range(2)])
    np.testing.assert_allclose(executor.grad_dict["x"].asnumpy(), counts / table, rtol=1e-4)
    assert mx.nd.sample_multinomial(mx.nd.array([0.2, 0.8])).shape == (1,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mx.nd.random_gamma(alpha=-1, shape=(2,)), "alpha must be above 0"),
        (lambda: mx.nd.sample_normal(mx.nd.zeros((2,)), mx.nd.array([1, -1])), "sigma must be at least 0"),
        (lambda: mx.nd.sample_uniform(mx.nd.ones((2,)), mx.nd.zeros((2,))), "low must not be above high"),
        (lambda: mx.nd.random_randint(low=3, high=3, shape=(2,)), "expected low < high"),
    ],
)
def test_impossible_parameters(call: Any, words: str) -> None:
    """Impossible parameters raise a ParameterError at the wait, as in MXNet."""
    result = call()
    with pytest.raises(ParameterError, match=words):
        result.wait_to_read()


def test_symbols_and_numbers_do_not_mix() -> None:
    """Parameters must be all symbols or all numbers."""
    with pytest.raises(DTypeError, match="all be symbols, or all numbers"):
        mx.sym.random.normal(mx.sym.Variable("m"), 1.0)


def test_like() -> None:
    """A ``_like`` operator draws with the shape and dtype of its input, whose values do not matter."""
    result = mx.sym._internal._random_poisson_like(mx.sym.Variable("x"), lam=3)
    values = drawn(result, x=mx.nd.zeros((40, 50), dtype="float64"))
    assert values.dtype == np.float64
    assert abs(values.mean() - 3) < 0.3
