"""``weftplan train``: accuracy, equal weights on all engines, reports, checkpoints and bad options."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan.cli import main
from weftplan.cli.train import tasks as train_tasks
from weftplan.training.fit.events import read_events

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")
"""``find_spec`` does not import scikit-learn, since every test process collects this file and only one runs it."""

KEYS = {
    "test_accuracy",
    "images_per_s",
    "wall_s",
    "planned_peak_bytes",
    "unshared_bytes",
    "lower_bound_bytes",
    "allocated_bytes",
    "weights_sha256",
}


def train(*args):
    """Run ``weftplan train --json``, check that it succeeds, and return its result."""
    result = CliRunner().invoke(main, ["train", "--json", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_defaults_reach_the_accuracy():
    """The defaults, lenet on two CPU contexts, reach accuracy 0.97 and allocate the planned bytes."""
    result = train()
    assert set(result) >= KEYS
    assert result["devices"] == ["cpu(0)", "cpu(1)"]
    assert result["engine"] == "ThreadedEnginePerDevice"
    assert result["test_accuracy"] >= 0.97
    assert result["allocated_bytes"] == result["planned_peak_bytes"]
    assert result["lower_bound_bytes"] <= result["planned_peak_bytes"] <= result["unshared_bytes"]


@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_devices_with_streams_train_as_cpu_contexts_do(kvstore):
    """One epoch on two simulated devices gives the weights of two CPU contexts."""
    arguments = ("--network", "mlp", "--epochs", "1", "--kvstore", kvstore)
    simulated = train(*arguments, "--devices", "sim(0),sim(1)")
    assert simulated["weights_sha256"] == train(*arguments)["weights_sha256"]


FEW = """
from weftplan.cli.train import tasks as train_tasks
from weftplan.data.datasets import load_digits


def few(**how):
    split = load_digits(**how)
    return type(split)(*(part[:320] for part in split))


train_tasks.load_digits = few
"""
"""Code that reduces training and test data to 320 images each."""
NETWORKS = ["mlp", "lenet", "resnet"]


@pytest.fixture(scope="module")
def four_workers():
    """Return {network: digest of its weights after one epoch with four workers per device}."""
    code = f"""{FEW}
from weftplan.cli import main

for network in {NETWORKS}:
    main(["train", "--json", "--network", network, "--epochs", "1"], standalone_mode=False)
"""
    environment = {**os.environ, "MXNET_CPU_WORKER_NTHREADS": "4"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return dict(zip(NETWORKS, re.findall(r'"weights_sha256": "(\w+)"', done.stdout), strict=True))


@pytest.mark.parametrize("network", NETWORKS)
def test_same_bits_on_every_engine(network, monkeypatch, four_workers):
    """One epoch gives the same weight bits on every engine with one and four workers."""
    monkeypatch.setattr(train_tasks, "load_digits", train_tasks.load_digits)  # restored after the test
    exec(FEW, {})
    digests = {
        engine: train("--network", network, "--epochs", "1", "--engine", engine)["weights_sha256"]
        for engine in ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice")
    }
    assert len(set(digests.values())) == 1, digests
    assert four_workers[network] == digests["NaiveEngine"]
    if network == "mlp":  # the seed affects only the drawing of weights, which is the same in all networks
        assert train("--network", network, "--epochs", "1", "--seed", "1")["weights_sha256"] != digests["NaiveEngine"]


def test_report_and_checkpoint(tmp_path):
    """--report writes the plan's picture, the result, events and pages; --checkpoint writes files that load."""
    from weftplan.training.fit.parameter_files import load_checkpoint

    report, prefix = tmp_path / "new" / "report", tmp_path / "digits"
    result = train("--epochs", "1", "--report", str(report), "--checkpoint", str(prefix), "--network", "mlp")
    assert (report / "memory-plan.svg").read_text().startswith("<?xml")
    assert json.loads((report / "result.json").read_text()) == result
    index = (report / "index.html").read_text()
    for name in re.findall(r'href="([^"]+)"', index):
        assert (report / name).stat().st_size > 0
    assert "where a step spends its time" in index
    events = read_events(report / "events.jsonl")
    assert [event["event"] for event in (events[0], events[-1])] == ["begin", "end"]
    steps = [event for event in events if event["event"] == "step"]
    assert sum(event["steps"] for event in steps) == steps[-1]["step"] <= 22
    assert {"accuracy", "cross-entropy"} == set(steps[0]["metrics"])
    assert "KVStoreReduce" in (report / "lanes.html").read_text()
    _, args, _ = load_checkpoint(prefix, 1)
    assert any(name.endswith("_weight") for name in args)


def test_text_output():
    """Without --json the text has accuracy, speed, memory with its bounds, and each device's operations."""
    result = CliRunner().invoke(main, ["train", "--epochs", "1", "--network", "mlp"], catch_exceptions=False)
    assert result.exit_code == 0
    for words in ("test accuracy", "images/s", "planned peak", "without sharing", "lower bound", "operations"):
        assert words in result.output
    assert "cpu(1)" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--network", "nope"], "'nope' is not one of 'mlp', 'lenet', 'resnet', 'lstm'"),
        (["--devices", "0"], "at least one device"),
        (["--devices", "tpu(0)"], "is no device"),
        (["--devices", "cpu0,cpu0"], "twice"),
        (["--epochs", "0"], "expected a whole number from 1 on, got '0'"),
        (["--epochs", "1.5"], "expected a whole number from 1 on, got '1.5'"),
        (["--batch-size", "-3"], "expected a whole number from 1 on"),
        (["--lr", "0"], "expected a number above 0, got '0'"),
        (["--seed", "4294967296"], "expected a whole number from 0 to 4294967295"),
        (["--engine", "Fast"], "'Fast' is not one of"),
        (["--kvstore", "none"], "2 devices would train apart: use --devices 1, or --kvstore device"),
        (["--checkpoint", "/dev/null/model"], "cannot write to /dev/null"),
    ],
)
def test_bad_options(args, words):
    """A bad option is a usage error that names the legal values."""
    result = CliRunner().invoke(main, ["train", *args])
    assert result.exit_code == 2
    assert words in result.output


def test_batch_larger_than_the_data():
    """A batch larger than the training data gives an error with the legal range."""
    result = CliRunner().invoke(main, ["train", "--batch-size", "100000"])
    assert result.exit_code == 1
    assert "batch_size must be an integer in [1, 1438]" in result.output


def test_no_permission_for_the_report(tmp_path):
    """A report folder that cannot be written is a usage error before training."""
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    result = CliRunner().invoke(main, ["train", "--report", str(blocker / "report")])
    assert result.exit_code == 2
    assert "cannot write to" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_gpu_without_a_gpu():
    """Without a GPU, --devices gpu0 exits with 1 and names the package to install."""
    result = CliRunner().invoke(main, ["train", "--devices", "gpu0", "--epochs", "1"])
    if result.exit_code == 0:
        pytest.skip("this machine has a GPU")
    assert result.exit_code == 1
    assert "cuda12" in result.output


def test_interrupt_leaves_a_usable_checkpoint(tmp_path):
    """Ctrl-C exits with 130 and saves a checkpoint, which loads, trains and predicts."""
    from weftplan.training.fit.parameter_files import load_checkpoint

    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "weftplan", "train", "--network", "resnet", "--epochs", "500"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits SIG_IGN
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "resnet on" in first
    process.send_signal(signal.SIGINT)
    remaining = process.communicate(timeout=60)[0]
    assert process.returncode == 130, remaining
    assert "interrupted: saved" in remaining
    files = sorted(p.name for p in tmp_path.iterdir())
    assert [name.rsplit(".", 1)[1] for name in files] == ["params", "states", "json"]
    assert files[2] == "digits-resnet-symbol.json"
    epoch = int(files[0].removesuffix(".params").rsplit("-", 1)[1])
    _, args, aux = load_checkpoint(tmp_path / "digits-resnet", epoch)
    assert args
    assert aux
    images = np.zeros((8, 1, 8, 8), "float32")
    module = mx.mod.Module.load(tmp_path / "digits-resnet", epoch, load_optimizer_states=True)
    data = mx.io.NDArrayIter(images, np.zeros(8), batch_size=4)
    module.fit(data, num_epoch=1, optimizer_params={"momentum": 0.9})
    assert module.predict(images).shape == (8, 10)


def test_a_budget_that_cannot_be_met():
    """A budget that is too small gives an error with a budget that works."""
    arguments = ["train", "--network", "mlp", "--devices", "1", "--epochs", "1"]
    refused = CliRunner().invoke(main, [*arguments, "--budget", "10KB"])
    assert refused.exit_code == 1
    assert "the memory budget is 10,000 bytes" in refused.output
    smallest = int(refused.output.split("budget found that works is ")[1].split(" ")[0])
    assert train(*arguments[1:], "--budget", str(smallest))["allocated_bytes"] < smallest
