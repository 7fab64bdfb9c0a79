"""``weftplan train``: micro-batches, mixed precision, resuming, early stopping, and text."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from weftplan.cli import main
from weftplan.cli.train import tasks as train_tasks
from weftplan.data.datasets import load_help_text
from weftplan.training.fit.checkpoint_writer import Checkpoints

MLP = ("--network", "mlp", "--devices", "1")


def train(*args):
    """Run ``weftplan train --json``, check that it succeeds, and return its result."""
    result = CliRunner().invoke(main, ["train", "--json", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_micro_batches_take_the_memory_of_a_piece():
    """With four micro-batches training allocates less memory, as planned, and reaches a similar accuracy."""
    whole, pieces = train(*MLP, "--epochs", "1"), train(*MLP, "--epochs", "1", "--micro-batches", "4")
    assert pieces["allocated_bytes"] == pieces["planned_peak_bytes"] < whole["allocated_bytes"]
    assert abs(pieces["test_accuracy"] - whole["test_accuracy"]) < 0.05


def test_mixed_precision():
    """In float16 the digits are learnt, and the allocated bytes are those planned."""
    result = train(*MLP, "--epochs", "2", "--mixed-precision", "float16")
    assert result["test_accuracy"] > 0.8
    assert result["allocated_bytes"] == result["planned_peak_bytes"]


def test_a_batch_that_cannot_be_cut():
    """A number of micro-batches that does not divide the batch gives an error."""
    result = CliRunner().invoke(main, ["train", *MLP, "--micro-batches", "7"])
    assert result.exit_code == 1
    assert "a batch of 64 samples" in result.output
    assert "choose a divisor of 64" in result.output


def test_killed_and_resumed(tmp_path):
    """A run killed after its first checkpoint and resumed ends with the weights of an unkilled run."""
    prefix = tmp_path / "run"
    arguments = (*MLP, "--epochs", "8")
    checkpoints = ("--checkpoint", str(prefix), "--every", "7")
    process = subprocess.Popen(
        [sys.executable, "-m", "weftplan", "train", *arguments, *checkpoints], stdout=subprocess.DEVNULL
    )
    while not Checkpoints(prefix).files():
        assert process.poll() is None
        time.sleep(0.005)  # polls the condition above
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = train(*arguments, *checkpoints, "--resume")
    assert resumed["weights_sha256"] == train(*arguments)["weights_sha256"]


@pytest.mark.parametrize("option", [("--resume",), ("--every", "3")])
def test_options_that_need_a_prefix(option):
    """--resume and --every without --checkpoint are usage errors."""
    result = CliRunner().invoke(main, ["train", *option])
    assert result.exit_code == 2
    assert f"{option[0]} needs --checkpoint PREFIX" in result.output


def test_early_stopping(tmp_path):
    """With --patience training stops early and saves the best epoch."""
    result = train(*MLP, "--epochs", "60", "--lr", "0.5", "--patience", "1", "--checkpoint", str(tmp_path / "run"))
    assert result["images_per_s"] > 0
    assert (tmp_path / "run-best.safetensors").exists()


def test_help_text_data():
    """``load_help_text`` returns over 3000 lines as character numbers; the split depends on the seed only."""
    text = load_help_text(seed=1)
    assert len(text.train) > 3000
    assert "".join(text.characters[n - 1] for n in text.train[0]).endswith("\n")
    assert {n for line in text.train for n in line} <= set(range(1, len(text.characters) + 1))
    assert load_help_text(seed=1) == text != load_help_text(seed=2)


def test_an_lstm_learns_to_write(monkeypatch, tmp_path):
    """An LSTM trained on 320 lines needs fewer bits per character than character frequencies alone."""

    def few(lines):
        return [line for line in lines if len(line) <= 16]

    text = load_help_text()
    short = text._replace(train=few(text.train)[:320], test=few(text.test))
    monkeypatch.setattr(train_tasks, "load_help_text", lambda seed: short)
    monkeypatch.setattr(train_tasks, "BUCKETS", (16,))
    monkeypatch.setattr(train_tasks, "HIDDEN", 32)
    report = tmp_path / "report"
    arguments = ("--network", "lstm", "--batch-size", "16", "--lr", "0.02", "--devices")
    result = train(*arguments, "1", "--epochs", "6", "--report", str(report))
    assert result["test_bits_per_character"] < result["unigram_bits_per_character"]
    assert result["allocated_bytes"] == result["planned_peak_bytes"]
    assert "perplexity" in (report / "index.html").read_text()
    repeated = train(*arguments, "1", "--epochs", "1", "--micro-batches", "2", "--checkpoint", str(tmp_path / "run"))
    assert repeated["lines_per_s"] > 0
    assert train(*arguments, "2", "--epochs", "1")["test_perplexity"] < len(text.characters)


def test_text_in_several_processes_is_refused():
    """--network lstm in several processes raises."""
    settings = {"seed": 0, "workers": 2, "lr": None, "settings": {}}
    with pytest.raises(ValueError, match="--network lstm trains in one process"):
        train_tasks.characters(16, **settings)
