"""The stand-in for CuPy refuses what CuPy refuses, and its table of names is that of the installed CuPy."""

import gc
import importlib.util
import pathlib
import sys
import threading
import warnings

import numpy as np
import pytest

import weftplan as mx
from tests.standin_cupy import CUDARuntimeError, installed, machine, meter, record
from tests.standin_cupy.machine import StreamRaceError
from tests.support.waiting import until
from weftplan import device, storage
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.ndarray.memory.release import dead, drain


@pytest.fixture
def xp():
    """The module of the stand-in, installed as ``cupy``."""
    with installed() as module:
        yield module


def test_the_table_is_that_of_the_installed_cupy():
    """The installed CuPy, if it has the recorded version, gives the recorded table of names and parameters.

    CuPy can be imported without a driver.
    """
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cupy = pytest.importorskip("cupy")
        table = list(record.lines(cupy))
    stored = record.FILE.read_text().splitlines()
    if table[0] != stored[0]:
        pytest.skip(f"the table is of {stored[0]}, installed is {table[0]}")
    assert table == stored


def test_names_missing_in_cupy_do_not_exist(xp):
    """The stand-in lacks the functions, parameters and array methods of NumPy that CuPy lacks."""
    with pytest.raises(AttributeError, match="bmat"):
        xp.bmat  # noqa: B018
    with pytest.raises(TypeError, match="where"):
        xp.sum(xp.zeros(3), where=True)
    with pytest.raises(AttributeError, match="setflags"):
        xp.zeros(3).setflags(write=False)
    with pytest.raises(TypeError, match="Wrong arguments"):
        xp.add(xp.zeros(3), 1, where=xp.zeros(3, bool))


def test_host_and_device_do_not_mix(xp):
    """NumPy arrays as operands, assignments from the host, and ``np.asarray`` raise TypeError or ValueError.

    The explicit copy ``set`` raises ValueError for an array of another shape.
    """
    x, host = xp.zeros(3), np.ones(3)
    for call in (
        lambda: xp.add(x, host),
        lambda: xp.concatenate([x, host]),
        lambda: xp.copyto(x, [1, 2, 3]),
        lambda: np.asarray(x),
        lambda: xp.matmul(x, host),
    ):
        with pytest.raises(TypeError):
            call()
    for call in (lambda: xp.copyto(x, host), lambda: x.__setitem__(slice(None), host)):
        with pytest.raises(ValueError, match="non-scalar"):
            call()
    with pytest.raises(ValueError, match="Shape mismatch"):
        xp.zeros(()).set(np.ones(1))


def test_loops_are_those_of_cupy(xp):
    """Python numbers do not widen a dtype, casts follow CuPy's loops, and ``at()`` accepts few dtypes."""
    assert xp.add(xp.zeros(2, np.float32), 1.5).dtype == np.float32
    assert xp.sqrt(xp.zeros(2, np.int32)).dtype == np.float64
    with pytest.raises(TypeError, match="casting"):
        xp.add(xp.zeros(2), 1.0, out=xp.zeros(2, np.int32))
    with pytest.raises(TypeError, match=r"subtract\.at only supports int32, uint32"):
        xp.subtract.at(xp.zeros(2), xp.zeros(1, np.int64), 1.0)
    with pytest.raises(NotImplementedError, match=r"multiply\.at"):
        xp.multiply.at(xp.zeros(2), xp.zeros(1, np.int64), 2.0)
    with pytest.raises(NotImplementedError, match=r"maximum\.reduce"):
        xp.maximum.reduce(xp.zeros(2))


def test_one_random_number_is_drawn_without_a_size(xp):
    """``random(out=…)`` without a size fills the array with a single number; with the shape, the elements differ."""
    generator = xp.random.Generator(xp.random.Philox4x3210(3))
    out = xp.empty(100, np.float32)
    generator.random(dtype=np.float32, out=out)
    assert len(set(out.tolist())) == 1
    generator.random(out.shape, dtype=np.float32, out=out)
    assert len(set(out.tolist())) > 90
    with pytest.raises(TypeError, match="wrong type"):
        generator.random(100, dtype=np.float64, out=out)
    with pytest.raises(ValueError, match="scalar"):
        generator.poisson(np.float32(2))


def test_take_wraps_around(xp):
    """``take`` wraps positions out of range instead of raising an error or clipping them."""
    assert xp.take(xp.arange(3), xp.asarray([3, -1])).tolist() == [0, 2]


def test_another_device_may_not_be_current(xp):
    """An array of gpu(1) cannot be used while gpu(0) is current."""
    with xp.cuda.Device(1):
        x = xp.zeros(3)
        x += 1
    with pytest.raises(ValueError, match=r"resides \(1\) is different from the current device \(0\)"):
        x += 1


def race(xp, wait):
    """Write x on stream a, read it on stream b, and write it on stream a again.

    ``wait`` selects the accesses that are ordered: with "event" all three, with "host" only the first two, with None
    none.
    """
    x, y = xp.zeros(4), xp.zeros(4)
    a, b = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with a:
        x += 1
        event = a.record()
    if wait == "event":
        b.wait_event(event)
    elif wait == "host":
        event.synchronize()
    with b:
        xp.copyto(y, x)
    if wait == "event":
        b.synchronize()
    with a:
        x += 1


def test_unordered_streams_are_refused(xp):
    """Accesses of two streams to an array raise StreamRaceError, unless events or waits of the host order them."""
    race(xp, "event")
    with pytest.raises(StreamRaceError, match="reads"):
        race(xp, None)
    with pytest.raises(StreamRaceError, match=r"add .*writes .* reads"):
        race(xp, "host")


def test_an_event_belongs_to_a_device(xp):
    """Recording an event on a stream of another device raises CUDARuntimeError."""
    stream = xp.cuda.Stream()
    with xp.cuda.Device(1):
        event = xp.cuda.Event()
    with pytest.raises(CUDARuntimeError, match="InvalidResourceHandle"):
        event.record(stream)


def test_counts(xp):
    """The meter counts launches by name, host waits, copies from the host, CuPy's allocations and atomics."""
    x = xp.zeros(4)
    meter.reset()
    y = x + 1
    y += x
    assert (meter.launches["add"], meter.total, meter.temporaries, meter.temporary_bytes) == (2, 2, 1, 32)
    assert bool(xp.all(y == 1))
    assert meter.syncs == {"bool": 1}
    _ = x[[0, 1]]
    assert meter.uploads == {"index": 1}
    xp.add.at(x, xp.asarray([0, 0]), y[:2])
    assert meter.atomics == {"add.at": 1}
    assert x.tolist() == [2, 0, 0, 0]


def test_dry_runs_count_the_same(xp):
    """A dry run computes nothing, but counts and checks the same operations."""
    counts = []
    for dry in (False, True):
        x = xp.ones(4)
        meter.reset()
        meter.dry = dry
        x += 1
        x[xp.asarray([3])] = 0
        with pytest.raises(TypeError):
            xp.add(x, np.ones(4))
        counts.append((dict(meter.launches), meter.temporaries))
        meter.dry = False
    assert counts[0] == counts[1]
    assert x.tolist() == [1] * 4


def test_the_driver_refuses_memory(xp):
    """An allocation beyond the device's capacity raises OutOfMemoryError; freed bytes can be allocated again."""
    machine.capacity[0] = 10_000
    place = device.get(mx.gpu(0))
    raw = place.allocate(8_000)
    with pytest.raises(OutOfMemoryError, match=r"refused 4,000 bytes; 2,000 of 10,000 are free"):
        place.allocate(4_000)
    del raw
    place.allocate(4_000)


def test_missing_gpu_is_refused(xp):
    """The error for gpu(9) lists the four GPUs that exist."""
    with pytest.raises(DeviceError, match=r"gpu\(9\) does not exist: this machine has 4 GPU\(s\): gpu\(0\), gpu\(1\)"):
        device.get(mx.gpu(9))


def test_installation_is_undone():
    """After the block, ``cupy`` is the previous module, and no device or pool of the stand-in remains."""
    before = sys.modules.get("cupy")
    with installed():
        mx.nd.ones((2,), ctx=mx.gpu(0)).wait_to_read()
        assert device.num_gpus() == 4
    assert sys.modules.get("cupy") is before
    assert mx.gpu(0) not in device.registry._devices
    assert mx.gpu(0) not in storage.registry.in_use()


def test_the_rules_name_their_sources():
    """Every rule in the list names a file of CuPy or CUDA's guide as its source."""
    text = (pathlib.Path(record.__file__).with_name("README.md")).read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) > 20
    assert all("cupy/" in row.split("|")[3] or "CUDA C++" in row.split("|")[3] for row in rows)


def test_work_is_named_on_simulated_devices_only(xp):
    """The name of an operation is computed only on simulated devices, which record faults."""
    asked = []
    for context in (mx.cpu(), mx.gpu(0), mx.sim(0)):
        stream = device.get(context).new_stream()
        with stream, stream.work(lambda context=context: asked.append(context)):
            pass
    assert asked == [mx.sim(0)]


def test_work_of_any_thread_is_captured(xp):
    """A capture belongs to its stream, so it includes the work of every thread on that stream."""
    x, stream = xp.zeros(3), xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()

    def foreign():
        with stream:
            xp.add(x, 1, out=x)

    stream.begin_capture()
    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    graph = stream.end_capture()
    assert x.host.tolist() == [0, 0, 0]
    graph.launch(stream)
    assert x.host.tolist() == [1, 1, 1]


def test_waits_for_a_captured_stream_are_refused(xp):
    """A wait for a captured stream, its device or its events raises CUDARuntimeError and invalidates the capture.

    A stream that waits for an event of the capture becomes a part of it, and must be joined before its end.
    """
    stream, second = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    before = second.record()
    calls = {
        "Stream.synchronize": stream.synchronize,
        "Stream.done": lambda: stream.done,
        "Device.synchronize": xp.cuda.Device(0).synchronize,
        "Event.done": lambda: stream.record().done,
        "wait_event": lambda: stream.wait_event(before),
    }
    for name, call in calls.items():
        stream.begin_capture()
        raised = []

        def foreign(call=call, raised=raised):
            with pytest.raises(CUDARuntimeError, match="Capture") as info:
                call()
            raised.append(info)

        thread = threading.Thread(target=foreign)
        thread.start()
        thread.join()
        assert raised
        with pytest.raises(CUDARuntimeError, match=f"Invalidated: because of {name}"):
            stream.end_capture()
    stream.begin_capture()
    second.wait_event(stream.record())
    assert second.is_capturing()
    with pytest.raises(CUDARuntimeError, match="Unjoined"):
        stream.end_capture()
    stream.begin_capture()
    second.wait_event(stream.record())
    stream.wait_event(second.record())
    stream.end_capture()
    assert not second.is_capturing()


def test_kernel_errors_are_raised_at_waits(xp):
    """The launch of a faulty kernel succeeds; a later wait raises its error, and so does every further call."""
    x = xp.zeros(3)
    machine.faulty["add"] = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    xp.add(x, 1, out=x)
    xp.multiply(x, 2, out=x)
    for _ in range(2):
        with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
            xp.cuda.get_current_stream().synchronize()
    with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
        xp.add(x, 1, out=x)


def test_handles_of_streams_are_used_again(xp):
    """A new stream gets the handle of a destroyed stream."""
    stream = xp.cuda.Stream()
    handle = stream.ptr
    del stream
    gc.collect()
    assert xp.cuda.Stream().ptr == handle


def test_freeing_waits_for_the_device(xp):
    """A free waits for all streams of the device, so later work on other streams is ordered after them."""
    a, b = xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)
    x, second = xp.zeros(3), xp.cuda.Memory(8)
    xp.cuda.get_current_stream().synchronize()
    with a:
        xp.add(x, 1, out=x)
    meter.reset()
    del second
    assert meter.frees == 1
    with b:
        xp.add(x, 1, out=x)


def test_cublas_handle_belongs_to_its_thread(xp):
    """Each thread has its own cuBLAS handle on a device, with a workspace of 32 MiB; another thread cannot use it."""
    free = xp.cuda.runtime.memGetInfo()[0]
    handle = xp.cuda.get_cublas_handle()
    assert xp.cuda.get_cublas_handle() == handle
    assert free - xp.cuda.runtime.memGetInfo()[0] == 32 << 20
    results = []
    thread = threading.Thread(target=lambda: results.append(xp.cuda.get_cublas_handle()))
    thread.start()
    thread.join()
    assert results[0] != handle
    with pytest.raises(RuntimeError, match="another thread"):
        xp.cuda.cublas.sgemmStridedBatched(results[0], *range(17))


def test_earlier_standins_count_nothing():
    """An array that outlives its stand-in is deleted on the next one: its waits neither count nor take errors there."""
    with installed():
        array = mx.nd.ones(8, ctx=mx.gpu(0)) + 1
    with installed():
        kept = mx.nd.ones(8, ctx=mx.gpu(0))
        kept.wait_to_read()
        meter.reset()
        machine.pending = "cudaErrorIllegalAddress: an illegal memory access was encountered"
        assert array.chunk.var.events is not None, "its deletion waits for no event"
        drain()
        before = len(dead.coming)  # arrays of engines that other tests have stopped stay in it
        del array
        drain()
        until(lambda: len(dead.coming) <= before)
        assert (meter.syncs, meter.frees, machine.sticky) == ({}, 0, None)
        machine.pending = None
