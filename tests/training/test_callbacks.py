"""Callbacks of ``fit``: Speedometer, checkpoints, metric logs, ProgressBar, and the parameters that callbacks get."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import weftplan as mx
from weftplan.training.fit import callbacks


@pytest.fixture
def module() -> mx.mod.Module:
    """Return a module of one layer that is not bound yet."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))


def ten_batches() -> mx.io.NDArrayIter:
    """Return an iterator over ten batches of four samples."""
    rng = np.random.default_rng(0)
    return mx.io.NDArrayIter(rng.random((40, 5), dtype=np.float32), rng.integers(0, 3, 40), batch_size=4)


def test_the_speedometer_reports_every_so_many_batches(caplog: pytest.LogCaptureFixture, module: mx.mod.Module) -> None:
    """Speedometer logs the metric after batches 3, 6 and 9 of each epoch if ``frequent`` is 3."""
    with caplog.at_level(logging.INFO, logger="weftplan"):
        module.fit(ten_batches(), num_epoch=2, batch_end_callback=mx.callback.Speedometer(4, 3))
    matches = re.findall(r"Epoch\[(\d)\] Batch \[\d-(\d)\]\tSpeed: [\d.]+ samples/sec\taccuracy=[\d.]+", caplog.text)
    assert matches == [(epoch, batch) for epoch in "01" for batch in "369"]


def test_the_speed_is_that_of_the_batches_since_the_last_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logged speed counts the batches and seconds since the last line: 10 batches of 8 in 2 s are 40 samples/s."""
    now = [100.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    meter = mx.callback.Speedometer(8, 10)
    with caplog.at_level(logging.INFO, logger="weftplan"):
        for batch, seconds in ((0, 0.0), (10, 2.0), (15, 50.0), (20, 50.0)):
            now[0] += seconds
            meter(callbacks.BatchEndParam(0, batch, None))
    assert re.findall(r"Speed: ([\d.]+)", caplog.text) == ["40.00", "0.80"]


def test_a_metric_of_the_last_batches_alone(caplog: pytest.LogCaptureFixture) -> None:
    """With ``auto_reset`` each logged line resets the local metric; without, no line does."""
    for auto_reset, resets in ((True, 2), (False, 0)):
        seen: list[str] = []
        metric = SimpleNamespace(
            get_name_value=lambda: [("acc", 0.5)], reset_local=lambda seen=seen: seen.append("reset")
        )
        meter = mx.callback.Speedometer(1, 1, auto_reset)
        for batch in range(3):
            meter(callbacks.BatchEndParam(0, batch, metric))
        assert len(seen) == resets


@pytest.mark.parametrize("kind", ["do_checkpoint", "module_checkpoint"])
def test_checkpoints_after_every_second_epoch(kind: str, module: mx.mod.Module, tmp_path: Path) -> None:
    """``period=2`` saves the parameters of epochs 2 and 4, and optimizer states only on request."""
    prefix = tmp_path / "net"
    if kind == "do_checkpoint":
        callback = mx.callback.do_checkpoint(prefix, period=2)
    else:
        callback = mx.callback.module_checkpoint(module, prefix, period=2, save_optimizer_states=True)
    kept: list[np.ndarray] = []

    def keep(epoch: int, symbol: object, args: dict[str, mx.nd.NDArray], aux: object) -> None:
        kept.append(args["fc_weight"].asnumpy())

    module.fit(ten_batches(), num_epoch=5, epoch_end_callback=[callback, keep], optimizer_params={"learning_rate": 0.5})
    states = ["net-0002.states", "net-0004.states"] if kind == "module_checkpoint" else []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["net-0002.params", "net-0004.params", "net-symbol.json", *states]
    )
    for epoch in (2, 4):
        reloaded = mx.mod.Module.load(str(prefix), epoch)
        data = ten_batches()
        reloaded.bind(data.provide_data, data.provide_label)
        reloaded.init_params()
        np.testing.assert_array_equal(reloaded.get_params()[0]["fc_weight"].asnumpy(), kept[epoch - 1])
    assert not np.array_equal(kept[1], kept[3])


def test_the_metric_every_so_many_batches(caplog: pytest.LogCaptureFixture, module: mx.mod.Module) -> None:
    """log_train_metric(4) logs batches 0, 4 and 8; with auto_reset a line covers the batches since the last."""
    seen: list[int] = []

    class Count(mx.metric.EvalMetric):
        def update(self, labels: object, preds: object) -> None:
            self.sum_metric += 1
            self.num_inst = 1

    def lines(auto_reset: bool) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="weftplan"):
            module.fit(
                ten_batches(),
                eval_metric=Count("n"),
                num_epoch=1,
                batch_end_callback=[
                    mx.callback.log_train_metric(4, auto_reset),
                    lambda param: seen.append(param.nbatch),
                ],
            )
        return re.findall(r"Iter\[0\] (Batch\[\d\] Train-n=\d)", caplog.text)

    assert lines(False) == ["Batch[0] Train-n=1", "Batch[4] Train-n=5", "Batch[8] Train-n=9"]
    assert lines(True) == ["Batch[0] Train-n=1", "Batch[4] Train-n=4", "Batch[8] Train-n=4"]
    assert seen == list(range(10)) * 2


def test_the_metric_of_a_validation(caplog: pytest.LogCaptureFixture, module: mx.mod.Module) -> None:
    """LogValidationMetricsCallback logs the value that ``score`` returns; without a metric it logs nothing."""
    callback = mx.callback.LogValidationMetricsCallback()
    callback(callbacks.BatchEndParam(0, 0, None))
    with caplog.at_level(logging.INFO, logger="weftplan"):
        module.fit(ten_batches(), num_epoch=1)
        caplog.clear()
        (pair,) = module.score(ten_batches(), "acc", score_end_callback=callback, epoch=3)
    assert caplog.messages == [f"Epoch[3] Validation-accuracy={pair[1]:f}"]


def test_the_bar(caplog: pytest.LogCaptureFixture) -> None:
    """ProgressBar shows the completed share, at most 100%."""
    bar = mx.callback.ProgressBar(total=4, length=8)
    with caplog.at_level(logging.INFO, logger="weftplan"):
        for nbatch in (0, 1, 3, 9):
            bar(callbacks.BatchEndParam(0, nbatch, None))
    assert caplog.messages == ["[==------] 25%", "[====----] 50%", "[========] 100%", "[========] 100%"]


def test_what_a_callback_is_told(module: mx.mod.Module) -> None:
    """A callback gets a named tuple of four fields; ``locals`` has ``self``, the module, and ``data_batch``."""
    told = []

    def look(param: callbacks.BatchEndParam) -> None:
        epoch, nbatch, metric, there = param
        assert there is not None
        assert there["self"] is module
        assert there["data_batch"].data[0].shape[0] == metric.num_inst  # type: ignore[union-attr]
        told.append((epoch, nbatch))
        metric.reset()  # type: ignore[union-attr]

    data = ten_batches()
    module.fit(data, num_epoch=1, eval_metric="acc", batch_end_callback=look)
    data.reset()
    module.score(data, "acc", batch_end_callback=look)
    assert told == [(0, number) for number in range(len(told) // 2)] * 2
