"""Leave a network training overnight: the run is killed three times, resumes each time, and ends with the same weights.

    python examples/overnight.py

The run is a process of its own. It is killed without warning (SIGKILL), as by a power failure or a scheduler. Three
arguments of `fit` make it safe: `checkpoint=…, every=…, resume=True`.
"""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import weftplan as mx


def train(folder: Path) -> str:
    """Train to the end, from the newest checkpoint if there is one, and return a digest of the weights."""
    mx.random.seed(7)
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 512)
    samples = rng.standard_normal((4, 20))[labels] + rng.standard_normal((512, 20))
    data = mx.io.NDArrayIter(samples.astype("float32"), labels, batch_size=32, shuffle=True)
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=32, name="fc1")
    net = mx.sym.Dropout(mx.sym.Activation(net, act_type="relu", name="act"), p=0.3, name="drop")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=4, name="fc2"), name="softmax")
    module = mx.mod.Module(net)
    module.fit(
        data,
        num_epoch=20,
        optimizer="adam",
        initializer=mx.init.Xavier(),
        checkpoint=folder / "night",  # night-step00000020.safetensors and so on
        every=20,
        resume=True,
        report=folder / "report",  # events.jsonl and index.html
    )
    digest = hashlib.sha256()
    for _, value in sorted(module.get_params()[0].items()):
        digest.update(value.asnumpy().tobytes())
    return digest.hexdigest()


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the run in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, "--run", str(folder)], stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Kill the run three times, let it end, and compare its weights with those of an undisturbed run."""
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        killed, whole = Path(name) / "killed", Path(name) / "whole"
        for _ in range(3):
            process, before = start(killed), set(killed.glob("night-step*"))
            while process.poll() is None and set(killed.glob("night-step*")) <= before:
                time.sleep(0.01)  # until there is a new checkpoint
            time.sleep(chance.random() / 10)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            steps = [path.name for path in sorted(killed.glob("night-step*"))]
            print(f"killed; the newest checkpoint is {steps[-1]}")
        resumed = start(killed).communicate()[0]
        undisturbed = start(whole).communicate()[0]
        assert resumed.split()[-1] == undisturbed.split()[-1]
        print("the run that was killed three times and the run without a kill ended with the same weights, bit for bit")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        print(train(Path(sys.argv[2])))
    else:
        main()
