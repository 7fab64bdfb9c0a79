"""The progress display of ``fit``: lines that fit the terminal, plain lines in a pipe, and one warning per problem."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest

import weftplan as mx
from weftplan import models
from weftplan.support import progress
from weftplan.training.fit.display import Display


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def make_batches(labels: np.ndarray | None = None, count: int = 4) -> mx.io.NDArrayIter:
    """Return an iterator over ``count`` batches of eight random digits; ``labels`` replaces the random labels."""
    rng = np.random.default_rng(0)
    actual = rng.integers(0, 10, 8 * count) if labels is None else labels
    return mx.io.NDArrayIter(rng.random((8 * count, 1, 8, 8), dtype=np.float32), actual, 8)


def test_a_pipe_gets_one_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets one line per epoch with metrics, validation and speed, and no control characters."""
    fit = mx.mod.Module(models.digits("mlp")).fit
    fit(make_batches(), eval_data=make_batches(), eval_metric=["acc", "ce"], num_epoch=2, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert all("accuracy " in line and "validation cross-entropy " in line and " samples/s" in line for line in lines)
    assert "\r" not in "".join(lines)
    assert "\x1b" not in "".join(lines)


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``progress`` fit writes nothing to stdout or stderr."""
    mx.mod.Module(models.digits("mlp")).fit(make_batches(), num_epoch=1)
    actual = capsys.readouterr()
    assert (actual.out, actual.err) == ("", "")


@pytest.mark.parametrize("columns", [80, 40])
def test_the_live_line_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live line is shorter than the terminal is wide; at the end of the epoch a complete line replaces it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(progress, "PERIOD", 0.0)
    stream = Terminal()
    shown = Display(3, 4, memory=lambda: 5 << 20, stream=stream)
    pairs = [("accuracy", 0.5), ("cross-entropy", 1.25), ("top_k_accuracy_5", 0.75)]
    for nbatch in range(4):
        shown.batch(0, nbatch, 8, pairs)
    live = [piece.removeprefix("\x1b[K") for piece in stream.getvalue().split("\r")]
    assert len(live) == 4
    assert all(len(piece) < columns for piece in live)
    assert live[3].startswith(f"epoch 1/3 [{'#' * (20 if columns == 80 else 6)}] 4/4")
    assert "accuracy 0.5000" in live[3]
    shown.epoch_end(0, pairs, seconds=1.0)
    assert stream.getvalue().endswith("  1.0 s\n")
    assert shown.samples == 32


def test_batches_are_learnt_from_the_first_epoch() -> None:
    """If the number of batches is not given, the display takes the first epoch's number."""
    shown = Display(2, stream=Terminal())
    for nbatch in range(3):
        shown.batch(0, nbatch, 8, [])
    shown.epoch_end(0, [])
    assert shown.batches == 3


def test_labels_that_no_class_has_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A label without a class warns once; the warning names the label and the number of classes."""
    with caplog.at_level(logging.WARNING, logger="weftplan"):
        mx.mod.Module(models.digits("mlp")).fit(make_batches(np.full(32, 10.0)), num_epoch=2)
    (record,) = [r for r in caplog.records if "label" in r.getMessage()]
    assert "a label is 10, but the network has 10 classes" in record.getMessage()


def test_a_loss_that_is_no_number_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A NaN loss warns once at its first batch, whether or not a metric shows it."""
    data = np.full((16, 1, 8, 8), np.nan, dtype=np.float32)
    for metric in ("acc", "ce"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="weftplan"):
            module = mx.mod.Module(models.digits("mlp"))
            module.fit(mx.io.NDArrayIter(data, np.zeros(16), 8), eval_metric=metric, num_epoch=2)
        (record,) = [r for r in caplog.records if "Lower the learning rate" in r.getMessage()]
        assert record.getMessage().startswith("epoch 1, batch 1: ")


def test_sound_training_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Training with valid data logs no warning."""
    with caplog.at_level(logging.WARNING, logger="weftplan"):
        mx.mod.Module(models.digits("lenet")).fit(make_batches(), eval_metric=["acc", "ce"], num_epoch=2)
    assert caplog.records == []


def test_a_warning_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live line is erased before a warning is written; the warning counts epochs and batches from 1."""
    stream = Terminal()
    monkeypatch.setattr(progress, "PERIOD", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    fitted = mx.mod.Module(models.digits("mlp"))
    fitted.logger = logging.Logger("of this test")
    fitted.logger.addHandler(logging.StreamHandler(stream))
    labels = np.zeros(32)
    labels[8:] = 10.0  # from the second batch on
    fitted.fit(make_batches(labels), num_epoch=1, progress=Display(1, stream=stream))
    shown = stream.getvalue()
    where = shown.index("epoch 1, batch 2: a label is 10")
    assert shown[:where].endswith("\r\x1b[K")


@pytest.mark.parametrize(("columns", "bar"), [(80, 20), (44, 4), (38, 0), (24, 0)])
def test_the_bar_yields_to_numbers(columns: int, bar: int) -> None:
    """On a narrow terminal the bar is shortened or dropped, before the batch count and the first metric are."""
    shown = Display(10, 1000, stream=Terminal())
    line = shown._line(1, 500, [("accuracy", 0.5)], 1.0, columns)
    assert len(line) <= columns
    assert "500/1000" in line
    if columns >= 38:
        assert "accuracy 0.5000" in line
    if bar == 20:
        assert f"[{'#' * 10}{'.' * 10}]" in line
    elif bar == 0:
        assert "[" not in line
