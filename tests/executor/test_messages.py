"""Error messages and warnings of executors: the caller's line, similar names, long lists, and invalid arrays."""

import linecache

import numpy as np
import pytest

import weftplan as mx
from weftplan import executor as executors
from weftplan.errors import BindError, DTypeError, ShapeError


def chain(depth):
    """Return a chain of ``depth`` fully connected layers of two units."""
    net = mx.sym.Variable("data")
    for i in range(depth):
        net = mx.sym.FullyConnected(net, num_hidden=2, name=f"fc{i}")
    return net


def held_buffer():
    """Return a shared buffer that cannot grow, because it contains an array of the caller."""
    return {"data": mx.nd.zeros((2,))}


def make_arguments(net):
    """Return zeros for the arguments of ``net`` by name."""
    shapes, _, _ = net.infer_shape(data=(2, 2))
    return {name: mx.nd.zeros(shape) for name, shape in zip(net.list_arguments(), shapes, strict=True)}


@pytest.mark.parametrize(
    "call",
    [
        lambda net: net.simple_bind(mx.cpu(), data=(4, 2), shared_buffer=held_buffer()),
        lambda net: executors.simple_bind(net, mx.cpu(), data=(4, 2), shared_buffer=held_buffer()),
        lambda net: net.simple_bind(mx.cpu(), data=(4, 2), nonsense=(3,)),
        lambda net: executors.simple_bind(net, mx.cpu(), data=(4, 2), nonsense=(3,)),
        lambda net: net.simple_bind(mx.cpu(), data=(4, 2), grad_req={"nonsense": "write"}),
        lambda net: net.bind(mx.cpu(), make_arguments(net), grad_req={"nonsense": "write"}),
        lambda net: executors.bind(net, mx.cpu(), make_arguments(net), args_grad={"nonsense": mx.nd.zeros((2,))}),
    ],
)
def test_warnings_point_at_the_callers_line(call):
    """Each way to bind attributes its warnings to the line of the caller."""
    with pytest.warns(UserWarning, match="is replaced|nonsense") as caught:
        call(chain(1))
    (warning,) = caught
    assert warning.filename == __file__
    assert "lambda net" in linecache.getline(warning.filename, warning.lineno)


def test_a_warning_without_a_caller_outside():
    """A warning from code of the package is attributed to the innermost caller outside the package."""
    from weftplan.symbol import node

    code = compile("warn('hello')", node._PACKAGE + "made_up.py", "exec")
    with pytest.warns(UserWarning, match="hello") as caught:
        exec(code, {"warn": node.warn})
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda e: e.forward(fc33_wieght=1), BindError, r"did you mean 'fc33_weight'\? .*, … 73 more\]"),
        (lambda e: e.copy_params_from({"fc33_wieght": 1}), BindError, r"did you mean 'fc33_weight'\? .*, … 73 more\]"),
        (lambda e: e.reshape(fc33_wieght=(2, 2)), BindError, r"did you mean 'fc33_weight'\? .*, … 73 more\]"),
        (lambda e: e.symbol.bind(mx.cpu(), []), BindError, r"has 0 arrays, needed are 81: \['data', .*, … 73 more\]"),
        (lambda e: e.symbol.bind(mx.cpu(), {}), BindError, r"lacks \['data', .*, … 73 more\]; needed are .* 73 more\]"),
        (lambda e: e.symbol.simple_bind(mx.cpu(), ["add"], data=(2, 2)), BindError, r"81 arguments \['data'.* 73 more"),
        (
            lambda e: mx.sym.add_n(*map(mx.sym.Variable, "abcdefghij")).simple_bind(mx.cpu()),
            ShapeError,
            r"argument 'a' is unknown .*; operator add_n .* needs it, .* \(as do 'b', 'c', 'd', 'e'\); give its shape",
        ),
    ],
)
def test_long_lists_are_cut(call, error, words):
    """For a network of 81 arguments a message shows the most similar name and eight arguments."""
    with pytest.raises(error, match=words):
        call(chain(40).simple_bind(mx.cpu(), data=(2, 2)))


def test_all_wrong_shapes_are_listed():
    """``copy_params_from`` lists every parameter whose shape differs, and copies none."""
    executor = chain(2).simple_bind(mx.cpu(), data=(2, 2))
    before = executor.arg_dict["fc0_bias"].asnumpy()
    wrong = {"fc0_bias": mx.nd.ones((2,)), "fc0_weight": mx.nd.ones((3, 2)), "fc1_weight": mx.nd.ones((2, 4))}
    with pytest.raises(ShapeError, match=r"2 parameters have other shapes: 'fc0_weight' .*\(3, 2\); 'fc1_weight' .*"):
        executor.copy_params_from(wrong, allow_missing=True)
    np.testing.assert_array_equal(executor.arg_dict["fc0_bias"].asnumpy(), before)


@pytest.mark.parametrize("dtype", [[("a", "f4")], "V4", "U1", "O", "c8"])
def test_arrays_without_numbers_are_refused(dtype):
    """NumPy arrays of records, bytes, text, objects or complex numbers raise a DTypeError."""
    values = np.zeros((2, 2), dtype=dtype)
    executor = chain(1).simple_bind(mx.cpu(), data=(2, 2))
    for call in (
        lambda: executor.forward(data=values),
        lambda: executor.copy_params_from({"fc0_weight": values}),
        lambda: executor.backward([values]),
    ):
        executor.forward(is_train=True)
        with pytest.raises(DTypeError, match="must hold numbers, got dtype"):
            call()


def test_arguments_by_position_in_mxnets_order():
    """``bind`` and ``simple_bind`` take positional arguments in MXNet's order."""
    net = mx.sym.BatchNorm(mx.sym.Variable("data"), name="bn", fix_gamma=False)
    args = [mx.nd.ones((2, 3)), mx.nd.ones((3,)), mx.nd.ones((3,))]
    states = [mx.nd.zeros((3,)), mx.nd.ones((3,))]
    first = net.bind(mx.cpu(), args, [mx.nd.zeros(a.shape) for a in args], "write", states)
    assert first.aux_dict["bn_moving_var"] is states[1]
    second = net.bind(mx.cpu(), args, None, "null", states, None, first)
    assert second.pool is first.pool
    executor = net.simple_bind(mx.cpu(), "null", {"data": "float64"}, data=(2, 3))
    assert executor.arg_dict["data"].dtype == np.float64


def test_shared_buffer_of_another_dtype_is_replaced():
    """A shared buffer of another dtype is replaced in the caller's dictionary, with a warning."""
    pool = {"data": mx.nd.ones((5,), dtype="float64")}
    with pytest.warns(
        UserWarning, match="'data' is float64 on cpu\\(0\\), float32 on cpu\\(0\\) is needed: it is replaced"
    ):
        executor = (mx.sym.Variable("data") * 2).simple_bind(mx.cpu(), "null", data=(2,), shared_buffer=pool)
    assert executor.arg_dict["data"].dtype == np.float32
    assert pool["data"].shape == (2,)


def test_an_array_in_the_place_of_is_train_is_refused():
    """An array as ``is_train`` raises an error that shows how to pass arrays; NumPy booleans are accepted."""
    executor = chain(1).simple_bind(mx.cpu(), data=(2, 2))
    for value in (mx.nd.zeros((2, 2)), np.zeros((1, 2))):
        with pytest.raises(BindError, match=r"is_train must be True or False, got an .* give arrays by name"):
            executor.forward(value)
    executor.forward(np.True_)


def test_parameters_that_are_no_dictionary_or_keep_their_kinds():
    """``copy_params_from`` refuses None and names like ``arg:fc0_weight``; the message suggests ``load_params``."""
    executor = chain(1).simple_bind(mx.cpu(), data=(2, 2))
    with pytest.raises(BindError, match="arg_params must be a dictionary of arrays by name, got NoneType"):
        executor.copy_params_from(None)
    with pytest.raises(BindError, match="load_params"):
        executor.copy_params_from({"arg:fc0_weight": mx.nd.zeros((2, 2))})
