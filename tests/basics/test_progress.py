"""Progress of long loops on a terminal, in a notebook and in a pipe, and how it is switched off."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan.cli import _COMMANDS, main
from weftplan.support import progress
from weftplan.support.package_log import log
from weftplan.training.fit import display
from weftplan.training.fit.display import Display


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Cell(io.StringIO):
    """A text stream whose module is that of a Jupyter kernel's stream."""


Cell.__module__ = "ipykernel.iostream"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of a clock that the test controls; progress is enabled."""
    seconds = [1000.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setenv("WEFTPLAN_PROGRESS", "1")
    monkeypatch.setenv("COLUMNS", "60")
    return seconds


def run(stream: Any, now: list[float], monkeypatch: pytest.MonkeyPatch, steps: int = 40, **settings: Any) -> str:
    """Run a loop of ``steps`` steps of half a second each with progress on ``stream``; return the output."""
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress("score", steps, **settings) as shown:
        for _ in range(steps):
            now[0] += 0.5
            shown.step()
    text: str = stream.getvalue()
    return text


def test_a_terminal_has_a_live_line(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A live line appears after a second, shows the remaining time, fits the width, and is erased at the end."""
    text = run(Terminal(), now, monkeypatch)
    lines = text.split("\r\x1b[K")
    assert lines[0] == "score: 2 of 40 batches, 2.0/s, 19 s left"
    assert lines[-2:] == ["score: 40 of 40 batches, 2.0/s", ""]
    assert len(lines) == 40
    assert all(len(line) < 60 for line in lines)


def test_a_notebook_has_a_live_line(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook gets a live line without terminal codes; spaces erase it."""
    text = run(Cell(), now, monkeypatch)
    assert "\x1b" not in text
    lines = [line for line in text.split("\r") if line.strip()]
    assert lines[0] == "score: 2 of 40 batches, 2.0/s, 19 s left"
    assert text.endswith(f"\r{' ' * len(lines[-1])}\r")


def test_a_pipe_gets_a_line_every_ten_seconds(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets a line every ten seconds, and none in a shorter loop."""
    assert run(io.StringIO(), now, monkeypatch, 50).splitlines() == [
        "score: 20 of 50 batches, 2.0/s, 15 s left",
        "score: 40 of 50 batches, 2.0/s, 5 s left",
    ]
    assert run(io.StringIO(), now, monkeypatch, 19) == ""


def test_a_short_loop_shows_nothing(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop shorter than a second prints nothing on a terminal."""
    assert run(Terminal(), now, monkeypatch, 1) == ""


@pytest.mark.shows("WEFTPLAN_PROGRESS")
def test_switches(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """``turn_off`` disables progress; otherwise ``show`` overrides WEFTPLAN_PROGRESS; ranks above 0 show none."""
    assert run(Terminal(), now, monkeypatch, show=False) == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")  # among several processes only the first prints
    assert run(Terminal(), now, monkeypatch) == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert run(Terminal(), now, monkeypatch)
    monkeypatch.setenv("WEFTPLAN_PROGRESS", "0")
    assert run(Terminal(), now, monkeypatch) == ""
    assert run(Terminal(), now, monkeypatch, show=True)
    progress.turn_off()
    try:
        assert run(Terminal(), now, monkeypatch, show=True) == ""
    finally:
        progress.turn_on()


def test_log_on_the_screen_replaces_progress(now: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Log messages at level INFO on a screen disable the live line; a log file does not."""
    monkeypatch.setattr(log, "propagate", False)
    before = log.level
    log.setLevel(logging.INFO)
    file, screen = logging.FileHandler(tmp_path / "log"), logging.StreamHandler(io.StringIO())
    try:
        assert run(Terminal(), now, monkeypatch) == ""  # a handler will be set up
        log.addHandler(file)
        assert run(Terminal(), now, monkeypatch)
        log.addHandler(screen)
        assert run(Terminal(), now, monkeypatch) == ""
        screen.setLevel(logging.WARNING)
        assert run(Terminal(), now, monkeypatch)
    finally:
        log.removeHandler(file)
        log.removeHandler(screen)
        file.close()
        log.setLevel(before)


def test_one_line_at_a_time(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner loop shows no line of its own; after the outer loop is closed, another loop shows its line."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)

    def outer() -> Any:
        for item in progress.Progress("outer", 2).each(range(2)):
            for _ in progress.Progress("inner", 8).each(range(8)):
                now[0] += 1
            yield item

    left = outer()
    next(left)
    left.close()
    assert "inner" not in stream.getvalue()
    assert "inner" in run(stream, now, monkeypatch) or "score" in stream.getvalue()


def test_closed_stream_does_not_end_a_loop(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop continues if its output stream is closed."""
    stream = Terminal()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress("score", 4) as shown:
        for _ in range(4):
            now[0] += 1
            shown.step()


def six_batches() -> mx.io.NDArrayIter:
    """Return an iterator over six batches of four samples."""
    return mx.io.NDArrayIter(np.zeros((24, 3), np.float32), np.zeros(24), 4)


def bound_module() -> mx.mod.Module:
    """Return a bound, initialized module of one layer."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
    bound_module = mx.mod.Module(net)
    bound_module.bind([("data", (4, 3))], [("softmax_label", (4,))])
    bound_module.init_params()
    return bound_module


LOOPS: dict[str, tuple[Callable[..., Any], str]] = {
    "fit": (lambda **more: bound_module().fit(six_batches(), num_epoch=1, **more), "epoch 1/1"),
    "score": (lambda **more: bound_module().score(six_batches(), "acc", **more), "score: "),
    "predict": (lambda **more: bound_module().predict(six_batches(), **more), "predict: "),
    "iter_predict": (lambda **more: list(bound_module().iter_predict(six_batches(), **more)), "predict: "),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loops_of_a_module(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fit, score and predict show a live line, erase it at the end, and show none with progress=False."""
    loop, begins = LOOPS[case]
    monkeypatch.setenv("WEFTPLAN_PROGRESS", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(display, "PATIENCE", 0.0)
    shown, quiet = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    loop()
    assert shown.getvalue().startswith(begins)
    assert shown.getvalue().endswith("\r\x1b[K")
    monkeypatch.setattr(sys, "stderr", quiet)
    loop(progress=False)
    assert quiet.getvalue() == ""


def test_training_in_a_pipe(now: list[float]) -> None:
    """In a pipe ``fit`` shows a line every ten seconds with epoch, batch and metric."""
    stream = io.StringIO()
    shown = Display(2, 30, stream=stream, passing=True)
    for epoch in range(2):
        for batch in range(30):
            now[0] += 0.5
            shown.batch(epoch, batch, 8, [("accuracy", 0.5)])
        shown.epoch_end(epoch, [("accuracy", 0.5)], seconds=15.0)
    lines = stream.getvalue().splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        "epoch 1/2 [#############.......] 20/30",
        "epoch 2/2 [######..............] 10/30",
        "epoch 2/2 [####################] 30/30",
    ]
    assert all("  accuracy 0.5000  16 samples/s  process " in line for line in lines)


def on_a_terminal(*args: str) -> tuple[str, str]:
    """Run a command with stderr on a pseudo-terminal; return (standard output, terminal output)."""
    leader, follower = pty.openpty()
    env = {**os.environ, "WEFTPLAN_PROGRESS": "1", "COLUMNS": "90", "TERM": "xterm"}
    done = subprocess.Popen(
        [sys.executable, "-m", "weftplan", *args], stdout=subprocess.PIPE, stderr=follower, text=True, env=env
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert done.stdout is not None
    with done.stdout:
        output = done.stdout.read()
    assert done.wait(200) == 0
    return output, shown.decode()


def test_quiet_commands() -> None:
    """A search shows a live line on a terminal, and none with -q; the result is the same."""
    args = ("plan", "resnet101", "--batch", "64", "--budget", "3GB")
    output, shown = on_a_terminal(*args)
    assert re.match(r"fitting resnet101 .* … \d+ s\r", shown)
    assert shown.endswith("\r\x1b[K")
    quiet, nothing = on_a_terminal(*args, "-q")
    assert (quiet, nothing) == (output, "")


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_the_options(name: str) -> None:
    """Each command has the options -v, -q and --log-file exactly once."""
    for _ in range(2):
        done = CliRunner().invoke(main, [name, "--help"])
        assert done.exit_code == 0
        for option in ("-v, --verbose", "-q, --quiet", "--log-file FILE"):
            assert done.output.count(option) == 1, done.output


def test_log_of_a_command(tmp_path: Path) -> None:
    """-v shows log messages, --log-file stores them, -q hides progress; the logger is restored after the command."""
    level = log.level
    train = ["train", "--network", "mlp", "--epochs", "1"]
    for more, on_screen in (([], False), (["-v"], True), (["-q"], False), (["-v", "--log-file"], True),
                            (["--log-file"], False), (["-q", "--log-file"], False)):  # fmt: skip
        file = tmp_path / "-".join(more)
        with_file = [*more, str(file)] if "--log-file" in more else more
        done = CliRunner().invoke(main, [*train, *with_file])
        assert done.exit_code == 0, done.output
        assert ("Epoch[0] Train-accuracy=" in done.output) == on_screen
        assert done.output.count("Epoch[0] Train-accuracy=") <= 1
        assert ("epoch 1/1" in done.output) == ("-q" not in more)
        assert "test accuracy" in done.output
        if "--log-file" in more:
            assert re.search(r"^\d{4}-\d\d-\d\d .* INFO Epoch\[0\] Train-accuracy=", file.read_text(), re.MULTILINE)
    assert log.level == level
    assert len(log.handlers) == 1
    done = CliRunner().invoke(main, [*train, "--log-file", str(tmp_path / "no" / "folder")])
    assert done.exit_code == 2
    assert "there is no folder" in done.output
