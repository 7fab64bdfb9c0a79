"""Repeated pulls that run inline: the cache of one pull must never decide for another."""

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
    """A store with the key "w" of three elements."""
    store = mx.kv.create(request.param)
    store.init("w", mx.nd.array([1, 2, 3]))
    return store


def pulled(kv, outs, key="w"):
    """Twice, so that the second is one that repeats; the values."""
    for _ in range(2):
        kv.pull(key, outs)
        engine.get().wait_for_all()
    return [out.asnumpy().tolist() for out in (outs if isinstance(outs, (list, tuple)) else [outs])]


def arrays(count, shape=(3,), dtype="float32"):
    """Some arrays of zeros, which are there."""
    result = [mx.nd.zeros(shape, ctx=mx.cpu(i), dtype=dtype) for i in range(count)]
    engine.get().wait_for_all()
    return result


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", [list, tuple, lambda outs: outs[0]])
def test_a_pull_that_repeats_gives_the_value_of_now(kv, eng, form, listed):
    """One array, a list or a tuple of them, the key in a list or not; no worker is asked."""
    outs = form(arrays(3))
    assert pulled(kv, outs)[0] == [1, 2, 3]
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
    """More of them, fewer, in another order, of another shape or dtype, or none at all."""
    outs = arrays(3)
    pulled(kv, outs)
    kv.push("w", mx.nd.full((3,), 4.0))
    more = [*outs[::-1], mx.nd.zeros((3,))]
    assert pulled(kv, more) == [[4] * 3] * 4
    assert pulled(kv, outs[:1]) == [[4] * 3]
    for wrong in (arrays(3, (4,)), arrays(3, dtype="float16"), [*outs[:2], mx.nd.zeros((2,))]):
        with pytest.raises(KVStoreError, match=r"key 'w' holds \(3,\) float32"):
            kv.pull("w", wrong)
    for nothing in (None, [], [None] * 3, 3):
        with pytest.raises(KVStoreError):
            kv.pull("w", nothing)


def test_a_list_that_changes_meanwhile(kv):
    """The list is the user's: its current arrays are filled."""
    outs = arrays(2)
    pulled(kv, outs)
    old, outs[1] = outs[1], mx.nd.zeros((3,))
    kv.push("w", mx.nd.full((3,), 9.0))
    kv.pull("w", outs)
    assert [array.asnumpy().tolist() for array in (outs[0], outs[1], old)] == [[9] * 3, [9] * 3, [1, 2, 3]]


def test_only_a_key_is_a_key(eng):
    """True is no key where 1 is one, and a list of keys is none either."""
    kv = mx.kv.create("local")
    kv.init(1, mx.nd.ones((3,)))
    out = mx.nd.zeros((3,))
    pulled(kv, out, 1)
    with pytest.raises(KVStoreError, match="a key must be an int or a str"):
        kv.pull(True, out)
    with pytest.raises(KVStoreError, match="Mixed key types"):
        kv.pull("1", out)
    assert pulled(kv, [out], [1]) == [[1, 1, 1]]
    for key, outs in (([1, 1], [out]), ([1], [out, out]), ([1], []), ([], [out]), ([[1]], [out]), (["1"], [out])):
        with pytest.raises(KVStoreError):
            kv.pull(key, outs)


def test_a_store_keeps_no_array_of_its_user(kv):
    """Neither the arrays nor their memory; another array in the place of a dead one is another array."""
    outs = arrays(2)
    pulled(kv, outs)
    gone = [weakref.ref(out) for out in outs]
    del outs
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert pulled(kv, arrays(2)) == [[1, 2, 3]] * 2


def test_a_pull_that_repeats_waits_its_turn(kv, eng):
    """The pull runs after a pending write of an array, and before a later change of it."""
    outs, gate = arrays(2), threading.Event()
    pulled(kv, outs)
    eng.wait_for_all()
    eng.push(gate.wait, (), (outs[1].var,))
    outs[1] += 1
    kv.pull("w", outs)
    outs[1] += 1
    assert eng.statistics().pending
    gate.set()
    assert [out.asnumpy().tolist() for out in outs] == [[1, 2, 3], [2, 3, 4]]


def test_failures_are_kept_as_ever(kv, eng):
    """A value that has failed fails what is pulled, in a pull that repeats, too; the next push heals it."""
    outs, bad = arrays(2), mx.nd.ones((3,))
    pulled(kv, outs)
    eng.push(lambda: 1 / 0, (), (bad.var,))
    kv.push("w", bad)
    kv.pull("w", outs)
    with pytest.raises(ZeroDivisionError):
        outs[0].wait_to_read()
    kv.push("w", mx.nd.ones((3,)))
    assert pulled(kv, outs) == [[1, 1, 1]] * 2


def test_arrays_that_may_wait_elsewhere_by_now(kv):
    """Cached calls do not decide how memory is found now."""
    outs = arrays(2)
    pulled(kv, outs)
    with spilling.using("true"):
        kv.push("w", mx.nd.full((3,), 2.0))
        assert pulled(kv, outs) == [[2, 2, 2]] * 2
    assert pulled(kv, outs) == [[2, 2, 2]] * 2


def test_another_engine_by_now(kv):
    """Its arrays are strangers to the vars that were settled: nothing is copied past the engine's order."""
    outs = arrays(1)
    pulled(kv, outs)
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
    """A pull that repeats reads what is stored now."""
    outs = arrays(2)
    pulled(kv, outs)
    kv.replace("w", mx.nd.array([7, 8, 9]))
    kv.pull("w", outs)
    assert outs[0].asnumpy().tolist() == [7, 8, 9]


def test_several_threads_pull_one_key(kv):
    """Threads pull into arrays of their own while another thread pushes: every pull finds one value whole."""
    stop, wrong = threading.Event(), []

    def pull():
        outs = arrays(2, (500,))
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
    assert np.array(pulled(kv, arrays(1, (500,)), "v")).max() == 59


@pytest.mark.parametrize("size", [3, 300_000])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_call_that_repeats_has_a_cached_layout(kind, optimizer, size):
    """Small and large, with an optimizer and without: few Python calls, and the values of calls with new arrays."""
    results = []
    with engine.using(own := engine.create("ThreadedEnginePerDevice")):
        for repeats in (True, False):
            kv = mx.kv.create(kind)
            kv.init("w", mx.nd.ones((size,)))
            if optimizer:
                kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1))
            values, outs = arrays(2, (size,)), arrays(2, (size,))
            for step in range(4):
                if not repeats:
                    values, outs = arrays(2, (size,)), arrays(2, (size,))
                for value in values:
                    value[:] = step + 1
                own.wait_for_all()
                calls = [0]
                sys.setprofile(
                    lambda frame, event, given, calls=calls: calls.__setitem__(0, calls[0] + (event == "call"))
                )
                kv.push("w", values)
                kv.pull("w", outs)
                sys.setprofile(None)
            own.wait_for_all()
            results.append([out.asnumpy().tobytes() for out in outs])
            assert not repeats or calls[0] <= (160 if optimizer else 85), calls
    own.stop()
    assert results[0] == results[1]


def test_a_repeated_call_with_a_failed_array(eng):
    """A large pull that repeats while one of its arrays has failed fills the others, and that one as well."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.ones((300_000,)))
    outs = arrays(2, (300_000,))
    pulled(kv, outs)

    def fail() -> None:
        raise ValueError("no bytes")

    eng.push(fail, (), (outs[0].var,))
    with pytest.raises(ValueError, match="no bytes"):
        eng.wait_for_var(outs[0].var)
    kv.push("w", mx.nd.full((300_000,), 3.0))
    kv.pull("w", outs)
    assert [out.asnumpy()[-1] for out in outs] == [3.0, 3.0]
