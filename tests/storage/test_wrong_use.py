"""Invalid frees and out-of-bounds writes: the error names the function that allocated the memory."""

import gc

import numpy as np
import pytest

import weftplan as mx
from weftplan import config, device, storage
from weftplan.errors import GuardError, MXNetError
from weftplan.ndarray.memory.origin import origin_of
from weftplan.storage import AutoGrowth, GuardResource, NaivePool, PoisonResource, RawResource

HOST = device.get(device.cpu())


def allocate_named(pool):
    """Allocate 100,000 bytes whose recorded origin is the caller's line and the function ``zeros``."""
    return pool.allocate(100_000, name=origin_of("zeros", 100_000))


@pytest.mark.parametrize("make", [RawResource, AutoGrowth, lambda place: PoisonResource(NaivePool(place))])
def test_a_double_free_names_the_origin(make):
    """A second free raises MXNetError with the allocating function, and does not change the statistics."""
    pool = make(HOST)
    held = allocate_named(pool)
    pool.free(held)
    with pytest.raises(MXNetError, match=r"<Allocation zeros .*100,000 bytes.* was freed before: free it once"):
        pool.free(held)
    assert pool.statistics().live == 0


def test_foreign_free_names_the_origin():
    """A free to another pool raises MXNetError with the allocating function; its own pool then accepts it."""
    ours, theirs = NaivePool(HOST), AutoGrowth(HOST)
    held = allocate_named(ours)
    with pytest.raises(MXNetError, match=r"<Allocation zeros .* does not belong to <AutoGrowth cpu\(0\)"):
        theirs.free(held)
    assert theirs.statistics().live == 0
    ours.free(held)
    assert ours.statistics().live == 0


def test_free_after_replacement_names_the_origin():
    """A free to the replacement of a pool raises MXNetError; the pool that allocated the memory accepts it."""
    ctx = mx.cpu(9131)
    with storage.using(NaivePool(device.get(ctx))) as before:
        held = allocate_named(storage.get(ctx))
        with (
            storage.using(NaivePool(device.get(ctx))),
            pytest.raises(MXNetError, match=r"<Allocation zeros .* even if another one has taken its place"),
        ):
            storage.get(ctx).free(held)
        storage.get(ctx).free(held)
        assert before.statistics().live == 0


@pytest.mark.parametrize("side", [slice(0, 3), slice(-3, None)], ids=["before", "past"])
def test_free_detects_out_of_bounds_writes(side):
    """Three bytes written out of bounds raise GuardError at a check and at the free, which still frees the memory."""
    guard = GuardResource(RawResource(HOST))
    held, second = guard.allocate(1000, name="weights"), guard.allocate(0, name="nothing")
    whole = held.block.raw
    whole[side] = 1
    with pytest.raises(GuardError, match=r"^3 bytes (before the start|past the end) of <Allocation weights"):
        guard.check()
    with pytest.raises(GuardError, match="weights"):
        guard.free(held)
    guard.free(second)
    assert guard.statistics().live == guard.statistics().reserved_bytes == 0
    guard.check()


@pytest.fixture
def guarded(monkeypatch):
    """Enable guard mode during the test."""
    monkeypatch.setenv("WEFTPLAN_STORAGE_GUARD", "1")
    config._reset_for_tests()
    yield
    monkeypatch.undo()
    config._reset_for_tests()


@pytest.mark.shows("WEFTPLAN_STORAGE_GUARD")
@pytest.mark.usefixtures("guarded")
def test_guard_accepts_correct_programs():
    """In guard mode a training step has no finding, and statistics exclude the margins."""
    ctx = mx.cpu(9132)  # no other test has created its pool, which would lack a guard
    x = mx.nd.array(np.arange(5000, dtype="float32"), ctx=ctx)
    pool = storage.get(ctx)
    assert isinstance(pool, GuardResource)
    executor = mx.models.get("mlp").simple_bind(ctx, **mx.models.input_shapes("mlp", 4))
    executor.forward(is_train=True)
    executor.backward()
    assert (x + 1).asnumpy().tolist() == list(range(1, 5001))
    mx.nd.waitall()
    storage.check_guards()
    assert pool.statistics().requested_bytes == sum(held.nbytes for held in pool.holders())
    del x, executor
    gc.collect()
    mx.nd.waitall()
    config._reset_for_tests()


def test_write_past_an_array_names_its_function():
    """A write past an array's end is reported at the next check, with the line that created the array."""
    ctx = mx.cpu(9133)
    with storage.using(GuardResource(NaivePool(device.get(ctx)))) as guard:
        x = mx.nd.zeros((10000,), ctx=ctx)
        x.wait_to_read()
        raw = x.raw()
        np.lib.stride_tricks.as_strided(raw, (10010,), raw.strides)[10000:] = 1.0
        with pytest.raises(GuardError, match=r"^40 bytes past the end of <Allocation zeros at .*test_wrong_use"):
            guard.check()
        np.lib.stride_tricks.as_strided(raw, (10010,), raw.strides)[10000:].view(np.uint8)[:] = 0xFD
        del x
        gc.collect()
        mx.nd.waitall()
