"""The host as a device, streams of a thread, and the messages for a missing GPU."""

import importlib
import sys
import threading

import numpy as np
import pytest

import weftplan as mx
from weftplan import device
from weftplan.device import cupy_device
from weftplan.errors import DeviceError


@pytest.mark.parametrize("context", [device.cpu(0), device.cpu(3), device.cpu_pinned(0)])
def test_host_memory_is_flat_aligned_and_exact(context):
    """Host memory has exactly the requested bytes, starts on a cache line, and can be viewed in any dtype."""
    place = device.get(context)
    for nbytes in (1, 63, 64, 1000):
        raw = place.allocate(nbytes)
        assert (raw.dtype, raw.shape) == (np.uint8, (nbytes,))
        assert raw.__array_interface__["data"][0] % place.alignment == 0
    assert place.allocate(24)[8:24].view(np.float32).reshape(2, 2).flags.c_contiguous
    assert not place.asynchronous


def test_one_device_per_context():
    """Equal contexts give one device object, also on different threads."""
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(device.get(device.cpu(7)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, seen))) == 1
    assert isinstance(seen[0], device.Device)


def test_host_stream_runs_work_inline():
    """On a host stream, launch and copy are complete when they return, and so are its events."""
    place = device.get(device.cpu())
    stream = place.new_stream()
    target = np.zeros(3)
    with stream:
        assert device.current_stream() is stream
        place.launch(lambda: target.fill(2))
        assert (target == 2).all()
        place.copy(target, np.ones(3))
    assert (target == 1).all()
    event = stream.record()
    assert event.query()
    event.synchronize()
    stream.wait(event)
    stream.synchronize()
    place.synchronize()
    assert device.current_stream() is None
    assert isinstance(stream, device.Stream)
    assert isinstance(event, device.Event)


def test_streams_of_a_thread_are_its_own():
    """The current stream is per thread, and nested ``with`` blocks of streams must be left in order."""
    place = device.get(device.cpu())
    outer, inner = place.new_stream(), place.new_stream()
    elsewhere = []
    with outer:
        thread = threading.Thread(target=lambda: elsewhere.append(device.current_stream()))
        thread.start()
        thread.join()
        with inner:
            assert device.current_stream() is inner
            with pytest.raises(DeviceError, match="leave `with stream:` blocks in order"):
                outer.__exit__(None, None, None)
        assert device.current_stream() is outer
    assert elsewhere == [None]


def test_memory_info_is_plausible():
    """The free bytes of the host are above 0 and at most the total."""
    free, total = device.get(device.cpu()).memory_info()
    assert 0 < free <= total


def test_missing_cupy_error_names_extras(monkeypatch):
    """Without CuPy, the use of gpu(0) raises DeviceError with both extras to install."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    context = device.gpu(0)
    with pytest.raises(DeviceError) as caught:
        cupy_device.load_cupy(context)
    text = str(caught.value)
    assert "gpu(0) needs CuPy" in text
    assert "pip install 'weftplan[cuda12]'" in text
    assert "weftplan[cuda13]" in text


class FakeCupy:
    """Test double of CuPy, with the parts that are used before the first device; ``count`` None means no driver."""

    class cuda:
        class runtime:
            count = 1

            @classmethod
            def getDeviceCount(cls):
                if cls.count is None:
                    raise RuntimeError("cudaErrorNoDevice")
                return cls.count


def test_missing_gpu_error_lists_gpus(monkeypatch):
    """The error for gpu(2) on a machine with one GPU lists gpu(0)."""
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeCupy)
    with pytest.raises(DeviceError, match=r"gpu\(2\) does not exist: this machine has 1 GPU\(s\): gpu\(0\)"):
        cupy_device.load_cupy(device.gpu(2))


def test_missing_driver_error_names_driver(monkeypatch):
    """Without a driver, gpu(0) raises DeviceError with the reason, and page-locked memory is plain memory."""
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeCupy)
    monkeypatch.setattr(FakeCupy.cuda.runtime, "count", None)
    with pytest.raises(DeviceError, match=r"cudaErrorNoDevice.*nvidia-smi"):
        cupy_device.load_cupy(device.gpu(0))
    assert cupy_device.pinned_device(device.cpu_pinned(0)).allocate(10).size == 10


def test_the_number_of_gpus(monkeypatch):
    """``num_gpus()`` returns the driver's count, and 0 if CuPy or the driver is missing."""
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeCupy)
    assert device.num_gpus() == 1
    monkeypatch.setattr(FakeCupy.cuda.runtime, "count", None)
    assert device.num_gpus() == 0
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert device.num_gpus() == 0
    with pytest.raises(DeviceError, match=r"gpu\(0\) needs CuPy"):
        device.gpu_memory_info()


def test_mxnets_module_of_contexts():
    """``mx.context`` has the names of MXNet's module."""
    assert mx.context.num_gpus is device.num_gpus
    assert mx.context.gpu_memory_info is device.gpu_memory_info
    assert mx.context.Context is mx.Context
    assert mx.context.current_context() == mx.cpu(0)


def test_contexts_of_contexts_and_of_numpys_integers():
    """A context can be made from a context or with a NumPy integer."""
    assert mx.Context(mx.cpu(3)) == mx.Context("cpu", np.int64(3)) == mx.cpu(np.uint8(3)) == mx.cpu(3)
    assert repr(mx.sim(np.int64(2))) == "sim(2)"
    assert type(mx.cpu(np.int64(3)).device_id) is int


@pytest.mark.parametrize("index", [-1, 1.0, "1", None, True, np.bool_(True), np.float32(1)])
def test_a_bad_index_is_refused(index):
    """A device index that is no integer >= 0 raises DeviceError."""
    with pytest.raises(DeviceError, match="device index of cpu must be an integer >= 0"):
        mx.cpu(index)


@pytest.mark.parametrize("kind", ["tpu", "", None, ["cpu"], 1])
def test_a_bad_device_type_is_refused(kind):
    """An unknown device type raises DeviceError with the legal types."""
    with pytest.raises(DeviceError, match="expected one of cpu, gpu, cpu_pinned, sim"):
        mx.Context(kind)


def test_a_context_empties_its_cache():
    """``empty_cache()`` releases the cached bytes of its own context only, and returns them."""
    here, there = mx.cpu(9861), mx.cpu(9862)
    for context in (here, there):
        pool = mx.storage.get(context)
        pool.free(pool.allocate(5000))
    assert here.empty_cache() == 8192
    assert here.empty_cache() == 0
    assert mx.storage.get(there).statistics().cached_bytes == 8192
    assert mx.cpu(9863).empty_cache() == 0
