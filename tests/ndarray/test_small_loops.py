"""Small work leaves NumPy's functions for its loops after many calls, where it is the same, and never otherwise."""

import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.ndarray import small_loops
from weftplan.ndarray.calls import call_cache
from weftplan.ops.compiled.target import host

nd = mx.nd
HOST = host()
needs_compiler = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is loaded, an engine with workers, and a small count until it is."""
    monkeypatch.setattr(small_loops, "_compiled", None)
    monkeypatch.setattr(small_loops, "_left", 50)
    monkeypatch.setattr(small_loops, "_loader", None)
    with engine.using(engine.create("ThreadedEngine")):
        yield


def call(kept, x):
    """``softmax`` by name, with settings of its own."""
    return call_cache.call(kept, "softmax", (x,), {})


def work_of(kept):
    """What is known of the only kind of call."""
    (known,) = kept.values()
    return known.small


def loader():
    """The thread that loads; None where there is none (any more)."""
    return next((one for one in threading.enumerate() if one.name == "weftplan loads small kernels"), None)


@needs_compiler
def test_after_many_calls_the_loops_serve(fresh):
    """Not before the count; then with the bits of before, whether the thread has ended or not."""
    x, kept = nd.array(np.random.default_rng(0).normal(size=(8, 16))), {}
    wanted = call(kept, x).asnumpy().tobytes()
    for _ in range(40):
        call(kept, x)
    assert loader() is None
    assert work_of(kept).direct is None
    for _ in range(20):
        assert call(kept, x).asnumpy().tobytes() == wanted
    while (thread := loader()) is not None:
        assert call(kept, x).asnumpy().tobytes() == wanted
        thread.join(0.01)
    call(kept, x)
    assert type(work_of(kept).direct) is type(len)
    assert call(kept, x).asnumpy().tobytes() == wanted
    assert nd.softmax(x, out=nd.zeros((8, 16))).asnumpy().tobytes() == wanted  # pushed


def test_the_setting_keeps_numpy(fresh, monkeypatch):
    """``WEFTPLAN_KERNELS=numpy``."""
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")
    small_loops.load()
    x, kept = nd.ones((8, 16)), {}
    for _ in range(3):
        call(kept, x)
    assert small_loops._compiled is None
    assert work_of(kept).direct is None


def test_where_nothing_can_be_compiled_numpy_stays(fresh, monkeypatch):
    """The load ends without an error."""
    from weftplan.ops.compiled import loops

    monkeypatch.setattr(loops, "refusal", lambda: "no compiler here")
    small_loops.load()
    assert small_loops._compiled is None


def test_work_with_other_bits_keeps_numpy(fresh, monkeypatch):
    """The first result of the loops is compared; where it differs, or there are none, nobody tries again."""
    x = nd.array(np.random.default_rng(0).normal(size=(8, 16)))
    wanted = call({}, x).asnumpy()
    asked = []

    def wrong(loops):
        asked.append(loops)
        return lambda data, out: np.add(data, 1, out)

    for answer in (wrong, lambda loops: asked.append(loops)):
        asked.clear()
        monkeypatch.setattr(small_loops, "_compiled", answer)
        kept = {}
        for _ in range(5):
            np.testing.assert_array_equal(call(kept, x).asnumpy(), wanted)
        assert len(asked) == 1
        assert work_of(kept).direct is None


def test_extrema_by_name_warn_of_nothing():
    """NumPy has deprecated a way to call them."""
    x, y = nd.array([1.0, 5.0]), nd.array([3.0, 2.0])
    for _ in range(3):
        assert nd.maximum(x, y).asnumpy().tolist() == [3.0, 5.0]
        assert nd.minimum(x, y).asnumpy().tolist() == [1.0, 2.0]
        assert nd.op._maximum(x, y).asnumpy().tolist() == [3.0, 5.0]
        assert nd.op._minimum(x, y).asnumpy().tolist() == [1.0, 2.0]
