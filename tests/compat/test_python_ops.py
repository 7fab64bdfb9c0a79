"""``mx.operator.NumpyOp`` and ``NDArrayOp``, and the description of operators' arguments."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import UnknownOperatorError


class Scale(mx.operator.NumpyOp):
    """An operator y = factor · a + b on NumPy arrays."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def list_arguments(self):
        """Return the names of the two inputs."""
        return ["a", "b"]

    def infer_shape(self, in_shape):
        """Return the first input's shape for both inputs and the output."""
        return [in_shape[0], in_shape[0]], [in_shape[0]]

    def forward(self, in_data, out_data):
        """Compute the formula."""
        assert all(type(array) is np.ndarray for array in (*in_data, *out_data))
        out_data[0][:] = self.factor * in_data[0] + in_data[1]

    def backward(self, out_grad, in_data, out_data, in_grad):
        """Compute the gradients of both inputs."""
        in_grad[0][:] = self.factor * out_grad[0]
        in_grad[1][:] = out_grad[0]


class Loss(mx.operator.NDArrayOp):
    """A loss x² / 2 on arrays of mx.nd, with the gradient x."""

    def __init__(self):
        super().__init__(need_top_grad=False)

    def forward(self, in_data, out_data):
        """Compute half of the square."""
        out_data[0][:] = in_data[0] * in_data[0] / 2

    def backward(self, out_grad, in_data, out_data, in_grad):
        """Write the gradient; no gradient comes in."""
        assert not out_grad
        in_grad[0][:] = in_data[0]


def test_numpy_op_computes_and_differentiates():
    """Two operators of one class keep their own factors in one network, in values and gradients."""
    a, b = mx.sym.Variable("a"), mx.sym.Variable("b")
    net = Scale(3)(Scale(2).get_symbol(a, b, name="inner"), b=b, name="outer")
    assert net.list_arguments() == ["a", "b"]
    assert net.list_outputs() == ["outer_output"]
    executor = net.simple_bind(mx.cpu(), a=(2, 3), b=(2, 3))
    executor.arg_dict["a"][:] = 5
    executor.arg_dict["b"][:] = 7
    (out,) = executor.forward(is_train=True)
    np.testing.assert_array_equal(out.asnumpy(), np.full((2, 3), 3 * (2 * 5 + 7) + 7))
    executor.backward(mx.nd.ones((2, 3)))
    np.testing.assert_array_equal(executor.grad_dict["a"].asnumpy(), np.full((2, 3), 6))
    np.testing.assert_array_equal(executor.grad_dict["b"].asnumpy(), np.full((2, 3), 4))


def test_a_base_as_it_is_hands_its_input_on():
    """NumpyOp and NDArrayOp without own methods return their input, and gradients of 1."""
    for kind in (mx.operator.NumpyOp, mx.operator.NDArrayOp):
        executor = kind().get_symbol(mx.sym.Variable("x"), name="op").simple_bind(mx.cpu(), x=(4,))
        executor.arg_dict["x"][:] = 10
        np.testing.assert_array_equal(executor.forward(is_train=True)[0].asnumpy(), np.full(4, 10))
        executor.backward(mx.nd.full((4,), 3))
        np.testing.assert_array_equal(executor.grad_dict["x"].asnumpy(), np.ones(4))


def test_a_loss_on_arrays_needs_no_gradient():
    """With need_top_grad=False, backward is called without gradients of the outputs."""
    executor = Loss()(mx.sym.Variable("x"), name="loss").simple_bind(mx.cpu(), x=(3,))
    executor.arg_dict["x"][:] = mx.nd.array([1, 2, 3])
    assert executor.forward(is_train=True)[0].asnumpy().tolist() == [0.5, 2, 4.5]
    executor.backward()
    assert executor.grad_dict["x"].asnumpy().tolist() == [1, 2, 3]


def test_the_common_base_is_no_operator():
    """PythonOp itself raises NotImplementedError, because it does not say which kind of arrays it uses."""
    symbol = mx.operator.PythonOp().get_symbol(mx.sym.Variable("x"))
    with pytest.raises(NotImplementedError, match="subclass one of them"):
        symbol.eval(x=mx.nd.ones((2,)))[0].wait_to_read()


def test_arguments_of_operators():
    """get_operator_arguments lists inputs, then parameters with their types, as MXNet does."""
    actual = mx.operator.get_operator_arguments("Convolution")
    assert actual.narg == len(actual.names) == len(actual.types)
    assert actual.names[:4] == ["data", "weight", "bias", "kernel"]
    types = dict(zip(actual.names, actual.types, strict=True))
    assert types["bias"] == "NDArray-or-Symbol"
    assert types["kernel"] == "Shape(tuple), required"
    assert types["num_group"] == "int, optional, default=1"
    assert types["no_bias"].startswith("boolean, optional")
    assert mx.operator.get_operator_arguments("Concat").types[0] == "NDArray-or-Symbol[]"
    with pytest.raises(UnknownOperatorError):
        mx.operator.get_operator_arguments("Nothing")


def test_randn_like_a_symbol():
    """``mx.sym.random.randn(data=symbol)`` has the symbol's shape and the requested dtype."""
    drawn = mx.sym.random.randn(data=mx.sym.Variable("x"), dtype="float16")
    (out,) = drawn.eval(x=mx.nd.ones((3, 4)))
    assert out.shape == (3, 4)
    assert out.dtype == np.float16
