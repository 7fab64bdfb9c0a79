"""Arrays that leave and return beside the computation: virtual time on a simulated device, queues, bits, failures."""

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
from weftplan.storage.homes import traffic

SIZE = 1 << 16
"""Bytes of an array in these tests."""
COPY, KERNEL = 0.8e-3, 1e-3
"""Virtual seconds of a copy, of a kernel."""


def virtual_seconds(number, homes, room):
    """Of one round over 16 arrays, each changed once, with room for some; counts of copies; the values at the end."""
    ctx = mx.sim(number)
    place = device.get(ctx)
    place.configure(cost=CostModel(launch=KERNEL, latency=0, bandwidth=SIZE / COPY))
    with spilling.using(homes), storage.using(LimitResource(NaivePool(place), room * SIZE)):
        arrays = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(16)]
        for array in arrays:  # where the model is made
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


def test_both_directions_run_beside_the_computation():
    """Sixteen arrays with room for eight: a round writes sixteen back and brings sixteen back, and takes little more
    than one direction of that, since the other and all kernels hide behind it. Threads decide how much: the best of
    three rounds counts, and each has less than three quarters of what its copies take one after the other."""
    plain, copies, values = virtual_seconds(130, "", 64)
    assert copies == (0, 0)
    rounds = [virtual_seconds(number, "host", 8) for number in (131, 138, 139)]
    for spilled, copies, same in rounds:
        assert same == values == [value + 2 for value in range(16)]
        assert sum(copies) >= 2 * 15  # here and there an array is back when it is told to go
        assert spilled < 0.75 * sum(copies) * COPY
    one_way = 16 * COPY
    assert min(spilled for spilled, _, _ in rounds) < max(plain, one_way) + 5 * COPY


def test_copies_are_operations_on_the_copy_queue():
    """Write-backs and bring-backs are in the trace, on the device's queue of copies, each behind what it waits for."""
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
    """A program of operations on two to three arrays each, in a third of its memory, gives NumPy's results."""
    ctx = mx.sim(133)
    device.get(ctx).configure(order=order, seed=5)
    rng = np.random.RandomState(3)
    wanted = [rng.rand(SIZE // 4).astype("float32") for _ in range(12)]
    made = engine.create(kind)
    with engine.using(made):
        with spilling.using("host"), storage.using(LimitResource(NaivePool(device.get(ctx)), 5 * SIZE)):
            arrays = [mx.nd.array(value, ctx=ctx) for value in wanted]
            for array in arrays:  # where the model is made
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
    made.stop()


def test_an_array_that_failed_fails_nothing_else():
    """One of the arrays that make room holds an error: those that get the room have values, and it still has its
    error."""
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


def test_arrays_of_another_engine_are_left_alone(folder):
    """Arrays that were made under one engine make room for work on others only where memory runs out: no operation of
    the next engine can wait for theirs."""
    ctx = mx.cpu(9214)
    with spilling.using(f"file:{folder}"), storage.using(LimitResource(NaivePool(device.get(ctx)), 4 * SIZE)):
        first = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(6)]
        mx.nd.waitall()
        assert spill_ahead._models
        with engine.using(engine.create("ThreadedEngine", cpu_workers=2)) as other:
            second = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(6)]
            for k, array in enumerate(second):
                assert first[k].asnumpy()[3] == k  # which is there now, and was used last but for what comes
                array += 1
            assert [float(array.asnumpy()[3]) for array in second] == [1, 2, 3, 4, 5, 6]
            del array, second
            settled()
        other.stop()
        assert [float(array.asnumpy()[3]) for array in first] == [0, 1, 2, 3, 4, 5]
        del first
        settled()


def test_a_destructor_may_use_arrays_while_a_push_settles_who_leaves(folder, monkeypatch):
    """Python may collect garbage at any moment, in the model's lock, too, and a destructor may push work on arrays."""
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


def test_homes_without_room_leave_everything_where_it_is(folder):
    """A write-back that finds no room is no error: what is there goes on working. One operation at a time, since two
    need the room of two more copies while they are brought back."""
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


def test_nothing_is_pushed_while_everything_fits(folder):
    """With homes and room enough there is no model, so no push waits for anything more."""
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
