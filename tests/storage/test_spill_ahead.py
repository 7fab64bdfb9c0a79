"""Spilling and restoring arrays ahead of time: overlap with compute, copy queues, values and failures."""

import threading

import numpy as np
import pytest

import weftplan as mx
from tests.contract.engines import Boom, boom
from tests.support.waiting import settled
from weftplan import device, engine, storage
from weftplan.device.simulated_device import CostModel
from weftplan.ndarray.spill import spill_ahead, spilling
from weftplan.storage import LimitResource, NaivePool
from weftplan.storage.offload import traffic

SIZE = 1 << 16
"""Bytes of an array in this file."""
COPY, KERNEL = 0.8e-3, 1e-3
"""Virtual seconds of a copy and of a kernel."""


def virtual_seconds(number, targets, room):
    """Change each of 16 arrays once with memory for ``room`` arrays, on a simulated device.

    Return the virtual seconds, the numbers of copies out and back, and one value of each array.
    """
    ctx = mx.sim(number)
    place = device.get(ctx)
    place.configure(cost=CostModel(launch=KERNEL, latency=0, bandwidth=SIZE / COPY))
    with spilling.using(targets), storage.using(LimitResource(NaivePool(place), room * SIZE)):
        arrays = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(16)]
        for array in arrays:  # creates the model
            array += 1
        mx.nd.waitall()
        begin, outs, backs = place.clock, traffic.outs, traffic.backs
        for array in arrays:
            array += 1
        mx.nd.waitall()
        spent, copies = place.clock - begin, (traffic.outs - outs, traffic.backs - backs)
        values = [float(array.asnumpy()[7]) for array in arrays]
        del array, arrays
        settled()
    return spent, copies, values


def test_copies_in_both_directions_overlap_with_compute():
    """With memory for eight of sixteen arrays, copies out, copies back and kernels overlap.

    The overlap depends on the timing of threads. Each of three rounds must take less than three quarters of its copies
    in sequence; the best round must take little more than one direction.
    """
    plain, copies, values = virtual_seconds(130, "", 64)
    assert copies == (0, 0)
    rounds = [virtual_seconds(number, "host", 8) for number in (131, 138, 139)]
    for spilled, copies, same in rounds:
        assert same == values == [value + 2 for value in range(16)]
        assert sum(copies) >= 2 * 15  # an array may be restored before it is spilled
        assert spilled < 0.75 * sum(copies) * COPY
    one_way = 16 * COPY
    assert min(spilled for spilled, _, _ in rounds) < max(plain, one_way) + 5 * COPY


def test_copies_run_on_the_copy_queue():
    """Copies in both directions run on the device's copy queue, as the trace shows."""
    seen = []
    current = engine.create("ThreadedEnginePerDevice")

    def note(*record):
        seen.append(record)

    with engine.using(current):
        current.tracer = note
        virtual_seconds(132, "host", 8)
        current.tracer = None
    current.stop()
    queues = {(record[0], record[2]) for record in seen if record[0] in ("write back", "bring back")}
    assert {name for name, _ in queues} == {"write back", "bring back"}
    assert all("copy" in queue for _, queue in queues), queues


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
@pytest.mark.parametrize("order", ["lazy", "random"])
def test_the_same_bits_on_every_engine_and_order(kind, order):
    """On every engine and device order, a random program in less than half of its memory gives NumPy's results."""
    ctx = mx.sim(133)
    device.get(ctx).configure(order=order, seed=5)
    rng = np.random.RandomState(3)
    wanted = [rng.rand(SIZE // 4).astype("float32") for _ in range(12)]
    eng = engine.create(kind)
    with engine.using(eng):
        with spilling.using("host"), storage.using(LimitResource(NaivePool(device.get(ctx)), 5 * SIZE)):
            arrays = [mx.nd.array(value, ctx=ctx) for value in wanted]
            for array in arrays:  # creates the model
                array += 1
            wanted = [value + 1 for value in wanted]
            for _ in range(60):
                i, j, k = rng.choice(12, 3, replace=False)
                if rng.rand() < 0.5:
                    arrays[i] += arrays[j]
                    wanted[i] = wanted[i] + wanted[j]
                else:
                    arrays[k] = (arrays[i] - arrays[j]) * 0.5
                    wanted[k] = (wanted[i] - wanted[j]) * np.float32(0.5)
            for array, value in zip(arrays, wanted, strict=True):
                np.testing.assert_array_equal(array.asnumpy(), value)
            del array, arrays
            settled()
        device.get(ctx).configure(order="lazy")
    eng.stop()


def test_failed_array_affects_no_other():
    """A spilled array with a failure raises it; arrays that get its memory have the right values."""
    ctx = mx.cpu(9210)
    with spilling.using("peer"), storage.using(LimitResource(NaivePool(device.get(ctx)), 4 * SIZE)):
        storage.get(mx.cpu(9211))
        arrays = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(6)]
        for array in arrays:
            array += 1
        mx.nd.waitall()
        engine.get().push(boom, (), [arrays[0].var], ctx)
        for array in arrays[1:]:
            array += 1
        for value, array in enumerate(arrays[1:], 1):
            assert (array.asnumpy() == value + 2).all()
        with pytest.raises(Boom):
            arrays[0].asnumpy()
        del array, arrays
        settled()


def test_arrays_of_another_engine_stay(folder):
    """Arrays of another engine are spilled only when memory runs out, and all arrays keep their values."""
    ctx = mx.cpu(9214)
    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 4 * SIZE)):
        first = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(6)]
        mx.nd.waitall()
        assert spill_ahead._models
        with engine.using(engine.create("ThreadedEngine", cpu_workers=2)) as another:
            second = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(6)]
            for k, array in enumerate(second):
                assert first[k].asnumpy()[3] == k  # restores first[k], which is then used last but for `array`
                array += 1
            assert [float(array.asnumpy()[3]) for array in second] == [1, 2, 3, 4, 5, 6]
            del array, second
            settled()
        another.stop()
        assert [float(array.asnumpy()[3]) for array in first] == [0, 1, 2, 3, 4, 5]
        del first
        settled()


def test_destructor_may_use_arrays_during_eviction(folder, monkeypatch):
    """A destructor that runs during the choice of arrays to spill may use arrays; no thread hangs."""
    ctx = mx.cpu(9215)
    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 4 * SIZE)):
        arrays = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(6)]
        mx.nd.waitall()
        collect = [lambda: arrays[0].__iadd__(10)]
        victims = spill_ahead._victims

        def collected(*args):
            if collect:
                collect.pop()()
            return victims(*args)

        monkeypatch.setattr(spill_ahead, "_victims", collected)
        pushed = threading.Thread(target=lambda: [array.__iadd__(1) for array in arrays], daemon=True)
        pushed.start()
        pushed.join(60)
        assert not pushed.is_alive()
        assert not collect
        assert [float(array.asnumpy()[3]) for array in arrays] == [11, 2, 3, 4, 5, 6]
        arrays.clear()
        settled()


def test_full_homes_leave_arrays_in_place(folder):
    """If the offload target is full, arrays stay in memory, and operations succeed.

    The naive engine runs one operation at a time, because two would need memory for two more copies.
    """
    ctx = mx.cpu(9212)
    with (
        engine.using(engine.create("NaiveEngine")),
        spilling.using(f"file:{folder}:{4 * SIZE}B"),
        storage.using(LimitResource(NaivePool(device.get(ctx)), 4 * SIZE)),
    ):
        arrays = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(7)]
        for _ in range(3):
            for array in arrays:
                array += 1
        for value, array in enumerate(arrays):
            assert (array.asnumpy() == value + 3).all()
        del array, arrays
        settled()


def test_no_copies_while_everything_fits(folder):
    """While all arrays fit into memory, no copy is pushed and no model of the memory exists."""
    ctx = mx.cpu(9213)
    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 64 * SIZE)):
        arrays = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(6)]
        before = engine.get().statistics().pushed
        for array in arrays:
            array += 1
        mx.nd.waitall()
        assert spill_ahead._models == {}
        assert engine.get().statistics().pushed - before <= len(arrays) + 1
        del array, arrays
        settled()
