"""Executors that are not running lend their memory: what leaves, what comes back, and what stays."""

import contextlib
import gc
import threading
import time

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, storage
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.ndarray import spilling
from weftplan.storage import LimitResource, NaivePool
from weftplan.storage.homes import traffic


def network():
    """A chain whose results backward needs."""
    net = mx.sym.Variable("data")
    for k in range(4):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=32, name=f"fc{k}"), act_type="tanh")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def bound(ctx):
    """An executor with fixed contents; its slab is much larger than its arguments."""
    executor = network().simple_bind(ctx, data=(256, 32))
    rng = np.random.RandomState(0)
    for name, array in sorted(executor.arg_dict.items()):
        array[:] = 0 if "label" in name else rng.rand(*array.shape).astype("float32") * 0.1
    return executor


def step(executor):
    """Bytes of outputs and gradients of one step."""
    executor.forward(is_train=True)
    executor.backward()
    return [array.asnumpy().tobytes() for array in (*executor.outputs, *executor.grad_arrays)]


def settled():
    """Everything that is dead has gone back, and every failure has been told."""
    gc.collect()
    with contextlib.suppress(MXNetError):
        mx.nd.waitall()


@pytest.fixture(params=["cpu", "sim"])
def room(request, folder):
    """(context, pool that holds one executor of two, homes are listed)."""
    make = getattr(mx, request.param)
    with storage.using(LimitResource(NaivePool(device.get(make(9400))), 1 << 40)) as pool:
        executor = bound(make(9400))
        want = step(executor)
        peak, slab = pool.statistics().peak_requested_bytes, executor.allocated_bytes
        del executor
        settled()
    ctx = make(9401)
    homes = f"file:{folder}:32MB" if request.param == "cpu" else "host:32MB"
    with spilling.using(homes), storage.using(LimitResource(NaivePool(device.get(ctx)), peak + slab // 2)) as pool:
        yield ctx, pool, want
        end = time.monotonic() + 60  # what a worker drops last goes a moment later
        while pool.statistics().requested_bytes and time.monotonic() < end:
            settled()
        assert pool.statistics().requested_bytes == 0
    assert traffic.waiting_bytes == 0


def test_two_executors_take_turns_in_memory_for_one(room):
    """The slab of the one that is not running waits in a home; bits are those of a run with room enough."""
    ctx, pool, want = room
    first, second = bound(ctx), bound(ctx)
    began = traffic.outs
    for executor in (first, second, first, second, second):
        assert step(executor) == want
    assert traffic.outs > began
    assert pool.statistics().peak_requested_bytes <= pool.limit
    assert first.pool.nbytes == second.pool.nbytes == {ctx: first.allocated_bytes}


def test_outputs_that_are_away_can_be_read(room):
    """Reading an output brings the slab back inside the operation that reads; backward goes on from there."""
    ctx, _, want = room
    first = bound(ctx)
    first.forward(is_train=True)
    output = first.outputs[0]
    output.wait_to_read()
    second = bound(ctx)
    step(second)
    assert first.pool.idleness.away
    assert output.asnumpy().tobytes() == want[0]
    assert not first.pool.idleness.away
    step(second)
    first.backward()
    assert [array.asnumpy().tobytes() for array in first.grad_arrays] == want[1:]


def test_what_somebody_looks_at_stays(room):
    """An array that was exported from the slab, or a run that is being pushed, keeps it; then memory runs out."""
    ctx, _, _ = room
    first = bound(ctx)
    first.forward(is_train=False)
    first.outputs[0].wait_to_read()
    mx.nd.waitall()
    with first.pool.idleness, pytest.raises(OutOfMemoryError):
        bound(ctx)
    settled()
    view = np.from_dlpack(first.outputs[0]) if ctx.device_type == "cpu" else first.outputs[0].to_dlpack_for_read()
    with pytest.raises(OutOfMemoryError):
        bound(ctx)
    del view
    settled()
    assert bound(ctx) is not None


def test_an_operation_that_is_pending_keeps_the_slab(room):
    """A run that has been pushed and has not ended stays where it is, and its values are right."""
    ctx, _, want = room
    first = bound(ctx)
    gate = threading.Event()
    current = mx.engine.get()
    current.push(gate.wait, (), (first.arg_dict["data"].var,), mx.cpu(0))
    first.forward(is_train=True)
    assert first.pool.idleness.leave(ctx, spilling.listed()) == 0
    gate.set()
    first.backward()
    assert [array.asnumpy().tobytes() for array in (*first.outputs, *first.grad_arrays)] == want


def test_an_executor_that_dies_away_leaves_nothing(room):
    """Its bytes in the home go with it."""
    ctx, _, want = room
    first, second = bound(ctx), bound(ctx)
    step(second)
    assert first.pool.idleness.away or second.pool.idleness.leave(ctx, spilling.listed())
    del first
    settled()
    assert step(second) == want


def test_threads_take_turns(room):
    """Two threads, each with an executor, in memory for one: neither loses a bit, and nobody waits for ever."""
    ctx, _, want = room
    executors, wrong = [bound(ctx), bound(ctx)], []

    def run(executor):
        for _ in range(5):
            try:
                if step(executor) != want:
                    wrong.append("bits")
            except OutOfMemoryError:  # both are needed at once; what has failed is told once more by a wait
                with contextlib.suppress(MXNetError):
                    mx.nd.waitall()

    threads = [threading.Thread(target=run, args=(executor,)) for executor in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    executors.clear()
    assert not wrong


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_an_engine_tells_whether_anything_is_pending(kind):
    """A var is idle once what was pushed on it has ended: reads, writes, and what waits behind them."""
    with mx.engine.using(mx.engine.create(kind)) as current:
        read, written, other = (current.new_variable() for _ in range(3))
        gate = threading.Event()
        assert current.idle([read, written, other])
        current.push(gate.wait, (read,), (written,), mx.cpu(0))
        current.push(int, (written,), (), mx.cpu(0))
        assert not current.idle([other, read])
        assert not current.idle([written])
        assert current.idle([other])
        gate.set()
        current.wait_for_all()
        assert current.idle([read, written, other])
