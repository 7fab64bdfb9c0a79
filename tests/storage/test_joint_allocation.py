"""Operations that do not fit into memory at the same time: each gets the memory of all its arrays or none.

The memory has room for two arrays. Operands that call a function when they are looked up force the interleaving.
"""

import threading
import weakref

import numpy as np
import pytest

import weftplan as mx
from tests.support.waiting import settled, until
from weftplan import device, engine, storage
from weftplan.errors import OutOfMemoryError
from weftplan.ndarray import pushing
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.spill import spill_ahead, spilling
from weftplan.storage import LimitResource, NaivePool, relief

SIZE = 1 << 16
"""Bytes of an array in this file."""


class Seen:
    """An operand without memory whose lookup calls a function."""

    ready = None

    def __init__(self, function):
        self.raw = function


def make_arrays(ctx, count):
    """Return ``count`` arrays filled with their numbers, some of them spilled."""
    arrays = [mx.nd.array(np.full(SIZE // 4, value, "float32"), ctx=ctx) for value in range(count)]
    mx.nd.waitall()
    spill_ahead.forget()
    return arrays


def push(kernel, operands, reads=()):
    """Push an operation that writes all arrays among its operands."""
    arrays = [one for one in operands if isinstance(one, mx.nd.NDArray)]
    pushing.push_kernel(kernel, operands, reads, [array.var for array in arrays], arrays[0].context)


@pytest.fixture(params=["ThreadedEngine", "ThreadedEnginePerDevice"])
def room(request, folder):
    """The context and pool of memory for two arrays; an engine with three workers and a spill file are current."""
    ctx = mx.cpu(9230)
    with (
        engine.using(engine.create(request.param, cpu_workers=3)) as current,
        spilling.using(f"file:{folder}:32MB"),
        storage.using(LimitResource(NaivePool(device.get(ctx)), 2 * SIZE)) as pool,
    ):
        yield ctx, pool
        settled()
        assert pool.statistics().requested_bytes == 0
        assert not joint_allocation._looks
        current.stop()


def test_two_operations_with_half_of_their_memory(room):
    """Memory for two arrays suffices for two operations on two arrays each, even if both begin with one array.

    If each kept its first array, neither could ever get its second.
    """
    ctx, _ = room
    arrays = make_arrays(ctx, 4)
    start, begun = threading.Event(), []

    def both():
        """Wait until the other operation has begun, unless this thread has the lock that prevents it."""
        begun.append(None)
        if not joint_allocation._beginning.owned():
            until(lambda: len(begun) == 2)

    def add(first, _, second):
        first += second

    order = engine.get().new_order("start")
    engine.get().push(start.wait, (), (order,), mx.cpu(0))
    push(add, [arrays[0], Seen(both), arrays[1]], (order,))
    push(add, [arrays[2], Seen(both), arrays[3]], (order,))
    start.set()
    assert [float(array.asnumpy()[5]) for array in arrays] == [1, 1, 5, 3]
    arrays.clear()


def test_impossible_operation_takes_no_memory(room):
    """An operation of three arrays fails with OutOfMemoryError and keeps no memory; other arrays can be written."""
    ctx, pool = room
    arrays = make_arrays(ctx, 4)
    results = [mx.nd.empty((SIZE // 4,), ctx=ctx) for _ in range(2)]
    for result in results:
        result.chunk.drop()
    for number, result in enumerate(results):
        push(lambda *_: None, [result, arrays[2 * number], arrays[2 * number + 1]])
    for result in results:
        with pytest.raises(OutOfMemoryError):
            result.wait_to_read()
        assert not result.chunk.allocated
        assert not result.chunk.is_offloaded
    for value, array in enumerate(arrays):
        with pytest.raises(OutOfMemoryError):  # the operation would have written it
            array.wait_to_read()
        array[:] = value
    assert [float(array.asnumpy()[5]) for array in arrays] == [0, 1, 2, 3]
    assert pool.statistics().requested_bytes <= 2 * SIZE
    del array, result
    arrays.clear()
    results.clear()


@pytest.mark.parametrize("outside", [False, True])
def test_starved_operation_waits_for_a_reader(room, monkeypatch, outside):
    """An operation or a reading thread without memory waits while another thread briefly reads an array."""
    ctx, _ = room
    arrays = make_arrays(ctx, 4)
    looks, waits = threading.Event(), threading.Event()
    await_completion = joint_allocation._await_completion

    def noted(begun, end):
        if begun:
            waits.set()
        await_completion(begun, end)

    monkeypatch.setattr(joint_allocation, "_await_completion", noted)

    def read():
        with joint_allocation.Look():
            views = [arrays[0].raw(), arrays[1].raw()]
            looks.set()
            waits.wait(60)
            views.clear()

    thread = threading.Thread(target=read)
    thread.start()
    looks.wait(60)
    if not outside:
        arrays[2] += 1
    assert arrays[2].asnumpy()[5] == 2 + (not outside)
    thread.join()
    assert waits.is_set()
    arrays.clear()


def test_large_operation_is_not_starved(room, monkeypatch):
    """While an operation waits for memory, reading threads cannot starve it with frequent short views."""
    ctx, _ = room
    arrays = make_arrays(ctx, 3)
    over, looks = threading.Event(), []
    chances = joint_allocation.chances
    monkeypatch.setattr(joint_allocation, "chances", lambda ctx: () if engine.get().in_operation else chances(ctx))

    def read():
        while not over.is_set():
            assert arrays[2].asnumpy()[5] == 2
            looks.append(None)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(looks) > 3)
    for _ in range(5):
        arrays[0] += arrays[1]
        arrays[0].wait_to_read()
    over.set()
    for thread in threads:
        thread.join()
    assert arrays[0].asnumpy()[5] == 5
    arrays.clear()


def test_prefetch_does_not_wait_for_memory(room):
    """A prefetch without memory returns without an error; a later read restores the array."""
    ctx, _ = room
    arrays = make_arrays(ctx, 3)
    away = next(array for array in arrays if array.chunk.is_offloaded)
    views = [array.raw() for array in arrays if array is not away]
    spill_ahead._bring_back(weakref.ref(away.chunk))
    assert away.chunk.is_offloaded
    assert not relief.starved_threads()
    views.clear()
    assert [float(array.asnumpy()[5]) for array in arrays] == [0, 1, 2]
    del away
    arrays.clear()


def test_interrupt_frees_taken_memory(room):
    """After Ctrl-C during the lookup of arrays, no memory stays reserved, and later operations succeed."""
    ctx, _ = room
    arrays = make_arrays(ctx, 2)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        joint_allocation.run(lambda: [arrays[0].raw(), stop()], lambda _: None)
    assert joint_allocation._attempts.attempt is None
    assert not joint_allocation._looks
    arrays[0] += arrays[1]
    assert arrays[0].asnumpy()[5] == 1
    arrays.clear()
