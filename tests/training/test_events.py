"""The report of a running fit: events.jsonl, warnings, and TensorBoard."""

import json
import math
import threading
import time

import numpy as np
import pytest

import weftplan as mx
from tests.support.training import small_network as network
from weftplan.errors import FormatError, MXNetError, ParameterError
from weftplan.training.fit import fit_warnings
from weftplan.training.fit.events import Events, gradient_norm, read_events
from weftplan.training.fit.fit_warnings import Watch


def data(scale=1.0):
    """Return an iterator over five batches of eight samples; ``scale`` multiplies the data."""
    rng = np.random.default_rng(2)
    return mx.io.NDArrayIter(rng.random((40, 4)) * scale, rng.integers(0, 3, 40), batch_size=8)


def fit(report, *, module=None, scale=1.0, **settings):
    """Train ``module`` (default: a new one) for two epochs with validation, and return it."""
    mx.random.seed(1)
    module = mx.mod.Module(network()) if module is None else module
    module.fit(data(scale), eval_data=data(), num_epoch=settings.pop("num_epoch", 2), report=report, **settings)
    return module


def test_a_run_in_lines(tmp_path):
    """The file has events for begin, steps, epochs, checkpoints and end; an HTML page is written next to it."""
    fit(tmp_path / "report", checkpoint=tmp_path / "run")
    events = read_events(tmp_path / "report" / "events.jsonl")
    kinds = [event["event"] for event in events]
    assert kinds[0] == "begin"
    assert kinds[-1] == "end"
    assert events[-1]["why"] == "all epochs are done"
    assert kinds.count("epoch") == kinds.count("checkpoint") == 2
    steps = [event for event in events if event["event"] == "step"]
    assert sum(event["steps"] for event in steps) == steps[-1]["step"] == 10
    assert steps[0]["steps"] == 1
    for event in steps:
        assert set(event["seconds"]) == {"data", "compute", "exchange", "other"}
        assert all(value >= 0 for value in event["seconds"].values())
        assert 0 < event["live"] <= event["reserved"]
        assert event["learning_rate"] == 0.01
        assert event["gradient_norm"] > 0
        assert event["metrics"].keys() == {"accuracy"}
        assert any(name.startswith("cpu(0)") for name in event["queues"])
    epochs = [event for event in events if event["event"] == "epoch"]
    assert epochs[0]["validation"].keys() == {"accuracy"}
    assert (tmp_path / "report" / "index.html").read_text().startswith("<!doctype html>")


def test_the_weights_do_not_depend_on_it(tmp_path):
    """Training with a report gives the same bits as training without."""
    with_report, without = fit(tmp_path / "report"), fit(None)
    for name, value in without.get_params()[0].items():
        np.testing.assert_array_equal(value.asnumpy(), with_report.get_params()[0][name].asnumpy())


def test_the_norm_of_the_gradients(tmp_path):
    """``gradient_norm`` is the root of the sum of squares of all gradients, times rescale_grad."""
    module = fit(None, num_epoch=1)
    squares = sum(float((grads[0].asnumpy().astype("float64") ** 2).sum()) for grads in module.group.grad_arrays)
    assert gradient_norm(module) == pytest.approx(math.sqrt(squares) / 8, rel=1e-5)


def test_numbers_that_json_does_not_have(tmp_path):
    """NaN and infinity are written as strings, so every line is valid JSON."""
    with np.errstate(all="ignore"):
        fit(tmp_path, scale=np.float32(1e30), eval_metric="ce", optimizer_params={"learning_rate": 1e30})
    lines = (tmp_path / "events.jsonl").read_text().splitlines()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    events = [json.loads(line, parse_constant=refuse) for line in lines]
    assert "nan" in {event["metrics"].get("cross-entropy") for event in events if event["event"] == "step"}
    assert any("cross-entropy is nan" in event["text"] for event in events if event["event"] == "warning")


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    """A resumed run's steps follow its checkpoint; later steps of the killed run are not read."""

    class Killed(BaseException):
        pass

    def kill(param):
        if (param.epoch, param.nbatch) == (1, 3):
            raise Killed

    settings = {"checkpoint": tmp_path / "run", "every": 3, "num_epoch": 3}
    with pytest.raises(Killed):
        fit(tmp_path / "report", batch_end_callback=kill, **settings)
    path = tmp_path / "report" / "events.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])  # the process died in the middle of a line
    fit(tmp_path / "report", resume=True, **settings)
    events = read_events(path)
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == sorted(set(steps))
    resumed = next(event for event in events if event["event"] == "resume")
    assert resumed["step"] == 6
    assert steps[-1] == 15
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [0, 1, 2]


def test_a_file_that_is_none(tmp_path):
    """A line that is no event raises FormatError with the line's number."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "begin"}\nnonsense\n{"event": "end"}\n')
    with pytest.raises(FormatError, match="line 2 is no event: 'nonsense'"):
        read_events(path)


def test_an_error_ends_the_file(tmp_path):
    """If training raises, the last event has the name of the exception."""

    def fail(param):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, batch_end_callback=fail)
    assert read_events(tmp_path / "events.jsonl")[-1]["why"] == "ZeroDivisionError"


class Slow(mx.io.DataIter):
    """An iterator that sleeps ``seconds`` per batch; with ``idle`` it first waits until the devices are idle."""

    def __init__(self, seconds, idle=False):
        super().__init__(8)
        self._source, self._seconds, self._idle = data(), seconds, idle
        self.provide_data, self.provide_label = self._source.provide_data, self._source.provide_label

    def reset(self):
        self._source.reset()

    def next(self):
        batch = self._source.next()
        if self._idle:
            mx.nd.waitall()  # the devices are idle during the sleep
        time.sleep(self._seconds)  # not a wait for a condition: the test measures this sleep
        return batch


def test_waiting_for_data_is_told_apart_from_computing(tmp_path):
    """While the devices are idle, the iterator's time counts as waiting for data."""
    mx.random.seed(1)
    module = mx.mod.Module(network())
    module.fit(Slow(0.02, idle=True), num_epoch=1, report=tmp_path)
    steps = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "step"]
    assert sum(event["seconds"]["data"] for event in steps) > 0.02 * (steps[-1]["step"] - 1)


def test_computing_is_no_wait_for_data(tmp_path, monkeypatch):
    """While an operation of the step still runs, the iterator's time does not count as waiting for data."""
    go_on = threading.Event()
    real_update, real_forward = mx.mod.Module.update, mx.mod.Module.forward_backward

    def update(module):
        """Update, then push an operation that runs until the next step begins."""
        real_update(module)
        go_on.clear()
        mx.engine.get().push(lambda: go_on.wait(60), (), (module.group.param_arrays[0][0].var,))

    def forward_backward(module, batch):
        go_on.set()
        real_forward(module, batch)

    monkeypatch.setattr(mx.mod.Module, "update", update)
    monkeypatch.setattr(mx.mod.Module, "forward_backward", forward_backward)
    mx.random.seed(1)
    module = mx.mod.Module(network())
    try:
        module.fit(Slow(0.002), num_epoch=1, report=Events(tmp_path, gradients=False))
    finally:
        go_on.set()
    steps = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "step"]
    assert sum(event["seconds"]["data"] for event in steps[1:]) == 0.0


def watch_and_warnings():
    """Return a Watch and the list to which it appends its warnings."""
    told = []
    return Watch(mx.mod.Module(network()), told.append), told


def test_starved_and_idle_devices_are_told_once():
    """Waiting for data or other work for a quarter of the time warns once, after 30 steps and 2 seconds."""
    one, told = watch_and_warnings()
    one.time({"data": 0.9, "compute": 0.1, "exchange": 0.0, "other": 0.0}, 10)
    assert told == []  # too short to judge
    for _ in range(3):
        one.time({"data": 2.1, "compute": 3.9, "exchange": 0.0, "other": 3.0}, 40)
    starved, idle = told
    assert starved.startswith("30 % of the last 50 steps went by waiting for data, while the devices had nothing to do")
    assert "mx.io.PrefetchingIter" in starved
    assert idle.startswith("30 % of the last 50 steps went by in callbacks, checkpoints and other work")


def test_a_busy_device_is_no_reason_to_warn():
    """If the devices compute for three quarters of the time, there is no warning."""
    one, told = watch_and_warnings()
    one.time({"data": 1.0, "compute": 8.0, "exchange": 0.5, "other": 1.0}, 100)
    assert told == []


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ([1.0] * 10 + [5000.0], "is 5e+03, 5,000 times what it was before"),
        ([math.nan], "the norm of the gradients is nan"),
        ([0.0], "all gradients are zero, so nothing is learnt"),
    ],
)
def test_gradients_that_explode_or_vanish(norms, words):
    """Exploding, NaN or zero gradients cause one warning."""
    one, told = watch_and_warnings()
    for norm in [*norms, norms[-1]]:
        one.gradients("epoch 0, batch 3", norm)
    assert len(told) == 1
    assert words in told[0]


def test_usual_gradients_are_not_told():
    """Gradient norms that vary by a factor of a hundred cause no warning."""
    one, told = watch_and_warnings()
    for number in range(100):
        one.gradients("", 10.0 ** (number % 3))
    assert told == []


class Writer:
    """A stand-in for a TensorBoard writer; it records name and step of each scalar."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        assert isinstance(value, float)
        self.scalars.append((name, step))


def test_a_writer_of_tensorboard(tmp_path):
    """A TensorBoard writer gets the figures of steps and epochs under names with a prefix such as ``train/``."""
    writer = Writer()
    fit(Events(tmp_path, tensorboard=writer))
    names = {name for name, _ in writer.scalars}
    assert {"train/accuracy", "run/samples_per_s", "run/gradient_norm", "seconds/data"} <= names
    assert ("epoch/validation/accuracy", 10) in writer.scalars


def test_tensorboard_from_its_own_package(tmp_path):
    """With tensorboardX and a folder, event files are written to the folder."""
    pytest.importorskip("tensorboardX")
    fit(Events(tmp_path, tensorboard=tmp_path / "board"))
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))


def test_tensorboard_without_its_package(tmp_path, monkeypatch):
    """Without tensorboardX the constructor raises, and the error names the package."""
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(MXNetError, match=r"needs the package tensorboardX: pip install 'weftplan\[tensorboard\]'"):
        Events(tmp_path, tensorboard=tmp_path / "board")


def test_a_period_that_is_none(tmp_path):
    """A negative ``period`` raises ParameterError."""
    with pytest.raises(ParameterError, match="period must be >= 0 seconds"):
        Events(tmp_path, period=-1)


def test_thresholds_are_those_that_are_told():
    """The thresholds are 25 % of the time, 30 steps and 2 seconds, as the documents say."""
    assert (fit_warnings.STARVED, fit_warnings.LEAST_STEPS, fit_warnings.LEAST_SECONDS) == (0.25, 30, 2.0)
