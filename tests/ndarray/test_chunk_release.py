"""Release of dead arrays' memory: immediately if nothing is pending, never early, and never much later."""

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


def allocated_bytes():
    """Return the bytes allocated from storage."""
    return storage.get(CTX).statistics().requested_bytes


@pytest.fixture
def empty():
    """Check that no memory is allocated on the context before and after the test."""
    mx.nd.waitall()
    drain()
    assert allocated_bytes() == 0
    yield
    mx.nd.waitall()
    drain()
    assert allocated_bytes() == 0


pytestmark = pytest.mark.usefixtures("empty")


@COUNTED
def test_idle_memory_is_freed_without_operation(each_engine):
    """Memory of an idle array is freed without an engine operation, because its var has no other reference."""
    a = mx.nd.ones((100,), ctx=CTX)
    a += 1
    a.wait_to_read()
    mx.nd.waitall()
    while sys.getrefcount(a.var) > 2:  # a worker releases an operation after it has notified the waiter
        time.sleep(0.001)
    pushed = each_engine.statistics().pushed
    del a
    drain()
    assert allocated_bytes() == 0
    assert each_engine.statistics().pushed == pushed


@COUNTED
def test_referenced_var_needs_a_delete_operation(each_engine):
    """A var that is still referenced is deleted by an operation and then known as deleted."""
    a = mx.nd.ones((100,), ctx=CTX)
    mx.nd.waitall()
    var = a.var
    del a
    drain()
    each_engine.wait_for_all()
    assert allocated_bytes() == 0
    assert var.deleted


def test_pending_operations_delay_the_free(gate):
    """An unreferenced pending result is computed into its own memory, and freed afterwards."""
    x = mx.nd.ones((100,), ctx=CTX)
    x.wait_to_read()
    gate.close(x)
    for _ in range(3):
        x + 1
    drain()
    assert allocated_bytes() == 400  # operations that have not run have no memory yet
    others = [mx.nd.zeros((100,), ctx=CTX) for _ in range(3)]
    gate.open()
    mx.nd.waitall()
    assert [float(second.asnumpy().sum()) for second in others] == [0, 0, 0]
    drain()
    mx.nd.waitall()
    assert allocated_bytes() == 4 * 400


def test_unflushed_bulk_delays_the_free(each_engine):
    """Operations collected in a thread's bulk keep their vars alive."""
    x = mx.nd.ones((100,), ctx=CTX)
    mx.nd.waitall()
    with each_engine.bulk(10):
        x + 1
        drain()
        kept = allocated_bytes()
    assert kept == 400
    del x
    mx.nd.waitall()


def test_failure_of_a_dead_array_is_raised(gate):
    """``waitall`` raises the failure of a dead array."""
    x = mx.nd.ones((100,), ctx=CTX)
    engine.get().push(lambda: 1 / 0, (), (x.var,), CTX)
    del x
    drain()
    gate.open()
    with pytest.raises(ZeroDivisionError):
        mx.nd.waitall()


def test_arithmetic_keeps_few_small_arrays(each_engine):
    """At most 1,025 dead small arrays stay allocated; ``waitall`` releases them."""
    x = mx.nd.ones((16,), ctx=CTX)
    mx.nd.waitall()
    most = 0
    for _ in range(3000):
        x + 1
        most = max(most, allocated_bytes())
    mx.nd.waitall()
    assert allocated_bytes() == 64
    if each_engine.kind == "NaiveEngine":
        assert most <= (1 + 1025 + 1) * 64


def test_arithmetic_keeps_no_large_array(each_engine):
    """A dead array above 4,096 bytes is freed before the next addition."""
    if each_engine.kind != "NaiveEngine":
        pytest.skip("operations may be pending there")
    x = mx.nd.ones((1025,), ctx=CTX)
    for _ in range(5):
        x + 1
        assert allocated_bytes() <= 2 * 4100


def test_small_part_holds_the_large_chunk(each_engine):
    """A dead part, however small, does not keep its large chunk allocated."""
    x = mx.nd.ones((4,), ctx=CTX)
    slab = Chunk(CTX, 1 << 20)
    part = slab.part(64, 64)
    del slab, part
    for _ in range(3):  # without a GIL the part is one operation, and the slab the next
        np.testing.assert_array_equal((x + x).asnumpy(), 2)
        each_engine.wait_for_all()
    assert allocated_bytes() <= 4 * 16
