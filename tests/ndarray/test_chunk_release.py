"""When the memory of dead arrays goes back: at once where nothing is pending, never early, and never much later."""

import sys
import time

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine, storage
from weftplan.ndarray import Chunk
from weftplan.ndarray.memory.release import drain

COUNTED = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="without a GIL every dead chunk is an operation"
)
CTX = mx.cpu(77)


def held():
    """Bytes that storage has given out."""
    return storage.get(CTX).statistics().requested_bytes


@pytest.fixture
def empty():
    """Nothing of other tests is left on the context."""
    mx.nd.waitall()
    drain()
    assert held() == 0
    yield
    mx.nd.waitall()
    drain()
    assert held() == 0


pytestmark = pytest.mark.usefixtures("empty")


@COUNTED
def test_no_operation_where_nothing_is_pending(each_engine):
    """The last reference was the chunk's own: nobody can have pushed what is not over."""
    a = mx.nd.ones((100,), ctx=CTX)
    a += 1
    a.wait_to_read()
    mx.nd.waitall()
    while sys.getrefcount(a.var) > 2:  # a worker lets go of an operation after it has said that it is over
        time.sleep(0.001)
    pushed = each_engine.statistics().pushed
    del a
    drain()
    assert held() == 0
    assert each_engine.statistics().pushed == pushed


@COUNTED
def test_an_operation_where_somebody_has_the_var(each_engine):
    """It could be used again, and must be known as deleted then."""
    a = mx.nd.ones((100,), ctx=CTX)
    mx.nd.waitall()
    var = a.var
    del a
    drain()
    each_engine.wait_for_all()
    assert held() == 0
    assert var.deleted


def test_never_before_what_is_pending(gate):
    """A result that nobody keeps is computed into memory that nobody else has."""
    x = mx.nd.ones((100,), ctx=CTX)
    x.wait_to_read()
    gate.close(x)
    for _ in range(3):
        x + 1
    drain()
    assert held() == 400  # of what has not run none has memory yet
    others = [mx.nd.zeros((100,), ctx=CTX) for _ in range(3)]
    gate.open()
    mx.nd.waitall()
    assert [float(other.asnumpy().sum()) for other in others] == [0, 0, 0]
    drain()
    mx.nd.waitall()
    assert held() == 4 * 400


def test_never_before_a_bulk_is_flushed(each_engine):
    """What a thread has collected and not pushed holds its vars, too."""
    x = mx.nd.ones((100,), ctx=CTX)
    mx.nd.waitall()
    with each_engine.bulk(10):
        x + 1
        drain()
        kept = held()
    assert kept == 400
    del x
    mx.nd.waitall()


def test_a_failure_stays_known(gate):
    """A dead array whose operation failed: whoever waits for everything is told."""
    x = mx.nd.ones((100,), ctx=CTX)
    engine.get().push(lambda: 1 / 0, (), (x.var,), CTX)
    del x
    drain()
    gate.open()
    with pytest.raises(ZeroDivisionError):
        mx.nd.waitall()


def test_arithmetic_leaves_a_few_small_ones(each_engine):
    """At most 1,025 of at most 4,096 bytes wait; the next array made otherwise sees to all of them."""
    x = mx.nd.ones((16,), ctx=CTX)
    mx.nd.waitall()
    most = 0
    for _ in range(3000):
        x + 1
        most = max(most, held())
    mx.nd.waitall()
    assert held() == 64
    if each_engine.kind == "NaiveEngine":
        assert most <= (1 + 1025 + 1) * 64


def test_arithmetic_leaves_no_large_one(each_engine):
    """Not even for the next addition."""
    if each_engine.kind != "NaiveEngine":
        pytest.skip("operations may be pending there")
    x = mx.nd.ones((1025,), ctx=CTX)
    for _ in range(5):
        x + 1
        assert held() <= 2 * 4100


def test_a_small_part_of_a_large_chunk(each_engine):
    """It keeps the whole, however small it is."""
    x = mx.nd.ones((4,), ctx=CTX)
    slab = Chunk(CTX, 1 << 20)
    part = slab.part(64, 64)
    del slab, part
    for _ in range(3):  # without a GIL the part is an operation, and the slab the next one
        np.testing.assert_array_equal((x + x).asnumpy(), 2)
        each_engine.wait_for_all()
    assert held() <= 4 * 16
