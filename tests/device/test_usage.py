"""Use of processors: cores by this process, GPUs by NVIDIA's management library, in events and on the page."""

import json
import sys
import time
import types

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from weftplan.device.usage import Usage
from weftplan.report.training_html import training_html
from weftplan.training.fit.events import Events, read_events


class NVMLError(Exception):
    """The exception class of the library."""


@pytest.fixture
def nvml(monkeypatch):
    """A stand-in for ``pynvml``, which numbers GPUs by bus address, unlike CUDA; gpu(1) reports no power."""
    library = types.ModuleType("pynvml")
    library.NVMLError = NVMLError
    library.begun = False

    def init():
        library.begun = True

    def handle(address):
        assert library.begun
        if not address.startswith("0000:"):
            raise NVMLError(address)
        return int(address.split(":")[1], 16)

    def power(number):
        if number == 0x3F:
            raise NVMLError("Not Supported")
        return 250_000

    library.nvmlInit = init
    library.nvmlDeviceGetHandleByPciBusId = handle
    library.nvmlDeviceGetUtilizationRates = lambda number: types.SimpleNamespace(gpu=number, memory=5)
    library.nvmlDeviceGetMemoryInfo = lambda number: types.SimpleNamespace(used=number << 20, total=1 << 40)
    library.nvmlDeviceGetPowerUsage = power
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_busy_cores():
    """The figure ``cpu`` is at least twice as high during a busy loop as during sleep."""
    usage = Usage([mx.cpu()])
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    busy = usage.figures()["cpu"]
    time.sleep(0.3)
    assert usage.figures()["cpu"] < 0.5 * busy
    assert "gpus" not in usage.figures()


def test_gpus_are_found_by_their_address(nvml):
    """GPUs are identified by bus address, and figures that a card does not report are omitted."""
    with place("standin") as context:
        actual = Usage([context(0), context(1), context(0), mx.cpu()]).figures()["gpus"]
    assert actual == {
        "gpu(0)": {"busy": 0x40, "bytes": 0x40 << 20, "watts": 250.0},
        "gpu(1)": {"busy": 0x3F, "bytes": 0x3F << 20},
    }


@pytest.mark.parametrize("what", ["missing", "no driver"])
def test_without_the_library_no_gpu_is_watched(nvml, monkeypatch, what):
    """Without the library or a driver, only ``cpu`` is reported, without an error."""
    if what == "missing":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(NVMLError("Driver Not Loaded")))
    with place("standin") as context:
        assert set(Usage([context(0)]).figures()) == {"cpu"}


def test_events_and_page_show_usage(nvml, tmp_path):
    """Each step event of a training has figures of cores and GPUs, and the page shows both."""
    with place("standin") as context:
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
        data = mx.io.NDArrayIter(np.ones((8, 3), np.float32), np.zeros(8, np.float32), 4)
        module = mx.mod.Module(net, context=context(0))
        module.fit(data, num_epoch=2, report=Events(tmp_path, period=0))
        del module
    steps = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "step"]
    assert steps
    assert all(step["cpu"] >= 0 and step["gpus"]["gpu(0)"]["busy"] == 0x40 for step in steps)
    page = training_html(steps)
    for title in ("processor cores in use", "GPUs busy", "memory of GPUs, all processes"):
        assert json.dumps(title) in page
