"""Debug mode of arrays and executors detects an operator that writes to its input."""

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import UndeclaredWriteError
from weftplan.ndarray.calls.invoke import invoke
from weftplan.ops.core import registry
from weftplan.ops.core.rules import same_dtype, same_shape
from weftplan.ops.core.schema import Op


def careless(ctx, params, inputs, outputs):
    """Write twice the input to the output, and to the input as well."""
    data = inputs[0]
    data *= 2
    outputs[0][...] = data


CARELESS = Op(name="careless_double", forward=careless, infer_shape=same_shape, infer_dtype=same_dtype, doc="Bad.")


@pytest.fixture(params=["ThreadedEnginePerDevice", "ThreadedEngine", "Simulator"])
def kind(request):
    """The name of each engine type on which a push does not raise."""
    return request.param


@pytest.fixture
def debug(monkeypatch):
    """Enable debug mode."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")


def test_an_operator_on_arrays(debug, kind):
    """If an operator writes to its input, a read raises UndeclaredWriteError with names and line; the input stays."""
    with engine.using(engine.create(kind)) as eng:
        a = mx.nd.ones((3,))
        (out,) = invoke(CARELESS, [a], {})
        with pytest.raises(UndeclaredWriteError, match=r"'careless_double'.*'data'.* at .*test_debug_operators.py:\d+"):
            out.asnumpy()
        assert a.asnumpy().tolist() == [1, 1, 1]
    eng.stop()


def test_an_operator_in_an_executor(debug, kind, monkeypatch):
    """If an executor's operator writes to its input, the output raises UndeclaredWriteError; the input is unchanged."""
    monkeypatch.setitem(registry._OPS, CARELESS.name, CARELESS)
    with engine.using(engine.create(kind)) as eng:
        net = mx.sym.exp(mx.sym.careless_double(mx.sym.Variable("x"), name="bad"))
        executor = net.simple_bind(mx.cpu(), x=(3,), grad_req="null")
        executor.arg_dict["x"][:] = 1
        executor.forward()
        with pytest.raises(UndeclaredWriteError, match="'data'"):
            executor.outputs[0].asnumpy()
        assert executor.arg_dict["x"].asnumpy().tolist() == [1, 1, 1]
    eng.stop()


def test_undeclared_write_passes_without_debug_mode(kind):
    """Without debug mode, an operator that writes to its input changes it to 2 and raises nothing."""
    with engine.using(engine.create(kind)) as eng:
        a = mx.nd.ones((3,))
        (out,) = invoke(CARELESS, [a], {})
        assert out.asnumpy().tolist() == [2, 2, 2]
        assert a.asnumpy().tolist() == [2, 2, 2]
    eng.stop()


def test_declared_outputs_are_writable(debug, kind):
    """In debug mode, ``a += b``, ``out=b`` and an update of BatchNorm's moving mean raise nothing."""
    with engine.using(engine.create(kind)) as eng:
        a, b = mx.nd.ones((3,)), mx.nd.ones((3,))
        a += b
        mx.nd.exp(b, out=b)
        assert a.asnumpy().tolist() == [2, 2, 2]
        np.testing.assert_allclose(b.asnumpy(), np.e, rtol=1e-6)
        net = mx.sym.BatchNorm(mx.sym.Variable("x"), fix_gamma=False, name="bn")
        executor = net.simple_bind(mx.cpu(), x=(4, 2))
        executor.arg_dict["x"][:] = np.arange(8).reshape(4, 2)
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((4, 2))])
        assert np.isfinite(executor.outputs[0].asnumpy()).all()
        assert executor.aux_dict["bn_moving_mean"].asnumpy().any()
    eng.stop()
