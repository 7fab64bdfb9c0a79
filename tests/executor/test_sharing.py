"""Memory that executors share, arrays that users keep meanwhile, and memory after executors are dropped."""

import gc
import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine, planner, storage
from weftplan.errors import EngineError, MXNetError
from weftplan.planner.program import Graph


@pytest.fixture
def two_workers(monkeypatch):
    """A threaded engine with two workers."""
    monkeypatch.setenv("MXNET_CPU_WORKER_NTHREADS", "2")
    chosen = engine.create("ThreadedEngine")
    with engine.using(chosen):
        yield chosen
        chosen.wait_for_all()
    chosen.stop()


def chain():
    """Return ``exp(data) ** 2``, which has one planned array in addition to the output."""
    return mx.sym.square(mx.sym.exp(mx.sym.Variable("data")))


def loss_net():
    """Return one layer and a softmax loss."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def live_bytes():
    """Return the bytes that storage has given out on cpu(0), after all dead arrays have been freed."""
    for _ in range(4):  # freeing a part may free its slab in the next drain
        mx.nd.zeros((1,)).wait_to_read()
        mx.nd.waitall()
    return storage.get(mx.cpu()).statistics().requested_bytes


@pytest.mark.parametrize("strategy", ["match_range", "arena"])
def test_output_being_read_is_not_overwritten(two_workers, strategy):
    """B, which shares A's memory, does not run before a pending reader of A's output has ended.

    A.forward --> [reader waits for the gate ........ reads A's output]
                  B.forward must not start before here ^
    """
    options = planner.PlanOptions.from_environment(strategy=strategy)
    first = chain().simple_bind(mx.cpu(), data=(300,), grad_req="null", plan_options=options)
    second = first.reshape(data=(200,))
    runs = [(first, 1.0, second, 2.0), (second, 3.0, first, 4.0)]
    for before, low, after, high in runs:
        held = before.forward(data=np.full(before.arg_arrays[0].shape, low, "float32"))[0]
        gate, kept = threading.Event(), mx.nd.zeros(held.shape)
        kept.wait_to_read()

        def slow(held=held, kept=kept, gate=gate):
            assert gate.wait(60)
            kept.raw()[...] = held.raw()

        engine.get().push(slow, [held.var], [kept.var], mx.cpu(), name="slow reader")
        after.forward(data=np.full(after.arg_arrays[0].shape, high, "float32"))
        # B's first kernel would finish long before this operation, which waits only for its own array.
        mx.nd.ones((4,)).wait_to_read()
        gate.set()
        np.testing.assert_allclose(kept.asnumpy(), np.exp(low) ** 2, rtol=1e-5)
        np.testing.assert_allclose(after.outputs[0].asnumpy(), np.exp(high) ** 2, rtol=1e-5)


def test_backward_after_a_sharing_executor_ran_is_refused():
    """A.backward raises an error if B, which shares A's memory, has run forward since A did."""
    first = loss_net().simple_bind(mx.cpu(), data=(4, 5))
    first.arg_dict["data"][:] = 1.0
    second = first.reshape(data=(2, 5), softmax_label=(2,))
    first.forward(is_train=True)
    second.forward(is_train=True)
    with pytest.raises(MXNetError, match=r"another executor that shares .* run forward\(is_train=True\) again"):
        first.backward()
    second.backward()
    first.forward(is_train=True)
    first.backward()
    assert np.abs(first.grad_dict["fc_weight"].asnumpy()).sum() > 0


def test_no_executor_needs_the_cycle_collector():
    """Executors that were bound, run, reshaped and dropped free all their bytes without the garbage collector."""
    loss_net().simple_bind(mx.cpu(), data=(4, 5)).forward()[0].wait_to_read()
    start = None
    while start != (start := live_bytes()):  # without the GIL a worker frees its last objects when it next wakes
        gc.collect()
    gc.disable()
    try:
        for rows in (4, 8, 16):
            executor = loss_net().simple_bind(mx.cpu(), data=(rows, 5))
            executor.forward(is_train=True)
            executor.backward()
            second = executor.reshape(data=(2, 5), softmax_label=(2,))
            second.forward()
            del executor, second
        assert live_bytes() == start
    finally:
        gc.enable()


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_a_bind_leaves_no_cycles(budget):
    """A bind frees all its intermediate graphs without the garbage collector, also with a budget."""
    result = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8)
    symbol = mx.sym.FullyConnected(mx.sym.Activation(result, act_type="relu"), num_hidden=3)
    symbol.simple_bind(mx.cpu(), budget=budget, data=(4, 5)).forward()[0].wait_to_read()  # fill the caches first
    gc.collect()

    def graphs():
        return sum(isinstance(one, Graph) for one in gc.get_objects())

    before = graphs()
    gc.disable()
    try:
        executor = symbol.simple_bind(mx.cpu(), budget=budget, data=(9, 5))
        assert graphs() == before + 1
        del executor, symbol
        assert graphs() < before
    finally:
        gc.enable()


def test_growing_by_reshape_keeps_no_slab_of_smaller_sizes():
    """After repeated growth by reshape, only the largest block is in use."""
    start = live_bytes()
    options = planner.PlanOptions.from_environment(strategy="arena")
    executor = chain().simple_bind(mx.cpu(), data=(1000,), grad_req="null", plan_options=options)
    for size in range(2000, 9000, 1000):
        executor = executor.reshape(data=(size,), allow_up_sizing=True)
        executor.forward()[0].wait_to_read()
    assert executor.pool.nbytes == {mx.cpu(): executor.memory_plan.peak}
    assert live_bytes() - start == executor.memory_plan.peak + executor.arg_arrays[0].nbytes


def test_an_executor_runs_under_the_engine_it_was_bound_under():
    """Under another engine ``forward`` raises and changes nothing; under its own engine it works again."""
    executor = chain().simple_bind(mx.cpu(), data=(3,), grad_req="null")
    second = engine.create("NaiveEngine")
    with engine.using(second), pytest.raises(EngineError, match=r"was bound under .* bind it again"):
        executor.forward(data=np.ones(3, "float32"))
    assert executor.arg_dict["data"].asnumpy().tolist() == [0, 0, 0]
    np.testing.assert_allclose(executor.forward()[0].asnumpy(), np.ones(3))


def test_shared_arguments_share_their_gradients():
    """The gradient of a shared argument is that of the other executor; an argument that is not shared has its own."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="f")
    first = net.simple_bind(mx.cpu(), data=(3, 4))
    second = net.simple_bind(mx.cpu(), data=(5, 4), shared_arg_names=["f_weight"], shared_exec=first)
    second.arg_dict["data"][:] = 1
    second.forward(is_train=True)
    second.backward(mx.nd.ones((5, 2)))
    assert first.grad_dict["f_weight"].tolist() == [[5] * 4] * 2
    assert second.grad_dict["f_bias"].tolist() == [5] * 2
    assert first.grad_dict["f_bias"].tolist() == [0] * 2
