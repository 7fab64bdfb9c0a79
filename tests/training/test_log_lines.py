"""Log messages of training: when they are shown, and their text as in MXNet 1.9.1."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan.training.fit.callbacks import BatchEndParam

PACKAGE = Path(mx.__file__).parent
TRAIN = """
import numpy as np, weftplan as mx
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")
data = mx.io.NDArrayIter(np.zeros((12, 4), np.float32), np.arange(12) % 3, 4)
mx.mod.Module(net).fit(data, num_epoch=1, batch_end_callback=mx.callback.Speedometer(4, 2))
from weftplan.support.package_log import log
log.warning("a warning")
"""
LINES = ["Epoch[0] Batch [0-2]", "Epoch[0] Train-accuracy=", "Epoch[0] Time cost="]


def run_training(setup: str) -> list[str]:
    """Train in a subprocess after the statements ``setup``; return the lines on stderr."""
    code = f"import logging, sys\n{setup}\n{TRAIN}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    "setup",
    [
        "logging.getLogger().setLevel(logging.INFO)",
        "logging.getLogger().setLevel(logging.DEBUG)",
        "logger = logging.getLogger(); logger.setLevel(logging.INFO)",
        "logging.getLogger('weftplan').setLevel(logging.INFO)",
        "import weftplan as mx; logging.getLogger('weftplan').setLevel(logging.INFO)",
        "logging.basicConfig(level=logging.INFO)",
    ],
)
def test_a_level_is_enough(setup: str):
    """If the script sets a level, each message is shown once, with or without a handler."""
    shown = run_training(setup)
    assert [line for line in LINES if any(f"INFO:weftplan:{line}" in text for text in shown)] == LINES
    assert len(shown) == len(LINES) + 1
    assert shown[-1] == "WARNING:weftplan:a warning"


def test_without_a_level_only_warnings_are_shown():
    """Without a level only warnings are shown, and logging.basicConfig still works afterwards."""
    assert run_training("") == ["a warning"]
    later = "logging.basicConfig(level=logging.INFO, format='later %(message)s'); log.info('shown')"
    done = subprocess.run(
        [sys.executable, "-c", f"import logging\n{TRAIN}\n{later}"], capture_output=True, text=True, timeout=200
    )
    assert done.stderr.splitlines() == ["a warning", "later shown"]


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        ("logging.getLogger().setLevel(logging.ERROR)", []),
        ("logging.disable(logging.CRITICAL)", []),
        ("logging.getLogger().setLevel(logging.INFO); logging.getLogger('weftplan').propagate = False", []),
        ("h = logging.StreamHandler(); h.setLevel(logging.WARNING); r = logging.getLogger(); r.addHandler(h); "
         "r.setLevel(logging.INFO)", ["a warning"]),
    ],
)  # fmt: skip
def test_what_a_program_sets_up_holds(setup: str, shown: list[str]):
    """A higher level, logging.disable, ``propagate`` and a handler of the program are respected."""
    assert [line for line in run_training(setup) if "propagate" not in line] == shown


def test_one_logger():
    """Only ``support/package_log.py`` and ``compat/log.py`` get a logger."""
    second = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"getLogger\(|logging\.(info|warning|error|debug)\(", path.read_text(encoding="utf-8"))
    ]
    assert sorted(second) == ["compat/log.py", "support/package_log.py"]


def test_lines_of_the_speedometer(caplog: pytest.LogCaptureFixture):
    """A Speedometer line covers the batches since the last line, or of the epoch with ``auto_reset=False``."""
    metric = mx.metric.Accuracy()
    for auto_reset, with_metric, expected in (
        (True, True, ["Epoch[0] Batch [0-5]\tS", "Epoch[0] Batch [5-10]\tS", "Epoch[1] Batch [0-5]\tS"]),
        (False, True, ["Epoch[0] Batch [0-5]\tS", "Epoch[0] Batch [0-10]\tS", "Epoch[1] Batch [0-5]\tS"]),
        (True, False, ["Iter[0] Batch [5]\tS", "Iter[0] Batch [10]\tS", "Iter[1] Batch [5]\tS"]),
    ):
        caplog.clear()
        meter = mx.callback.Speedometer(4, 5, auto_reset)
        with caplog.at_level(logging.INFO, logger="weftplan"):
            for epoch, batches in ((0, 12), (1, 7)):
                for nbatch in range(batches):
                    metric.update([mx.nd.array([0.0])], [mx.nd.array([[1.0, 0.0]])])
                    meter(BatchEndParam(epoch, nbatch, metric if with_metric else None))
        assert [text.partition("peed")[0] for text in caplog.messages] == expected
        values = r"\taccuracy=1\.000000" if with_metric else ""
        assert all(re.search(rf"\tSpeed: \d+\.\d\d samples/sec{values}$", text) for text in caplog.messages)
        assert (meter.init, meter.last_count) == (True, 6)


def test_lines_of_a_run(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    """Checkpoints, optimizer states and changes of the learning rate are logged as by MXNet."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")
    data = mx.io.NDArrayIter(np.zeros((16, 4), np.float32), np.arange(16) % 3, 4)
    module, prefix = mx.mod.Module(net), str(tmp_path / "net")
    schedule = mx.lr_scheduler.MultiFactorScheduler([1, 6], 0.1, base_lr=0.5)
    with caplog.at_level(logging.INFO, logger="weftplan"):
        module.fit(data, num_epoch=2, optimizer_params={"lr_scheduler": schedule},
                   epoch_end_callback=mx.callback.do_checkpoint(prefix, 2))  # fmt: skip
        module.save_checkpoint(prefix, 3, save_optimizer_states=True)
    assert [text for text in caplog.messages if not text.startswith("Epoch")] == [
        "Update[2]: Change learning rate to 5.00000e-02",
        "Update[7]: Change learning rate to 5.00000e-03",
        f'Saved checkpoint to "{prefix}-0002.params"',
        f'Saved checkpoint to "{prefix}-0003.params"',
        f'Saved optimizer state to "{prefix}-0003.states"',
    ]


def test_lines_of_a_rate_that_ends(caplog: pytest.LogCaptureFixture):
    """FactorScheduler logs once that its rate has reached the minimum, then nothing."""
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.1, stop_factor_lr=0.03, base_lr=1.0)
    with caplog.at_level(logging.INFO, logger="weftplan"):
        rates = [schedule(update) for update in range(1, 10) for _ in range(2)]
    assert rates[-1] == 0.03
    assert caplog.messages == [
        "Update[3]: Change learning rate to 1.00000e-01",
        "Update[5]: now learning rate arrived at 3.00000e-02, will not change in the future",
    ]


@pytest.mark.filterwarnings("ignore:FeedForward is deprecated")
@pytest.mark.parametrize("callback", [False, True])
def test_each_validation_is_logged_once(callback: bool, caplog: pytest.LogCaptureFixture):
    """FeedForward and Module log each validation once, with or without the callback that logs it."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3), name="softmax")
    samples, labels = np.zeros((12, 4), np.float32), np.arange(12) % 3
    inputs = {"eval_end_callback": mx.callback.LogValidationMetricsCallback()} if callback else {}
    with caplog.at_level(logging.INFO, logger="weftplan"):
        mx.model.FeedForward(net, num_epoch=2).fit(samples, labels, eval_data=(samples, labels), **inputs)
        data = mx.io.NDArrayIter(samples, labels, 4)
        mx.mod.Module(net).fit(data, data, num_epoch=2, **inputs)
    actual = [text.partition("=")[0] for text in caplog.messages if "Validation" in text]
    assert actual == ["Epoch[0] Validation-accuracy", "Epoch[1] Validation-accuracy"] * 2
