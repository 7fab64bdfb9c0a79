"""Executors refuse invalid input with clear messages, and stay in a consistent state."""

import numpy as np
import pytest

import weftplan as mx
from tests.executor.small_networks import mlp
from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError
from weftplan.planner import PlanOptions


def test_bind_bad_input():
    """Missing arguments, wrong contexts, shapes, types and gradients raise errors that name them."""
    net = mlp()
    names = net.list_arguments()
    arrays = dict(zip(names, (mx.nd.zeros(s) for s in net.infer_shape(data=(4, 5))[0]), strict=True))
    with pytest.raises(BindError, match=r"lacks \['fc1_bias'\]"):
        net.bind(mx.cpu(), {k: v for k, v in arrays.items() if k != "fc1_bias"})
    with pytest.raises(BindError, match="has 1 arrays, needed are"):
        net.bind(mx.cpu(), [arrays["data"]])
    with pytest.raises(BindError, match=r"is on cpu\(0\), the executor on cpu\(1\)"):
        net.bind(mx.cpu(1), arrays)
    with pytest.raises(ShapeError, match="its gradient array"):
        net.bind(mx.cpu(), arrays, {"data": mx.nd.zeros((1, 1))})
    with pytest.raises(BindError, match="grad_req of 'data' must be one of"):
        net.bind(mx.cpu(), arrays, {}, grad_req="wirte")
    with pytest.raises(DTypeError, match="must be an NDArray"):
        net.bind(mx.cpu(), {**arrays, "data": np.zeros((4, 5))})
    with pytest.raises(ShapeError, match=r"fc1"):
        net.bind(mx.cpu(), {**arrays, "fc1_weight": mx.nd.zeros((8, 9))})
    with pytest.raises(MXNetError, match=r"simple_bind error. Arguments:\ndata: "):
        net.simple_bind(mx.cpu(), data=(4, 5), fc1_weight=(1, 1))
    with pytest.raises(ShapeError, match=r"shape of argument 'data' is unknown and cannot be inferred"):
        net.simple_bind(mx.cpu(), fc1_bias=(8,))
    with pytest.warns(UserWarning, match="no arguments or options named"):
        net.simple_bind(mx.cpu(), data=(4, 5), dta=(1,))


def test_copy_params_from_is_all_or_nothing():
    """``copy_params_from`` copies nothing if a name is unknown or a shape is wrong; it casts values."""
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5))
    good = mx.nd.ones((8, 5), dtype="float64")
    with pytest.raises(BindError, match="'nope'"):
        executor.copy_params_from({"fc1_weight": good, "nope": good})
    assert (executor.arg_dict["fc1_weight"].asnumpy() == 0).all()
    executor.copy_params_from({"fc1_weight": good, "nope": good}, allow_extra_params=True)
    assert (executor.arg_dict["fc1_weight"].asnumpy() == 1).all()
    with pytest.raises(ShapeError, match="fc2_bias"):
        executor.copy_params_from({"fc2_bias": good})


@pytest.fixture
def broken(monkeypatch):
    """Return a list of one boolean: whether the node ``middle`` fails."""
    from weftplan.executor import prepared_calls

    told = [True]
    real = prepared_calls.StepBuilder._kernel_call

    def sometimes(builder, step, *sizes):
        bind = real(builder, step, *sizes)

        def failing():
            if told[0]:
                raise FloatingPointError("kernel failed")
            bind(prepared_calls.RunState(is_train=False))()

        return (lambda run: failing) if step.node.name == "middle" else bind

    monkeypatch.setattr(prepared_calls.StepBuilder, "_kernel_call", sometimes)
    return told


def test_a_failing_kernel_reaches_the_reader(broken):
    """Reading an output raises the error of a failed node, with its name and line; the next run works."""
    net = mx.sym.sqrt(mx.sym.square(mx.sym.Variable("x"), name="middle"))
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=(4,))
    executor.arg_dict["x"][:] = 3
    executor.forward()
    with pytest.raises(FloatingPointError, match="kernel failed") as caught:
        executor.outputs[0].asnumpy()
    assert "middle" in caught.value.__notes__[0]
    assert "test_invalid_input.py" in caught.value.__notes__[0]
    broken[0] = False
    assert executor.forward()[0].asnumpy().tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("reused", [False, True])
def test_independent_gradients_survive_a_failure(monkeypatch, broken, reused):
    """Gradients that do not need the failed first node are right, with and without reuse of memory."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN", "1")
    x, bias = mx.sym.Variable("x"), mx.sym.Variable("bias")
    net = mx.sym.square(x, name="middle")
    for k in range(3):
        net = mx.sym.sin(net, name=f"n{k}")
    net = mx.sym.broadcast_add(net, bias)
    options = PlanOptions(strategy="arena" if reused else "none", fusion=False)
    executor = net.simple_bind(mx.cpu(), x=(4, 3), bias=(1, 3), plan_options=options)
    assert (executor.memory_plan.num_reuse_edges > 0) is reused
    executor.arg_dict["x"][:] = 3
    for fails in (False, True, False):
        broken[0] = fails
        executor.grad_dict["bias"][:] = 0
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((4, 3))])
        if fails:
            for one in (executor.outputs[0], executor.grad_dict["x"]):
                with pytest.raises(FloatingPointError, match="kernel failed"):
                    one.asnumpy()
        else:
            actual = executor.grad_dict["x"].asnumpy()
        assert executor.grad_dict["bias"].asnumpy().tolist() == [[4, 4, 4]]
    assert actual.any()


def test_duplicate_names():
    """Two variables of one name raise an error at bind."""
    net = mx.sym.Variable("same") + mx.sym.Variable("same")
    with pytest.raises(BindError, match="Duplicate names detected"):
        net.bind(mx.cpu(), [mx.nd.ones((2,)), mx.nd.ones((2,))])


def layers():
    """Return a layer, a batch norm and a loss."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.SoftmaxOutput(mx.sym.BatchNorm(net, name="bn"), name="softmax")


def test_a_parameter_without_a_value_is_an_error():
    """``forward`` raises an error that lists parameters without a value, instead of using zeros.

    This applies once ``copy_params_from`` has omitted them.
    """
    executor = layers().simple_bind(mx.cpu(), grad_req="null", data=(2, 4))
    inputs = {name: mx.nd.ones(executor.arg_dict[name].shape) for name in ("fc_weight", "bn_gamma")}
    executor.copy_params_from(inputs)
    lost = r"\['fc_bias', 'bn_beta', 'bn_moving_mean', 'bn_moving_var'\] never got a value"
    for _ in range(2):  # the second call raises, too
        with pytest.raises(MXNetError, match=lost):
            executor.forward(data=mx.nd.ones((2, 4)))
    with pytest.raises(MXNetError, match=lost):
        executor.reshape(data=(1, 4), softmax_label=(1,)).forward()
    executor.arg_dict["fc_bias"][:] = 0
    with pytest.raises(MXNetError, match=r"\['bn_beta', 'bn_moving_mean', 'bn_moving_var'\] never"):
        executor.forward(data=mx.nd.ones((2, 4)))
    executor.forward(is_train=True, bn_beta=mx.nd.zeros((3,)))  # moving statistics are computed from the batch
    executor.copy_params_from({}, {"bn_moving_mean": mx.nd.zeros((3,)), "bn_moving_var": mx.nd.ones((3,))})
    executor.forward()


def test_parameters_that_may_stay_zero():
    """With ``allow_missing``, and for arrays of the caller, ``forward`` uses zeros without an error."""
    executor = layers().simple_bind(mx.cpu(), grad_req="null", data=(2, 4))
    executor.copy_params_from({"fc_weight": mx.nd.ones((3, 4))}, allow_missing=True)
    executor.forward()
    shapes = dict(zip(layers().list_arguments(), layers().infer_shape(data=(2, 4))[0], strict=True))
    arrays = {name: mx.nd.zeros(shape) for name, shape in shapes.items()}
    own = layers().bind(mx.cpu(), arrays, grad_req="null", aux_states=[mx.nd.zeros((3,)), mx.nd.ones((3,))])
    own.copy_params_from({"fc_weight": mx.nd.ones((3, 4))})
    own.forward()


@pytest.mark.parametrize("strategy", ["", "dynamic"])
def test_backward_without_forward(strategy, monkeypatch):
    """Backward without forward works if the gradients need no result of forward; otherwise it raises an error.

    It can be repeated, and it can share memory, as in MXNet.
    """
    if strategy:
        monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", strategy)
    x = mx.sym.Variable("x")
    net = mx.sym.repeat(mx.sym.sin(x) * 2.0, repeats=2, axis=0)
    first = mx.sym.tanh(mx.sym.exp(x)).simple_bind(mx.cpu(), x=(3,))
    first.forward(is_train=True)
    second = net.simple_bind(mx.cpu(), x=(3,), shared_exec=None if strategy else first)
    second.arg_dict["x"][:] = values = np.array([0.5, 1.0, -2.0], "f4")
    for scale in (1.0, 3.0):
        second.backward(mx.nd.full((6,), scale))
        np.testing.assert_allclose(second.grad_dict["x"].asnumpy(), 4 * scale * np.cos(values), rtol=1e-5)
    with pytest.raises(MXNetError, match=r"run forward\(is_train=True\) first$"):
        mx.sym.tanh(x).simple_bind(mx.cpu(), x=(3,)).backward(mx.nd.ones((3,)))
    drawn = mx.sym.Dropout(x) * 2.0
    with pytest.raises(MXNetError, match=r"run forward\(is_train=True\) first$"):
        drawn.simple_bind(mx.cpu(), x=(3,)).backward(mx.nd.ones((3,)))


def test_unknown_keywords_of_simple_bind():
    """``simple_bind`` warns of unknown keywords and ignores them; a misspelt option raises an error.

    MXNet ignores both without a warning.
    """
    net = mx.sym.Variable("data") * 2.0
    with pytest.warns(UserWarning, match=r"no arguments or options named \['force_rebind', 'zzz'\]"):
        executor = net.simple_bind(mx.cpu(), data=(2,), force_rebind=True, zzz=3)
    assert executor.forward(data=mx.nd.ones((2,)))[0].asnumpy().tolist() == [2, 2]
    with pytest.raises(BindError, match=r"no option .*'grad_reg'.*did you mean 'grad_req'"):
        net.simple_bind(mx.cpu(), data=(2,), grad_reg="null")


def test_backward_after_forward_outside_training():
    """After ``forward()`` without training, backward works if no operator behaves differently in training."""
    x = mx.sym.Variable("x")
    executor = mx.sym.broadcast_mul(x, mx.sym.tanh(x)).bind(mx.cpu(), [mx.nd.array([0.5, -2.0])], [mx.nd.zeros((2,))])
    with pytest.raises(MXNetError, match=r"run forward\(is_train=True\) first$"):
        executor.backward(mx.nd.ones((2,)))
    executor.forward()
    executor.backward(mx.nd.ones((2,)))
    values = np.array([0.5, -2.0])
    expected = np.tanh(values) + values * (1 - np.tanh(values) ** 2)
    np.testing.assert_allclose(executor.grad_arrays[0].asnumpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("net", "data"),
    [
        (lambda x: mx.sym.Dropout(x, name="odd"), (3, 4)),
        (lambda x: mx.sym.BatchNorm(x, name="odd"), (3, 4)),
        (lambda x: mx.sym.RNN(x, state_size=2, num_layers=2, mode="gru", p=0.5, name="odd"), (3, 4, 5)),
    ],
)
def test_operators_that_need_training(net, data):
    """Backward after inference raises an error for Dropout, BatchNorm and RNN, which need results of a training run.

    With p=0 or global statistics it works.
    """
    executor = net(mx.sym.Variable("x")).simple_bind(mx.cpu(), x=data)
    executor.forward()
    with pytest.raises(MXNetError, match=r"'odd' keeps what its gradient needs in training only"):
        executor.backward(executor.outputs[0])
    executor.forward(is_train=True)
    executor.backward(executor.outputs[0])
    tame = mx.sym.Dropout(mx.sym.BatchNorm(mx.sym.Variable("x"), use_global_stats=True), p=0)
    executor = tame.simple_bind(mx.cpu(), x=(3, 4))
    executor.forward()
    executor.backward(executor.outputs[0])
