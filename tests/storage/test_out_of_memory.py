"""Out of memory: the order of relief steps, the contents of the error, and the release of memory afterwards.

A relief step ("rung") is a function that tries to free memory; the steps form a ladder, ordered by number.
"""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from tests.storage.small_devices import MIB, Room
from weftplan import device, engine, storage
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.ndarray.memory import joint_allocation, release
from weftplan.ndarray.memory.release import drain
from weftplan.storage import AutoGrowth, LimitResource, NaiveBestFit, NaivePool, RawResource, StatisticsResource, relief

CTX = device.cpu(61)


def room(total):
    return Room(total, CTX)


def remaining_bytes(resource):
    """Free all dead memory; return the bytes that are still live."""
    gc.collect()
    drain()
    mx.nd.waitall()
    drain()
    return resource.statistics().requested_bytes


# -- the ladder -------------------------------------------------------------------------------------------------------


def test_rungs_run_from_the_lowest_until_served(monkeypatch):
    """Relief steps run in order of their numbers until the request fits; later steps do not run."""
    monkeypatch.setattr(relief, "_rungs", {})
    place, tried = room(1000), []
    pool = RawResource(place)
    held = pool.allocate(900)

    def rung(name, does):
        def climb(context, nbytes):
            tried.append((name, str(context)))
            does()
            return True

        return climb

    relief.add(30, rung("never", lambda: None))
    relief.add(20, rung("frees", lambda: pool.free(held)))
    relief.add(10, rung("nothing", lambda: None))
    pool.allocate(500)
    assert [name for name, _ in tried] == ["nothing", "frees"]
    assert tried[0][1] == "cpu(61)"
    assert pool.statistics().failures == 0


def test_memory_freed_during_the_climb_is_used(monkeypatch):
    """A request is served if another thread frees memory during the relief, although no step did."""
    monkeypatch.setattr(relief, "_rungs", {})
    pool = RawResource(room(1000))
    held = pool.allocate(900)

    def late(context, nbytes):
        pool.free(held)
        return False

    relief.add(40, late)
    assert pool.allocate(500).nbytes == 500
    assert pool.statistics().failures == 0


def test_a_rung_that_allocates_does_not_climb(monkeypatch):
    """An allocation inside a relief step raises OutOfMemoryError without further steps, so a step cannot recurse."""
    monkeypatch.setattr(relief, "_rungs", {})
    pool, depth = RawResource(room(1000)), []

    def rung(context, nbytes):
        depth.append(1)
        with pytest.raises(OutOfMemoryError):
            pool.allocate(1000)
        return False

    relief.add(10, rung)
    pool.allocate(500)
    with pytest.raises(OutOfMemoryError):
        pool.allocate(600)
    assert len(depth) == 1


@pytest.mark.parametrize("nbytes", [1 << 40, 1 << 62])
def test_impossible_request_fails_immediately(monkeypatch, nbytes):
    """A request larger than the device fails without any relief step."""
    monkeypatch.setattr(relief, "_rungs", {10: [lambda context: pytest.fail("asked")]})
    with pytest.raises(OutOfMemoryError, match=f"{nbytes:,} bytes requested"):
        RawResource(room(1000)).allocate(nbytes)


def test_arrays_in_a_cycle_are_collected():
    """Python's garbage collector runs before a request is refused, so arrays in a cycle are freed."""
    resource = RawResource(room(3 * MIB))
    with storage.using(resource):
        gc.disable()
        try:
            array = mx.nd.empty((2 * MIB,), ctx=CTX, dtype="uint8")
            cycle = [array]
            cycle.append(cycle)
            del array, cycle
            fits = mx.nd.empty((2 * MIB,), ctx=CTX, dtype="uint8")
        finally:
            gc.enable()
        assert resource.statistics().failures == 0
        del fits
        assert remaining_bytes(resource) == 0


def test_cache_of_another_host_pool_is_released():
    """A request on cpu(61) releases the cache of the pool of cpu(62), because both use host memory."""
    other_pool = AutoGrowth(Room(context=device.cpu(62)))
    place = room(1000)
    with storage.using(other_pool):
        other_pool.free(other_pool.allocate(5000))
        place.allocate = lambda nbytes, inner=place.allocate: (
            inner(nbytes) if other_pool.statistics().reserved_bytes == 0 else Room(0).allocate(1)
        )
        RawResource(place).allocate(10)
    assert other_pool.statistics().reserved_bytes == 0


def test_pending_free_is_waited_for():
    """A request waits for the running operation of a dead array and then gets its memory."""
    resource = RawResource(room(3 * MIB))
    with storage.using(resource):
        a = mx.nd.zeros((2 * MIB,), ctx=CTX, dtype="uint8")
        a.wait_to_read()
        goes = threading.Event()
        engine.get().push(lambda: goes.wait(60), (a.var,), (), CTX, name="slow reader")
        del a
        threading.Timer(0.3, goes.set).start()
        b = mx.nd.empty((2 * MIB,), ctx=CTX, dtype="uint8")
        assert goes.is_set()
        del b
        assert remaining_bytes(resource) == 0


def test_operation_does_not_wait_for_itself():
    """An allocation inside an operation does not wait for other operations, which may need its worker."""
    resource = RawResource(room(3 * MIB))
    with storage.using(resource):
        a = mx.nd.zeros((2 * MIB,), ctx=CTX, dtype="uint8")
        a.wait_to_read()
        held, seen = [a], []

        def greedy():
            held.clear()
            try:
                resource.allocate(2 * MIB)
            except OutOfMemoryError as error:
                seen.append(error)

        engine.get().push(greedy, (a.var,), (), CTX, name="greedy")
        del a
        mx.nd.waitall()
        assert len(seen) == 1
        assert remaining_bytes(resource) == 0


def test_wait_for_endless_operation_is_limited(monkeypatch):
    """A request waits for pending operations at most PATIENCE_S, which is ten seconds, before it fails."""
    assert release.PATIENCE_S == 10
    for place in (joint_allocation, release):
        monkeypatch.setattr(place, "PATIENCE_S", 0.2)
    resource = RawResource(room(3 * MIB))
    with storage.using(resource):
        a = mx.nd.zeros((2 * MIB,), ctx=CTX, dtype="uint8")
        a.wait_to_read()
        goes = threading.Event()
        engine.get().push(lambda: goes.wait(60), (a.var,), (), CTX, name="slow reader")
        with pytest.raises(OutOfMemoryError):
            mx.nd.empty((2 * MIB,), ctx=CTX, dtype="uint8")
        assert not goes.is_set()
        goes.set()
        del a
        assert remaining_bytes(resource) == 0


def test_limit_uses_the_relief_ladder():
    """A LimitResource uses the relief steps, too: dead arrays make room below its limit."""
    resource = LimitResource(NaivePool(room(1 << 30)), 3 * MIB)
    with storage.using(resource):
        mx.nd.zeros((2 * MIB,), ctx=CTX, dtype="uint8").wait_to_read()
        b = mx.nd.zeros((2 * MIB,), ctx=CTX, dtype="uint8")
        b.wait_to_read()
        assert resource.statistics().failures == 0
        del b
        assert remaining_bytes(resource) == 0


# -- the report -------------------------------------------------------------------------------------------------------


def allocate_zeros(n):
    """Allocate an array of ``n`` zeros in a user function."""
    return mx.nd.zeros((n,), ctx=CTX)


def line_of(part):
    """Return the number of the first line of this file that starts with ``part``."""
    lines = [n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip().startswith(part)]
    return lines[0]


def test_report_names_operators_functions_and_lines():
    """The error sums the holders by function and line; a network's memory has the line of its bind."""
    resource = NaivePool(room(1 << 22))
    with storage.using(resource):
        many = [allocate_zeros(10_000) for _ in range(3)]
        twice = many[0] + many[1]
        net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4096, name="fc")
        executor = net.simple_bind(CTX, grad_req="null", data=(20, 10))
        with pytest.raises(OutOfMemoryError) as caught:
            allocate_zeros(1 << 20).wait_to_read()
        text = str(caught.value)
        assert f"zeros at {__file__}:{allocate_zeros.__code__.co_firstlineno + 2}: 120,000 in 3" in text
        for name, part in (("broadcast_add", "twice ="), ("planned", "executor ="), ("simple_bind", "executor =")):
            assert f"{name} at {__file__}:{line_of(part)}: " in text, text
        assert "unnamed" not in text
        del many, twice, executor, net, caught
        assert remaining_bytes(resource) == 0


def test_report_lists_settings_and_advice(monkeypatch):
    """The error lists all storage variables that are set, and advises first to raise the limiting one."""
    monkeypatch.setenv("FLAGS_gpu_memory_limit_mb", "16")
    monkeypatch.setenv("MXNET_GPU_MEM_POOL_TYPE", "Round")
    pool = RawResource(Room(100, device.sim(3)))
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(101)
    text = str(caught.value)
    assert "settings: MXNET_GPU_MEM_POOL_TYPE=Round, FLAGS_gpu_memory_limit_mb=16" in text
    assert "to fit: raise FLAGS_gpu_memory_limit_mb, use a smaller batch" in text


def test_report_measures_fragmentation():
    """The error gives the free bytes, the largest free block and the scattered share of the free bytes."""
    pool = AutoGrowth(room(8192), chunk=8192)
    held = [pool.allocate(1024) for _ in range(8)]
    for allocation in held[::2]:
        pool.free(allocation)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(2048)
    text = str(caught.value)
    assert "8,192 bytes, 4,096 of them cached; largest free cached block: 1,024 bytes, 75% of them scattered" in text
    assert "the free bytes would do but lie apart" in text


def test_report_lists_ten_origins():
    """The error lists the ten largest holders and the number of the rest."""
    pool = RawResource(room(1000))
    for k in range(13):
        pool.allocate(10 + k, name=f"array {k}")
    with pytest.raises(OutOfMemoryError, match="array 3: 13; 3 more") as caught:
        pool.allocate(900)
    assert "array 2:" not in str(caught.value)


# -- afterwards -------------------------------------------------------------------------------------------------------


class Failing(Room):
    """A device that refuses all allocations after the first ``n``, until ``left`` is raised."""

    def __init__(self, n):
        super().__init__(context=CTX)
        self.left = n

    def allocate(self, nbytes):
        self.left -= 1
        if self.left < 0:
            raise OutOfMemoryError("refused")
        return super().allocate(nbytes)


def training_step():
    """Run one training step of a small network with Module; return the weights."""
    rng = np.random.RandomState(0)
    batches = mx.io.NDArrayIter(rng.rand(8, 5).astype("float32"), rng.randint(0, 3, 8).astype("float32"), 8)
    net = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="one"), act_type="tanh")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="two"), name="softmax")
    module = mx.mod.Module(net, context=CTX)
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params(mx.init.One())
    module.init_optimizer(optimizer_params={"learning_rate": 0.5})
    module.forward_backward(next(batches))
    module.update()
    weights, _ = module.get_params()
    return {name: value.asnumpy() for name, value in weights.items()}


POOLS = {
    "raw": RawResource,
    "naive": NaivePool,
    "auto growth": AutoGrowth,
    "best fit": lambda place: NaiveBestFit(place, first=64),
}


@pytest.mark.parametrize("kind", POOLS)
def test_nth_allocation_fails_in_a_training_step(kind):
    """If the nth allocation of a training step fails, no memory leaks, and the next step gives the right weights."""
    expected, n, failures = None, 0, 0
    while True:
        place = Failing(n)
        resource = StatisticsResource(POOLS[kind](place))
        with storage.using(resource):
            failed = False
            try:
                training_step()
                mx.nd.waitall()
            except OutOfMemoryError:
                failed = True
                failures += 1
            for _ in range(3):
                try:
                    mx.nd.waitall()
                    break
                except MXNetError:
                    continue
            assert remaining_bytes(resource) == 0, n
            place.left = 1 << 60
            weights = training_step()
            expected = expected or weights
            for name, value in weights.items():
                np.testing.assert_array_equal(value, expected[name])
            assert remaining_bytes(resource) == 0, n
            resource.empty_cache()
            assert place.taken == [], n
        if not failed:
            break
        n += 1 if n < 6 else 4
    assert failures > 2  # small inputs, their gradients, memory of the plan
