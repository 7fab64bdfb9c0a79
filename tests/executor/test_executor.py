"""The executor: values, gradients, grad_req, reshape, sharing, random numbers, monitor and invalid input."""

import numpy as np
import pytest

import weftplan as mx
from tests.executor.small_networks import fill, mlp
from weftplan import engine, planner
from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError
from weftplan.executor import segments


def reference_mlp(a):
    """Return the outputs and gradients of :func:`mlp`, computed with NumPy in float64."""
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
    """With every planner strategy, with and without bulk execution, values and gradients are close to NumPy's."""
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", bulk)
    options = planner.PlanOptions.from_environment(strategy=strategy)
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5), plan_options=options)
    for seed in range(3):
        fill(executor, seed)
        outputs = executor.forward(is_train=True)
        executor.backward()
        want, gradients = reference_mlp(executor.arg_dict)
        np.testing.assert_allclose(outputs[0].asnumpy(), want, rtol=1e-5, atol=1e-6)
        for name, value in gradients.items():
            np.testing.assert_allclose(executor.grad_dict[name].asnumpy(), value, rtol=1e-4, atol=1e-5, err_msg=name)
    planner.validate(executor.planned)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_allocated_bytes_are_the_plan(strategy):
    """A bind allocates exactly the planned bytes, and runs allocate none."""
    options = planner.PlanOptions.from_environment(strategy=strategy)
    ctx = mx.cpu(70 + STRATEGIES.index(strategy))  # a context for this test only
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
    """With ``add`` gradients are added to the array's contents; an argument with ``null`` has no gradient."""
    executor = mlp().simple_bind(mx.cpu(), grad_req={"fc1_weight": "add", "fc2_weight": "write"}, data=(4, 5))
    fill(executor)
    executor.grad_dict["fc1_weight"][:] = 10
    assert executor.grad_dict["data"] is None
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward()
    _, gradients = reference_mlp(executor.arg_dict)
    np.testing.assert_allclose(
        executor.grad_dict["fc1_weight"].asnumpy(), 10 + 2 * gradients["fc1_weight"], rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        executor.grad_dict["fc2_weight"].asnumpy(), gradients["fc2_weight"], rtol=1e-4, atol=1e-5
    )


def test_head_gradients():
    """Gradients of outputs may be an array, a list or a dictionary; missing and wrong gradients raise errors."""
    x, y = mx.sym.Variable("x"), mx.sym.Variable("y")
    executor = (x * y).simple_bind(mx.cpu(), x=(3,), y=(3,))
    executor.arg_dict["x"][:] = 2
    executor.arg_dict["y"][:] = 5
    head = mx.nd.array([1, 2, 3])
    name = executor.output_names[0]
    for inputs in (head, [head], {name: head}):
        executor.grad_dict["x"][:] = 0
        executor.forward(is_train=True)
        executor.backward(inputs)
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
    """``forward`` copies values given by name; wrong names, shapes and types raise errors."""
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5))
    fill(executor)
    data = np.random.default_rng(9).standard_normal((4, 5)).astype("float32")
    out = executor.forward(data=mx.nd.array(data))[0].asnumpy()
    np.testing.assert_allclose(out, reference_mlp(executor.arg_dict)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(BindError, match="unknown argument 'dat'"):
        executor.forward(dat=mx.nd.array(data))
    with pytest.raises(ShapeError, match=r"'data' was bound with shape \(4, 5\), got \(2, 5\)"):
        executor.forward(data=mx.nd.array(data[:2]))
    with pytest.raises(DTypeError, match="must be an NDArray or a NumPy array"):
        executor.forward(data=[1, 2])


def test_reshape_shares_parameters_and_memory():
    """A smaller batch shares parameter arrays and planned memory; a larger batch needs ``allow_up_sizing``."""
    big = mlp().simple_bind(mx.cpu(), data=(8, 5))
    fill(big)
    small = big.reshape(data=(2, 5), softmax_label=(2,))
    assert small.arg_dict["fc1_weight"] is big.arg_dict["fc1_weight"]
    assert small.allocated_bytes == 0
    small.arg_dict["data"][:] = 1
    small.arg_dict["softmax_label"][:] = 1
    small.forward(is_train=True)
    small.backward()
    want, gradients = reference_mlp(small.arg_dict)
    np.testing.assert_allclose(small.outputs[0].asnumpy(), want, rtol=1e-5)
    np.testing.assert_allclose(small.grad_dict["fc1_weight"].asnumpy(), gradients["fc1_weight"], rtol=1e-4, atol=1e-5)
    fill(big)
    big.forward(is_train=True)
    np.testing.assert_allclose(big.outputs[0].asnumpy(), reference_mlp(big.arg_dict)[0], rtol=1e-5)
    with pytest.raises(ShapeError, match="allow_up_sizing"):
        small.reshape(data=(9, 5), softmax_label=(9,))
    grown = small.reshape(data=(9, 5), softmax_label=(9,), allow_up_sizing=True)
    assert grown.arg_dict["data"].shape == (9, 5)
    with pytest.raises(ShapeError, match="partial_shaping"):
        big.reshape(data=(8, 4))


@pytest.mark.parametrize("engine", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pending_runs_do_not_disturb_each_other(engine, strategy):
    """Thirty runs are pushed without waiting, and a copy of each output is right."""
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
    """With one seed, runs have the same masks each time; two runs differ, and inference drops nothing."""
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


def test_dropouts_of_all_runs_draw_differently():
    """No two masks are equal among those of several Dropout nodes in several runs from a seed on."""
    x = mx.sym.Variable("x")
    net = mx.sym.Group([mx.sym.Dropout(x, name=name) for name in "abcd"])
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=(100,))
    executor.arg_dict["x"][:] = 1
    mx.random.seed(5)  # the first run draws with the counter 0
    masks = [out.asnumpy().tobytes() for _ in range(5) for out in executor.forward(is_train=True)]
    assert len(set(masks)) == 20


def test_monitor_sees_every_output():
    """A monitor gets outputs in execution order, and also inputs with ``monitor_all``; results do not change."""
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
    """``debug_str`` has MXNet's format, with the planned megabytes in the third line from the end."""
    executor = mlp().simple_bind(mx.cpu(), data=(4, 5))
    text = executor.debug_str()
    assert text.startswith("Symbol Outputs:\n\toutput[0]=softmax(0)\n")
    assert "Op:FullyConnected, Name=fc1\nInputs:\n\targ[0]=data(0) version=0\n" in text
    assert text.split("\n")[-3].split()[1] == str(executor.memory_plan.peak >> 20)
    assert text.endswith("Total 11 TempSpace resource requested\n")
    assert "planned bytes" in repr(executor)


def test_model_parallel():
    """Layers in two groups on two contexts give the values and gradients of one context."""

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
    want, gradients = reference_mlp(executor.arg_dict)
    np.testing.assert_allclose(executor.outputs[0].asnumpy(), want, rtol=1e-5)
    for name, value in gradients.items():
        np.testing.assert_allclose(executor.grad_dict[name].asnumpy(), value, rtol=1e-4, atol=1e-5)
    assert set(executor.memory_plan.peak_by_device) >= {mx.cpu(1), mx.cpu(2)}
    planner.validate(executor.planned)


def test_shared_buffers_and_arguments():
    """``simple_bind`` takes arguments from ``shared_buffer``, which grows, and shares named arrays with an executor."""
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
    pool["data"] = mx.nd.zeros((2, 5))  # an array of the caller cannot grow
    with pytest.warns(UserWarning, match="is replaced"):
        mlp().simple_bind(mx.cpu(), data=(16, 5), shared_buffer=pool)
    with pytest.raises(ShapeError, match="is shared as"):
        mlp().simple_bind(mx.cpu(), data=(2, 6), shared_arg_names=["fc1_weight"], shared_exec=first)


def test_gradient_arrays_with_null_are_unchanged():
    """Gradient arrays of arguments with ``null`` stay in ``grad_arrays`` unchanged."""
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


@pytest.mark.parametrize(("is_train", "limit", "times"), [(True, 0, 1), (False, 0, 0), (True, 1 << 62, 0)])
def test_long_training_runs_yield_to_the_worker(monkeypatch, is_train, limit, times):
    """A long training run yields to the workers after its push; a short run and inference do not."""
    ways = []
    monkeypatch.setattr(type(engine.get()), "yield_to_worker", lambda engine: ways.append(engine))
    monkeypatch.setattr(segments, "LONG_NS", limit)
    executor = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2).simple_bind(mx.cpu(), data=(3, 4))
    executor.forward(is_train=is_train)
    mx.nd.waitall()
    ways.clear()  # the first run has yielded already if it ended before forward returned
    executor.forward(is_train=is_train)
    assert len(ways) == times
    mx.nd.waitall()
