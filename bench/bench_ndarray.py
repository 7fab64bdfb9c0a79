"""Question: how long does a call on a small array take until its work is done, compared with MXNet 1.9.1?

The arrays have 8 x 16 float32 elements, so that nearly all time is the library's own. After 1,000 warm-up calls, a
process makes 1,500 calls in a row and then waits for all. Each library runs in its own process; figures are medians
over the rounds.

    python bench/bench_ndarray.py [--mxnet-python PATH] [--rounds 3]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

import blas_setting
import numpy as np

PEER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "array_calls.py")


def run(python, package):
    """Run the peer's script, and return the microseconds of each call by name."""
    done = subprocess.run([python, PEER, package], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{package} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    """Measure both libraries, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mxnet-python", help="interpreter of an environment with mxnet==1.9.1")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    print(f"{args.rounds} rounds; microseconds a call\n")
    if not args.mxnet_python:
        print("MXNet is skipped: no --mxnet-python\n")
    pythons = {"weftplan": sys.executable} | ({"mxnet": args.mxnet_python} if args.mxnet_python else {})
    rounds = [{package: run(python, package) for package, python in pythons.items()} for _ in range(args.rounds)]
    print("| call | " + " | ".join(pythons) + " | mxnet / weftplan |\n" + "|---" * (len(pythons) + 2) + "|")
    for name in rounds[0]["weftplan"]:
        cells = [f"{statistics.median(one[package][name] for one in rounds):.1f}" for package in pythons]
        ratios = [one["mxnet"][name] / one["weftplan"][name] for one in rounds if "mxnet" in one]
        print(f"| `{name}` | {' | '.join(cells)} | {f'{statistics.median(ratios):.2f}' if ratios else ''} |")


if __name__ == "__main__":
    main()
