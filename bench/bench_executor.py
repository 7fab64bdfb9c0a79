"""Question: how long does a bound graph of tiny operations run, compared with a loop of the same NumPy calls?

The graph is a chain of ``x + 1`` on 16 floats, bound once for inference (one bulk segment) and run many times. The loop
calls ``np.add(a, 1, out=b)`` on two buffers. Rounds are paired; figures are medians. Goal: at most 1.3 times the loop.

    python bench/bench_executor.py
"""

import argparse
import os
import platform
import statistics
import time

import blas_setting
import numpy as np

import weftplan as mx


def main():
    """Time a bound chain of additions on each engine and the same NumPy loop, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=30)
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    print("| engine | µs a node, executor | µs a node, NumPy loop | ratio (median of pairs) |\n|---|---|---|---|")
    for kind in ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"):
        with mx.engine.using(mx.engine.create(kind)):
            net = mx.sym.Variable("x")
            for _ in range(args.nodes):
                net = net + 1
            executor = net.simple_bind(mx.cpu(), grad_req="null", x=(16,))
            executor.forward()
            mx.nd.waitall()
            a, b = np.zeros(16, np.float32), np.zeros(16, np.float32)
            one = np.float32(1)
            ours, loops = [], []
            for _ in range(args.rounds):
                start = time.perf_counter()
                for _ in range(args.repeat):
                    executor.forward()
                mx.nd.waitall()
                ours.append((time.perf_counter() - start) / args.repeat / args.nodes * 1e6)
                start = time.perf_counter()
                for _ in range(args.repeat):
                    for _ in range(args.nodes // 2):
                        np.add(a, one, out=b)
                        np.add(b, one, out=a)
                loops.append((time.perf_counter() - start) / args.repeat / args.nodes * 1e6)
            ratio = statistics.median(x / y for x, y in zip(ours, loops, strict=True))
            print(f"| {kind} | {statistics.median(ours):.3f} | {statistics.median(loops):.3f} | {ratio:.2f} |")


main()
