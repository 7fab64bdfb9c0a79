"""Repeated pulls, which reuse a cached layout and run inline: they notice other arrays, keys, values and engines."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import KVStoreError
from weftplan.ndarray.spill import spilling


@pytest.fixture(params=["local", "device"])
def kv(request, eng):
    """A store ``local`` or ``device`` with key ``w``, the array [1, 2, 3]."""
    store = mx.kv.create(request.param)
    store.init("w", mx.nd.array([1, 2, 3]))
    return store


def pull_twice(kv, outs, key="w"):
    """Pull ``key`` into ``outs`` twice, so that the second pull uses the cache, and return the values as lists."""
    for _ in range(2):
        kv.pull(key, outs)
        engine.get().wait_for_all()
    return [out.asnumpy().tolist() for out in (outs if isinstance(outs, (list, tuple)) else [outs])]


def make_zeros(count, shape=(3,), dtype="float32"):
    """Return ``count`` arrays of zeros, on ``cpu(0)`` to ``cpu(count - 1)``, after they have been written."""
    result = [mx.nd.zeros(shape, ctx=mx.cpu(i), dtype=dtype) for i in range(count)]
    engine.get().wait_for_all()
    return result


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", [list, tuple, lambda outs: outs[0]])
def test_repeated_pull_returns_current_value(kv, eng, form, listed):
    """A repeated pull into an array, a list or a tuple returns the current value, and runs on no worker thread."""
    outs = form(make_zeros(3))
    assert pull_twice(kv, outs)[0] == [1, 2, 3]
    gradients = [mx.nd.full((3,), value) for value in (5.0, 7.0)]
    eng.wait_for_all()
    workers = sum(queue.completed for queue in eng.statistics().queues)
    for value, gradient in zip((5.0, 7.0), gradients, strict=True):
        kv.push("w", gradient)
        kv.pull(*((["w"], [outs]) if listed else ("w", outs)))
        assert eng.statistics().pending == 0
        assert sum(queue.completed for queue in eng.statistics().queues) == workers
        assert (outs if isinstance(outs, mx.nd.NDArray) else outs[-1]).asnumpy().tolist() == [value] * 3


def test_other_arrays_are_checked_as_ever(kv):
    """After cached pulls, a pull fills another number or order of arrays.

    Wrong shapes, wrong dtypes and missing arrays raise errors.
    """
    outs = make_zeros(3)
    pull_twice(kv, outs)
    kv.push("w", mx.nd.full((3,), 4.0))
    more = [*outs[::-1], mx.nd.zeros((3,))]
    assert pull_twice(kv, more) == [[4] * 3] * 4
    assert pull_twice(kv, outs[:1]) == [[4] * 3]
    for wrong in (make_zeros(3, (4,)), make_zeros(3, dtype="float16"), [*outs[:2], mx.nd.zeros((2,))]):
        with pytest.raises(KVStoreError, match=r"key 'w' holds \(3,\) float32"):
            kv.pull("w", wrong)
    for nothing in (None, [], [None] * 3, 3):
        with pytest.raises(KVStoreError):
            kv.pull("w", nothing)


def test_a_list_that_changes_meanwhile(kv):
    """If the caller replaces an array in its list, the next pull fills the new array and not the old one."""
    outs = make_zeros(2)
    pull_twice(kv, outs)
    old, outs[1] = outs[1], mx.nd.zeros((3,))
    kv.push("w", mx.nd.full((3,), 9.0))
    kv.pull("w", outs)
    assert [array.asnumpy().tolist() for array in (outs[0], outs[1], old)] == [[9] * 3, [9] * 3, [1, 2, 3]]


def test_only_a_key_is_a_key(eng):
    """After cached pulls of key 1, pulls of True, ``"1"`` and malformed lists of keys raise a KVStoreError."""
    kv = mx.kv.create("local")
    kv.init(1, mx.nd.ones((3,)))
    out = mx.nd.zeros((3,))
    pull_twice(kv, out, 1)
    with pytest.raises(KVStoreError, match="a key must be an int or a str"):
        kv.pull(True, out)
    with pytest.raises(KVStoreError, match="Mixed key types"):
        kv.pull("1", out)
    assert pull_twice(kv, [out], [1]) == [[1, 1, 1]]
    for key, outs in (([1, 1], [out]), ([1], [out, out]), ([1], []), ([], [out]), ([[1]], [out]), (["1"], [out])):
        with pytest.raises(KVStoreError):
            kv.pull(key, outs)


def test_a_store_keeps_no_array_of_its_user(kv):
    """The cache does not keep pulled arrays alive, and pulls fill new arrays after the old arrays are freed."""
    outs = make_zeros(2)
    pull_twice(kv, outs)
    gone = [weakref.ref(out) for out in outs]
    del outs
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert pull_twice(kv, make_zeros(2)) == [[1, 2, 3]] * 2


def test_repeated_pull_keeps_its_order(kv, eng):
    """A repeated pull runs after an earlier pending write to its output array, and before a later write."""
    outs, gate = make_zeros(2), threading.Event()
    pull_twice(kv, outs)
    eng.wait_for_all()
    eng.push(gate.wait, (), (outs[1].var,))
    outs[1] += 1
    kv.pull("w", outs)
    outs[1] += 1
    assert eng.statistics().pending
    gate.set()
    assert [out.asnumpy().tolist() for out in outs] == [[1, 2, 3], [2, 3, 4]]


def test_repeated_pull_of_failed_value_raises(kv, eng):
    """After a repeated pull of a failed value, reading the output raises its error.

    After a new push, a pull returns the pushed value.
    """
    outs, bad = make_zeros(2), mx.nd.ones((3,))
    pull_twice(kv, outs)
    eng.push(lambda: 1 / 0, (), (bad.var,))
    kv.push("w", bad)
    kv.pull("w", outs)
    with pytest.raises(ZeroDivisionError):
        outs[0].wait_to_read()
    kv.push("w", mx.nd.ones((3,)))
    assert pull_twice(kv, outs) == [[1, 1, 1]] * 2


def test_cached_pull_with_spilling_turned_on(kv):
    """Cached pulls return the current value after spilling is turned on, and after it is turned off again."""
    outs = make_zeros(2)
    pull_twice(kv, outs)
    with spilling.using("true"):
        kv.push("w", mx.nd.full((3,), 2.0))
        assert pull_twice(kv, outs) == [[2, 2, 2]] * 2
    assert pull_twice(kv, outs) == [[2, 2, 2]] * 2


def test_cached_pull_with_another_engine_raises(kv):
    """With another engine installed, a pull into arrays of the old engine raises an error and pushes nothing."""
    outs = make_zeros(1)
    pull_twice(kv, outs)
    second = engine.create("NaiveEngine")
    try:
        with engine.using(second):
            before = engine.get().statistics().pushed
            with pytest.raises(mx.MXNetError):
                kv.pull("w", outs)
            assert engine.get().statistics().pushed == before
    finally:
        second.stop()


def test_a_value_that_is_replaced(kv):
    """A repeated pull after ``replace`` returns the new value."""
    outs = make_zeros(2)
    pull_twice(kv, outs)
    kv.replace("w", mx.nd.array([7, 8, 9]))
    kv.pull("w", outs)
    assert outs[0].asnumpy().tolist() == [7, 8, 9]


def test_several_threads_pull_one_key(kv):
    """While one thread pushes, pulls of two other threads never return a mixture of two values."""
    stop, wrong = threading.Event(), []

    def pull():
        outs = make_zeros(2, (500,))
        while not stop.is_set():
            kv.pull("v", outs)
            for out in outs:
                values = out.asnumpy()
                if not (values == values[0]).all():
                    wrong.append(values)

    kv.init("v", mx.nd.zeros((500,)))
    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(60):
        kv.push("v", mx.nd.full((500,), value))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert np.array(pull_twice(kv, make_zeros(1, (500,)), "v")).max() == 59


@pytest.mark.parametrize("size", [3, 300_000])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
@pytest.mark.parametrize("kind", ["local", "device"])
def test_repeated_call_uses_cached_layout(kind, optimizer, size):
    """A repeated push and pull takes few Python calls, and gives the same bits as calls with new arrays."""
    results = []
    with engine.using(own := engine.create("ThreadedEnginePerDevice")):
        for repeats in (True, False):
            kv = mx.kv.create(kind)
            kv.init("w", mx.nd.ones((size,)))
            if optimizer:
                kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1))
            values, outs = make_zeros(2, (size,)), make_zeros(2, (size,))
            fewest = 10**6  # of all steps: the garbage of other tests may be collected during one of them
            for step in range(4):
                if not repeats:
                    values, outs = make_zeros(2, (size,)), make_zeros(2, (size,))
                for value in values:
                    value[:] = step + 1
                own.wait_for_all()
                calls = [0]
                sys.setprofile(
                    lambda frame, event, value, calls=calls: calls.__setitem__(0, calls[0] + (event == "call"))
                )
                kv.push("w", values)
                kv.pull("w", outs)
                sys.setprofile(None)
                fewest = min(fewest, calls[0])
            own.wait_for_all()
            results.append([out.asnumpy().tobytes() for out in outs])
            assert not repeats or fewest <= {None: 85, "sgd": 190, "adam": 230}[optimizer]
    own.stop()
    assert results[0] == results[1]


def test_a_repeated_call_with_a_failed_array(eng):
    """A repeated large pull fills all its output arrays, also an array that has failed before."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.ones((300_000,)))
    outs = make_zeros(2, (300_000,))
    pull_twice(kv, outs)

    def fail() -> None:
        raise ValueError("no bytes")

    eng.push(fail, (), (outs[0].var,))
    with pytest.raises(ValueError, match="no bytes"):
        eng.wait_for_var(outs[0].var)
    kv.push("w", mx.nd.full((300_000,), 3.0))
    kv.pull("w", outs)
    assert [out.asnumpy()[-1] for out in outs] == [3.0, 3.0]
