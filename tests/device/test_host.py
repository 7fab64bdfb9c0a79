"""The host as a device, streams of a thread, and what is said when a GPU is missing."""

import importlib
import sys
import threading

import numpy as np
import pytest

from weftplan import device
from weftplan.device import cupy_device
from weftplan.errors import DeviceError


@pytest.mark.parametrize("context", [device.cpu(0), device.cpu(3), device.cpu_pinned(0)])
def test_host_memory_is_flat_aligned_and_exact(context):
    """Raw memory has exactly the bytes, starts on a cache line, and can be viewed as any dtype."""
    place = device.get(context)
    for nbytes in (1, 63, 64, 1000):
        raw = place.allocate(nbytes)
        assert (raw.dtype, raw.shape) == (np.uint8, (nbytes,))
        assert raw.__array_interface__["data"][0] % place.alignment == 0
    assert place.allocate(24)[8:24].view(np.float32).reshape(2, 2).flags.c_contiguous
    assert not place.asynchronous


def test_one_device_per_context():
    """Equal contexts give one object; every thread sees the same."""
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(device.get(device.cpu(7)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, seen))) == 1
    assert isinstance(seen[0], device.Device)


def test_a_host_stream_does_everything_at_once():
    """launch and copy have happened when they return; events are complete."""
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
    """A stream entered here is not current in another thread, and blocks must be left in order."""
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
    """Free bytes lie between 0 and the total."""
    free, total = device.get(device.cpu()).memory_info()
    assert 0 < free <= total


def test_a_gpu_without_cupy_says_what_to_install(monkeypatch):
    """Making gpu(0) is free; using it names CuPy and both extras."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    context = device.gpu(0)
    with pytest.raises(DeviceError) as caught:
        cupy_device.load_cupy(context)
    text = str(caught.value)
    assert "gpu(0) needs CuPy" in text
    assert "pip install weftplan[cuda12]" in text
    assert "weftplan[cuda13]" in text


class FakeCupy:
    """CuPy as far as the checks before first use go."""

    class cuda:
        class runtime:
            count = 1

            @classmethod
            def getDeviceCount(cls):
                if cls.count is None:
                    raise RuntimeError("cudaErrorNoDevice")
                return cls.count


def test_a_gpu_that_does_not_exist_names_those_that_do(monkeypatch):
    """gpu(2) on a machine with one GPU."""
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeCupy)
    with pytest.raises(DeviceError, match=r"gpu\(2\) does not exist: this machine has 1 GPU\(s\): gpu\(0\)"):
        cupy_device.load_cupy(device.gpu(2))


def test_cupy_without_a_driver_points_at_the_driver(monkeypatch):
    """CuPy imports but finds no GPU: gpu(0) fails with the reason, pinned memory falls back to plain memory."""
    monkeypatch.setattr(importlib, "import_module", lambda name: FakeCupy)
    monkeypatch.setattr(FakeCupy.cuda.runtime, "count", None)
    with pytest.raises(DeviceError, match=r"cudaErrorNoDevice.*nvidia-smi"):
        cupy_device.load_cupy(device.gpu(0))
    assert cupy_device.pinned_device(device.cpu_pinned(0)).allocate(10).size == 10
