"""Pending operations have no memory; if memory is short, they complete first."""

import gc
import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan import config, device, engine, nd, storage
from weftplan.errors import OutOfMemoryError
from weftplan.ndarray.memory.release import drain
from weftplan.storage import LimitResource, RawResource

CTX = mx.cpu(78)
MIB = 1 << 20
SHAPE = (MIB // 4,)


def limited(nbytes, context=CTX):
    """Use storage on ``context`` whose system memory is limited to ``nbytes``."""
    return storage.using(LimitResource(RawResource(device.get(context)), nbytes))


PROGRAMS = {
    "arithmetic": lambda x: (x + 1) * x - x / 2,
    "negation": lambda x: -x,
    "operator": lambda x: nd.exp(x),
    "several outputs": lambda x: nd.split(x, num_outputs=2, axis=0),
    "copy": lambda x: x.copy(),
    "cast": lambda x: x.astype("float64"),
    "slice": lambda x: x.reshape((2, -1))[:, 1:],
    "view of a result": lambda x: (x + 1)[5:] * 2,
    "gather": lambda x: x[[0, 1, 2]],
    "gather by array": lambda x: x[nd.argsort(x)],
    "concatenate": lambda x: nd.concatenate([x, x + 1]),
    "random": lambda x: nd.random.normal(x, 1),
    "shuffle": lambda x: nd.random.shuffle(x),
    "assignment": lambda x: (x * 2).__setitem__(slice(0, 3), 1),
    "into an empty one": lambda x: nd.zeros_like(x).__setitem__(slice(None), x),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_pending_operations_take_no_memory(program):
    """A pending operation's results, temporaries and later writes take no memory until it runs."""
    held, gate = engine.create("ThreadedEngine", cpu_workers=1), threading.Event()
    with engine.using(held), limited(64 * MIB) as resource:
        x = nd.ones(SHAPE, CTX)
        x.wait_to_read()
        held.push(gate.wait, (), [x.var], CTX)  # blocks the only worker, also for operations independent of x
        results = [PROGRAMS[program](x) for _ in range(4)]
        before = resource.statistics().requested_bytes
        gate.set()
        nd.waitall()
        assert before < MIB + 10_000
        assert program == "negation" or len(results) == 4
        del x, results
        gc.collect()
        nd.waitall()
        assert resource.statistics().live == 0


def test_unawaited_loop_holds_few_arrays(each_engine):
    """A loop of ``a = a * 1.5`` without waits uses at most 6 arrays at a time, not one per step."""
    with limited(64 * MIB) as resource:
        a = nd.ones(SHAPE, CTX)
        for _ in range(40):
            a = a * 1.5
        assert a.asnumpy()[0] == np.float32(1.5) ** 40
        assert resource.statistics().peak_requested_bytes <= 6 * MIB
        del a
        nd.waitall()
        each_engine.wait_for_all()


def test_loop_on_a_device_with_four_arrays():
    """A loop runs with memory for four arrays on a device that frees memory only after its stream."""
    context = mx.sim(5)
    eng = engine.create("ThreadedEnginePerDevice")
    with engine.using(eng), limited(4 * MIB + 4096, context):
        a = nd.ones(SHAPE, context)
        for _ in range(60):
            a = a * 1.0 + 1
        assert a.asnumpy()[0] == 61
        del a
        nd.waitall()
        drain()
        eng.wait_for_all()
    eng.stop()


ENGINES = {
    "one worker": lambda: engine.create("ThreadedEngine", cpu_workers=1),
    "two workers": lambda: engine.create("ThreadedEngine", cpu_workers=2),
    "sixteen workers": lambda: engine.create("ThreadedEngine", cpu_workers=16),
    "per device": lambda: engine.create("ThreadedEnginePerDevice"),
    **{f"simulator {seed}": lambda seed=seed: engine.create("Simulator", seed=seed) for seed in range(4)},
}


@pytest.mark.parametrize("kind", ENGINES)
def test_starved_operation_yields_to_others(kind):
    """A starved operation runs other operations that free memory.

    Of x -> y1 -> sum, x -> y2 -> sum, …, all y are ready together, with room for two of eight. The starved operation
    runs the sums, after which their y are dropped.
    """
    eng = ENGINES[kind]()
    with engine.using(eng), limited(3 * MIB + 8192):
        x = nd.ones(SHAPE, CTX)
        x.wait_to_read()
        door = threading.Event()
        if not kind.startswith("simulator"):
            eng.push(door.wait, (), (x.var,), CTX)
        sums = []
        for i in range(8):
            y = x * (i + 1)
            sums.append(y.sum())
            del y
        door.set()
        for i, total in enumerate(sums):
            assert total.asscalar() == (i + 1) * SHAPE[0]
        del x, sums, total
        nd.waitall()
        drain()
        eng.wait_for_all()
    eng.stop()


def test_new_array_waits_for_pending_operations(gate):
    """``nd.empty`` waits for a pending reader of a dropped array if memory is short."""
    with limited(2 * MIB):
        x = nd.ones(SHAPE, CTX)
        x.wait_to_read()  # otherwise z takes the memory intended for x
        y = nd.empty(SHAPE, CTX)
        x.copyto(y)
        gate.close(y)
        y.copyto(x)
        del y

        gate.open()
        z = nd.empty(SHAPE, CTX)
        z[:] = x
        assert z.asnumpy()[0] == 1
        del x, z
        nd.waitall()


@pytest.fixture(params=["ThreadedEngine", "ThreadedEnginePerDevice"])
def threaded(request):
    """Yield an engine that raises errors at the wait, with garbage collection disabled.

    An engine that raises at the push would keep the arrays alive in the error's frames.
    """
    eng = engine.create(request.param)
    gc.disable()
    with engine.using(eng):
        yield eng
        drain()
        eng.wait_for_all()
    gc.enable()
    eng.stop()


def test_refusal_holds_no_arrays(threaded):
    """The error of an operation without memory names the operation.

    Dropping its inputs frees them without a garbage collection.
    """
    with limited(3 * MIB) as resource:
        a, b = nd.ones(SHAPE, CTX), nd.ones(SHAPE, CTX)
        nd.waitall()
        held = (a + b, a * b)
        with pytest.raises(OutOfMemoryError, match="1,048,576 bytes requested") as caught:
            nd.waitall()
        assert "raised in engine operation" in caught.value.__notes__[0]
        del a, b, held
        nd.waitall()
        threaded.wait_for_all()
        assert resource.statistics().live == 0
        fine = nd.ones(SHAPE, CTX) + 1
        assert fine.asnumpy()[0] == 2
        del fine
        nd.waitall()


def test_failed_kernel_holds_no_arrays(threaded):
    """The error of a failed kernel keeps no arrays alive."""
    with limited(8 * MIB) as resource:
        x = nd.ones(SHAPE, CTX)
        bad = x[nd.array([SHAPE[0] + 1], CTX)]
        with pytest.raises(IndexError):
            nd.waitall()
        del x, bad
        nd.waitall()
        threaded.wait_for_all()
        assert resource.statistics().live == 0


def test_memory_comes_from_the_resource_of_the_call(gate):
    """A result is allocated from the resource in force at its push, even if another is in force when it runs."""
    x = nd.ones(SHAPE, ctx=CTX)
    x.wait_to_read()
    first, second = (storage.StatisticsResource(RawResource(device.get(CTX))) for _ in range(2))
    gate.close(x)
    with storage.using(first):
        result = x + 1
    with storage.using(second):
        gate.open()
        result.wait_to_read()
    assert first.statistics().requested_bytes == MIB
    assert second.statistics().requested_bytes == 0


@pytest.mark.shows("FLAGS_gpu_allocator_retry_time")
@pytest.mark.parametrize(("milliseconds", "fits"), [("20000", True), ("50", False)])
def test_how_long_an_allocation_on_a_gpu_waits(monkeypatch, milliseconds, fits):
    """An allocation waits for the memory of a dead array in use, for at most the milliseconds of the flag."""
    monkeypatch.setenv("FLAGS_gpu_allocator_retry_time", milliseconds)
    config._reset_for_tests()
    context, gate = mx.sim(6), threading.Event()
    held = engine.create("ThreadedEnginePerDevice")
    with engine.using(held), limited(MIB + 4096, context):
        x = nd.ones(SHAPE, context)
        x.wait_to_read()
        held.push(gate.wait, [x.var], (), context)
        del x
        release = threading.Timer(0.5, gate.set)
        release.start()
        resource = storage.get(context)
        if fits:
            resource.free(resource.allocate(MIB, name="next"))
        else:
            with pytest.raises(OutOfMemoryError):
                resource.allocate(MIB, name="next")
        release.join()
        nd.waitall()
        drain()
    held.stop()
    config._reset_for_tests()
