"""Reuse of dead small arrays: never of memory in use, and only of a bounded number."""

import sys

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, engine, storage
from weftplan.ndarray import operators
from weftplan.ndarray.memory import release
from weftplan.storage import NaivePool

nd = mx.nd
CTX = mx.cpu(78)
square = operators.function("square")

pytestmark = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="without a GIL nobody knows that a var is his alone"
)


@pytest.fixture
def x():
    """Yield an idle array on an engine with workers, whose call of square is cached."""
    with engine.using(engine.create("ThreadedEngine")):
        array = nd.array(np.arange(32.0), ctx=CTX)
        square(array).wait_to_read()
        nd.waitall()
        yield array
        nd.waitall()


def address_of(array):
    """Return the address of an array's memory."""
    return array.raw().__array_interface__["data"][0]


def test_next_array_reuses_memory_view_and_var(x):
    """The next array reuses the memory, view and var of a dead array, under the new operation's name."""
    first = square(x)
    where, view, var = address_of(first), id(first.ready), id(first.var)
    del first
    second = x + x
    assert (address_of(second), id(second.ready), id(second.var)) == (where, view, var)
    assert (second.var.version, second.var.name, second.chunk.name) == (1, "broadcast_add", "broadcast_add")
    np.testing.assert_array_equal(second.asnumpy(), 2 * np.arange(32))


def test_free_lists_are_specific(x):
    """A free list is specific to a context, a shape and a dtype."""
    first = square(x)
    where = address_of(first)
    del first
    others = [x.reshape((8, 4)), x.astype("float64"), x.as_in_context(mx.cpu(79))]
    for second in others:
        for _ in range(2):
            assert address_of(square(second)) != where
        np.testing.assert_array_equal(square(second).asnumpy().ravel(), np.arange(32) ** 2)
    assert address_of(square(x)) == where


@pytest.mark.parametrize("kept", ["slice", "reshape", "var", "raw", "operation"])
def test_memory_in_use_is_not_reused(x, kept):
    """Memory is not reused while a slice, a reshape, the var, the raw bytes or an operation refers to it."""
    first, another = square(x), x + 1
    old = first.asnumpy()
    own = {"slice": first[2:4], "reshape": first.reshape((4, 8)), "var": first.var, "raw": first.raw()}.get(kept)
    if kept == "operation":
        own = first + first * nd.ones((300, 300), ctx=CTX)[0, :32]  # pushed, because it waits for a large array
    ids = address_of(first), id(first.var)
    del first
    second = square(another)
    assert id(second.var) != ids[1] or kept == "operation"
    if kept == "slice":
        np.testing.assert_array_equal(own.asnumpy(), old[2:4])
    if kept == "reshape":
        np.testing.assert_array_equal(own.asnumpy().ravel(), old)
    if kept == "operation":
        np.testing.assert_array_equal(own.asnumpy(), 2 * old)


def test_free_lists_are_bounded_and_drained(x):
    """Free lists are bounded in length and number, however many arrays die; draining frees all memory."""
    with storage.using(NaivePool(device.get(CTX))) as pool:
        kept = [square(x) for _ in range(200)]
        del kept
        release.sweep(everything=True)
        assert 0 < pool.statistics().live <= release._CAPACITY
        for size in range(1, 2 * release._MAX_FREE_LISTS):
            one = nd.ones((size,), ctx=CTX)
            one.wait_to_read()
            for _ in range(2):
                one + one
        assert len(release.dead.free_lists) <= release._MAX_FREE_LISTS
        del one
        nd.waitall()
        release.drain()
        assert pool.statistics().live == 0


def test_free_lists_are_reclaimed_before_refusal(x):
    """Memory on free lists is the first that storage reclaims."""
    with storage.using(NaivePool(device.get(CTX))) as pool:
        square(x)
        assert pool.statistics().live == 1
        assert release._give_dead_back(CTX, 100)
        assert pool.statistics().live == 0
        assert not release._give_dead_back(CTX, 100)


def test_engine_or_storage_change_closes_free_lists(x):
    """A change of engine or storage resource releases the free lists of the old pair.

    Vars belong to an engine, and memory to a resource.
    """
    with storage.using(NaivePool(device.get(CTX))) as pool:
        square(x)
        with storage.using(NaivePool(device.get(CTX))) as second:
            square(x)
            assert (pool.statistics().live, second.statistics().live) == (0, 1)
            release.drain()
        own = square(x)
        late = own.chunk
        with engine.using(engine.create("ThreadedEngine")):
            there = nd.array(np.ones(32), ctx=CTX)
            for _ in range(3):
                squared = square(there)
                assert squared.var.engine is engine.get()
            del own, late  # dies when its free list is closed
        del there, squared
        nd.waitall()
        release.drain()
        assert pool.statistics().live == 0
