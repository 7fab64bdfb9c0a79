"""Question: does training wait for its data, and how much does the pipeline cost if the data are ready?

* *wait*: time spent waiting for data, divided by the time of the steps, without workers and with two. One reader needs
  1.5 times the time of a step for a batch. Three cases: the step runs on a device and the reader on the cores; the
  reader waits for a disk; both run on the cores. In the last case a step and its batch are 2.5 steps of work, so two
  cores need at least 1.25 steps.
* *overhead*: how much longer a step of LeNet (batch 64) takes, and how much more processor time the training process
  uses, if workers or a thread that reads ahead feed it, compared with one fixed batch. Steps of both kinds alternate.
* *torch*: samples a second against ``torch.utils.data.DataLoader`` on the same Python dataset, with two workers each,
  in alternating processes. One dataset augments images with NumPy, the other returns stored images. The processor time
  of a sample, workers included, depends less on the load of the machine.

Figures are medians over the rounds, and ratios are medians of the ratios of each round.

    python bench/bench_input.py wait|overhead [--rounds 5]
    python bench/bench_input.py torch --torch-python PATH [--rounds 5]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

PEERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers")
sys.path.insert(0, PEERS)
import blas_setting  # noqa: F401, E402 - before NumPy
import numpy as np  # noqa: E402
from data_samples import Slow  # noqa: E402

import weftplan as mx  # noqa: E402

BATCH = 16


def busy(seconds):
    """Keep a core busy for ``seconds`` of CPU time."""
    end = time.thread_time() + seconds
    x = np.ones(1000)
    while time.thread_time() < end:
        x.sum()


def waiting(step, read_busy, workers, step_s, steps):
    """Return the time spent waiting for data, divided by the time spent in ``steps`` steps."""
    source = Slow(BATCH * (steps + 4), 1.5 * step_s / BATCH, read_busy)
    with mx.io.DatasetIter(source, BATCH, num_workers=workers) as it:
        it.next()
        it.next()
        waited = stepped = 0.0
        for _ in range(steps):
            start = time.perf_counter()
            it.next()
            middle = time.perf_counter()
            step(step_s)
            waited, stepped = waited + middle - start, stepped + time.perf_counter() - middle
    return waited / stepped


def wait(args):
    """Print the time spent waiting for a slow reader / the time of the steps, without workers and with two."""
    kinds = {
        "step on a device, reader on the cores": (time.sleep, True),
        "step on a core, reader waits for a disk": (busy, False),
        "step and reader on the cores": (busy, True),
    }
    print("| | no workers | 2 workers |\n|---|---|---|")
    for kind, (step, read_busy) in kinds.items():
        shares = {n: [] for n in (0, 2)}
        for _ in range(args.rounds):
            for workers, actual in shares.items():
                actual.append(waiting(step, read_busy, workers, 0.04, args.steps))
        figures = " | ".join(f"{statistics.median(actual):.1%}" for actual in shares.values())
        print(f"| {kind}: data wait / step | {figures} |")
    print("\nGoal: at most 10 % with two workers, where the cores suffice; the floor of the last row is 25 %.")


def trained():
    """Return a function that trains a LeNet for one step on a batch of 64, and waits for its output."""
    module = mx.mod.Module(mx.models.get("lenet"))
    module.bind([("data", (64, 1, 28, 28))], [("softmax_label", (64,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params={"learning_rate": 0.01})

    def step(batch):
        module.forward_backward(batch)
        module.update()
        module.get_outputs()[0].wait_to_read()

    return step


def overhead(args):
    """Print how much longer a step takes with a data pipeline than with a fixed batch."""
    rng = np.random.default_rng(0)
    images, labels = rng.random((64 * args.steps, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, 64 * args.steps)
    pairs = list(zip(images, labels.astype(np.float32), strict=True))
    fixed = mx.io.NDArrayIter(images, labels, 64).next()
    step = trained()
    feeds = {
        "workers: DatasetIter(num_workers=2)": mx.io.DatasetIter(pairs, 64, num_workers=2, ahead=4),
        "a thread: PrefetchingIter(NDArrayIter, depth=2)": mx.io.PrefetchingIter(
            mx.io.NDArrayIter(images, labels, 64), depth=2
        ),
    }

    # The steps alternate, so that both see the same load. The next batch is read ahead as soon as one is taken.
    clocks = {"wall time": time.perf_counter, "processor time": time.process_time}
    alone, more = {name: [] for name in clocks}, {(name, clock): [] for name in feeds for clock in clocks}
    for _ in range(args.rounds + 1):
        for name, it in feeds.items():
            it.reset()
            while True:
                start = [now() for now in clocks.values()]
                step(fixed)
                middle = [now() for now in clocks.values()]
                batch = next(it, None)
                if batch is None:
                    break
                step(batch)
                end = [now() for now in clocks.values()]
                for clock, first, second, third in zip(clocks, start, middle, end, strict=True):
                    alone[clock].append(second - first)
                    more[name, clock].append(third - second - (second - first))
    typical = {clock: statistics.median(by_name) for clock, by_name in alone.items()}
    told = " and ".join(f"{seconds * 1e3:.2f} ms of {clock}" for clock, seconds in typical.items())
    print(f"LeNet, batch 64: a step takes {told}; {len(alone['wall time'])} pairs of steps\n")
    print("| | a step takes longer by | processor time of the training process |\n|---|---|---|")
    for name in feeds:
        cells = [f"{statistics.median(more[name, clock]) / typical[clock]:+.1%}" for clock in clocks]
        print(f"| {name} | {' | '.join(cells)} |")
        feeds[name].close()
    print("\nGoal: at most 2 %.")


def torch(args):
    """Print samples per second, and processor time per sample, against PyTorch's loader."""
    if not args.torch_python:
        raise SystemExit("torch needs --torch-python: an interpreter that has PyTorch")

    def rate(python, framework, dataset):
        command = [python, os.path.join(PEERS, "data_loading.py"), framework, dataset, "64", "2", "5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise SystemExit(f"{framework} failed:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout)

    print("batch 64, 2 workers\n")
    print("| dataset | | weftplan | torch | weftplan is better by |\n|---|---|---|---|---|")
    for dataset in ("images", "ready"):
        rates = {"weftplan": [], "torch": []}
        for number in range(args.rounds):
            for framework in ("weftplan", "torch")[:: 1 if number % 2 else -1]:
                python = sys.executable if framework == "weftplan" else args.torch_python
                rates[framework].append(rate(python, framework, dataset))
        for what, place, power in (("samples/s", 0, 1), ("us of all processors a sample", 1, -1)):
            ours, theirs = ([one[place] for one in rates[framework]] for framework in ("weftplan", "torch"))
            ratio = statistics.median((a / b) ** power for a, b in zip(ours, theirs, strict=True))
            figures = f"{statistics.median(ours):,.1f} | {statistics.median(theirs):,.1f} | {ratio:.2f}"
            print(f"| {dataset} | {what} | {figures} |")
    print("\nGoal: at least 1.0 in samples/s.")


ROWS = {"wait": wait, "overhead": overhead, "torch": torch}


def main():
    """Run the measurement that the command line names: ``wait``, ``overhead`` or ``torch``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--torch-python", help="an interpreter of a virtual environment with torch")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}\n")
    ROWS[args.row](args)


if __name__ == "__main__":
    main()
