"""Random numbers: equal for equal seeds on every engine, with the right distributions."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan import engine, nd
from weftplan.errors import DeviceError, DTypeError, ParameterError, ShapeError
from weftplan.ndarray import random

pytestmark = pytest.mark.usefixtures("each_engine")


def draws():
    """Return a sample of every distribution, as bytes."""
    x = nd.arange(10)
    parts = [
        random.uniform(-1, 1, (5, 3)),
        random.normal(2, 3, 7, dtype="float64"),
        random.randint(-5, 5, (4,), dtype="int64"),
        random.exponential(2, 5),
        random.gamma(2, 3, 5),
        random.poisson(4, 5),
        random.randn(2, 2),
        random.shuffle(x),
        random.multinomial(nd.array([[0.1, 0.9], [0.5, 0.5]]), 6),
        random.uniform(0, 1, 4, ctx=mx.cpu(1)),
        random.gamma(x + 1, x + 2, 3),
        random.negative_binomial(3, 0.4, 5),
    ]
    return [part.asnumpy().tobytes() for part in parts]


def test_the_seed_decides_everything():
    """Seeding again repeats every draw; another seed, or no new seed, does not."""
    mx.random.seed(3)
    first = draws()
    second = draws()
    mx.random.seed(3)
    assert draws() == first
    mx.random.seed(4)
    other_draws = draws()
    assert all(a != b for a, b in zip(first[:4], second[:4], strict=True))
    assert all(a != b for a, b in zip(first[:4], other_draws[:4], strict=True))


def test_every_engine_draws_the_same():
    """Draws have the same bits on every engine."""
    seen = []
    for kind in ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"):
        eng = engine.create(kind)
        with engine.using(eng):
            mx.random.seed(11)
            seen.append(draws())
            nd.waitall()
        eng.stop()
    assert seen[0] == seen[1] == seen[2]


def test_contexts_have_their_own_numbers():
    """cpu(0) and cpu(1) draw different numbers under one seed; seeding one does not affect the other."""
    mx.random.seed(5)
    a, b = random.next_key(mx.cpu(0)), random.next_key(mx.cpu(1))
    assert a[0] != b[0]
    mx.random.seed(5, mx.cpu(0))
    assert random.next_key(mx.cpu(0)) == a
    assert random.next_key(mx.cpu(1)) == (b[0], 1)


def test_distributions():
    """Draws pass Kolmogorov-Smirnov or chi-square tests at a fixed seed; the Poisson mean is right."""
    from scipy import stats  # local, because it takes a second in every process that collects this file

    mx.random.seed(1)
    n = 20_000
    assert stats.kstest(random.uniform(-2, 3, n).asnumpy(), stats.uniform(-2, 5).cdf).pvalue > 0.01
    assert stats.kstest(random.normal(1, 2, n).asnumpy(), stats.norm(1, 2).cdf).pvalue > 0.01
    assert stats.kstest(random.exponential(3, n).asnumpy(), stats.expon(scale=3).cdf).pvalue > 0.01
    assert stats.kstest(random.gamma(2, 3, n).asnumpy(), stats.gamma(2, scale=3).cdf).pvalue > 0.01
    whole = random.randint(-2, 3, n).asnumpy()
    assert whole.dtype == np.int32
    counts = np.unique(whole, return_counts=True)
    assert counts[0].tolist() == [-2, -1, 0, 1, 2]
    assert stats.chisquare(counts[1]).pvalue > 0.01
    assert abs(random.poisson(4, n).asnumpy().mean() - 4) < 0.05
    picked = random.multinomial(nd.array([0.2, 0.5, 0.3]), n).asnumpy()
    assert stats.chisquare(np.bincount(picked), n * np.array([0.2, 0.5, 0.3])).pvalue > 0.01


def test_shapes_and_targets():
    """The default shape is (1,), ``out`` is filled in place, and array parameters give a block per element."""
    assert random.uniform().shape == (1,)
    assert random.randn(2, 3).shape == (2, 3)
    out = nd.zeros((2, 2))
    assert random.normal(out=out) is out
    assert (out.asnumpy() != 0).all()
    low = nd.array([0, 100])
    blocks = random.uniform(low, low + 1, 3)
    assert blocks.shape == (2, 3)
    assert (np.floor(blocks.asnumpy()) == [[0] * 3, [100] * 3]).all()
    np.testing.assert_array_equal(random.normal(low, nd.zeros(2)).asnumpy(), [0, 100])


A, B = [1.0, 8.0], [2.0, 3.0]
# (function, parameters as lists, mean, variance)
BY_ARRAY = [
    (random.uniform, (A, [4.0, 9.0]), lambda a, b: (a + b) / 2, lambda a, b: (b - a) ** 2 / 12),
    (random.normal, (A, B), lambda a, b: a, lambda a, b: b**2),
    (random.exponential, (A,), lambda a: a, lambda a: a**2),
    (random.gamma, (A, B), lambda a, b: a * b, lambda a, b: a * b**2),
    (random.poisson, (A,), lambda a: a, lambda a: a),
    (random.negative_binomial, (A, [0.25, 0.5]), lambda k, p: k * (1 - p) / p, lambda k, p: k * (1 - p) / p**2),
    (random.generalized_negative_binomial, (A, [0.0, 0.5]), lambda m, a: m, lambda m, a: m + a * m**2),
]


@together()
@pytest.mark.parametrize(("draw", "parameters", "mean", "variance"), BY_ARRAY)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parameters_may_be_arrays(draw, parameters, mean, variance, dtype):
    """Each element of array parameters, of any float dtype, gives a float32 block with its mean and variance."""
    mx.random.seed(2)
    n = 20_000
    result = draw(*(nd.array(values, dtype=dtype) for values in parameters), shape=n)
    assert result.shape == (2, n)
    assert result.dtype == np.float32
    for row, element in zip(result.asnumpy().astype(float), zip(*parameters, strict=True), strict=True):
        assert abs(row.mean() - mean(*element)) < 5 * np.sqrt(variance(*element) / n)
        assert row.var() == pytest.approx(variance(*element), rel=0.08)
        one = draw(*element, shape=n).asnumpy()
        assert abs(one.mean() - mean(*element)) < 5 * np.sqrt(variance(*element) / n)
    single = draw(*(nd.array(values) for values in parameters), dtype="float64")
    assert (single.shape, single.dtype) == ((2,), np.float64)


def test_parameters_may_be_integers():
    """Integer parameters give float32 draws that are not truncated."""
    low, high = nd.array([0, 250], dtype="uint8"), nd.array([1, 255], dtype="uint8")
    drawn = random.uniform(low, high, 100)
    assert drawn.dtype == np.float32
    assert np.unique(drawn.asnumpy()).size > 150
    assert random.gamma(nd.array([3], dtype="int32"), nd.array([2], dtype="int64")).asnumpy() % 1 != 0


def test_parameters_are_read_when_the_draw_runs():
    """A draw waits for pending writes of its parameter arrays and ignores later writes."""
    scale = nd.zeros(2)
    scale += 1000
    drawn = random.exponential(scale, shape=50)
    scale[:] = 0
    assert drawn.asnumpy().max() > 100
    with pytest.raises(ValueError, match="lam"):  # at the call on NaiveEngine, else at the wait
        random.poisson(nd.array([-1.0])).asnumpy()


@pytest.mark.parametrize("shape", [(), 7, (2, 3), 100])
def test_multinomial_returns_log_probabilities(shape):
    """get_prob returns the draws and the logarithm of each draw's probability; impossible draws never occur."""
    weights = np.array([[0.25, 0.75, 0], [0, 0, 1], [0.5, 0, 0.5]] * 10, np.float32)
    picked, logs = random.multinomial(nd.array(weights), shape, get_prob=True)
    block = (shape,) if isinstance(shape, int) else shape
    assert picked.shape == logs.shape == (30, *block)
    assert (picked.dtype, logs.dtype) == (np.int32, np.float32)
    chosen = np.take_along_axis(weights, picked.asnumpy().reshape(30, -1), 1)
    assert (chosen > 0).all()
    np.testing.assert_allclose(logs.asnumpy().reshape(30, -1), np.log(chosen), rtol=1e-6)


def test_multinomial_writes_to_out():
    """multinomial writes to ``out`` and returns it: one array, or two with get_prob."""
    weights, places, logs = nd.array([0, 1]), nd.zeros(3), nd.ones(3)
    assert random.multinomial(weights, 3, out=places, name="ignored") is places
    assert places.asnumpy().tolist() == [1, 1, 1]
    assert random.multinomial(weights, 3, True, [places, logs])[1] is logs
    assert logs.asnumpy().tolist() == [0, 0, 0]


def test_shuffle_permutes_rows_in_place_too():
    """shuffle permutes whole rows, also in place."""
    x = nd.arange(40).reshape((10, 4))
    y = random.shuffle(x, out=x)
    assert y is x
    rows = x.asnumpy()
    assert sorted(rows[:, 0].tolist()) == list(range(0, 40, 4))
    assert (np.diff(rows, axis=1) == 1).all()
    assert rows[:, 0].tolist() != list(range(0, 40, 4))


@together()
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: mx.random.seed("x"), ParameterError, "integer"),
        (lambda: mx.random.seed(1, "cpu"), DeviceError, "Context or 'all'"),
        (lambda: random.randint(3, 3), ParameterError, "low must be below high"),
        (lambda: random.randint(0, 3, dtype="float32"), DTypeError, "integer"),
        (lambda: random.uniform(dtype="int32"), DTypeError, "float"),
        (lambda: random.uniform(shape=(2,), out=nd.ones(3)), ShapeError, "out has shape"),
        (lambda: random.uniform(shape=-1), ShapeError, "negative"),
        (lambda: random.shuffle(nd.ones(2), out=nd.ones(3)), ShapeError, "not like data"),
        (lambda: random.shuffle(nd.array(5.0)), ShapeError, "at least one dimension"),
        (lambda: random.multinomial(nd.array(5.0)), ShapeError, "last axis"),
        (lambda: random.uniform(lo=3), ParameterError, "no argument 'lo': did you mean 'low'"),
        (lambda: random.shuffle(nd.ones(2), axis=1), ParameterError, "no argument 'axis'"),
        (lambda: random.multinomial(nd.ones(2), 3, out=nd.ones(2)), ShapeError, "out has shape"),
        (lambda: random.multinomial(nd.ones(2), 2, True, nd.ones(2)), ParameterError, "out must be two arrays, got 1"),
        (lambda: random.randint(0, 2.5), ParameterError, "must be integers, got 2.5"),
        (lambda: random.randint(nd.zeros(1), 2), ParameterError, "must be integers"),
        (lambda: random.uniform("a"), ParameterError, "low must be a number or an NDArray, got str"),
        (lambda: random.uniform(nd.zeros(2), nd.ones(3)), ShapeError, "one shape"),
        (lambda: random.normal(nd.zeros(2), nd.ones(2, mx.cpu(1))), ShapeError, "context"),
        (lambda: random.uniform(nd.zeros(2), 1, 3, out=nd.ones(2)), ShapeError, "out has shape"),
    ],
)
def test_bad_arguments(call, error, says):
    """Bad arguments are refused at the call, with the reason."""
    with pytest.raises(error, match=says):
        call()


@together()
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: random.normal(scale=-1), "at least 0"),
        (lambda: random.exponential(0), "above 0"),
        (lambda: random.gamma(-1), "above 0"),
        (lambda: random.poisson(-1), "at least 0"),
        (lambda: random.negative_binomial(0, 0.5), "k must be above 0"),
        (lambda: random.negative_binomial(1, 1.5), "p must be above 0 and at most 1"),
        (lambda: random.generalized_negative_binomial(1, -1), "alpha must be at least 0"),
        (lambda: random.uniform(2, -1), "low must not be above high"),
        (lambda: random.uniform(float("nan"), 1), "low must not be above high"),
        (lambda: random.normal(nd.zeros(2), -1), "at least 0"),
        (lambda: nd.random_normal(0, -1, shape=2), "scale is the standard deviation"),
        (lambda: nd.random_uniform(2, -1, shape=2), "expected low <= high"),
    ],
)
def test_impossible_distributions(call, says):
    """Impossible parameters raise a ParameterError at the wait, or at the call on an inline engine."""
    with pytest.raises(ParameterError, match=says):
        call().asnumpy()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_of_draws_in_every_spelling(dtype):
    """A dtype as NumPy object, class or name sets the dtype of the draw.

    float64, which NumPy compares equal to None, is still recognized.
    """
    for inputs in (dtype, np.dtype(dtype), np.dtype(dtype).type):
        assert mx.random.normal(0, 1, shape=(2,), dtype=inputs).dtype is np.dtype(dtype).type
        assert mx.random.uniform(0, 1, shape=(2,), dtype=inputs).dtype is np.dtype(dtype).type
    assert mx.random.normal(0, 1, shape=(2,), dtype="None").dtype == np.float32
    assert mx.random.randint(0, 9, shape=(2,), dtype=np.dtype("int64")).dtype == np.int64
    assert mx.random.randint(0, 9, shape=(2,), dtype="None").dtype == np.int32
