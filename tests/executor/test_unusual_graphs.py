"""Unusual graphs and binds: repeated outputs, arguments as outputs, shared arrays, other dtypes and groups."""

import numpy as np
import pytest

import weftplan as mx
from weftplan import sym
from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError

X = mx.sym.Variable("data")


def test_an_output_twice_and_an_argument_as_output():
    """For outputs y, y and the argument itself, the gradient is the sum over all three outputs."""
    y = mx.sym.square(X)
    executor = mx.sym.Group([y, y, X]).simple_bind(mx.cpu(), data=(3,))
    out = executor.forward(is_train=True, data=np.array([1.0, 2.0, 3.0]))
    assert [o.asnumpy().tolist() for o in out] == [[1, 4, 9], [1, 4, 9], [1, 2, 3]]
    executor.backward([mx.nd.ones((3,)), mx.nd.ones((3,)) * 10, mx.nd.ones((3,)) * 100])
    assert executor.grad_dict["data"].asnumpy().tolist() == [2 * 11 * v + 100 for v in (1, 2, 3)]


@pytest.mark.parametrize(("req", "expected"), [("write", 7.0), ("add", 14.0)])
def test_a_network_of_one_variable(req, expected):
    """The gradient of a network of one variable is the head gradient, written or added."""
    executor = X.simple_bind(mx.cpu(), data=(2,), grad_req=req)
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((2,)) * 7])
    assert executor.grad_dict["data"].asnumpy().tolist() == [expected, expected]


def test_one_array_as_two_arguments_adds_both_gradients():
    """With one array and one gradient array for both arguments of a * b, ``add`` gives the gradient 2a in each run."""
    both, grad = mx.nd.array([1.0, 2.0, 3.0]), mx.nd.zeros((3,))
    product = mx.sym.Variable("a") * mx.sym.Variable("b")
    executor = product.bind(
        mx.cpu(), {"a": both, "b": both}, args_grad={"a": grad, "b": grad}, grad_req={"a": "add", "b": "add"}
    )
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((3,)))
    assert grad.asnumpy().tolist() == [4.0, 8.0, 12.0]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_reach_every_array(dtype):
    """Parameters, labels, outputs and gradients have the dtype of the data, and values are close to float32's."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(X, num_hidden=3, name="fc"), name="softmax")
    results = []
    for kind in (dtype, "float32"):
        executor = net.simple_bind(mx.cpu(), data=(4, 5), type_dict={"data": kind})
        rng = np.random.default_rng(0)
        for name, array in executor.arg_dict.items():
            assert array.dtype is np.dtype(kind).type, name
            array[:] = rng.integers(0, 3, array.shape) if name == "softmax_label" else rng.random(array.shape)
        out = executor.forward(is_train=True)[0]
        executor.backward()
        assert out.dtype is np.dtype(kind).type
        assert executor.grad_dict["fc_weight"].dtype is out.dtype
        results.append((out.asnumpy(), executor.grad_dict["fc_weight"].asnumpy()))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-3)


def test_moving_statistics_are_on_the_device_of_their_group():
    """With ``group2ctx``, auxiliary states of BatchNorm are on the context of its group, and are updated there."""
    with mx.AttrScope(ctx_group="far"):
        norm = mx.sym.BatchNorm(mx.sym.square(X), fix_gamma=False, name="bn")
    with mx.AttrScope(ctx_group="near"):
        net = mx.sym.sum(norm * 2, name="total")
    executor = net.simple_bind(mx.cpu(0), data=(6, 2), group2ctx={"far": mx.cpu(1), "near": mx.cpu(0)})
    assert executor.aux_dict["bn_moving_mean"].context == mx.cpu(1)
    assert executor.outputs[0].context == mx.cpu(0)
    values = np.arange(12.0, dtype="float32").reshape(6, 2)
    executor.forward(is_train=True, data=values)
    np.testing.assert_allclose(executor.aux_dict["bn_moving_mean"].asnumpy(), 0.1 * (values**2).mean(0), rtol=1e-5)


SHAPES = {"data": (4, 5), "fc_weight": (3, 5), "fc_bias": (3,)}


def layer():
    """Return a fully connected layer, and an array for each of its arguments by name."""
    return (
        mx.sym.FullyConnected(X, num_hidden=3, name="fc"),
        {name: mx.nd.ones(shape) for name, shape in SHAPES.items()},
    )


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"args_grad": {"data": [1]}}, DTypeError, r"'data' must be an NDArray .* got list; make one with mx.nd.zeros"),
        ({"args_grad": mx.nd.ones((4, 5))}, BindError, "args_grad must be a list or a dictionary, got NDArray"),
        ({"args_grad": {"data": mx.nd.ones((4, 6))}}, ShapeError, r"'data' has shape \(4, 5\), its gradient array"),
        ({"args_grad": {"data": mx.nd.ones((4, 5), ctx=mx.cpu(1))}}, BindError, r"'grad of data' is on cpu\(1\)"),
        ({"grad_req": "wirte"}, BindError, "must be one of null, write, add; got 'wirte'"),
        ({"ctx": "cpu"}, BindError, r"ctx must be a context such as mx.cpu\(\).* got 'cpu'"),
    ],
)
def test_bind_says_what_is_wrong(how, error, words):
    """``bind`` refuses gradients of a wrong type, shape or context, and an invalid context, and names them."""
    symbol, args = layer()
    with pytest.raises(error, match=words):
        symbol.bind(how.pop("ctx", mx.cpu()), args, **how)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"data": 4}, ShapeError, r"shape of 'data' must be a tuple of integers such as \(32, 10\), got 4"),
        ({"data": (4, 5), "type_dict": {"data": "flot32"}}, DTypeError, "'data' needs a dtype .* got 'flot32'"),
        ({}, ShapeError, r"argument 'data' is unknown .* \(as do 'fc_weight'\); give its shape"),
    ],
)
def test_simple_bind_says_what_is_wrong(how, error, words):
    """``simple_bind`` refuses a missing shape, a shape that is a number, and an unknown dtype."""
    with pytest.raises(error, match=words):
        layer()[0].simple_bind(mx.cpu(), **how)


def test_misspelt_names_warn():
    """A name in ``grad_req`` or ``args_grad`` that is no argument warns, with the most similar name."""
    symbol, args = layer()
    with pytest.warns(UserWarning, match="grad_req names 'fc_weigth'.*did you mean 'fc_weight'"):
        symbol.simple_bind(mx.cpu(), data=(4, 5), grad_req={"fc_weigth": "write"})
    with pytest.warns(UserWarning, match="args_grad names 'dta'.*did you mean 'data'"):
        symbol.bind(mx.cpu(), args, args_grad={"dta": mx.nd.ones((4, 5))})


def test_values_may_be_numpy_arrays_but_nothing_else():
    """``forward``, ``backward`` and ``copy_params_from`` take NumPy arrays of numbers, and refuse lists and text."""
    symbol, _ = layer()
    executor = symbol.simple_bind(mx.cpu(), data=(4, 5))
    executor.copy_params_from({"fc_weight": np.full((3, 5), 2.0)}, allow_missing=True)
    out = executor.forward(is_train=True, data=np.ones((4, 5)))[0]
    assert out.asnumpy().tolist() == [[10.0] * 3] * 4
    executor.backward(np.ones((4, 3)))
    assert executor.grad_dict["fc_bias"].asnumpy().tolist() == [4.0] * 3
    for call in (
        lambda: executor.forward(data=[[1]]),
        lambda: executor.copy_params_from({"fc_weight": [1]}),
        lambda: executor.backward([[1]]),
    ):
        with pytest.raises(
            DTypeError, match=r"must be an NDArray or a NumPy array .* got list; make one with mx.nd.array"
        ):
            call()
    with pytest.raises(DTypeError, match="must hold numbers, got dtype <U1"):
        executor.forward(data=np.full((4, 5), "a"))


def test_bad_forward_values_change_nothing():
    """If one of two values for ``forward`` is invalid, neither is copied."""
    symbol, _ = layer()
    executor = symbol.simple_bind(mx.cpu(), data=(4, 5))
    with pytest.raises(ShapeError, match="'fc_bias'"):
        executor.forward(data=np.ones((4, 5)), fc_bias=np.ones(4))
    assert executor.arg_dict["data"].asnumpy().sum() == 0


def test_backward_twice_is_right_or_an_error():
    """A second backward gives the same gradients, or raises an error if results of forward were overwritten.

    Products of arguments read only the arguments. Layers read results of forward, which backward overwrites.
    """
    x, w = sym.Variable("x"), sym.Variable("w")
    executor = (x * w).simple_bind(mx.cpu(), x=(3,), w=(3,), grad_req="add")
    executor.arg_dict["x"][:], executor.arg_dict["w"][:] = 2, 5
    executor.forward(is_train=True)
    for times in (1, 2, 3):
        executor.backward(mx.nd.ones((3,)))
        assert executor.grad_dict["x"].asnumpy().tolist() == [5.0 * times] * 3
    net = x
    for k in range(6):
        net = sym.tanh(sym.FullyConnected(net, num_hidden=8, name=f"fc{k}"))
    executor = net.simple_bind(mx.cpu(), x=(4, 8))
    executor.forward(is_train=True)
    executor.backward(mx.nd.ones((4, 8)))
    with pytest.raises(MXNetError, match=r"run forward\(is_train=True\) again"):
        executor.backward(mx.nd.ones((4, 8)))
    executor.forward(is_train=True)
    executor.backward(mx.nd.ones((4, 8)))


def test_gradients_of_the_first_outputs_alone():
    """Gradients of trailing outputs may be omitted if they are not needed; otherwise an error names the output."""
    x, y = sym.Variable("x"), sym.Variable("y")
    executor = sym.Group([x + y, sym.BlockGrad(x * y)]).simple_bind(mx.cpu(), x=(2,), y=(2,))
    executor.forward(is_train=True)
    executor.backward(mx.nd.ones((2,)))
    assert executor.grad_dict["y"].asnumpy().tolist() == [1, 1]
    executor = sym.Group([x + y, sym.exp(x * y, name="e")]).simple_bind(mx.cpu(), x=(2,), y=(2,))
    executor.forward(is_train=True)
    with pytest.raises(MXNetError, match="the gradient of output 'e_output' is needed"):
        executor.backward([mx.nd.ones((2,))])
    with pytest.raises(BindError, match="3 gradients for 2 outputs"):
        executor.backward([mx.nd.ones((2,))] * 3)


def test_optimized_symbol_computes_the_same():
    """The optimized symbol has merged equal expressions, computes the same values, and shares no node."""
    x = sym.Variable("x")
    net = sym.exp(x, name="one") * sym.exp(x, name="two")
    executor = net.simple_bind(mx.cpu(), x=(3,))
    actual = executor.get_optimized_symbol()
    assert actual.get_internals().list_outputs() == ["x", "one_output", net.list_outputs()[0]]
    assert actual.entries[0].node is not executor.planned.graph.nodes[-1]
    values = mx.nd.array([0, 1, 2])
    repeated = actual.eval(x=values)[0].asnumpy()
    assert repeated.tolist() == executor.forward(x=values)[0].asnumpy().tolist()


@pytest.mark.parametrize("req", ["write", "add"])
def test_gradients_are_cast_to_the_dtype_of_their_arrays(req):
    """A gradient is cast to the dtype of its array, whether it is written or added, also after a reshape."""
    x, w = mx.sym.Variable("x"), mx.sym.Variable("w")
    args = {"x": mx.nd.array([1.0, 2.0]), "w": mx.nd.array([3.0, 4.5])}
    grads = {"x": mx.nd.ones((2,), dtype="float16"), "w": mx.nd.ones((2,), dtype="float64")}
    executor = (x * w + x).bind(mx.cpu(), args, grads, req)
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((2,)))
    times, before = (2, 1) if req == "add" else (1, 0)
    np.testing.assert_array_equal(grads["x"].asnumpy(), np.float16([4, 5.5]) * times + before)
    np.testing.assert_array_equal(grads["w"].asnumpy(), np.float64([1, 2]) * times + before)
    assert grads["x"].dtype == np.float16
    assert grads["w"].dtype == np.float64
    smaller = executor.reshape(x=(1,), w=(1,))
    assert smaller.grad_dict["x"].dtype == np.float16
    smaller.forward(is_train=True)
    smaller.backward(mx.nd.ones((1,)))
    assert smaller.grad_dict["x"].shape == (1,)
