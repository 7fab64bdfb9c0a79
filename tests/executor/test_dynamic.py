"""The executor strategy ``dynamic``: the bits of a static plan, errors, and reuse of prepared calls."""

import numpy as np
import pytest

import weftplan as mx
from tests.executor.dynamic_runs import deep, network, run, wait_until_freed
from weftplan import device, storage
from weftplan.errors import BindError, ConfigError, MXNetError, OutOfMemoryError
from weftplan.executor.dynamic import DynamicExecutor
from weftplan.storage import LimitResource, RawResource


@pytest.mark.parametrize("engine", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def test_same_bits_on_every_engine(dynamic, engine):
    """A dynamic executor on any engine gives the results of a static one."""
    dynamic.delenv("WEFTPLAN_EXECUTOR_STRATEGY")
    _, expected = run(mx.cpu(45))
    dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", "dynamic")
    with mx.engine.using(mx.engine.create(engine)):
        for ours, theirs in zip(run(mx.cpu(45))[1], expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        mx.nd.waitall()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FLAGS_eager_delete_tensor_gb", "much"),
        ("FLAGS_memory_fraction_of_eager_deletion", "1.5"),
        ("FLAGS_memory_fraction_of_eager_deletion", "-0.1"),
        ("FLAGS_eager_delete_scope", "maybe"),
        ("WEFTPLAN_EXECUTOR_STRATEGY", "lazy"),
    ],
)
def test_bad_settings(dynamic, name, text):
    """An invalid value of a variable raises an error that names both, and nothing is bound."""
    dynamic.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name}='{text}' is not legal"):
        network().simple_bind(mx.cpu(), data=(20, 30))


def test_backward_twice_is_refused(dynamic):
    """A second backward raises an error, because the results of forward have been freed."""
    executor, _ = run(mx.cpu(45), steps=1)
    executor.forward(is_train=True)
    executor.backward()
    with pytest.raises(MXNetError, match=r"given back \(WEFTPLAN_EXECUTOR_STRATEGY=dynamic\); run forward"):
        executor.backward()


def test_a_budget_needs_a_plan(dynamic):
    """A memory budget with the strategy ``dynamic`` raises an error."""
    with pytest.raises(BindError, match="unset WEFTPLAN_EXECUTOR_STRATEGY"):
        network().simple_bind(mx.cpu(), data=(20, 30), memory_budget="1GB")


def test_a_monitor_sees_every_result(dynamic):
    """A monitor sees the same values as with a static executor."""
    shown = {}

    def look(name, array):
        shown.setdefault(name, []).append(array.asnumpy())

    for strategy in ("static", "dynamic"):
        dynamic.setenv("WEFTPLAN_EXECUTOR_STRATEGY", strategy)
        mx.random.seed(3)
        executor = network().simple_bind(mx.cpu(45), data=(20, 30))
        executor.set_monitor_callback(look)
        for array in executor.arg_arrays:
            array[:] = 0.25
        executor.forward(is_train=True)
        mx.nd.waitall()
    named = {name: arrays for name, arrays in shown.items() if len(arrays) == 2}  # names with numbers differ
    for name, (ours, theirs) in named.items():
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert len(named) > 8


def test_running_out_in_the_middle_of_a_run(dynamic):
    """An allocation that fails during a run raises OutOfMemoryError at the read, and the next run is right."""
    ctx = mx.cpu(48)
    resource = LimitResource(RawResource(device.get(ctx)), 1 << 30)
    with storage.using(resource):
        executor, expected = run(ctx, deep, steps=1)
        mx.nd.waitall()
        resource.limit = resource.statistics().requested_bytes + 6000
        executor.forward(is_train=True)
        with pytest.raises(OutOfMemoryError, match="out of memory on cpu"):
            executor.outputs[0].asnumpy()
        resource.limit = 1 << 30
        executor.forward(is_train=True)
        np.testing.assert_array_equal(executor.outputs[0].asnumpy(), expected[0])
        executor.backward([mx.nd.ones(o.shape, ctx=ctx) for o in executor.outputs])
        mx.nd.waitall()
        del executor
        assert wait_until_freed(resource).requested_bytes == 0


def test_reshape(dynamic):
    """Reshaping a dynamic executor gives a dynamic executor with the same values."""
    executor, _ = run(mx.cpu(45), steps=1)
    smaller = executor.reshape(data=(5, 30), softmax_label=(5,))
    assert type(smaller) is DynamicExecutor
    smaller.forward(is_train=False, data=executor.arg_dict["data"][:5])
    executor.forward(is_train=False)
    np.testing.assert_allclose(smaller.outputs[0].asnumpy(), executor.outputs[0].asnumpy()[:5], rtol=1e-5)


def test_calls_are_cached_for_reused_memory(dynamic):
    """Runs at the same addresses reuse prepared calls with the current values, and the cache stays within its limit."""
    net, shapes = mx.sym.Variable("x"), {"x": (8, 8)}
    for k in range(6):
        net = mx.sym.tanh(mx.sym.FullyConnected(net, num_hidden=8, name=f"fc{k}"))
    executor = mx.sym.MakeLoss(net).simple_bind(mx.cpu(), **shapes)
    for turn in range(6):
        for array in executor.arg_dict.values():
            array[:] = 0.1 * (turn + 1)
        executor.forward(is_train=True)
        executor.backward()
        got = executor.outputs[0].asnumpy()
        want = np.full((8, 8), 0.1 * (turn + 1), "float32")
        weight = np.float32(0.1 * (turn + 1))
        for _ in range(6):
            want = np.tanh(want @ np.full((8, 8), weight, "float32") + weight)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        mx.nd.waitall()
        if turn == 3:
            result = len(executor._memory._calls)
    assert 0 < len(executor._memory._calls) <= 2 * result
    assert executor._memory._cached_bytes <= 4 << 20
