"""Small inline calls on idle arrays: in program order, complete after an interrupt, and pushed if arrays are in use."""

import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.ndarray import pushing, small_calls
from weftplan.support.slots import MAKE_ROOM

nd = mx.nd


def program(seed):
    """Run 120 random calls on a few small arrays and a large array that keeps the engine busy; return all bytes."""
    rng = np.random.default_rng(seed)
    arrays = [nd.array(rng.normal(size=(6, 8))) for _ in range(4)]
    large = nd.array(rng.normal(size=(200, 6, 8)))
    for _ in range(120):
        a, b, c = (arrays[i] for i in rng.integers(0, 4, 3))
        begin = int(rng.integers(0, 4))
        match int(rng.integers(0, 12)):
            case 0:
                a += b
            case 1:
                a *= 0.5
            case 2:
                b.copyto(a)
            case 3:
                a[begin : begin + 2] = b[begin : begin + 2]
            case 4:
                a[begin : begin + 2] = a[begin + 1 : begin + 3]
            case 5:
                a[begin] = 1.25
            case 6:
                nd.sgd_update(a, b, lr=0.1, wd=0.01, out=a)
            case 7:
                nd.adam_update(a, b, *(nd.abs(one) for one in (b, c)), lr=0.1, out=a)
            case 8:
                large += 0.25
                a[:] = large[begin]
            case 9:
                nd.exp(-nd.abs(b), out=a)
            case 10:
                a -= nd.zeros((6, 8)) + a[begin] * 0.5
            case 11:
                large[begin] = a
    nd.waitall()
    return [one.asnumpy().tobytes() for one in (*arrays, large)]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_equal_serial_execution(seed):
    """Random programs, whose calls run inline or are pushed, give the bits of serial execution."""
    with engine.using(engine.create("NaiveEngine")):
        wanted = program(seed)
    for kind in ("ThreadedEngine", "ThreadedEnginePerDevice"):
        with engine.using(engine.create(kind)):
            assert program(seed) == wanted


WRITES = {
    "iadd": lambda a, b: a.__iadd__(b),
    "isub a number": lambda a, b: a.__isub__(1.5),
    "copyto": lambda a, b: b.copyto(a),
    "rows": lambda a, b: a.__setitem__(slice(0, 2), 1.0),
    "sgd_update": lambda a, b: nd.sgd_update(a, b, lr=0.1, out=a),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_of_idle_arrays_runs_inline(name, monkeypatch):
    """A write of idle arrays is complete when the call returns, and increments the version."""
    with engine.using(engine.create("ThreadedEngine")):
        a, b = nd.array(np.ones((4, 4))), nd.array(np.ones((4, 4)))
        WRITES[name](a, b)
        nd.waitall()
        version = a.var.version
        monkeypatch.setattr(type(engine.get()), "push", None)
        WRITES[name](a, b)
        monkeypatch.undo()
        assert (a.var.version, a.var.state) == (version + 1, "IDLE")


@pytest.mark.parametrize("name", WRITES)
def test_write_waits_for_earlier_readers(name):
    """A reader pushed before the write sees the old values."""
    with engine.using(engine.create("ThreadedEngine")) as current:
        a, b, seen, opened = nd.array(np.full((4, 4), 7.0)), nd.array(np.ones((4, 4))), [], threading.Event()
        WRITES[name](a, b)
        a[:] = 7
        nd.waitall()
        current.push(lambda: (opened.wait(), seen.append(a.raw().copy())), (a.var,), ())
        WRITES[name](a, b)
        opened.set()
        nd.waitall()
        np.testing.assert_array_equal(seen[0], 7)


def test_interrupted_computation_is_not_repeated():
    """A call repeated after Ctrl-C copies the computed result, because computing it again would add twice."""
    a, b, m = (nd.array(np.full(4, value)) for value in (1.0, 2.0, 3.0))

    def kernel(one, other, state, out):
        np.add(one, other, out)
        state += 1

    work = small_calls.Computed(kernel, (a, b, m), (a, m), (2,), 0)
    for _ in range(2):
        work()
        np.testing.assert_array_equal(a.asnumpy(), 3)
        np.testing.assert_array_equal(m.asnumpy(), 4)


def test_error_leaves_old_values():
    """An inline call that fails leaves the old values, so that the push that follows can raise the error."""
    a = nd.array(np.ones(4))

    def kernel(one, out):
        out[:] = 5
        raise ValueError

    assert not small_calls.write_inline(kernel, (a,), (a,))
    np.testing.assert_array_equal(a.asnumpy(), 1)


def test_spillable_or_duplicate_arrays_are_pushed(monkeypatch):
    """Arrays that may be spilled, and arrays that overlap an output, are not written inline."""
    with engine.using(engine.create("ThreadedEngine")):
        a = nd.array(np.ones((4, 4)))
        a.wait_to_read()
        assert not small_calls.write_inline(lambda x, out: None, (a,), (a, a[0:2]), (0,))
        assert small_calls.copy_inline(pushing.KernelValue(2.0), a)
        monkeypatch.setattr(MAKE_ROOM, "value", lambda context, arrays: ())
        assert not small_calls.copy_inline(pushing.KernelValue(2.0), a)


@pytest.mark.parametrize(("values", "inline"), [(1 << 17, True), ((1 << 17) + 1, False)])
def test_small_copies_run_inline(values, inline):
    """A copy of at most 2^17 values, which takes no longer than waking a worker, runs inline.

    A copy by key has the limit of all small work.
    """
    with engine.using(engine.create("ThreadedEngine")):
        source, target = (nd.array(np.full((values, 1), value)) for value in (1.0, 2.0))
        nd.waitall()
        assert small_calls.copy_inline(target, source, slice(0, values)) is False
        assert small_calls.copy_inline(source, target) is inline
        np.testing.assert_array_equal(target.asnumpy(), 1 if inline else 2)
