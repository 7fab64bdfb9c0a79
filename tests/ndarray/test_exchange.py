"""Memory shared with NumPy and PyTorch through DLPack."""

import gc

import numpy as np
import pytest

from weftplan import device, nd, storage
from weftplan.errors import DTypeError, ParameterError
from weftplan.storage import PoisonResource, RawResource

pytestmark = pytest.mark.usefixtures("each_engine")


def test_numpy_reads_our_memory():
    """np.from_dlpack waits for pending work and shares memory, so that later writes are visible there."""
    x = nd.zeros(4)
    x += 3
    there = np.from_dlpack(x)
    np.testing.assert_array_equal(there, [3] * 4)
    x += 1
    x.wait_to_read()
    np.testing.assert_array_equal(there, [4] * 4)
    assert x.__dlpack_device__() == (1, 0)


def test_numpy_memory_is_shared():
    """from_dlpack and from_numpy share memory, and keep the source alive."""
    values = np.arange(4, dtype=np.float32)
    for x in (nd.from_dlpack(values), nd.from_numpy(values)):
        x += 1
        x.wait_to_read()
    np.testing.assert_array_equal(values, [2, 3, 4, 5])
    kept = nd.from_numpy(np.full(1000, 7.0))
    gc.collect()
    np.testing.assert_array_equal(kept.asnumpy(), np.full(1000, 7.0))


def test_shared_memory_becomes_read_only_for_numpy():
    """Shared memory becomes read-only for NumPy, whose writes the engine would not see, as in MXNet.

    The memory can be shared again, unlike other read-only memory. A copy leaves the source writable.
    """
    values = np.arange(4, dtype=np.float32)
    nd.from_numpy(values, zero_copy=False)
    assert values.flags.writeable
    first, second = nd.from_numpy(values), nd.from_numpy(values)
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1
    for x in (first, second):
        x += 1
        x.wait_to_read()
    np.testing.assert_array_equal(values, [2, 3, 4, 5])
    own = np.arange(3.0)
    own.flags.writeable = False
    with pytest.raises(ParameterError, match="writable memory"):
        nd.from_numpy(own)
    swapped = np.arange(3, dtype=">f4")
    nd.from_numpy(swapped)
    assert swapped.flags.writeable  # nothing is shared


def test_unshareable_memory_is_copied_or_refused():
    """from_dlpack copies strided memory; from_numpy refuses it unless a copy is requested."""
    values = np.arange(6, dtype=np.float32)
    x = nd.from_dlpack(values[::2])
    x += 1
    np.testing.assert_array_equal(x.asnumpy(), [1, 3, 5])
    np.testing.assert_array_equal(values, np.arange(6))
    with pytest.raises(ValueError, match="zero_copy=False"):  # as in MXNet
        nd.from_numpy(values[::2])
    np.testing.assert_array_equal(nd.from_numpy(values[::2], zero_copy=False).asnumpy(), [0, 2, 4])
    with pytest.raises(DTypeError, match="__dlpack__"):
        nd.from_dlpack([1, 2])
    with pytest.raises(DTypeError, match="NumPy array"):
        nd.from_numpy([1, 2])


def test_capsules_follow_mxnet():
    """A DLPack capsule, from a method or function, shares the memory.

    It can be used once; other capsules are refused.
    """
    x = nd.arange(6).reshape((2, 3))
    for capsule in (x.to_dlpack_for_read(), nd.to_dlpack_for_read(x), nd.to_dlpack_for_write(x[1:])):
        y = nd.from_dlpack(capsule)
        y += 1
        y.wait_to_read()
        with pytest.raises(DTypeError, match="used already"):
            nd.from_dlpack(capsule)
    np.testing.assert_array_equal(x.asnumpy(), [[2, 3, 4], [6, 7, 8]])
    values = np.arange(3.0)
    versioned = [{"max_version": (1, 0)}] if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else []
    for how in ({}, *versioned):
        capsule = values.__dlpack__(**how)
        nd.from_dlpack(capsule)[:] = 5
        nd.waitall()
        assert values.tolist() == [5, 5, 5]
        values[:] = 0
    with pytest.raises(DTypeError, match="no DLPack tensor"):
        nd.from_dlpack(np._core._multiarray_umath._ARRAY_API)


def test_exported_memory_outlives_the_array():
    """Exported memory is not freed while NumPy refers to it; the resource would poison freed memory."""
    context = device.cpu(6)
    resource = PoisonResource(RawResource(device.get(context)))
    with storage.using(resource):
        x = nd.ones(100, context)
        there = np.from_dlpack(x)
        del x
        gc.collect()
        nd.waitall()
        nd.waitall()
        np.testing.assert_array_equal(there, np.ones(100))
        assert resource.statistics().live == 1
        del there
        gc.collect()
        nd.waitall()
        nd.waitall()
        assert resource.statistics().live == 0


def test_torch_round_trip():
    """PyTorch shares this package's memory, and this package shares PyTorch's."""
    torch = pytest.importorskip("torch")
    x = nd.arange(6).reshape((2, 3))
    tensor = torch.from_dlpack(x)
    tensor.add_(1)
    np.testing.assert_array_equal(x.asnumpy(), np.arange(1, 7).reshape(2, 3))
    back = nd.from_dlpack(tensor)
    back *= 2
    back.wait_to_read()
    assert tensor.tolist() == [[2, 4, 6], [8, 10, 12]]
