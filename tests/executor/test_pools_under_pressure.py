"""Pools on devices without room for a larger block next to the old one: moved, restored and lost blocks."""

import numpy as np
import pytest

import weftplan as mx
from tests.executor.chains import chain, held_bytes
from weftplan import device, storage
from weftplan.device.simulated import configure
from weftplan.errors import OutOfMemoryError
from weftplan.storage.adaptors import PoisonResource
from weftplan.storage.raw import RawResource


@pytest.mark.parametrize("order", ["lazy", "random"])
def test_a_device_without_room_for_both_blocks(order):
    """If only one block fits, contents wait on the host while the larger block replaces the smaller.

    If the larger block does not fit either, the bind raises OutOfMemoryError and nothing changes.
    """
    ctx = mx.sim(4)
    with storage.using(PoisonResource(RawResource(device.get(ctx)))):
        small = chain(3000, ctx)
        data = mx.nd.ones((3000,), ctx=ctx)
        out = small.forward(data=data)[0]
        arguments = 5000 * 4
        held_bytes(ctx)  # free dead arrays first
        room = device.get(ctx).used + arguments
        place = configure(4, capacity=room + small.memory_plan.peak, order=order, seed=1)
        try:
            large = chain(5000, ctx, small)
            assert large.pool.nbytes == {ctx: large.memory_plan.peak}
            held_bytes(ctx)
            assert place.used == room - small.memory_plan.peak + large.memory_plan.peak
            np.testing.assert_allclose(out.asnumpy(), np.e, rtol=1e-5)
            with pytest.raises(OutOfMemoryError):
                chain(7000, ctx, small)
            assert large.pool.nbytes == {ctx: large.memory_plan.peak}
            np.testing.assert_allclose(out.asnumpy(), np.e, rtol=1e-5)
            np.testing.assert_allclose(small.forward(data=data * 2)[0].asnumpy(), np.e**2, rtol=1e-5)
            np.testing.assert_allclose(large.forward()[0].asnumpy(), 1)
        finally:
            del small, large, data, out
            held_bytes(ctx)
            configure(4, capacity=4 << 30, order="lazy")


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("order", ["lazy", "random"])
def test_a_block_that_does_not_even_fit_alone(order, ran):
    """If the larger block does not fit even without the old block, the old block and its contents are restored."""
    ctx = mx.sim(4)
    with storage.using(PoisonResource(RawResource(device.get(ctx)))):
        small = chain(3000, ctx)
        data = mx.nd.ones((3000,), ctx=ctx)
        out = small.forward(data=data)[0] if ran else None
        held_bytes(ctx)
        before = small.pool.nbytes
        configure(4, capacity=device.get(ctx).used + 7000 * 4, order=order, seed=1)
        try:
            with pytest.raises(OutOfMemoryError, match="largest holders") as refused:
                chain(7000, ctx, small)
            assert "planned" not in str(refused.value)  # the old block was gone when the new one was refused
            del refused
            assert small.pool.nbytes == before
            if ran:
                np.testing.assert_allclose(out.asnumpy(), np.e, rtol=1e-5)
            data[:] = 2
            np.testing.assert_allclose(small.forward(data=data)[0].asnumpy(), np.e**2, rtol=1e-5)
        finally:
            del small, data, out
            held_bytes(ctx)
            configure(4, capacity=4 << 30, order="lazy")


def test_a_block_that_is_lost_for_good_is_told_and_comes_back(monkeypatch):
    """If the old block cannot be restored, each use raises an error until a bind finds room for all executors."""
    ctx = mx.cpu(7)
    small = chain(3000, ctx)
    data, out = mx.nd.ones((3000,), ctx=ctx), small.outputs[0]

    def refuse(ctx, nbytes):
        raise OutOfMemoryError("no room on purpose")

    with monkeypatch.context() as patched:
        patched.setattr("weftplan.executor.pool.PoolMemory", refuse)
        with pytest.raises(OutOfMemoryError, match="on purpose"):
            chain(7000, ctx, small)
    for use in (out.asnumpy, lambda: small.forward(data=data)):
        with pytest.raises(OutOfMemoryError, match=r"has lost its memory: .*; free memory and bind again"):
            use()
    tiny = chain(100, ctx, small)
    assert small.pool.nbytes == {ctx: small.memory_plan.peak}
    np.testing.assert_allclose(tiny.forward(data=np.ones(100, "float32"))[0].asnumpy(), np.e, rtol=1e-5)
    np.testing.assert_allclose(small.forward(data=data)[0].asnumpy(), np.e, rtol=1e-5)
