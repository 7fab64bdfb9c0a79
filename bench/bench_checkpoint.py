"""Question: how much does a checkpoint every 100 steps cost a training run? Goal: at most 1 % of ResNet-18's time.

    python bench/bench_checkpoint.py [--network resnet18] [--batch 4] [--rounds 7]

Steps and checkpoints alternate in one process. The bench measures processor time of the whole process, including the
writing thread, and how long the training thread is blocked. A checkpoint contains the parameters, the momentum and all
other state; it counts as written when its bytes are on the disk. The share is that of one checkpoint in 100 steps; a
larger batch makes it smaller.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import weftplan as mx
from weftplan import engine, models
from weftplan.training.fit.checkpoint_writer import Checkpoints
from weftplan.training.fit.display import Display
from weftplan.training.fit.loop import Fitting
from weftplan.training.metrics import metric

EVERY = 100


def main() -> None:
    """Measure steps and checkpoints, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    wishes = parser.parse_args()
    shapes = models.input_shapes(wishes.network, wishes.batch)
    rng = np.random.default_rng(0)
    samples = rng.random(shapes["data"], dtype=np.float32)
    data = mx.io.NDArrayIter(samples, rng.integers(0, 10, wishes.batch), batch_size=wishes.batch)
    module = mx.mod.Module(models.get(wishes.network))
    module.bind(data.provide_data, data.provide_label)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(None, "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    batch = next(data)
    steps, written, held = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "run", keep=2)
        fitting = Fitting(
            module, data, metric.create("acc"), (0, 1), checkpoints=checkpoints, display=Display(1, silent=True)
        )
        for turn in range(wishes.rounds + 1):
            start = time.process_time()
            module.forward_backward(batch)
            module.update()
            engine.get().wait_for_all()
            middle, wall = time.process_time(), time.perf_counter()
            checkpoints.save(checkpoints.path(turn), fitting.snapshot())
            blocked = time.perf_counter() - wall
            checkpoints.wait()
            if turn:  # round 0 is a warm-up
                steps.append(middle - start)
                written.append(time.process_time() - middle)
                held.append(blocked)
        size = checkpoints.found()[-1].stat().st_size
    step, cost = statistics.median(steps), statistics.median(written)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{wishes.network}, batch {wishes.batch}, {wishes.rounds} rounds, medians; checkpoint of {size:,} bytes")
    print(f"a step                          {step * 1e3:10.1f} ms of processor time")
    print(f"a checkpoint                    {cost * 1e3:10.1f} ms of processor time")
    print(f"the training thread is held up  {statistics.median(held) * 1e3:10.1f} ms a checkpoint")
    print(f"share, one in {EVERY} steps         {100 * cost / (EVERY * step + cost):10.3f} %   (goal: 1 %)")


if __name__ == "__main__":
    main()
