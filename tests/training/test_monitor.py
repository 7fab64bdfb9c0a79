"""Monitors: the arrays they show, on which batches, and after the module is reshaped or bound again."""

import logging

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import MXNetError, ParameterError


def bound_module(contexts=1):
    """Return a bound module of two layers whose weights are all 0.5."""
    net = mx.sym.Activation(
        mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc1"), "relu", name="act"
    )
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")
    module = mx.mod.Module(net, context=[mx.cpu(i) for i in range(contexts)])
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    module.init_params(mx.init.Constant(0.5))
    return module


def batch(rows=4):
    """Return a batch of ones with label 1."""
    return mx.io.DataBatch([mx.nd.ones((rows, 5))], [mx.nd.ones((rows,))])


def test_outputs_and_arguments():
    """toc lists outputs in order of computation, then arguments; the default statistic is norm / sqrt(size)."""
    module, monitor = bound_module(), mx.mon.Monitor(1, pattern="fc|act")
    module.install_monitor(monitor)
    monitor.tic()
    module.forward(batch(), is_train=False)
    seen = monitor.toc()
    assert [name for _, name, _ in seen] == [
        "fc1_output", "act_output", "fc2_output", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias",
    ]  # fmt: skip
    assert {step for step, _, _ in seen} == {1}
    for name, value in (("fc1_output", 2.5), ("fc2_output", 5.0), ("fc1_weight", 0.5)):
        text = next(t for _, n, t in seen if n == name)
        assert text.endswith("\t")
        assert float(text) == pytest.approx(value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "float64"])
def test_a_statistic_is_printed_as_numpy_prints_it(dtype):
    """As in MXNet: the digits of the statistic's dtype, for one element and for several."""
    module, value = bound_module(), np.array([1 / 3, 2.5]).astype(dtype)
    monitor = mx.mon.Monitor(
        1, lambda _: [mx.nd.array(value[:1], dtype=dtype), mx.nd.array(value, dtype=dtype)], "fc1_bias"
    )
    module.install_monitor(monitor)
    monitor.tic()
    ((_, _, text),) = monitor.toc()
    assert (
        text
        == {"float32": "0.33333334", "float16": "0.3333", "int32": "0", "float64": "0.3333333333333333"}[dtype]
        + f"\t{value}\t"
    )


def test_every_third_batch_sorted_and_with_inputs():
    """With interval 3 only batches 1 and 4 are shown; monitor_all adds inputs; a statistic may be a list."""
    monitor = mx.mon.Monitor(3, lambda x: [mx.nd.max(x), x[0:1]], "act|data|fc1_data", sort=True, monitor_all=True)
    module = bound_module()
    module.install_monitor(monitor)
    results = []
    for _ in range(4):
        monitor.tic()
        module.forward(batch(), is_train=False)
        results.append(monitor.toc())
    assert [bool(one) for one in results] == [True, False, False, True]
    names = [name for _, name, _ in results[0]]
    assert names == sorted(names)
    assert {"act_input0", "act_output", "data", "fc1_data"} == set(names)
    assert results[0][0][2].count("\t") == 2
    assert monitor.toc() == []


@pytest.mark.parametrize("contexts", [1, 2])
def test_other_batch_sizes_and_bindings(contexts):
    """A reshaped or rebound module stays monitored, with each array once per context."""
    module, monitor = (
        bound_module(contexts),
        mx.mon.Monitor(1, lambda x: mx.nd.array([x.shape[0]]), "fc1_output|fc1_weight"),
    )
    module.install_monitor(monitor)

    def monitored_rows(count):
        monitor.tic()
        module.forward(batch(count), is_train=False)
        return sorted((name, int(float(text))) for _, name, text in monitor.toc())

    def expected(count):
        return [("fc1_output", count // contexts)] * contexts + [("fc1_weight", 4)] * contexts

    for count in (4, 6, 4):
        assert monitored_rows(count) == expected(count)
    module.bind([("data", (8, 5))], [("softmax_label", (8,))], force_rebind=True)
    assert monitored_rows(8) == expected(8)


def test_fit_with_a_monitor(caplog):
    """``fit`` logs a line per array, including gradients; the weights are those of a run without a monitor."""

    def train_and_get_weight(monitor):
        module = bound_module()
        data = mx.io.NDArrayIter(np.random.default_rng(0).random((12, 5)), np.arange(12) % 3, batch_size=4)
        module.fit(data, num_epoch=2, monitor=monitor)
        return module.get_params()[0]["fc1_weight"].asnumpy()

    with caplog.at_level(logging.INFO, logger="weftplan"):
        watched = train_and_get_weight(mx.mon.Monitor(2, pattern=".*backward.*|softmax_output"))
    lines = [line for line in caplog.messages if line.startswith("Batch:")]
    assert [line.split()[1] for line in lines if "softmax_output" in line] == ["1", "3", "5"]
    assert any("fc2_backward" in line for line in lines)
    np.testing.assert_array_equal(watched, train_and_get_weight(None))


def test_misuse():
    """An interval of 0, a statistic that is no array and an unbound module raise."""
    with pytest.raises(ParameterError, match="interval must be a number of batches >= 1, got 0"):
        mx.mon.Monitor(0)
    with pytest.raises(MXNetError, match="not bound"):
        mx.mod.Module(bound_module().symbol).install_monitor(mx.mon.Monitor(1))
    module, monitor = bound_module(), mx.mon.Monitor(1, lambda x: 1.0)
    module.install_monitor(monitor)
    monitor.tic()
    module.forward(batch(), is_train=False)
    with pytest.raises(ParameterError, match=r"must return an NDArray or a list of them, got 1\.0"):
        monitor.toc()


def test_inputs_have_the_names_of_mxnet():
    """Inputs have MXNet's names, which depend on the operator: ``input0``, ``data``, ``arg0``, ``lhs``."""
    x = mx.sym.Variable("x")
    for symbol, expected in (
        (mx.sym.Activation(x, act_type="relu", name="n"), ["x", "n_input0", "n_output"]),
        (mx.sym.exp(x, name="n"), ["x", "n_input0", "n_output"]),
        (mx.sym.softmax(x, name="n"), ["x", "n_data", "n_output"]),
        (mx.sym.Pooling(x, kernel=(1, 1), name="n"), ["x", "n_data", "n_output"]),
        (mx.sym.concat(x, x, dim=1, name="n"), ["x", "n_arg0", "x", "n_arg1", "n_output"]),
        (mx.sym.UpSampling(x, scale=2, sample_type="nearest", name="n"), ["x", "n_arg0", "n_output"]),
        (mx.sym.broadcast_add(x, x, name="n"), ["x", "n_lhs", "x", "n_rhs", "n_output"]),
    ):
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", x=(1, 2, 3, 3))
        seen = []
        executor.set_monitor_callback(lambda name, array, seen=seen: seen.append(name), monitor_all=True)
        executor.forward()
        assert seen == expected


def test_backward_nodes_have_the_names_of_mxnet():
    """Gradient outputs are numbered as in MXNet by the inputs they belong to; unwanted gradients are not shown."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    net = mx.sym.SoftmaxOutput(mx.sym.Activation(net, act_type="relu", name="act"), name="softmax")
    wanted = {"data": "null", "fc_weight": "write", "fc_bias": "write", "softmax_label": "null"}
    executor = net.simple_bind(mx.cpu(), grad_req=wanted, data=(2, 4))
    for everything, expected in (
        (False, ["softmax_backward_output0", "act_backward_output", "fc_backward_output1", "fc_backward_output2"]),
        (
            True,
            [
                "softmax_backward_input0", "softmax_backward_input1", "softmax_backward_output0", "act_backward_input0",
                "act_backward_input1", "act_backward_output", "fc_backward_input0", "fc_backward_input1",
                "fc_backward_input2", "fc_backward_output1", "fc_backward_output2",
            ],
        ),
    ):  # fmt: skip
        seen = []
        executor.set_monitor_callback(lambda name, array, seen=seen: seen.append(name), monitor_all=everything)
        executor.forward(is_train=True)
        executor.backward()
        shown = [name for name in seen if "backward" in name]
        assert [name for name in shown if name in expected] == [name for name in expected if name in shown]
        assert set(shown) <= set(expected)
        assert set(expected) - set(shown) <= {"fc_backward_input2"}  # a weight whose data's gradient is unwanted


def normalized():
    """Return a network whose normalization and activation are fused."""
    net = mx.sym.Convolution(mx.sym.var("data"), kernel=(3, 3), num_filter=2, name="conv")
    net = mx.sym.Activation(mx.sym.BatchNorm(net, name="bn"), act_type="relu", name="act")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=2, name="fc"), name="softmax")


MXNET_NAMES = ["conv_output", "bn_output", "bn_mean", "bn_var", "act_output", "fc_output", "softmax_output"]
"""Outputs of :func:`normalized` as a monitor of MXNet 1.9.1 names them, in a training run."""


def outputs_seen(monitor):
    """Return the names of forward outputs that a monitor has collected in a batch."""
    names = [name for _, name, _ in monitor.toc() if "moving" not in name and "backward" not in name]
    return [name for name in names if name.endswith(("_output", "_mean", "_var"))]


@pytest.mark.parametrize("runs_before", [False, True])
def test_fused_nodes_are_all_shown(runs_before):
    """A module that is monitored is bound without fusion, before its first run or later; the values stay."""
    data = mx.io.NDArrayIter(np.random.default_rng(0).random((4, 1, 6, 6)), np.arange(4) % 2, batch_size=4)
    monitor = mx.mon.Monitor(1)
    if not runs_before:  # fit knows the monitor before it binds
        monitor.toc_print = lambda: seen.append(outputs_seen(monitor))
        seen = []
        mx.mod.Module(normalized()).fit(data, num_epoch=1, monitor=monitor)
        assert seen == [MXNET_NAMES]
        return
    module, plain = mx.mod.Module(normalized()), mx.mod.Module(normalized())
    batch = next(data)
    for one in (module, plain):
        one.bind(data.provide_data, data.provide_label)
        mx.random.seed(1)
        one.init_params(mx.init.Xavier())
        one.init_optimizer(optimizer_params={"learning_rate": 0.1})
        one.forward_backward(batch)
        one.update()
    assert module.group.executors[0].hidden_outputs == ["bn"]
    module.install_monitor(monitor)
    for one in (module, plain):
        monitor.tic()
        one.forward_backward(batch)
        one.update()
        if one is module:
            assert outputs_seen(monitor) == MXNET_NAMES
    for ours, theirs in zip(module.get_params(), plain.get_params(), strict=True):
        for name, value in ours.items():
            np.testing.assert_allclose(value.asnumpy(), theirs[name].asnumpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_executor_that_has_run_shows_no_false_names():
    """A callback on an executor that has run warns of fused nodes, and names only outputs that the network has."""
    executor = normalized().simple_bind(mx.cpu(), data=(4, 1, 6, 6), softmax_label=(4,))
    executor.forward(is_train=True)
    names = []
    with pytest.warns(mx.errors.ConfigWarning, match="'bn'"):
        executor.set_monitor_callback(lambda name, array: names.append(name))
    executor.forward(is_train=True)
    assert names == ["conv_output", "act_output", "bn_mean", "bn_var", "fc_output", "softmax_output"]


def test_a_callback_of_an_executor_stays():
    """A callback on a module's executor stays set when the module binds for another batch size, or again."""
    module, names = bound_module(), []
    module.group.executors[0].set_monitor_callback(lambda name, array: names.append((name, array.shape[0])))
    for rows in (4, 6, 2):
        names.clear()
        module.forward(batch(rows), is_train=False)
        assert ("fc1_output", rows) in names
    module.bind([("data", (8, 5))], [("softmax_label", (8,))], force_rebind=True)
    names.clear()
    module.forward(batch(8), is_train=False)
    assert ("fc1_output", 8) in names
    reshaped = module.group.executors[0].reshape(data=(3, 5), softmax_label=(3,), partial_shaping=True)
    names.clear()
    reshaped.forward()
    assert ("fc1_output", 3) in names
