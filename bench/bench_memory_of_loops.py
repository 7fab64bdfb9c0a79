"""Question: how much memory and time do loops of array operations take, compared with MXNet 1.9.1?

The loops compute arrays of one size (``a = a * 1.0001``), results that are only added up, or arrays whose size changes
in every step. A loop waits for every step or for none. Memory is resident memory above that before the loop: its peak,
and the remainder after all arrays are freed. Each loop runs in its own process; figures are medians over the rounds.
Linux only.

    python bench/bench_memory_of_loops.py [--mxnet-python PATH] [--mib 16] [--steps 300] [--rounds 3]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

import numpy as np

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "memory_of_loops.py")
LOOPS = ("one size", "temporaries", "other sizes")


def run(python, package, loop, mib, steps):
    """Run one loop in its own process; return the bytes and seconds that the peer's script prints, by name."""
    command = [python, PEER, package, loop, str(mib), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{package}, {loop} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    """Measure the loops, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16, help="of one array; the largest of other sizes has ten times it")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mxnet-python", help="interpreter of an environment with mxnet==1.9.1")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(f"{args.rounds} rounds, {args.steps} steps, arrays of {args.mib} MiB (other sizes: up to {10 * args.mib})\n")
    if not args.mxnet_python:
        print("MXNet is skipped: no --mxnet-python\n")
    pythons = {"weftplan": sys.executable} | ({"mxnet": args.mxnet_python} if args.mxnet_python else {})
    print("| loop | package | peak, MB | left, MB | seconds | CPU s |\n|---|---|---|---|---|---|")
    for loop in (name + wait for name in LOOPS for wait in ("", ", waiting")):
        mib, steps = (10 * args.mib, max(args.steps // 4, 1)) if loop.startswith("other") else (args.mib, args.steps)
        rounds = [
            {package: run(python, package, loop, mib, steps) for package, python in pythons.items()}
            for _ in range(args.rounds)
        ]
        for package in pythons:
            medians = {key: statistics.median(one[package][key] for one in rounds) for key in rounds[0][package]}
            print(
                f"| {loop} | {package} | {medians['peak'] / 1e6:.0f} | {medians['left'] / 1e6:.0f} "
                f"| {medians['wall_s']:.2f} | {medians['cpu_s']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
