"""Pushes and pulls: their number of engine operations, and their effect on overlapping and failed arrays."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan.support import core_sharing


def count_operations(eng, call):
    """Return how many operations ``call()`` pushes to the engine."""
    before = eng.statistics().pushed
    call()
    return eng.statistics().pushed - before


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("size", [1, 1 << 16, (1 << 16) + 1, 1 << 20])
def test_operations(eng, kind, size):
    """A push of three arrays is one operation that sums into the stored value; a pull into three arrays is one."""
    kv = mx.kv.create(kind)
    kv.init("w", mx.nd.zeros((size,)))
    gradients = [mx.nd.full((size,), i + 1, ctx=mx.cpu(i)) for i in range(3)]
    outs = [mx.nd.zeros((size,), ctx=mx.cpu(i)) for i in range(3)]
    eng.wait_for_all()
    assert count_operations(eng, lambda: kv.push("w", gradients)) == 1
    assert count_operations(eng, lambda: kv.pull("w", outs)) == 1
    for out in outs:
        np.testing.assert_array_equal(out.asnumpy(), 6)
    assert kv.statistics()["merged_bytes"] == 0


@pytest.mark.parametrize(("size", "helpers"), [((1 << 20) - 1, 0), (1 << 20, 2)])
def test_large_arrays_are_shared_between_threads(eng, monkeypatch, size, helpers):
    """Arrays of at least ``MXNET_KVSTORE_BIGARRAY_BOUND`` elements are summed and copied by several threads.

    ``MXNET_KVSTORE_REDUCTION_NTHREADS=3`` means the worker and two helpers.
    """
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", str(1 << 20))
    monkeypatch.setenv("MXNET_KVSTORE_REDUCTION_NTHREADS", "3")
    asked = []

    class Helper:
        def give(self, run, work):
            asked.append(work)

    monkeypatch.setattr(core_sharing, "_helpers", lambda wanted: [Helper() for _ in range(wanted)])
    monkeypatch.setattr(core_sharing._pool, "free", [])
    kv = mx.kv.create("local")
    kv.init("w", mx.nd.zeros((size,)))
    arrays = [mx.nd.full((size,), i + 1, ctx=mx.cpu(i)) for i in range(2)]
    kv.push("w", arrays)
    eng.wait_for_all()
    assert len(asked) == helpers
    kv.pull("w", arrays)
    assert [array.asnumpy()[-1] for array in arrays] == [3, 3]
    assert len(asked) == 2 * helpers


def test_an_updater_gets_a_sum_of_its_own():
    """An updater receives the sum in an array separate from the stored value."""
    kv, seen = mx.kv.create("device"), []
    kv.init("w", mx.nd.ones((4,)))
    kv.set_updater(lambda key, merged, stored: seen.append((merged.asnumpy().tolist(), stored.asnumpy().tolist())))
    kv.push("w", [mx.nd.full((4,), 2.0), mx.nd.full((4,), 3.0, ctx=mx.cpu(1))])
    assert seen == [([5] * 4, [1] * 4)]


def test_the_same_array_twice_and_parts_of_one():
    """A pull fills an array that is listed twice, and several views of one array."""
    kv = mx.kv.create("local")
    kv.init("w", mx.nd.array([1, 2, 3]))
    whole, second = mx.nd.zeros((3, 3)), mx.nd.zeros((3,))
    kv.pull("w", [whole[0], second, second, whole[2]])
    assert whole.asnumpy().tolist() == [[1, 2, 3], [0, 0, 0], [1, 2, 3]]
    assert second.asnumpy().tolist() == [1, 2, 3]


def test_devices_and_the_host_in_one_pull():
    """One pull fills arrays on the host and on simulated devices, and a push sums them."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.array([1, 2, 3]))
    outs = [mx.nd.zeros((3,), ctx=ctx) for ctx in (mx.cpu(0), mx.sim(0), mx.cpu(1), mx.sim(1))]
    kv.pull("w", outs)
    kv.push("w", outs)
    kv.pull("w", outs)
    assert [out.asnumpy().tolist() for out in outs] == [[4, 8, 12]] * 4


def test_failed_out_fails_alone(eng):
    """If one output array has failed already, a pull fills the others.

    Once the error has been raised, a pull fills the failed array, too.
    """
    kv = mx.kv.create("local")
    kv.init("w", mx.nd.ones((3,)))
    outs = [mx.nd.zeros((3,), ctx=mx.cpu(i)) for i in range(3)]
    eng.push(lambda: 1 / 0, (), (outs[1].var,))
    while outs[1].var.failure is None:
        pass
    kv.pull("w", outs)
    assert outs[0].asnumpy().tolist() == outs[2].asnumpy().tolist() == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        outs[1].wait_to_read()
    kv.pull("w", outs)
    assert outs[1].asnumpy().tolist() == [1, 1, 1]


def test_a_failure_that_comes_later_is_shared(eng):
    """If one output array fails while a pull waits for it, all arrays of the pull raise its error.

    The next pull fills them.
    """
    kv = mx.kv.create("local")
    kv.init("w", mx.nd.ones((3,)))
    outs = [mx.nd.zeros((3,), ctx=mx.cpu(i)) for i in range(2)]
    gate = threading.Event()
    eng.push(lambda: gate.wait(60) and 1 / 0, (), (outs[1].var,))
    kv.pull("w", outs)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        outs[0].wait_to_read()
    kv.pull("w", outs)
    assert [out.asnumpy().tolist() for out in outs] == [[1, 1, 1]] * 2


def test_a_failed_gradient_reaches_the_stored_value(eng):
    """After a push with a failed gradient, pulls of its key raise the gradient's error until the next push."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros((3,)))
    gradients = [mx.nd.ones((3,), ctx=mx.cpu(i)) for i in range(2)]
    bad, out = mx.nd.ones((3,)), mx.nd.zeros((3,))
    eng.push(lambda: 1 / 0, (), (bad.var,))
    kv.push("w", [gradients[0], bad])
    kv.pull("w", out)
    with pytest.raises(ZeroDivisionError):
        out.wait_to_read()
    kv.push("w", gradients)
    kv.pull("w", out)
    assert out.asnumpy().tolist() == [2, 2, 2]


@pytest.mark.parametrize("kind", ["local", "device"])
def test_small_pushes_and_pulls_of_idle_arrays_are_over_when_they_return(eng, kind):
    """Small pushes and pulls of idle arrays run inline: nothing is pending afterwards, and no worker has run."""
    kv = mx.kv.create(kind)
    kv.init("w", mx.nd.zeros((3, 5)))
    gradients = [mx.nd.full((3, 5), i + 1.0, ctx=mx.cpu(i)) for i in range(6)]
    outs = [mx.nd.zeros((3, 5), ctx=mx.cpu(i)) for i in range(6)]
    eng.wait_for_all()
    workers = sum(queue.completed for queue in eng.statistics().queues)
    kv.push("w", gradients)
    kv.pull("w", outs)
    assert eng.statistics().pending == 0
    assert sum(queue.completed for queue in eng.statistics().queues) == workers
    for out in outs:
        np.testing.assert_array_equal(out.asnumpy(), 21)


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_small_sums_have_the_bits_of_pushed_ones(eng, kind, dtype, count):
    """A worker thread, which sums busy arrays, computes the same bits as the caller, which sums idle arrays."""
    rng = np.random.default_rng(count)
    values = [(rng.standard_normal((7, 3)) * 10.0 ** rng.integers(-2, 3, (7, 3))).astype(dtype) for _ in range(count)]
    results = []
    for busy in (False, True):
        kv = mx.kv.create(kind)
        kv.init("w", mx.nd.zeros((7, 3), dtype=dtype))
        arrays = [mx.nd.array(value, ctx=mx.cpu(i), dtype=dtype) for i, value in enumerate(values)]
        out = mx.nd.zeros((7, 3), dtype=dtype)
        eng.wait_for_all()
        gate = threading.Event()
        if busy:
            eng.push(gate.wait, (), (arrays[0].var,))
        kv.push("w", arrays)
        kv.pull("w", out)
        assert bool(eng.statistics().pending) == busy
        gate.set()
        results.append(out.asnumpy().tobytes())
    assert results[0] == results[1]


def test_small_push_keeps_its_order(eng):
    """A small push runs after an earlier pending write of its gradient, and before a later write."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros((4,)))
    gradient, out, gate = mx.nd.ones((4,)), mx.nd.zeros((4,)), threading.Event()
    eng.wait_for_all()
    eng.push(gate.wait, (), (gradient.var,))
    gradient += 1
    kv.push("w", gradient)
    gradient += 1
    kv.pull("w", out)
    gate.set()
    np.testing.assert_array_equal(out.asnumpy(), 2)
    np.testing.assert_array_equal(gradient.asnumpy(), 3)
