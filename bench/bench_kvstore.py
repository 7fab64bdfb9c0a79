"""Question: how fast does a store of one process exchange gradients, beside plain NumPy and MXNet 1.9.1?

One float32 key on 4 CPU contexts. GB/s of what the work must touch at least: a push reads 4 arrays and writes one, a
pull reads one and writes 4. The NumPy row does the same with ``np.add(a, b, out=)`` and ``np.copyto`` on one thread.
Every framework runs in a process of its own, in turn; medians over the rounds.

    python bench/bench_kvstore.py --mxnet-python PATH [--rounds 3] [--store device]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import blas_setting
import numpy as np

PEERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers")
CONTEXTS = 4
REPEAT = {10_000: 300, 1_000_000: 40, 10_000_000: 8}
STEPS = ("push", "pull", "push+pull")


def peer(python, package, store, elements):
    """Seconds per step of a store, from the JSON that a process prints."""
    command = [python, os.path.join(PEERS, "store_exchange.py"), package, store, str(elements), str(REPEAT[elements])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode:
        raise SystemExit(f"{command} failed:\n{run.stderr[-2000:]}")
    result = json.loads(run.stdout.strip().splitlines()[-1])
    if not result["right"]:
        raise SystemExit(f"{package} {store}: the sum is wrong")
    return result


def plain(elements):
    """Seconds per step of NumPy on one thread."""
    values = [np.full(elements, i + 1.0, np.float32) for i in range(CONTEXTS)]
    outs, total = [np.zeros(elements, np.float32) for _ in range(CONTEXTS)], np.zeros(elements, np.float32)

    def push():
        np.add(values[0], values[1], out=total)
        for value in values[2:]:
            np.add(total, value, out=total)

    def pull():
        for out in outs:
            np.copyto(out, total)

    def both():
        push()
        pull()

    result = {}
    for name, work in zip(STEPS, (push, pull, both), strict=True):
        times = []
        for _ in range(REPEAT[elements] + 2):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        result[name] = statistics.median(times[2:])
    return result


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", choices=("device", "local"), default="device")
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    args = parser.parse_args()
    runs = {"weftplan": lambda n: peer(sys.executable, "weftplan", args.store, n), "NumPy, 1 thread": plain}
    if args.mxnet_python:
        runs["MXNet 1.9.1"] = lambda n: peer(args.mxnet_python, "mxnet", args.store, n)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    print(f"store {args.store!r}, {CONTEXTS} contexts, {args.rounds} rounds; GB/s (microseconds)\n")
    print("| elements | | " + " | ".join(STEPS) + " |\n|---|---|" + "---|" * len(STEPS))
    for elements in REPEAT:
        times = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(run(elements))
        for name, results in times.items():
            cells = []
            for step in STEPS:
                seconds = statistics.median(result[step] for result in results)
                arrays = (CONTEXTS + 1) * (2 if step == "push+pull" else 1)
                cells.append(f"{arrays * 4 * elements / seconds / 1e9:.1f} ({seconds * 1e6:,.0f})")
            print(f"| {elements:,} | {name} | " + " | ".join(cells) + " |", flush=True)


main()
