"""Question: how long does a training step take beside PyTorch on the CPU and MXNet 1.9.1?

Forward, backward and SGD with momentum on one random batch of: an MLP 784-512-512-10 (batch 128), LeNet (28x28,
batch 64) and ResNet-18 for 32x32 images (batch 32). Each framework runs in a process of its own, in turn, with the same
number of threads; medians over the rounds, and medians of the ratios of each round's pair.

    python bench/bench_training.py --mxnet-python PATH [--networks mlp lenet] [--rounds 3]
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys

import blas_setting

PEERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers")
STEPS = {"mlp": 40, "lenet": 10, "resnet18": 2}


def call(python, threads, script, *args):
    """Seconds of a step, from the JSON that a peer prints."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "WEFTPLAN_BLAS_NTHREADS": str(threads),
        "MXNET_SUBGRAPH_VERBOSE": "0",
    }
    command = [python, os.path.join(PEERS, script), *map(str, args)]
    run = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=600, check=False
    )
    if run.returncode:
        raise SystemExit(f"{script} {args} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])["step_s"]


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    args = parser.parse_args()
    me = sys.executable
    runs = {"weftplan": lambda n: call(me, args.threads, "module_training.py", "weftplan", n, STEPS[n])}
    if args.mxnet_python:
        runs["MXNet 1.9.1"] = lambda n: call(
            args.mxnet_python, args.threads, "module_training.py", "mxnet", n, STEPS[n]
        )
    if importlib.util.find_spec("torch") is not None:
        import torch

        runs[f"torch {torch.__version__}"] = lambda n: call(
            me, args.threads, "torch_training.py", n, STEPS[n], args.threads
        )
    print(f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, Python {platform.python_version()}")
    print(blas_setting.describe())
    print(f"{args.rounds} rounds; milliseconds a training step (time / weftplan's, median of pairs)\n")
    print("| network | " + " | ".join(runs) + " |")
    print("|---|" + "---|" * len(runs))
    for network in args.networks:
        times = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(run(network))
        cells = []
        for values in times.values():
            ratio = statistics.median(v / w for v, w in zip(values, times["weftplan"], strict=True))
            cells.append(f"{statistics.median(values) * 1e3:.2f} ({ratio:.2f})")
        print(f"| {network} | " + " | ".join(cells) + " |", flush=True)


main()
