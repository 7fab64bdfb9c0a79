"""CuPy's temporaries come from storage, are freed to their stream, and are released when memory is short."""

import numpy as np
import pytest

import weftplan as mx
from tests.standin_cupy import installed, machine, meter
from weftplan import device, storage
from weftplan.device.temporaries import NAME
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.storage import RawResource


@pytest.fixture
def place():
    """The device gpu(0) of the stand-in."""
    with installed():
        yield device.get(mx.gpu(0))


def temporary_bytes():
    """Return the bytes of temporaries that storage has allocated."""
    return sum(a.nbytes for a in storage.get(mx.gpu(0)).holders() if a.name == NAME)


def test_kernels_do_not_use_cupys_pool(place):
    """A sorting operator allocates its temporaries from storage under their name, and none from CuPy's pool."""
    x = mx.nd.array(np.random.default_rng(0).standard_normal((50, 20)), ctx=mx.gpu(0))
    mx.nd.waitall()
    meter.reset()
    y = mx.nd.sort(x, axis=1)
    np.testing.assert_array_equal(y.asnumpy(), np.sort(x.asnumpy(), axis=1))
    assert (meter.temporaries, meter.temporary_bytes) == (0, 0)
    assert temporary_bytes() > 0


def test_repeated_calls_reuse_temporaries(place):
    """Ten further calls of an operator reuse the temporaries of the first calls."""
    x = mx.nd.ones((64, 64), ctx=mx.gpu(0))
    for _ in range(3):
        mx.nd.argsort(x).wait_to_read()
    mx.nd.waitall()
    before = place.temporaries.reserved
    for _ in range(10):
        mx.nd.argsort(x).wait_to_read()
    assert place.temporaries.reserved == before > 0


def test_block_is_reused_on_its_stream(place):
    """A freed block is reused on its own stream only, because the device may still use it."""
    xp = place.xp
    a, b = place.new_stream(), place.new_stream()
    with a:
        first = xp.empty(1000).data.ptr
    with b:
        second = xp.empty(1000).data.ptr
    with a:
        assert xp.empty(900).data.ptr == first != second


def test_empty_cache_releases_temporaries(place):
    """``empty_cache()`` waits for the device and releases free blocks; blocks in use stay."""
    with place.new_stream():
        kept = place.xp.empty(1 << 16)
        place.xp.empty(1 << 20)
        used = machine.used[0]
    mx.gpu(0).empty_cache()
    assert machine.used[0] <= used - (8 << 20)
    assert place.temporaries.reserved == temporary_bytes() == kept.nbytes
    with place.new_stream():
        kept += 1
    assert storage.get(mx.gpu(0)).statistics().live == 1


def test_block_freed_during_release_stays(place, monkeypatch):
    """A block that is freed during the wait of ``release()`` stays with its stream.

    A worker may enqueue work on the block after the device was found idle; nothing would order the block's next user on
    another stream after that work.
    """
    stream = place.new_stream()
    with stream:
        place.xp.empty(1 << 20, place.xp.uint8)
    waited = []
    device_type = place.xp.cuda.Device
    real = device_type.synchronize

    def synchronize(self):
        real(self)
        waited.append(self.id)
        with stream:
            place.xp.empty(1 << 16, place.xp.uint8).fill(1)

    monkeypatch.setattr(device_type, "synchronize", synchronize)
    assert place.temporaries.release() == 1 << 20
    monkeypatch.undo()
    assert waited == [0]
    assert place.temporaries.reserved == temporary_bytes() == 1 << 16
    allocation = storage.get(mx.gpu(0)).allocate(1 << 16)
    with place.new_stream():
        allocation.raw.fill(2)
    storage.get(mx.gpu(0)).free(allocation)


def test_starved_allocation_releases_temporaries(place):
    """An allocation that fits only after temporaries are released succeeds."""
    machine.capacity[0] = 20 << 20
    with storage.using(RawResource(place)):
        with place.new_stream():
            place.xp.empty(2 << 20)  # 16 MiB
        big = storage.get(mx.gpu(0)).allocate(12 << 20)
        storage.get(mx.gpu(0)).free(big)


def test_out_of_memory_inside_a_kernel(place):
    """If a kernel finds no memory, the wait raises OutOfMemoryError with the report, and the next operation runs."""
    x = mx.nd.ones((1 << 20,), ctx=mx.gpu(0))
    mx.nd.waitall()
    out = mx.nd.zeros((1 << 20,), ctx=mx.gpu(0))
    mx.nd.waitall()
    machine.capacity[0] = machine.used[0]
    with pytest.raises(OutOfMemoryError, match=r"out of memory on gpu\(0\): [\d,]+ bytes requested"):
        mx.nd.sort(x, out=out).wait_to_read()
    machine.capacity[0] = 80 << 30
    assert (x + 1).asnumpy()[0] == 2


def test_a_sticky_error_is_not_out_of_memory(place):
    """After an illegal address, an allocation raises DeviceError, which says that only a new process helps."""
    machine.sticky = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    with pytest.raises(DeviceError, match=r"IllegalAddress.*not a lack of memory. Start the process again"):
        place.allocate(100)
