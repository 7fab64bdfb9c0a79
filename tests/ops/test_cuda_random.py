"""Random numbers on a GPU: the host's uniform numbers for the same key, and moments of other distributions."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter
from weftplan import device
from weftplan.ndarray.randomness import seeds
from weftplan.ops.core.schema import OpContext

KEY = (2**62 + 5, (7 << 32) + 3)


def drawn(draw):
    """Return the result of ``draw(generator, xp)`` on the host and on a GPU, both as NumPy arrays."""
    with place("standin") as context:
        where = device.get(context(0))
        results = []
        where.launch(lambda: results.append(draw(OpContext(where.xp, random_key=KEY).generator(), where.xp).get()))
        return draw(OpContext(np, random_key=KEY).generator(), np), results[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_uniform_numbers_are_those_of_the_host(dtype, count):
    """Uniform numbers have the host's bits, also after an earlier draw from the generator."""

    def draw(generator, xp):
        generator.random((3,), dtype=dtype)
        return generator.random((count,), dtype=dtype)

    host, gpu = drawn(draw)
    np.testing.assert_array_equal(host.view(np.uint8), gpu.view(np.uint8))


@pytest.mark.parametrize(
    ("draw", "mean", "deviation"),
    [
        (lambda g, xp: g.standard_normal(4000, dtype=np.float64), 0, 1),
        (lambda g, xp: g.standard_exponential(4000, dtype=np.float64), 1, 1),
        (lambda g, xp: g.standard_gamma(0.5, 4000), 0.5, 0.5**0.5),
        (lambda g, xp: g.standard_gamma(4.0, 4000), 4, 2),
        (lambda g, xp: g.poisson(3.0, 4000), 3, 3**0.5),
        (lambda g, xp: g.poisson(50.0, 4000), 50, 50**0.5),
    ],
)
def test_distributions_hold(draw, mean, deviation):
    """The mean is within six standard errors and the deviation within 15 %; the first ten numbers differ."""
    for actual in drawn(draw):
        assert abs(actual.mean() - mean) < 6 * deviation / 4000**0.5
        assert abs(actual.std() - deviation) < 0.15 * deviation
        assert len(set(actual[:10].tolist())) > 3


def test_dropout_has_the_mask_of_the_host(monkeypatch):
    """Dropout takes one launch per pass; the same key gives the same zeros on the host and on two GPUs."""
    monkeypatch.setattr(seeds, "_mixed", lambda number, ctx: number)  # otherwise contexts have different keys
    x = np.ones((33, 7), np.float32)
    results = []
    with place("standin", kind="NaiveEngine") as context:
        for ctx in (mx.cpu(), context(0), context(1)):
            executor = mx.sym.Dropout(mx.sym.Variable("x"), p=0.4).simple_bind(ctx, x=x.shape)
            mx.random.seed(11)
            meter.reset()
            executor.forward(is_train=True, x=mx.nd.array(x, ctx=ctx))
            results.append(executor.outputs[0].asnumpy())
            executor.backward(mx.nd.ones(x.shape, ctx=ctx))
            np.testing.assert_array_equal(executor.grad_arrays[0].asnumpy(), results[-1])
        assert meter.launches["drop"] == meter.launches["drop_back"] == 1
        del executor
    assert 0.2 < (results[0] == 0).mean() < 0.6
    for second in results[1:]:
        np.testing.assert_array_equal(results[0], second)


@pytest.mark.parametrize("kind", ["rrelu", "RNN"])
def test_every_element_has_a_number_of_its_own(kind, monkeypatch):
    """rrelu slopes and RNN dropout are drawn per element on a GPU, with the host's numbers.

    No number is repeated from one block of work to the next.
    """
    monkeypatch.setattr(seeds, "_mixed", lambda number, ctx: number)
    x = mx.sym.Variable("x")
    if kind == "rrelu":
        shape = (64, 700)
        symbol = mx.sym.LeakyReLU(x, act_type="rrelu", lower_bound=0.1, upper_bound=0.9)
    else:  # the second layer copies the first layer's output
        shape = (9, 40, 50)
        symbol = mx.sym.RNN(x, state_size=50, num_layers=2, mode="rnn_relu", p=0.5, name="rnn")
    results = []
    with place("standin", kind="NaiveEngine") as context:
        for ctx in (mx.cpu(), context(0)):
            executor = symbol.simple_bind(ctx, x=shape)
            if kind == "RNN":
                eye, none = np.eye(50, dtype="f4").ravel(), np.zeros(2500, "f4")
                weights = np.concatenate([eye, none, eye, none, np.zeros(4 * 50, "f4")])
                executor.arg_dict["rnn_parameters"][:] = mx.nd.array(weights, ctx=ctx)
                executor.arg_dict["rnn_state"][:] = 0
            mx.random.seed(11)
            executor.forward(is_train=True, x=mx.nd.full(shape, 1.0 if kind == "RNN" else -1.0, ctx=ctx))
            results.append(executor.outputs[0].asnumpy())
        del executor
    host, gpu = results
    np.testing.assert_array_equal(gpu, host)
    if kind == "rrelu":
        assert len(np.unique(gpu)) > 0.99 * gpu.size  # of 2**24 numbers
        assert abs(gpu.mean() + 0.5) < 0.01
    else:
        assert set(np.unique(gpu)) == {0.0, 2.0}
        assert 0.45 < (gpu == 0).mean() < 0.55
        steps = gpu.reshape(len(gpu), -1)
        assert len({step.tobytes() for step in steps}) == len(steps)
        assert len({row.tobytes() for row in gpu.reshape(-1, 50)}) > 350
