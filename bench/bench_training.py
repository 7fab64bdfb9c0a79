"""Question: how long does a training step take compared with PyTorch on the CPU and MXNet 1.9.1?

A step is forward, backward and SGD with momentum on one random batch. The networks are an MLP 784-512-512-10 (batch
128), LeNet (28x28, batch 64), ResNet-18 for 32x32 images (batch 32) and for 224x224 (batch 8), MobileNet v1 for 224x224
(batch 4), and a language model (35 steps of two layers of 200 LSTM cells, 10,000 words, batch 32; PyTorch uses its
fused LSTM). Each framework runs in its own process with the same number of threads; the frameworks alternate. Figures
are medians over the rounds, and medians of the ratios of each round's pair. With --cpu the CPU time of all threads is
compared, which a loaded machine changes less. With --numpy weftplan is measured without its compiled kernels as well.

    python bench/bench_training.py --mxnet-python PATH --torch-python PATH [--networks mlp lenet] [--rounds 3]
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
STEPS = {"mlp": 40, "lenet": 10, "resnet18": 2, "resnet18_224": 2, "mobilenet": 4, "lstm": 4}


def call(python, threads, script, *args, **more):
    """Run a peer's script with ``threads`` threads, and return its JSON; ``more`` are environment variables."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "WEFTPLAN_BLAS_NTHREADS": "1",  # weftplan divides operations itself, over OMP_NUM_THREADS cores
        "MXNET_SUBGRAPH_VERBOSE": "0",
    }
    command = [python, os.path.join(PEERS, script), *map(str, args)]
    run = subprocess.run(
        command, env={**os.environ, **settings, **more}, capture_output=True, text=True, timeout=600, check=False
    )
    if run.returncode:
        raise SystemExit(f"{script} {args} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def main():
    """Measure the networks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    parser.add_argument("--torch-python", help="interpreter of a virtual environment with torch (default: this one's)")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time of all threads, not wall time")
    parser.add_argument("--numpy", action="store_true", help="measure weftplan with WEFTPLAN_KERNELS=numpy, too")
    args = parser.parse_args()
    me = sys.executable
    runs = {"weftplan": lambda n: call(me, args.threads, "module_training.py", "weftplan", n, STEPS[n])}
    if args.mxnet_python:
        runs["MXNet 1.9.1"] = lambda n: call(
            args.mxnet_python, args.threads, "module_training.py", "mxnet", n, STEPS[n]
        )
    torch_python = args.torch_python or (me if importlib.util.find_spec("torch") is not None else None)
    if torch_python:
        runs["torch"] = lambda n: call(torch_python, args.threads, "torch_training.py", n, STEPS[n], args.threads)
    if args.numpy:
        runs["weftplan, NumPy's kernels"] = lambda n: call(
            me, args.threads, "module_training.py", "weftplan", n, STEPS[n], WEFTPLAN_KERNELS="numpy"
        )
    key = "cpu_s" if args.cpu else "step_s"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, Python {platform.python_version()}")
    print(blas_setting.describe())
    unit = "milliseconds of CPU time" if args.cpu else "milliseconds"
    print(f"{args.rounds} rounds; {unit} a training step (time / weftplan's, median of pairs)\n")
    print("| network | " + " | ".join(runs) + " |")
    print("|---|" + "---|" * len(runs))
    for network in args.networks:
        times = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(run(network)[key])
        cells = []
        for values in times.values():
            ratio = statistics.median(v / w for v, w in zip(values, times["weftplan"], strict=True))
            cells.append(f"{statistics.median(values) * 1e3:.2f} ({ratio:.2f})")
        print(f"| {network} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
