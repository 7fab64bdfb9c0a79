"""Operators of MXNet's NumPy interface: the contract, shapes without dimensions, an exported network, refusals."""

import importlib.util
import pathlib

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_contract, check_gradient, run
from tests.support.together import operator, together
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ops.core import registry

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


def _module(name):
    spec = importlib.util.spec_from_file_location(f"numpy_{name}", GOLDEN / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inputs, cases = _module("inputs"), _module("cases_numpy")


@together(by=operator)
@pytest.mark.parametrize("case", cases.CASES, ids=inputs.case_name)
def test_contract(case):
    """Every golden case meets the kernel contract in float64: in-place pairs, unwanted outputs, exact workspace."""
    arrays = [x.astype(np.float64) for x in inputs.case_inputs(case)]
    check_contract(case["op"], arrays, case.get("params", {}))


X = np.random.RandomState(0).uniform(0.5, 1.5, (2, 3, 4))


@pytest.mark.parametrize("op", ["_np_sum", "_np_prod", "_npi_mean", "_np_max", "_np_min", "_npi_var", "_npi_std"])
@pytest.mark.parametrize("params", [{}, {"axis": (0, 2)}, {"keepdims": True}])
def test_reductions(op, params):
    """Reductions equal NumPy's, without dimensions over all axes, and have the gradients of central differences."""
    (out, *_) = run(op, [X], params)
    expected = getattr(np, op.rsplit("_", 1)[1])(X, **params)
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    check_gradient(op, [X], params)
    check_contract(op, [X], params)


@pytest.mark.parametrize("op", ["_npi_var", "_npi_std"])
def test_degrees_of_freedom(op):
    """var and std divide by the number of elements minus ``ddof``, and refuse a ``ddof`` that leaves 0."""
    np.testing.assert_allclose(run(op, [X], {"ddof": 2})[0], getattr(np, op[5:])(X, ddof=2))
    check_gradient(op, [X], {"ddof": 1, "axis": 1})
    with pytest.raises(ParameterError, match="smaller ddof"):
        run(op, [X], {"ddof": 3, "axis": 1})


def test_positions_are_int64():
    """argmax returns int64 as in NumPy, without dimensions for the whole tensor."""
    for params in ({}, {"axis": 1}):
        (out,) = run("_npi_argmax", [X], params)
        assert out.dtype == np.int64
        np.testing.assert_array_equal(out, X.argmax(**params))


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,))])
def test_dot(shapes):
    """_np_dot of matrices and vectors equals NumPy's and has the gradients of central differences."""
    a, b = (np.random.RandomState(k).uniform(-1, 1, shape) for k, shape in enumerate(shapes))
    (out,) = run("_np_dot", [a, b])
    assert out.shape == a.dot(b).shape
    np.testing.assert_allclose(out, a.dot(b))
    check_gradient("_np_dot", [a, b])


@pytest.mark.parametrize(
    ("op", "arrays", "params", "error", "says"),
    [
        ("_np_sum", [np.ones(3, np.int32)], {}, DTypeError, "expects floats, got int32"),
        ("_np_sum", [np.ones(3, np.float32)], {"dtype": "float64"}, DTypeError, "not dtype=float64"),
        ("_np_sum", [np.ones(3)], {"initial": 2.0}, ParameterError, "another start"),
        ("_npi_true_divide", [np.ones(3, np.int32)] * 2, {}, DTypeError, "expects floats, got int32"),
        ("_npi_true_divide_scalar", [np.ones(3, np.int64)], {"scalar": 2}, DTypeError, "expects floats, got int64"),
        ("_np_reshape", [np.ones((2, 3))], {"newshape": (0, -1)}, ParameterError, "expected positive sizes"),
        ("_npx_reshape", [np.ones((2, 1, 3))], {"newshape": (-2, -3, -4)}, ParameterError, "code -3 is not supported"),
        ("_np_reshape", [np.ones((2, 3))], {"newshape": (6,), "order": "F"}, ParameterError, "expected one of C"),
        ("_np_dot", [np.ones((2, 3)), np.ones((4, 3, 2))], {}, ShapeError, "1 or 2 dimensions each"),
        ("_npi_matmul", [np.ones((2, 3)), np.ones((3, 2))], {}, ShapeError, "3 dimensions each"),
    ],
)
def test_refused(op, arrays, params, error, says):
    """Unsupported dtypes, shapes and parameters are refused, with the reason."""
    with pytest.raises(error, match=says):
        run(op, arrays, params)


def test_every_operator_is_documented():
    """Every operator of the family has a documentation text."""
    family = [name for name in registry.names(aliases=False) if name.startswith("_np")]
    assert len(family) > 120
    for name in family:
        assert registry.get(name).doc


def test_an_exported_network():
    """A Gluon network exported by MXNet 1.9.1 gives MXNet's outputs, one of them without dimensions."""
    symbol, arguments, auxiliary = mx.model.load_checkpoint(str(GOLDEN / "data" / "numpy_net"), 0)
    with np.load(GOLDEN / "data" / "numpy_net.npz") as stored:
        expected = dict(stored)
    net = symbol.simple_bind(mx.cpu(), data=(2, 3, 6, 6))
    net.copy_params_from(arguments, auxiliary)
    outputs = net.forward(is_train=False, data=mx.nd.array(expected["x"]))
    for k, out in enumerate(outputs):
        want = expected[f"out{k}"]
        assert out.shape == want.shape
        assert out.dtype == want.dtype
        np.testing.assert_allclose(out.asnumpy(), want, rtol=1e-4, atol=1e-6)
    assert outputs[5].shape == ()


def test_heads_without_dimensions():
    """An executor differentiates a network whose output has no dimensions."""
    net = mx.sym._internal._np_sum(mx.sym.Variable("x") ** 2).simple_bind(mx.cpu(), x=(2, 3))
    net.arg_dict["x"][:] = 3
    assert net.forward(is_train=True)[0].asnumpy() == 54.0
    net.backward([mx.nd.full((), 2.0)])
    assert (net.grad_dict["x"].asnumpy() == 12.0).all()
