"""Chunks, the memory of arrays: allocation on first use, parts, release, refusals; on every engine."""

import gc

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, nd, storage
from weftplan.errors import MXNetError, OutOfMemoryError, ShapeError
from weftplan.ndarray import Chunk, NDArray
from weftplan.storage import LimitResource, PoisonResource, RawResource

pytestmark = pytest.mark.usefixtures("each_engine")


def alive(resource):
    """Return the number of live allocations after all dead memory and pending deletes are processed."""
    gc.collect()
    for _ in range(3):
        nd.waitall()
    return resource.statistics().live


def test_memory_returns_when_arrays_die():
    """The memory of a dropped array is freed after the array's pending work, neither earlier nor never."""
    context = mx.cpu(6)
    resource = PoisonResource(_raw(context))
    with storage.using(resource):
        total = nd.zeros(100, context)
        for step in range(50):
            part = nd.full((100,), step, context)
            total += part
            del part
        np.testing.assert_array_equal(total.asnumpy(), np.full(100, sum(range(50))))
        del total
        assert alive(resource) == 0


def _raw(context):
    return RawResource(device.get(context))


def test_out_of_memory_is_an_ordinary_error():
    """An allocation that fails raises OutOfMemoryError with the requested bytes.

    ``nd.empty`` raises it at the call, other functions at the wait. The same call succeeds after an array was dropped.
    """
    context = mx.cpu(6)
    with storage.using(LimitResource(_raw(context), 1000)) as resource:
        held = nd.ones(200, context)
        with pytest.raises(OutOfMemoryError, match="400 bytes requested"):
            nd.ones(100, context).wait_to_read()
        with pytest.raises(OutOfMemoryError, match="400 bytes requested"):
            nd.empty(100, context)
        del held
        gc.collect()
        nd.waitall()
        assert nd.ones(100, context).asnumpy().sum() == 100
        assert alive(resource) == 0


def test_delayed_chunks_take_memory_at_first_use():
    """A delayed chunk has no memory until its bytes are used."""
    context = mx.cpu(6)
    with storage.using(_raw(context)) as resource:
        chunk = Chunk(context, 64, delay_alloc=True)
        assert resource.statistics().live == 0
        unused = Chunk(context, 64, delay_alloc=True)
        del unused
        x = NDArray(chunk, (16,), np.float32)
        x[:] = 3
        x.wait_to_read()
        assert resource.statistics().live == 1
        assert x.asnumpy().sum() == 48
        del x, chunk
        assert alive(resource) == 0


def test_chunk_parts_have_own_vars_and_hold_it():
    """Two parts of a slab are written independently; the slab is freed with its last part."""
    context = mx.cpu(6)
    with storage.using(_raw(context)) as resource:
        slab = Chunk(context, 128, name="slab")
        first, second = slab.part(0, 64), slab.part(64, 64)
        assert len({id(slab.var), id(first.var), id(second.var)}) == 3
        x, y = NDArray(first, (16,), np.float32), NDArray(second, (4, 2), np.float64)
        x[:], y[:] = 1, 2
        whole = NDArray(slab, (128,), np.uint8)
        nd.waitall()
        assert whole.raw()[:64].view(np.float32).sum() == 16
        del slab, first, whole, x
        gc.collect()
        nd.waitall()
        assert y.asnumpy().sum() == 16
        assert resource.statistics().live == 1
        del second, y
        assert alive(resource) == 0
        with pytest.raises(MXNetError, match="does not lie within"):
            Chunk(context, 10).part(5, 6)


def test_an_array_must_lie_within_its_chunk():
    """An array whose offset plus bytes exceeds its chunk is refused."""
    chunk = Chunk(mx.cpu(), 64)
    NDArray(chunk, (14,), np.float32, 8)
    with pytest.raises(ShapeError, match="exceeds"):
        NDArray(chunk, (15,), np.float32, 8)
