"""``mx.test_utils``: comparisons, checks of symbols, random arrays and helpers.

Comparisons and checks must also fail on wrong numbers.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError

tu = mx.test_utils
X, Y = mx.sym.Variable("x"), mx.sym.Variable("y")


@pytest.fixture(autouse=True)
def seeded() -> Any:
    """Seed NumPy's global generator, and restore it after the test."""
    state = np.random.get_state()
    np.random.seed(1)
    yield
    np.random.set_state(state)


def test_comparisons() -> None:
    """Comparisons accept equal and nearly equal arrays, and equal or ignored NaN if requested.

    The error for different arrays names the worst position.
    """
    a = mx.nd.array([1.0, 2.0, 3.0])
    assert tu.same(a, np.array([1, 2, 3], np.float32))
    assert tu.almost_equal(a, a * (1 + 1e-6))
    assert not tu.almost_equal(a, a * 1.1)
    tu.assert_almost_equal(a, np.array([[1.0, 2.0, 3.0]]))
    with pytest.raises(AssertionError, match=r"ours and theirs differ.*most at \(1,\): 2.0 and 4.0"):
        tu.assert_almost_equal(a, np.array([1.0, 4.0, 3.1]), names=("ours", "theirs"))
    with pytest.raises(AssertionError, match="shape"):
        tu.assert_almost_equal(a, np.ones((1, 3)), use_broadcast=False)
    gap = np.array([1.0, np.nan, 3.0])
    assert not tu.almost_equal(gap, gap)
    assert tu.almost_equal(gap, gap, equal_nan=True)
    assert tu.almost_equal_ignore_nan(gap, a)
    tu.assert_almost_equal_ignore_nan(gap, a)
    place, times = tu.find_max_violation(np.array([1.0, 3.0]), np.array([1.0, 2.0]), rtol=0.1, atol=0)
    assert place == (1,)
    assert times == pytest.approx(5.0)


def test_exceptions_and_retries() -> None:
    """assert_exception fails if no error is raised; retry repeats a test after assertion errors."""
    tu.assert_exception(int, ValueError, "x")
    with pytest.raises(AssertionError, match="did not raise"):
        tu.assert_exception(int, ValueError, "1")
    calls: list[int] = []

    @tu.retry(3)
    def flaky() -> str:
        calls.append(1)
        assert len(calls) == 3
        return "done"

    assert flaky() == "done"
    with pytest.raises(AssertionError):
        tu.retry(2)(lambda: (_ for _ in ()).throw(AssertionError))()


def test_outputs_and_gradients_are_compared() -> None:
    """Checks of symbols pass for right numbers and fail for wrong numbers.

    Gradients are checked for ``write``, ``add`` and ``null``.
    """
    net, place = X * Y, {"x": np.array([1.0, 2.0]), "y": np.array([3.0, 4.0])}
    tu.check_symbolic_forward(net, place, [np.array([3.0, 8.0])])
    with pytest.raises(AssertionError, match="output"):
        tu.check_symbolic_forward(net, place, [np.array([3.0, 9.0])])
    head = [np.array([1.0, 10.0])]
    right = {"x": np.array([3.0, 40.0]), "y": np.array([1.0, 20.0])}
    for req in ("write", "add", "null"):
        tu.check_symbolic_backward(net, place, head, right, grad_req=req, rtol=1e-4)
    with pytest.raises(AssertionError, match="gradient of y"):
        tu.check_symbolic_backward(net, place, head, {**right, "y": np.array([1.0, 21.0])})
    with pytest.raises(ParameterError, match="z"):
        tu.check_symbolic_forward(net, {**place, "z": 1}, [np.zeros(2)])
    assert tu.simple_forward(net, **place).tolist() == [3.0, 8.0]


def test_central_differences_find_a_wrong_gradient() -> None:
    """check_numeric_gradient passes for a layer with states and fails for a wrong backward."""
    net = mx.sym.BatchNorm(mx.sym.FullyConnected(X, num_hidden=3, name="fc"), name="bn", fix_gamma=False)
    shapes, _, states = net.infer_shape(x=(4, 2))
    place = [np.random.normal(size=shape) for shape in shapes]
    tu.check_numeric_gradient(net, place, [np.ones(shape) for shape in states], numeric_eps=1e-4, dtype=np.float64)

    class Wrong(mx.operator.CustomOp):
        def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            self.assign(out_data[0], req[0], in_data[0] * 2)

        def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
            self.assign(in_grad[0], req[0], out_grad[0] * 3)

    @mx.operator.register("test_utils_wrong")
    class WrongProp(mx.operator.CustomOpProp):
        def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Any:
            return Wrong()

    with pytest.raises(AssertionError, match="gradient of x"):
        tu.check_numeric_gradient(mx.sym.Custom(X, op_type="test_utils_wrong"), {"x": np.ones((2, 2))})


def test_central_differences_of_an_executor() -> None:
    """numeric_grad gives MXNet 1.9.1's slopes of the sum of output 0, and restores the executor's arrays."""
    place = {"x": np.array([[1, 2], [3, 4.0]]), "y": np.array([[2.0, -1]])}
    inputs = {name: mx.nd.array(value, dtype="float64") for name, value in place.items()}
    executor = mx.sym.Group([mx.sym.broadcast_mul(X * X, Y), X]).bind(mx.cpu(), inputs)
    actual = tu.numeric_grad(executor, place, eps=1e-3, dtype=np.float64)
    np.testing.assert_allclose(actual["x"], [[4, -4], [12, -8]], rtol=1e-9)
    np.testing.assert_allclose(actual["y"], [[10, 20]], rtol=1e-9)
    assert (actual["x"].dtype, tu.numeric_grad(executor, {"y": place["y"]})["y"].dtype) == (np.float64, np.float32)
    for name, value in place.items():
        np.testing.assert_array_equal(executor.arg_dict[name].asnumpy(), value)


def test_central_differences_with_states_and_whole_numbers() -> None:
    """numeric_grad sets states before each run, and gives 0 for integer inputs."""
    net = mx.sym.BatchNorm(X, fix_gamma=True, name="bn", eps=0)
    executor = net.simple_bind(mx.cpu(), x=(4, 1), grad_req="null")
    place = {"x": np.array([[1], [2], [3], [4]])}
    states = {"bn_moving_mean": np.zeros(1), "bn_moving_var": np.full(1, 4.0)}
    actual = tu.numeric_grad(executor, place, states, use_forward_train=False)
    assert actual["x"].tolist() == [[0], [0], [0], [0]]
    place["x"] = place["x"].astype(np.float64)
    actual = tu.numeric_grad(executor, place, states, eps=1e-2, use_forward_train=False)
    np.testing.assert_allclose(actual["x"], 0.5, rtol=1e-2)


def test_contexts_and_dtypes_agree() -> None:
    """check_consistency passes for one network on two contexts and dtypes, and fails for two networks."""
    net = mx.sym.Activation(mx.sym.FullyConnected(X, num_hidden=3, name="fc"), act_type="tanh")
    runs = [
        {"ctx": mx.cpu(), "x": (2, 4), "type_dict": {"x": np.float64}},
        {"ctx": mx.cpu(), "x": (2, 4), "type_dict": {"x": np.float32}},
        {"ctx": mx.sim(0), "x": (2, 4), "type_dict": {"x": np.float32}},
    ]
    tu.check_consistency(net, runs)
    second = mx.sym.Activation(mx.sym.FullyConnected(X, num_hidden=3, name="fc"), act_type="sigmoid")
    # Both outputs get the same name, so that only their values differ.
    renamed = [mx.sym.identity(one, name="out") for one in (net, second)]
    with pytest.raises(AssertionError, match="run 1"):
        tu.check_consistency(renamed, runs[:2])
    assert tu.check_speed(net, x=(2, 4), N=2) > 0


def test_random_arrays_are_what_was_asked_for() -> None:
    """Random shapes are within their bounds, arrays have their dtypes, samples are sorted.

    np_reduce reduces several axes.
    """
    assert len(tu.rand_shape_nd(4, 3)) == 4
    assert max(max(tu.rand_shape_3d(2, 3, 4)) for _ in range(20)) <= 4
    assert min(min(tu.rand_shape_2d()) for _ in range(50)) >= 1
    array = tu.rand_ndarray((3, 2), dtype="float64", modifier_func=abs)
    assert (array.dtype, array.shape) == (np.float64, (3, 2))
    assert array.asnumpy().min() >= 0
    assert tu.rand_ndarray((5, 2), "row_sparse", density=0).asnumpy().any() is np.False_
    with pytest.raises(ParameterError, match="csr"):
        tu.rand_ndarray((2, 2), "csr")
    one, two = tu.random_arrays((2, 3), ())
    assert (one.shape, two.shape) == ((2, 3), ())
    chosen = tu.random_sample(range(10), 4)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 4
    data = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(tu.np_reduce(data, (0, -1), True, np.sum), data.sum(axis=(0, 2), keepdims=True))
    assert tu.create_vector(3).asnumpy().tolist() == [0, 1, 2]


def test_helpers() -> None:
    """Helpers set variables, compare memory, repeat a batch, compare optimizers, and refuse downloads."""
    with tu.EnvManager("WEFTPLAN_TEST_UTILS_X", "1"):
        assert os.environ["WEFTPLAN_TEST_UTILS_X"] == "1"
    assert "WEFTPLAN_TEST_UTILS_X" not in os.environ
    a = mx.nd.ones((4,))
    assert tu.same_array(a, a.reshape((2, 2)).reshape((4,)))
    assert not tu.same_array(a, a.copy())
    assert tu.default_context() == mx.cpu()
    endless = tu.DummyIter(mx.io.NDArrayIter(np.zeros((2, 1)), batch_size=2))
    assert endless.next() is endless.next()
    tu.compare_optimizer(mx.optimizer.SGD(momentum=0.9), mx.optimizer.SGD(momentum=0.9), (3, 2), np.float32)
    with pytest.raises(AssertionError, match="weight"):
        tu.compare_optimizer(mx.optimizer.SGD(), mx.optimizer.SGD(learning_rate=0.5), (3, 2), np.float32)
    with pytest.raises(MXNetError, match="fetches nothing"):
        tu.get_mnist()


def test_environment() -> None:
    """``environment`` sets and unsets variables, and restores them, also after an exception."""
    os.environ.pop("WEFTPLAN_OF_A_TEST", None)
    with tu.environment("WEFTPLAN_OF_A_TEST", "1"):
        assert os.environ["WEFTPLAN_OF_A_TEST"] == "1"
        with tu.environment({"WEFTPLAN_OF_A_TEST": None, "WEFTPLAN_OF_ANOTHER": 2}):
            assert "WEFTPLAN_OF_A_TEST" not in os.environ
            assert os.environ["WEFTPLAN_OF_ANOTHER"] == "2"
        with pytest.raises(ZeroDivisionError), tu.environment("WEFTPLAN_OF_A_TEST", None):
            raise ZeroDivisionError
        assert os.environ["WEFTPLAN_OF_A_TEST"] == "1"
    assert not {"WEFTPLAN_OF_A_TEST", "WEFTPLAN_OF_ANOTHER"} & set(os.environ)
    with pytest.raises(ParameterError, match="a name and a value, or a dictionary"), tu.environment():
        pass


def test_generators_are_judged() -> None:
    """Generator checks accept the right distribution, from NumPy or from mx.nd, and refuse others."""
    draw = np.random.default_rng(3)
    ranges, probs = tu.gen_buckets_probs_with_ppf(lambda p: 2 * p - 1, 5)
    mx.random.seed(3)
    for uniform in (lambda n: draw.uniform(-1, 1, n), lambda n: mx.nd.random.uniform(-1, 1, shape=(n,))):
        assert len(tu.verify_generator(uniform, ranges, probs, nsamples=5000)) == 5
    with pytest.raises(AssertionError, match=r"above 0\.05"):
        tu.verify_generator(lambda n: draw.uniform(-1, 1.2, n), ranges, probs, nsamples=5000)
    p, actual, expected = tu.chi_square_check(lambda n: draw.integers(0, 4, n), [0, 1, 2, 3], [0.25] * 4, nsamples=4000)
    assert p > 0.01
    assert actual.sum() == expected.sum() == 4000
    assert tu.chi_square_check(lambda n: draw.integers(0, 4, n), [0, 1, 2, 3], [0.2, 0.2, 0.3, 0.3], 4000)[0] < 1e-6
    assert tu.mean_check(lambda n: draw.normal(1, 2, n), 1, 2, 5000)
    assert not tu.mean_check(lambda n: draw.normal(1.3, 2, n), 1, 2, 5000)
    assert tu.var_check(lambda n: draw.normal(1, 2, n), 2, 5000)
    assert not tu.var_check(lambda n: draw.normal(1, 2.3, n), 2, 5000)
    for buckets, shares in (([0, 1], [1.0]), ([(0, 2), (1, 3)], [0.5, 0.5]), ([0, 1], [0, 1.0])):
        with pytest.raises(ParameterError, match="chi_square_check"):
            tu.chi_square_check(lambda n: draw.integers(0, 2, n), buckets, shares, 100)


def test_more_helpers() -> None:
    """Further comparisons accept a share of differing elements, nested tuples, and symbols of other names.

    Other helpers collapse sums and create arrays.
    """
    a = np.zeros(10, np.float32)
    b = a.copy()
    b[3] = 1
    tu.assert_almost_equal_with_err(a, b, etol=0.1)
    with pytest.raises(AssertionError, match="most at"):
        tu.assert_almost_equal_with_err(a, b, etol=0.05)
    tu.compare_ndarray_tuple((mx.nd.ones((2,)), (None, mx.nd.zeros((1,)))), (mx.nd.ones((2,)), (b, mx.nd.zeros((1,)))))
    with pytest.raises(AssertionError):
        tu.compare_ndarray_tuple((mx.nd.ones((2,)),), (mx.nd.zeros((2,)),))
    assert tu.collapse_sum_like(mx.nd.ones((2, 3)), (3,)).asnumpy().tolist() == [2, 2, 2]
    assert tu.assign_each2(np.array([1.0, 2.0]), np.array([3.0, 4.0]), lambda x, y: x * y).tolist() == [3, 8]
    assert tu.assign_each(b, None).tolist() == b.tolist()
    assert tu.create_2d_tensor(2, 3).asnumpy().tolist() == [[0, 0, 0], [1, 1, 1]]
    low, high = tu.random_uniform_arrays((3, 2), (4,), low=2, high=3)
    assert (low.shape, high.shape, low.dtype) == ((3, 2), (4,), np.float32)
    assert ((low >= 2) & (low < 3)).all()
    assert tu.effective_dtype(mx.nd.ones((1,), dtype="float16")) == np.float16
    assert tu.same_symbol_structure(mx.sym.relu(X, name="a"), mx.sym.relu(Y, name="b"))
    assert not tu.same_symbol_structure(mx.sym.relu(X), mx.sym.sigmoid(X))
