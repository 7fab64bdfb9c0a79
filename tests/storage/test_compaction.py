"""Compaction: arrays move within a pool to merge its free bytes, on request or before an out-of-memory error."""

import gc

import numpy as np
import pytest

import weftplan as mx
from weftplan import config, device, storage
from weftplan.errors import OutOfMemoryError
from weftplan.ndarray.spill import spilling
from weftplan.storage import AutoGrowth, GuardResource, NaiveBestFit, NaivePool, PoisonResource
from weftplan.storage.limited import LimitedDevice
from weftplan.support import slots

SIZE = 1 << 14


def limited_device(ctx, arrays):
    """Return a device with memory for ``arrays`` arrays of SIZE bytes."""
    return LimitedDevice(device.get(ctx), arrays * SIZE, "the test")


MAKERS = {
    "growth": lambda place: AutoGrowth(place, chunk=16 * SIZE),
    "best fit": lambda place: NaiveBestFit(place, first=16 * SIZE),
    "poison": lambda place: PoisonResource(AutoGrowth(place, chunk=16 * SIZE)),
}


def array(ctx, value, count=1):
    return mx.nd.array(np.full(count * SIZE // 4, value, "float32"), ctx=ctx)


def scattered_arrays(ctx):
    """Return the eight arrays with odd values of sixteen; the others are freed."""
    held = [array(ctx, value) for value in range(16)]
    mx.nd.waitall()
    del held[::2]
    gc.collect()
    mx.nd.waitall()
    return held


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("ctx", [mx.cpu(9180), mx.sim(80)], ids=str)
def test_compaction_merges_free_memory(ctx, maker):
    """After compaction, eight free gaps serve one array of their total size.

    Values are unchanged, the moved bytes are returned, and a second call moves nothing.
    """
    with spilling.using("", movable=True), storage.using(MAKERS[maker](limited_device(ctx, 16))) as pool:
        held = scattered_arrays(ctx)
        moved = storage.compact(ctx)
        assert 0 < moved <= 8 * SIZE
        assert moved % SIZE == 0
        assert storage.compact(ctx) == 0
        large = array(ctx, 99, 8)
        assert (large.asnumpy() == 99).all()
        assert [float(x.asnumpy()[0]) for x in held] == list(range(1, 16, 2))
        assert pool.statistics().failures == 0
        assert pool.statistics().reserved_bytes == 16 * SIZE
        del held, large
        gc.collect()
        mx.nd.waitall()
        assert pool.statistics().live == 0


@pytest.mark.parametrize(("setting", "fits"), [("1", True), ("0", False)])
@pytest.mark.shows("WEFTPLAN_STORAGE_COMPACT")
def test_compaction_is_a_rung_of_relief(monkeypatch, setting, fits):
    """With WEFTPLAN_STORAGE_COMPACT=1 a request that needs merged free bytes succeeds; with 0 it fails."""
    ctx = mx.cpu(9181)
    config._reset_for_tests()
    monkeypatch.setenv("WEFTPLAN_STORAGE_COMPACT", setting)
    monkeypatch.setattr(slots.ARRAY_CHUNK, "value", spilling._first_chunk)
    with storage.using(MAKERS["growth"](limited_device(ctx, 16))):
        held = scattered_arrays(ctx)
        if fits:
            assert (array(ctx, 99, 8).asnumpy() == 99).all()
        else:
            with pytest.raises(OutOfMemoryError, match=r"lie apart|scattered"):
                array(ctx, 99, 8)
        assert [float(x.asnumpy()[0]) for x in held] == list(range(1, 16, 2))
        del held
        gc.collect()
        mx.nd.waitall()
    config._reset_for_tests()
    spilling.start(())


def test_exported_memory_does_not_move():
    """An array exported by DLPack keeps its address; other arrays move."""
    ctx = mx.cpu(9182)
    with spilling.using("", movable=True), storage.using(MAKERS["growth"](limited_device(ctx, 16))):
        held = scattered_arrays(ctx)
        views = [np.from_dlpack(x) for x in held[:2]]
        assert storage.compact(ctx) > 0
        for value, view in enumerate(views):
            held[value][:] = -value
            held[value].wait_to_read()
            assert (view == -value).all()
        assert [float(x.asnumpy()[0]) for x in held[2:]] == list(range(5, 16, 2))
        del held, views, view
        gc.collect()
        mx.nd.waitall()


@pytest.mark.parametrize("maker", [NaivePool, lambda place: GuardResource(AutoGrowth(place))])
def test_immovable_pools_move_nothing(maker):
    """Pools of whole blocks and guarded pools move no array."""
    ctx = mx.cpu(9183)
    with spilling.using("", movable=True), storage.using(maker(device.get(ctx))):
        held = scattered_arrays(ctx)
        assert storage.compact(ctx) == 0
        assert [float(x.asnumpy()[0]) for x in held] == list(range(1, 16, 2))
        del held
        gc.collect()
        mx.nd.waitall()
