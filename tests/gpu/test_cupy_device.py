"""The contracts of device, storage and arrays on a real GPU."""

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, storage

pytestmark = pytest.mark.gpu


@pytest.fixture
def place():
    """Return the device object of GPU 0."""
    return device.get(device.gpu(0))


def test_memory_is_aligned_and_comes_from_the_driver(place):
    """Raw memory is flat aligned bytes, and reduces the driver's free memory."""
    before, _ = place.memory_info()
    raw = place.allocate(64 << 20)
    assert raw.shape == (64 << 20,)
    assert raw.data.ptr % place.alignment == 0
    assert before - place.memory_info()[0] >= 64 << 20


def test_streams_and_events(place):
    """A copy, a kernel on another stream after an event, and a copy back give the right values."""
    xp = place.xp
    source, out = np.arange(1 << 16, dtype=np.float32), np.zeros(1 << 16, np.float32)
    with xp.cuda.Device(0):
        middle = xp.empty(1 << 16, np.float32)
    a, b = place.new_stream(), place.new_stream(priority=1)
    with a:
        place.copy(middle, source)
    b.wait(a.record())
    with b:
        assert device.current_stream() is b
        place.launch(lambda: xp.multiply(middle, 2, out=middle))
        place.copy(out, middle)
    b.synchronize()
    np.testing.assert_array_equal(out, source * 2)


def test_pinned_memory_is_page_locked():
    """cpu_pinned memory is a NumPy array that CUDA recognizes as page-locked host memory."""
    raw = device.get(device.cpu_pinned(0)).allocate(1000)
    assert raw.shape == (1000,)
    cupy = pytest.importorskip("cupy")
    assert cupy.cuda.runtime.pointerGetAttributes(raw.__array_interface__["data"][0]).type == 1


def test_arrays_on_a_gpu_give_what_the_host_gives():
    """Arithmetic, views, indexing and copies on a GPU agree with NumPy."""
    host = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    x = mx.nd.array(host, ctx=mx.gpu(0))
    y = (x * 2 + 1)[1]
    y[0] = 5
    x[:, 1] = np.ones(4)
    expected = host * 2 + 1
    expected[1, 0] = 5
    np.testing.assert_array_equal(y.asnumpy(), expected[1])
    np.testing.assert_array_equal(x[:, 1].asnumpy(), np.ones((2, 4)))
    np.testing.assert_array_equal(x[[1, 0], [2, 0]].asnumpy(), host[[1, 0], [2, 0]])
    np.testing.assert_array_equal(x.as_in_context(mx.cpu()).asnumpy(), x.asnumpy())
    np.testing.assert_array_equal(mx.nd.from_dlpack(x).asnumpy(), x.asnumpy())


def test_gpu_memory_returns_to_the_pool():
    """The pool reuses a dead array's block for the next array of its size."""
    pool = storage.get(mx.gpu(0))
    x = mx.nd.ones((1000, 1000), ctx=mx.gpu(0))
    mx.nd.waitall()
    del x
    mx.nd.waitall()
    before = pool.statistics()
    mx.nd.ones((1000, 1000), ctx=mx.gpu(0)).wait_to_read()
    after = pool.statistics()
    assert after.hits == before.hits + 1
    assert after.system_allocations == before.system_allocations
