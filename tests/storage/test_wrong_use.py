"""Frees to which nobody has a right, and writes outside of an allocation: the error names who asked for the memory."""

import gc

import numpy as np
import pytest

import weftplan as mx
from weftplan import config, device, storage
from weftplan.errors import GuardError, MXNetError
from weftplan.ndarray.memory.origin import origin_of
from weftplan.storage import AutoGrowth, GuardResource, NaivePool, PoisonResource, RawResource

HOST = device.get(device.cpu())


def named(pool):
    """100,000 bytes that a function of the package would have asked for on this line."""
    return pool.allocate(100_000, name=origin_of("zeros", 100_000))


@pytest.mark.parametrize("make", [RawResource, AutoGrowth, lambda place: PoisonResource(NaivePool(place))])
def test_a_double_free_names_the_origin(make):
    """The second free says which function had asked for the memory, and what happened before; the first one counts."""
    pool = make(HOST)
    held = named(pool)
    pool.free(held)
    with pytest.raises(MXNetError, match=r"<Allocation zeros .*100,000 bytes.* was freed before: free it once"):
        pool.free(held)
    assert pool.statistics().live == 0


def test_a_foreign_free_names_the_origin_and_both_sides():
    """Memory of one pool is refused by another, which keeps its figures, and its own pool still takes it."""
    ours, theirs = NaivePool(HOST), AutoGrowth(HOST)
    held = named(ours)
    with pytest.raises(MXNetError, match=r"<Allocation zeros .* does not belong to <AutoGrowth cpu\(0\)"):
        theirs.free(held)
    assert theirs.statistics().live == 0
    ours.free(held)
    assert ours.statistics().live == 0


def test_a_free_after_the_resource_was_replaced_names_the_origin():
    """Whoever looks the resource up again after it was replaced is told so; the memory goes back to its own."""
    ctx = mx.cpu(9131)
    with storage.using(NaivePool(device.get(ctx))) as before:
        held = named(storage.get(ctx))
        with (
            storage.using(NaivePool(device.get(ctx))),
            pytest.raises(MXNetError, match=r"<Allocation zeros .* even if another one has taken its place"),
        ):
            storage.get(ctx).free(held)
        storage.get(ctx).free(held)
        assert before.statistics().live == 0


@pytest.mark.parametrize("side", [slice(0, 3), slice(-3, None)], ids=["before", "past"])
def test_a_write_outside_of_an_allocation_is_caught_by_its_free(side):
    """Three bytes beside it are enough; the error counts them and names the memory, which has gone back."""
    guard = GuardResource(RawResource(HOST))
    held, other = guard.allocate(1000, name="weights"), guard.allocate(0, name="nothing")
    whole = held.block.raw
    whole[side] = 1
    with pytest.raises(GuardError, match=r"^3 bytes (before the start|past the end) of <Allocation weights"):
        guard.check()
    with pytest.raises(GuardError, match="weights"):
        guard.free(held)
    guard.free(other)
    assert guard.statistics().live == guard.statistics().reserved_bytes == 0
    guard.check()


@pytest.fixture
def guarded(monkeypatch):
    """Guard mode for what is built here; later tests of the process build without it."""
    monkeypatch.setenv("WEFTPLAN_STORAGE_GUARD", "1")
    config._reset_for_tests()
    yield
    monkeypatch.undo()
    config._reset_for_tests()


@pytest.mark.shows("WEFTPLAN_STORAGE_GUARD")
@pytest.mark.usefixtures("guarded")
def test_a_guard_lets_correct_programs_alone():
    """Arrays and a training step in guard mode: same values, figures without the margins, nothing found."""
    ctx = mx.cpu(9132)  # no other test has made its pool, which would be one without a guard
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


def test_a_write_past_the_end_of_an_array_is_told_with_its_function():
    """What code spoils through an array's raw memory is reported at the next look, with who asked for that memory."""
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
