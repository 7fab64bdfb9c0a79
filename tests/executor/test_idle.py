"""Idle executors release memory: slabs are offloaded when other executors need room, and reloaded on use."""

import contextlib
import gc
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

import weftplan as mx
from tests.support.waiting import until
from weftplan import device, storage
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.executor import idle, waits
from weftplan.ndarray.pushing import push_kernel
from weftplan.ndarray.spill import spill_ahead, spilling
from weftplan.storage import LimitResource, NaivePool, relief
from weftplan.storage.offload import traffic, waiting_bytes


def network():
    """Return a chain of layers whose results backward needs."""
    net = mx.sym.Variable("data")
    for k in range(4):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=32, name=f"fc{k}"), act_type="tanh")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def bound(ctx):
    """Return an executor with fixed contents, whose slab is much larger than its arguments."""
    executor = network().simple_bind(ctx, data=(256, 32))
    rng = np.random.RandomState(0)
    for name, array in sorted(executor.arg_dict.items()):
        array[:] = 0 if "label" in name else rng.rand(*array.shape).astype("float32") * 0.1
    return executor


def step(executor):
    """Run one training step and return the bytes of its outputs and gradients."""
    executor.forward(is_train=True)
    executor.backward()
    return [array.asnumpy().tobytes() for array in (*executor.outputs, *executor.grad_arrays)]


def free_dead_arrays():
    """Free all dead arrays, and discard pending failures."""
    gc.collect()
    with contextlib.suppress(MXNetError):
        mx.nd.waitall()


@pytest.fixture(params=["cpu", "sim"])
def room(request, folder):
    """Yield (context, pool with room for one and a half executors, bytes of a step); offload targets are listed."""
    make = getattr(mx, request.param)
    with storage.using(LimitResource(NaivePool(device.get(make(9400))), 1 << 40)) as pool:
        executor = bound(make(9400))
        want = step(executor)
        peak, slab = pool.statistics().peak_requested_bytes, executor.allocated_bytes
        del executor
        free_dead_arrays()
    ctx = make(9401)
    targets = f"file:{folder}:32MB" if request.param == "cpu" else "host:32MB"
    with spilling.using(targets), storage.using(LimitResource(NaivePool(device.get(ctx)), peak + slab // 2)) as pool:
        yield ctx, pool, want
        end = time.monotonic() + 60  # a worker may free its last array a little later
        while pool.statistics().requested_bytes and time.monotonic() < end:
            free_dead_arrays()
        assert pool.statistics().requested_bytes == 0
    assert waiting_bytes() == 0


def test_two_executors_alternate_in_memory_for_one(room):
    """Two executors alternate in memory for one executor: idle slabs are offloaded, and the bits are right."""
    ctx, pool, want = room
    first, second = bound(ctx), bound(ctx)
    began = traffic.outs
    for executor in (first, second, first, second, second):
        assert step(executor) == want
    assert traffic.outs > began
    assert pool.statistics().peak_requested_bytes <= pool.limit
    assert first.pool.nbytes == second.pool.nbytes == {ctx: first.allocated_bytes}


def test_reading_an_output_reloads_the_slab(room):
    """Reading an output reloads an offloaded slab, and backward continues after another offload."""
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


def test_slab_in_use_is_not_offloaded(room, monkeypatch):
    """A slab stays while a run is being pushed or an exported array exists, and other binds raise OutOfMemoryError."""
    monkeypatch.setattr(idle, "LOOKING_S", 0.01)
    ctx, _, _ = room
    first = bound(ctx)
    first.forward(is_train=False)
    first.outputs[0].wait_to_read()
    mx.nd.waitall()
    with first.pool.idleness, pytest.raises(OutOfMemoryError):
        bound(ctx)
    free_dead_arrays()
    view = np.from_dlpack(first.outputs[0]) if ctx.device_type == "cpu" else first.outputs[0].to_dlpack_for_read()
    with pytest.raises(OutOfMemoryError):
        bound(ctx)
    del view
    free_dead_arrays()
    assert bound(ctx) is not None


def test_an_operation_that_is_pending_keeps_the_slab(room):
    """A slab is not offloaded while an operation of its run is pending, and the run's values are right."""
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


def test_offloaded_executor_that_dies_frees_its_bytes(room):
    """If an offloaded executor is dropped, its bytes in the offload target are freed."""
    ctx, _, want = room
    first, second = bound(ctx), bound(ctx)
    step(second)
    assert first.pool.idleness.away or second.pool.idleness.leave(ctx, spilling.listed())
    del first
    free_dead_arrays()
    assert step(second) == want


def start_thread(function):
    """Start ``function`` in a thread.

    Returns:
        A function that waits for the thread, and returns its result or raises its error.
    """
    done = Future()

    def run():
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return lambda: done.result(timeout=60)


def test_threads_alternate(room):
    """Two threads, each with an executor, run four steps each in memory for one executor, with the right bits."""
    ctx, _, want = room
    executors = [bound(ctx), bound(ctx)]
    for finish in [start_thread(lambda e=e: [step(e) for _ in range(4)]) for e in executors]:
        assert finish() == [want] * 4
    executors.clear()


def test_starved_step_waits_for_a_run_being_pushed(room):
    """A step and a bind that lack memory wait until another thread has pushed its run, and then succeed."""
    ctx, _, want = room
    first, second = bound(ctx), bound(ctx)
    for needs in (lambda: step(second), lambda: step(bound(ctx))):
        step(first)
        entered = threading.Event()

        def run(entered=entered):
            with first.pool.idleness:
                entered.set()
                until(lambda: relief.other_thread_starves([ctx]))

        finish = start_thread(run)
        entered.wait(60)
        assert needs() == want
        finish()


def test_starved_step_waits_for_a_reader(room):
    """A step that lacks memory waits while another thread reads an output of the idle executor, and then succeeds."""
    ctx, _, want = room
    first, second = bound(ctx), bound(ctx)
    step(first)
    looks = threading.Event()

    def read():
        view = first.outputs[0].raw()
        looks.set()
        until(lambda: relief.other_thread_starves([ctx]))
        return len(view)

    finish = start_thread(read)
    looks.wait(60)
    assert step(second) == want
    finish()


def test_starved_read_waits_for_a_run_being_pushed(room):
    """A read of an offloaded output waits while another thread pushes a run into the memory that it needs."""
    ctx, _, want = room
    first, second = bound(ctx), bound(ctx)
    first.forward(is_train=True)
    output = first.outputs[0]
    output.wait_to_read()
    step(second)
    assert first.pool.idleness.away
    with second.pool.idleness:
        finish = start_thread(lambda: output.asnumpy().tobytes())
        until(lambda: relief.other_thread_starves([ctx]))
    assert finish() == want[0]


def test_new_run_yields_to_a_starved_thread(room):
    """A thread that steps without a pause yields to another thread that lacks memory."""
    ctx, _, want = room
    first, second = bound(ctx), bound(ctx)
    over = threading.Event()

    def run():
        while not over.is_set():
            assert step(first) == want

    finish = start_thread(run)
    try:
        for _ in range(3):
            assert step(second) == want
    finally:
        over.set()
        finish()


def test_starved_run_releases_memory_and_starts_over(room, monkeypatch):
    """A starved run that is being prepared releases the memory that another thread waits for, and starts over."""
    ctx, _, want = room
    executor = bound(ctx)
    assert step(executor) == want
    count, calls, threads, let = executor.allocated_bytes // 4, [], [], idle.Idleness._yield_memory

    def let_one_go_and_drop_its_array(pool_of_run):
        let(pool_of_run)
        if threads:
            threads[0]()

    monkeypatch.setattr(idle.Idleness, "_yield_memory", let_one_go_and_drop_its_array)

    def prepare():
        calls.append(None)
        if len(calls) == 1:
            threads.append(start_thread(lambda: mx.nd.empty((count,), ctx=ctx).shape))
            until(lambda: waits.waiting)
            mx.nd.empty((count,), ctx=ctx)

    with executor.pool.idleness.prepared(prepare):
        assert len(calls) == 2
    assert threads[0]() == (count,)
    assert step(executor) == want
    assert not waits.preparing


def test_starved_run_without_waiters_raises(room):
    """A starved run raises OutOfMemoryError without starting over if no other thread waits for its memory."""
    ctx, _, want = room
    executor = bound(ctx)
    calls = []

    def prepare():
        calls.append(None)
        mx.nd.empty((executor.allocated_bytes,), ctx=ctx)

    with pytest.raises(OutOfMemoryError), executor.pool.idleness.prepared(prepare):
        pass
    assert len(calls) == 1
    assert step(executor) == want


def test_one_of_two_mutual_waits_raises(room):
    """If two threads wait for each other's memory, one raises OutOfMemoryError and the other succeeds."""
    ctx, _, _ = room
    first, second = bound(ctx), bound(ctx)
    step(first)
    assert second.pool.idleness.away

    def other():
        with second.pool.idleness:
            return "there"

    refused = False
    with first.pool.idleness:
        finish = start_thread(other)
        until(lambda: relief.other_thread_starves([ctx]))
        try:
            bound(ctx)
        except OutOfMemoryError:
            refused = True
    try:
        assert finish() == "there"
    except OutOfMemoryError:
        assert not refused
    else:
        assert refused


def test_a_run_takes_no_memory_before_its_arrays_are_ready(room, monkeypatch):
    """A run allocates after its arguments are ready; otherwise it would deadlock with the operation that writes them.

    big = …, which needs the slab's room  --->  data  --->  the run, which needs its slab
    """
    ctx, pool, want = room
    run, second = bound(ctx), bound(ctx)
    assert step(run) == step(second) == want
    mx.nd.waitall()
    assert spill_ahead.active()
    big = mx.nd.empty((pool.limit // 2 // 4,), ctx=ctx)
    big.chunk.drop()
    gate, waits, ready, current = threading.Event(), threading.Event(), [], mx.engine.get()
    start, let = current.new_order("start"), idle.Idleness._let_pending_end

    def noted(pool_of_run, arrays):
        waits.set()
        let(pool_of_run, arrays)
        ready.append(current.idle([run.arg_dict["data"].var]))

    monkeypatch.setattr(idle.Idleness, "_let_pending_end", noted)
    current.push(gate.wait, (), (start,), mx.cpu(0))
    push_kernel(lambda raw: raw.fill(0), [big], (start,), [big.var], ctx)
    current.push(lambda: None, (big.var,), (run.arg_dict["data"].var,), mx.cpu(0))
    stepped = start_thread(lambda: step(run))
    until(waits.is_set)
    gate.set()
    assert stepped() == want
    assert all(ready)
    assert not big.asnumpy().any()


@pytest.mark.parametrize("arrays_fit", [True, False])
def test_two_devices_are_not_taken_by_halves(room, arrays_fit):
    """Two executors on two devices share memory for one executor: each reload gets the blocks of both devices.

    Memory has room for the arrays of both executors, or of one executor; then the arrays alternate, too.
    """
    ctx, pool, _ = room
    second = mx.Context(ctx.device_type, 9402)
    with mx.AttrScope(ctx_group="a"):
        net = mx.sym.Activation(
            mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=32, name="fa"), act_type="tanh"
        )
    with mx.AttrScope(ctx_group="b"):
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=32, name="fb"), name="softmax")

    def made():
        executor = net.simple_bind(ctx, data=(256, 32), group2ctx={"a": ctx, "b": second})
        for name, array in executor.arg_dict.items():
            array[:] = 0 if "label" in name else 0.1
        return executor

    with storage.using(LimitResource(NaivePool(device.get(second)), 1 << 40)) as beside:
        probe = made()
        want = step(probe)
        assert set(probe.pool.nbytes) == {ctx, second}
        before = pool.limit
        for place in (pool, beside):
            now = place.statistics()
            place.limit = 2 * now.allocated_bytes - 1 if arrays_fit else int(1.1 * now.peak_requested_bytes)
        del probe
        free_dead_arrays()
        executors = [made(), made()]
        for finish in [start_thread(lambda e=e: [step(e) for _ in range(3)]) for e in executors]:
            assert finish() == [want] * 3
        executors.clear()
        free_dead_arrays()
        until(lambda: free_dead_arrays() or not beside.statistics().requested_bytes)
        pool.limit = before


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_an_engine_tells_whether_anything_is_pending(kind):
    """``idle`` returns whether all operations that read or write these vars have ended."""
    with mx.engine.using(mx.engine.create(kind)) as current:
        read, written, second = (current.new_variable() for _ in range(3))
        gate = threading.Event()
        assert current.idle([read, written, second])
        current.push(gate.wait, (read,), (written,), mx.cpu(0))
        current.push(int, (written,), (), mx.cpu(0))
        assert not current.idle([second, read])
        assert not current.idle([written])
        assert current.idle([second])
        gate.set()
        current.wait_for_all()
        assert current.idle([read, written, second])


def test_prepared_run_can_start_over(room):
    """``can_go_on`` is True while a run that another thread waits for is being prepared, and False afterwards."""
    ctx, _, _ = room
    place, me, answers = bound(ctx).pool.idleness, threading.get_ident(), []

    def ask():
        with waits.looking:
            waits.waiting[me] = [threading.get_ident()]  # as if the preparing thread waited for memory of this thread
            try:
                answers.append(waits.can_go_on(me))
            finally:
                del waits.waiting[me]

    with place.prepared(lambda: start_thread(ask)()):
        start_thread(ask)()
    assert answers == [True, False]


def test_locked_pool_is_not_offloaded(room):
    """``leave`` returns 0 and offloads nothing while the lock of the pool is held."""
    ctx, _, _ = room
    place = bound(ctx).pool.idleness
    with place._lock:
        assert place.leave(ctx, spilling.listed()) == 0
    assert not place.away


class Returning(tuple):
    """(contents, bytes) of an offloaded block that another thread brings back while it is read."""

    def __new__(cls, idleness, ctx):
        entry = super().__new__(cls, (None, 8))
        entry.idleness, entry.ctx = idleness, ctx
        return entry

    def __iter__(self):
        self.idleness._offloaded.pop(self.ctx)
        return super().__iter__()


def test_bytes_can_be_read_while_blocks_come_back():
    """If blocks are brought back while ``away`` is read, it returns the bytes before the change, without an error."""
    pool = network().simple_bind(mx.cpu(), data=(4, 32)).pool
    idleness, contexts = pool.idleness, [mx.sim(index) for index in range(9500, 9503)]
    idleness._offloaded.update({ctx: Returning(idleness, ctx) for ctx in contexts})
    assert idleness.away == dict.fromkeys(contexts, 8)
    assert not idleness._offloaded
    assert pool.nbytes.keys() == {mx.cpu()}
