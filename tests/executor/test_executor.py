"""The executor: values, gradients, requests, reshape, sharing, random numbers, monitor, bad input."""

import numpy as np
import pytest

import weftplan as mx
from weftplan import planner
from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError


def mlp():
    """Two layers and a softmax loss."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc1")
    net = mx.sym.Activation(net, act_type="tanh", name="act")
    net = mx.sym.FullyConnected(net, num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def fill(executor, seed=0):
    """Seeded values in every argument."""
    rng = np.random.default_rng(seed)
    for name, array in executor.arg_dict.items():
        if name.endswith("label"):
            array[:] = rng.integers(0, 3, array.shape).astype("float32")
        else:
            array[:] = rng.standard_normal(array.shape).astype("float32")


def mlp_oracle(a):
    """Outputs and gradients of :func:`mlp` in NumPy, float64."""
    a = {k: v.asnumpy().astype("float64") for k, v in a.items()}
    h = np.tanh(a["data"] @ a["fc1_weight"].T + a["fc1_bias"])
    z = h @ a["fc2_weight"].T + a["fc2_bias"]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dz = p.copy()
    dz[np.arange(len(dz)), a["softmax_label"].astype(int)] -= 1
    dh = (dz @ a["fc2_weight"]) * (1 - h * h)
    return p, {
        "fc2_weight": dz.T @ h,
        "fc2_bias": dz.sum(0),
        "fc1_weight": dh.T @ a["data"],
        "fc1_bias": dh.sum(0),
        "data": dh @ a["fc1_weight"],
    }


STRATEGIES = ["none", "match_range", "arena", "auto"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bulk", ["0", "1"])
def test_values_and_gradients(strategy, bulk, monkeypatch):
    """Forward and backward agree with NumPy under every planner strategy, bulk or not, run after run."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", bulk)
    options = planner.PlanOptions.from_environment(strategy=strategy)
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5), plan_options=options)
    for seed in range(3):
        fill(executor, seed)
        outputs = executor.forward(is_train=True)
        executor.backward()
        want, gradients = mlp_oracle(executor.arg_dict)
        np.testing.assert_allclose(outputs[0].asnumpy(), want, rtol=1e-5, atol=1e-6)
        for name, value in gradients.items():
            np.testing.assert_allclose(executor.grad_dict[name].asnumpy(), value, rtol=1e-4, atol=1e-5, err_msg=name)
    planner.validate(executor.planned)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_allocated_bytes_are_the_plan(strategy):
    """Storage hands out exactly the bytes that the plan reports, and gets them back."""
    options = planner.PlanOptions.from_environment(strategy=strategy)
    ctx = mx.cpu(70 + STRATEGIES.index(strategy))  # a context that nothing else uses
    resource = mx.storage.get(ctx)
    mx.nd.waitall()
    args = {
        n: mx.nd.zeros(s, ctx=ctx)
        for n, s in zip(mlp().list_arguments(), mlp().infer_shape(data=(64, 100))[0], strict=True)
    }
    grads = {n: mx.nd.zeros(a.shape, ctx=ctx) for n, a in args.items()}
    mx.nd.waitall()
    before = resource.statistics().requested_bytes
    executor = mlp().bind(ctx, args, grads, plan_options=options)
    assert resource.statistics().requested_bytes - before == executor.memory_plan.peak == executor.allocated_bytes
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
    assert resource.statistics().requested_bytes - before == executor.memory_plan.peak


def test_grad_req_add_and_null():
    """``add`` accumulates onto what the array holds; ``null`` leaves no gradient."""
    executor = mlp().simple_bind(mx.cpu(), grad_req={"fc1_weight": "add", "fc2_weight": "write"}, data=(4, 5))
    fill(executor)
    executor.grad_dict["fc1_weight"][:] = 10
    assert executor.grad_dict["data"] is None
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward()
    _, gradients = mlp_oracle(executor.arg_dict)
    np.testing.assert_allclose(
        executor.grad_dict["fc1_weight"].asnumpy(), 10 + 2 * gradients["fc1_weight"], rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        executor.grad_dict["fc2_weight"].asnumpy(), gradients["fc2_weight"], rtol=1e-4, atol=1e-5
    )


def test_head_gradients():
    """An output that is no loss needs its gradient: as array, list or dictionary."""
    x, y = mx.sym.Variable("x"), mx.sym.Variable("y")
    executor = (x * y).simple_bind(mx.cpu(), x=(3,), y=(3,))
    executor.arg_dict["x"][:] = 2
    executor.arg_dict["y"][:] = 5
    head = mx.nd.array([1, 2, 3])
    name = executor.output_names[0]
    for given in (head, [head], {name: head}):
        executor.grad_dict["x"][:] = 0
        executor.forward(is_train=True)
        executor.backward(given)
        assert executor.grad_dict["x"].asnumpy().tolist() == [5, 10, 15]
        assert executor.grad_dict["y"].asnumpy().tolist() == [2, 4, 6]
    executor.forward(is_train=True)
    with pytest.raises(MXNetError, match="make_loss"):
        executor.backward()
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        executor.backward(mx.nd.ones((4,)))
    with pytest.raises(BindError, match="no outputs named"):
        executor.backward({"nope": head})


def test_forward_keywords():
    """Values given to forward are copied in; wrong names, shapes and types are refused by name."""
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5))
    fill(executor)
    data = np.random.default_rng(9).standard_normal((4, 5)).astype("float32")
    out = executor.forward(data=mx.nd.array(data))[0].asnumpy()
    np.testing.assert_allclose(out, mlp_oracle(executor.arg_dict)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(BindError, match="unknown argument 'dat'"):
        executor.forward(dat=mx.nd.array(data))
    with pytest.raises(ShapeError, match=r"'data' was bound with shape \(4, 5\), got \(2, 5\)"):
        executor.forward(data=mx.nd.array(data[:2]))
    with pytest.raises(DTypeError, match="must be an NDArray or a NumPy array"):
        executor.forward(data=[1, 2])


def test_bind_bad_input():
    """Missing arguments, wrong contexts and gradients that do not fit are named."""
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
    """An unknown name stops the call before anything is copied; values are cast."""
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5))
    good = mx.nd.ones((8, 5), dtype="float64")
    with pytest.raises(BindError, match="'nope'"):
        executor.copy_params_from({"fc1_weight": good, "nope": good})
    assert (executor.arg_dict["fc1_weight"].asnumpy() == 0).all()
    executor.copy_params_from({"fc1_weight": good, "nope": good}, allow_extra_params=True)
    assert (executor.arg_dict["fc1_weight"].asnumpy() == 1).all()
    with pytest.raises(ShapeError, match="fc2_bias"):
        executor.copy_params_from({"fc2_bias": good})


def test_reshape_shares_parameters_and_memory():
    """A smaller batch uses the same parameter arrays and no new planned memory; growing must be allowed."""
    big = mlp().simple_bind(mx.cpu(), data=(8, 5))
    fill(big)
    small = big.reshape(data=(2, 5), softmax_label=(2,))
    assert small.arg_dict["fc1_weight"] is big.arg_dict["fc1_weight"]
    assert small.allocated_bytes == 0
    small.arg_dict["data"][:] = 1
    small.arg_dict["softmax_label"][:] = 1
    small.forward(is_train=True)
    small.backward()
    want, gradients = mlp_oracle(small.arg_dict)
    np.testing.assert_allclose(small.outputs[0].asnumpy(), want, rtol=1e-5)
    np.testing.assert_allclose(small.grad_dict["fc1_weight"].asnumpy(), gradients["fc1_weight"], rtol=1e-4, atol=1e-5)
    fill(big)
    big.forward(is_train=True)
    np.testing.assert_allclose(big.outputs[0].asnumpy(), mlp_oracle(big.arg_dict)[0], rtol=1e-5)
    with pytest.raises(ShapeError, match="allow_up_sizing"):
        small.reshape(data=(9, 5), softmax_label=(9,))
    grown = small.reshape(data=(9, 5), softmax_label=(9,), allow_up_sizing=True)
    assert grown.arg_dict["data"].shape == (9, 5)
    with pytest.raises(ShapeError, match="partial_shaping"):
        big.reshape(data=(8, 4))


@pytest.mark.parametrize("engine", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_runs_in_flight_do_not_disturb_each_other(engine, strategy):
    """Many forwards pushed without waiting, each output copied: every copy is right."""
    with mx.engine.using(mx.engine.create(engine, cpu_workers=4)):
        options = planner.PlanOptions.from_environment(strategy=strategy)
        x = mx.sym.Variable("x")
        a, b = mx.sym.exp(x), mx.sym.square(x)
        net = mx.sym.sqrt(a * b + mx.sym.abs(a - b)) + mx.sym.tanh(b)
        executor = net.simple_bind(mx.cpu(), grad_req="null", x=(50, 40), plan_options=options)
        values = [np.random.default_rng(i).standard_normal((50, 40)).astype("float32") for i in range(30)]
        copies = [executor.forward(x=mx.nd.array(v))[0].copy() for v in values]
        for v, copy in zip(values, copies, strict=True):
            p, q = np.exp(v), np.square(v)
            np.testing.assert_allclose(copy.asnumpy(), np.sqrt(p * q + np.abs(p - q)) + np.tanh(q), rtol=2e-5)


def test_dropout_is_seeded_per_run():
    """The same seed gives the same masks, the next run others; inference drops nothing."""
    net = mx.sym.Dropout(mx.sym.Variable("x"), p=0.5, name="drop")
    executor = net.simple_bind(mx.cpu(), x=(100,))
    executor.arg_dict["x"][:] = 1

    def masks():
        mx.random.seed(3)
        return [executor.forward(is_train=True)[0].asnumpy().copy() for _ in range(2)]

    first, second = masks(), masks()
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert not np.array_equal(first[0], first[1])
    assert (executor.forward(is_train=False)[0].asnumpy() == 1).all()


def test_two_dropouts_draw_differently():
    """Two nodes of one run have masks of their own."""
    x = mx.sym.Variable("x")
    net = mx.sym.Group([mx.sym.Dropout(x, name="a"), mx.sym.Dropout(x, name="b")])
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=(100,))
    executor.arg_dict["x"][:] = 1
    one, two = (o.asnumpy() for o in executor.forward(is_train=True))
    assert not np.array_equal(one, two)


def test_monitor_sees_every_output():
    """Names in execution order, inputs too when asked; results do not change."""
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5))
    fill(executor)
    plain = executor.forward()[0].asnumpy().copy()
    seen = []
    executor.set_monitor_callback(lambda name, array: seen.append((name, array.asnumpy().shape)))
    assert np.array_equal(executor.forward()[0].asnumpy(), plain)
    assert [n for n, _ in seen] == ["fc1_output", "act_output", "fc2_output", "softmax_output"]
    seen.clear()
    executor.set_monitor_callback(lambda name, array: seen.append(name), monitor_all=True)
    executor.forward()
    assert seen[:7] == ["data", "fc1_data", "fc1_weight", "fc1_weight", "fc1_bias", "fc1_bias", "fc1_output"]
    executor.set_monitor_callback(None)
    seen.clear()
    executor.forward()
    assert seen == []


def test_debug_str_and_repr():
    """MXNet's text: the megabytes stand where its readers look."""
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5))
    text = executor.debug_str()
    assert text.startswith("Symbol Outputs:\n\toutput[0]=softmax(0)\n")
    assert "Op:FullyConnected, Name=fc1\nInputs:\n\targ[0]=data(0) version=0\n" in text
    assert text.split("\n")[-3].split()[1] == str(executor.memory_plan.peak >> 20)
    assert text.endswith("Total 11 TempSpace resource requested\n")
    assert "planned bytes" in repr(executor)


def test_model_parallel():
    """Layers in two groups on two contexts, with copies between, give the same numbers as on one."""

    def net():
        with mx.AttrScope(ctx_group="one"):
            h = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc1")
            h = mx.sym.Activation(h, act_type="tanh", name="act")
        with mx.AttrScope(ctx_group="two"):
            h = mx.sym.FullyConnected(h, num_hidden=3, name="fc2")
            return mx.sym.SoftmaxOutput(h, name="softmax")

    executor = net().simple_bind(mx.cpu(0), data=(4, 5), group2ctx={"one": mx.cpu(1), "two": mx.cpu(2)})
    assert executor.arg_dict["fc1_weight"].context == mx.cpu(1)
    assert executor.arg_dict["fc2_weight"].context == mx.cpu(2)
    fill(executor)
    executor.forward(is_train=True)
    executor.backward()
    want, gradients = mlp_oracle(executor.arg_dict)
    np.testing.assert_allclose(executor.outputs[0].asnumpy(), want, rtol=1e-5)
    for name, value in gradients.items():
        np.testing.assert_allclose(executor.grad_dict[name].asnumpy(), value, rtol=1e-4, atol=1e-5)
    assert set(executor.memory_plan.peak_by_device) >= {mx.cpu(1), mx.cpu(2)}
    planner.validate(executor.planned)


def test_shared_buffers_and_arguments():
    """simple_bind cuts arguments from shared_buffer and shares arrays with another executor."""
    pool = {}
    first = mlp().simple_bind(mx.cpu(), data=(8, 5), shared_buffer=pool)
    assert "data" in pool
    assert "grad of data" in pool
    second = mlp().simple_bind(
        mx.cpu(), data=(2, 5), shared_arg_names=["fc1_weight"], shared_exec=first, shared_buffer=pool
    )
    assert second.arg_dict["fc1_weight"] is first.arg_dict["fc1_weight"]
    first.arg_dict["data"][:] = 4
    assert (second.arg_dict["data"].asnumpy() == 4).all()
    third = mlp().simple_bind(mx.cpu(), data=(16, 5), shared_buffer=pool)
    assert pool["data"].shape == (16, 5)
    assert (third.arg_dict["data"].asnumpy()[:8] == 4).all()
    third.arg_dict["data"][:] = 3
    assert (first.arg_dict["data"].asnumpy() == 3).all()
    pool["data"] = mx.nd.zeros((2, 5))  # the caller's own array has others behind it: it cannot grow
    with pytest.warns(UserWarning, match="is replaced"):
        mlp().simple_bind(mx.cpu(), data=(16, 5), shared_buffer=pool)
    with pytest.raises(ShapeError, match="is shared as"):
        mlp().simple_bind(mx.cpu(), data=(2, 6), shared_arg_names=["fc1_weight"], shared_exec=first)


def test_a_failing_kernel_reaches_the_reader(monkeypatch):
    """An error in a node is raised at the read, naming the node; the executor works again afterwards."""
    from weftplan.executor import schedule

    broken = [True]
    real = schedule._kernel_call

    def sometimes(op, node, *rest):
        bind = real(op, node, *rest)

        def failing():
            if broken[0]:
                raise FloatingPointError("kernel failed")
            bind(schedule.RunState(is_train=False))()

        return (lambda run: failing) if node.name == "middle" else bind

    monkeypatch.setattr(schedule, "_kernel_call", sometimes)
    net = mx.sym.sqrt(mx.sym.square(mx.sym.Variable("x"), name="middle"))
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=(4,))
    executor.arg_dict["x"][:] = 3
    executor.forward()
    with pytest.raises(FloatingPointError, match="kernel failed") as caught:
        executor.outputs[0].asnumpy()
    assert "middle" in caught.value.__notes__[0]
    assert "test_executor.py" in caught.value.__notes__[0]
    broken[0] = False
    assert executor.forward()[0].asnumpy().tolist() == [3, 3, 3, 3]


def test_duplicate_names():
    """Two variables of one name are refused at bind."""
    net = mx.sym.Variable("same") + mx.sym.Variable("same")
    with pytest.raises(BindError, match="Duplicate names detected"):
        net.bind(mx.cpu(), [mx.nd.ones((2,)), mx.nd.ones((2,))])


def layers():
    """Data, a layer, a normalisation, a loss."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.SoftmaxOutput(mx.sym.BatchNorm(net, name="bn"), name="softmax")


def test_a_parameter_without_a_value_is_an_error():
    """What copy_params_from left out, and nobody has set since, is listed at forward; zeros would look plausible."""
    executor = layers().simple_bind(mx.cpu(), grad_req="null", data=(2, 4))
    given = {name: mx.nd.ones(executor.arg_dict[name].shape) for name in ("fc_weight", "bn_gamma")}
    executor.copy_params_from(given)
    lost = r"\['fc_bias', 'bn_beta', 'bn_moving_mean', 'bn_moving_var'\] never got a value"
    for _ in range(2):  # not only once
        with pytest.raises(MXNetError, match=lost):
            executor.forward(data=mx.nd.ones((2, 4)))
    with pytest.raises(MXNetError, match=lost):
        executor.reshape(data=(1, 4), softmax_label=(1,)).forward()
    executor.arg_dict["fc_bias"][:] = 0
    with pytest.raises(MXNetError, match=r"\['bn_beta', 'bn_moving_mean', 'bn_moving_var'\] never"):
        executor.forward(data=mx.nd.ones((2, 4)))
    executor.forward(is_train=True, bn_beta=mx.nd.zeros((3,)))  # moving statistics come from batches
    executor.copy_params_from({}, {"bn_moving_mean": mx.nd.zeros((3,)), "bn_moving_var": mx.nd.ones((3,))})
    executor.forward()


def test_zeros_may_be_meant():
    """allow_missing says so; arrays of the caller, inputs whose shape was given and labels are never asked for."""
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
    """It runs where the gradients need nothing that forward computes, twice and with shared memory too, as in MXNet; an
    executor whose memory it takes has to run forward again."""
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


def test_words_that_simple_bind_does_not_know():
    """What resembles no option and no argument is left out with a warning (MXNet does that silently); what is near
    one is an error that names it."""
    net = mx.sym.Variable("data") * 2.0
    with pytest.warns(UserWarning, match=r"no arguments or options named \['force_rebind', 'zzz'\]"):
        executor = net.simple_bind(mx.cpu(), data=(2,), force_rebind=True, zzz=3)
    assert executor.forward(data=mx.nd.ones((2,)))[0].asnumpy().tolist() == [2, 2]
    with pytest.raises(BindError, match=r"no option .*'grad_reg'.*did you mean 'grad_req'"):
        net.simple_bind(mx.cpu(), data=(2,), grad_reg="null")


def test_backward_after_forward_outside_training():
    """Where no operator behaves otherwise in training, forward() will do for backward, as in MXNet."""
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
    """What keeps nothing for its gradient outside training is named; without dropping or batches it may run."""
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


def test_gradient_arrays_beside_null_are_kept():
    """Arrays of what wants no gradient stay in grad_arrays, untouched; backward without gradients does nothing."""
    x, y = mx.sym.Variable("x"), mx.sym.Variable("y")
    arrays, grads = [mx.nd.ones((2,)), mx.nd.ones((2,))], [mx.nd.full((2,), 7), mx.nd.full((2,), 8)]
    executor = (x * y).bind(mx.cpu(), arrays, grads, grad_req={"x": "null", "y": "write"})
    executor.forward(is_train=True)
    executor.backward(mx.nd.ones((2,)))
    assert executor.grad_dict["x"] is grads[0]
    assert [g.asnumpy().tolist() for g in executor.grad_arrays] == [[7, 7], [1, 1]]
    executor = (x * y).bind(mx.cpu(), arrays, grads, grad_req="null")
    executor.forward()
    executor.backward()
    assert executor.grad_arrays[1].asnumpy().tolist() == [1, 1]
