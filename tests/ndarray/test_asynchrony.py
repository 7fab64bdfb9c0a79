"""Operations are pushed and run later, as an engine blocked by a gate shows."""

import gc
import threading

import numpy as np
import pytest

from weftplan import engine, nd


def test_operations_return_before_they_run(gate):
    """Arithmetic, indexing, assignment, copies and reshapes of a blocked array return immediately."""
    x = nd.ones((4, 4))
    gate.close(x)
    x += 1
    y = x * 3
    z = y[:, 1] + x.reshape(16)[:4]
    y[0] = x[2]
    copied = x.copy()
    index = nd.array([0, 1])
    gate.close(index)
    taken = x[index]
    assert not z.chunk.allocated
    gate.open()
    np.testing.assert_array_equal(z.asnumpy(), np.full(4, 8))
    np.testing.assert_array_equal(y.asnumpy()[:2], [[2] * 4, [6] * 4])
    np.testing.assert_array_equal(copied.asnumpy(), np.full((4, 4), 2))
    np.testing.assert_array_equal(taken.asnumpy(), np.full((2, 4), 2))


def test_wait_to_write_waits_for_readers(gate):
    """While a reader is blocked, wait_to_read returns but wait_to_write does not."""
    x, y = nd.ones(3), nd.zeros(3)
    x.wait_to_read()
    gate.close(y)
    x.copyto(y)  # reads x, blocked by the gate on y
    x.wait_to_read()
    waited = threading.Event()
    thread = threading.Thread(target=lambda: (x.wait_to_write(), waited.set()))
    thread.start()
    assert not waited.wait(0.05)
    gate.open()
    assert waited.wait(60)
    thread.join()
    np.testing.assert_array_equal(y.asnumpy(), np.ones(3))


def test_an_array_may_die_before_its_work_runs(gate):
    """Temporaries of an expression are dropped immediately, but keep their memory until the work has run."""
    x = nd.ones(1000)
    gate.close(x)
    y = ((x + 1) * 2 - 1) / 3
    gc.collect()
    others = [nd.full((1000,), 9) for _ in range(8)]  # would take the memory if it had been freed
    gate.open()
    np.testing.assert_array_equal(y.asnumpy(), np.ones(1000))
    assert len(others) == 8


@pytest.mark.usefixtures("each_engine")
def test_collecting_arrays_inside_an_operation_is_harmless():
    """Arrays can be finalized on a worker, inside an operation, without a deadlock."""
    trash = []
    for _ in range(20):
        loop = [nd.ones(10)]
        loop.append(loop)
        trash.append(loop)
    target = nd.zeros(1)
    del loop

    def collect():
        trash.clear()
        gc.collect()

    engine.get().push(collect, (), (target.var,), target.context, name="collect")
    target += 1
    assert target.asscalar() == 1
    nd.waitall()


@pytest.mark.parametrize("way", ["setitem", "out", "copyto", "in place"])
def test_a_write_of_a_part_heals_no_array(way):
    """After a failure of the whole array, a write of some elements leaves the others without values: reads raise."""
    array = nd.ones((4,))

    def fail():
        raise ValueError("no values")

    engine.get().push(fail, mutable_vars=[array.var])
    with pytest.raises(ValueError, match="no values"):
        array.wait_to_read()
    part = array[1:3]
    if way == "setitem":
        part[:] = 5
    elif way == "out":
        nd.broadcast_add(nd.ones((2,)), nd.ones((2,)), out=part)
    elif way == "copyto":
        nd.ones((2,)).copyto(part)
    else:
        part += 1
    with pytest.raises(ValueError, match="no values"):
        array.asnumpy()
    array[:] = 3
    assert array.tolist() == [3] * 4


def test_failing_index_is_reported_at_the_wait():
    """An index that is out of range at run time raises at the wait for the result; the source stays usable."""
    eng = engine.create("ThreadedEngine")
    with engine.using(eng):
        x = nd.array([1, 2, 3])
        bad = x[nd.array([7])]
        with pytest.raises(IndexError):
            bad.asnumpy()
        np.testing.assert_array_equal(x.asnumpy(), [1, 2, 3])
        np.testing.assert_array_equal((x + 1).asnumpy(), [2, 3, 4])
    eng.stop()


def test_random_programs_equal_numpy_on_every_engine(each_engine):
    """300 random in-place statements over 6 arrays and their views give NumPy's values."""
    generator = np.random.default_rng(7)
    arrays = [generator.standard_normal((4, 5)).astype(np.float32) for _ in range(6)]
    ours = [nd.array(a) for a in arrays]
    for _ in range(300):
        i, j, k = generator.integers(0, 6, 3)
        row = int(generator.integers(0, 4))
        kind = generator.integers(0, 5)
        if kind == 0:
            ours[i] += ours[j]
            arrays[i] += arrays[j]
        elif kind == 1:
            ours[i][:] = ours[j] * 0.5 - ours[k]
            arrays[i][:] = arrays[j] * np.float32(0.5) - arrays[k]
        elif kind == 2:
            ours[i][row] = ours[j][3 - row]
            arrays[i][row] = arrays[j][3 - row]
        elif kind == 3:
            ours[i][:, row] = 1.25
            arrays[i][:, row] = 1.25
        else:
            ours[i] = nd.minimum(nd.maximum(ours[j][::-1], -4), 4)
            arrays[i] = np.clip(arrays[j][::-1], -4, 4)
    for mine, theirs in zip(ours, arrays, strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), theirs)
